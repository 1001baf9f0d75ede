"""The `quantization_config` of a config.json: how a checkpoint stores quantised weights.

Methods are accepted or refused here. Which matrices are quantised, with how many bits and in groups
of which size, the tensors themselves say: `loader.quantized_tensors` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.errors import UnsupportedModelError

KEYS = ("quantization_config", "compression_config")
METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt")
MXFP4 = "mxfp4"
"""Experts of gpt-oss alone, which have tensors of their own."""
_HAS_MXFP4 = "GptOssForCausalLM"
_FORMATS = {
    "compressed-tensors": (
        *("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized"),
        *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "pack-quantized"),
    ),
    "awq": ("gemm",),
    "gptq": ("gptq", "gptq_v2"),
    "modelopt": ("FP8", "NVFP4"),
}
_FORMAT_KEYS = {
    "compressed-tensors": ("format",),
    "awq": ("version",),
    "gptq": ("checkpoint_format", "format"),
    "modelopt": ("quant_algo",),
}
"""The keys that name a format; the first that is there counts."""
_FLOAT8_FORMATS = {
    "compressed-tensors": "float-quantized",
    "fbgemm_fp8": "fbgemm_fp8",
    "modelopt": "fp8",
}
"""The formats in which matrices are 8-bit floats."""
_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "mixed-precision")
_GROUP_COLUMNS = 32
"""The columns of a group that stays so are a multiple."""
FLOAT8_RUN, FLOAT8_COLUMNS = 16, 128
"""Rows and columns, of which those of a block are multiples."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    method: str
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, of 8-bit floats with a scale for each block."""
    zero_offset: int = 0
    """Added to stored zero points: the first format of GPTQ has them less one."""


def read_stored_weights(read: ConfigReader) -> StoredWeights | None:
    """None for weights that are floats. Raises UnsupportedModelError, with the methods that work,
    or CorruptFileError naming the key."""
    key = next((key for key in KEYS if read.get(key) is not None), None)
    if key is None:
        return None
    values = read.get(key)
    method = values.get("quant_method") if isinstance(values, Mapping) else None
    if method == MXFP4:
        return StoredWeights(MXFP4)
    if method not in METHODS:
        raise _unsupported(key, method)
    own = ConfigReader(values, prefix=key)
    _check_format(own, method, key)
    return StoredWeights(
        method,
        block=_block(own) if method == "fp8" else None,
        zero_offset=1 if method == "gptq" and _format(own, method) != "gptq_v2" else 0,
    )


def are_float8(read: ConfigReader) -> bool:
    """True for matrices of layers in 8-bit floats, in blocks that a GPU's kernels take."""
    stored = read_stored_weights(read)
    if stored is None:
        return False
    if stored.method == "fp8":
        rows, columns = stored.block or (FLOAT8_RUN, FLOAT8_COLUMNS)
        return rows % FLOAT8_RUN == 0 and columns % FLOAT8_COLUMNS == 0
    key = next(key for key in KEYS if read.get(key) is not None)
    form = _format(ConfigReader(read.get(key), prefix=key), stored.method).lower()
    return form == _FLOAT8_FORMATS.get(stored.method)


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """Matrices of layers in integers with groups, or in floats of 4 bits, that stay so."""

    num_bits: int
    """4 or 8."""
    is_rounded_on_cpu: bool = False
    """True if a CPU rounds what a GPU keeps, to 8 bits."""


def kept_groups(read: ConfigReader) -> KeptGroups | None:
    """None for other weights, and for groups that become floats."""
    stored = read_stored_weights(read)
    if stored is None:
        return None
    key = next(key for key in KEYS if read.get(key) is not None)
    own = ConfigReader(read.get(key), prefix=key)
    form = _format(own, stored.method).lower()
    if stored.method in ("awq", "gptq"):
        size = own.get("group_size") or own.get("q_group_size")
        found = _groups(own.get("bits") or own.get("w_bit") or 4, size)
        is_ordered = stored.method == "gptq" and own.get("desc_act") is True
        return None if found is None else replace(found, is_rounded_on_cpu=is_ordered)
    if form in ("nvfp4", "nvfp4-pack-quantized"):
        return KeptGroups(4, is_rounded_on_cpu=True)
    if form == "mxfp4-pack-quantized":
        return KeptGroups(4)
    if stored.method != "compressed-tensors" or form not in _INTEGER_FORMATS:
        return None
    made = [_groups_of(scheme) for scheme in _mapping(own.get("config_groups")).values()]
    wide = [found for found in made if found is not None]
    return max(wide, key=lambda found: found.num_bits) if wide and len(wide) == len(made) else None


def _groups_of(scheme: object) -> KeptGroups | None:
    weights = _mapping(_mapping(scheme).get("weights"))
    if weights.get("type", "int") != "int":
        return None
    found = _groups(weights.get("num_bits"), weights.get("group_size"))
    is_ordered = weights.get("actorder") in ("group", "dynamic", True)
    return None if found is None else replace(found, is_rounded_on_cpu=is_ordered)


def _groups(bits: object, size: object) -> KeptGroups | None:
    """size: columns of a group; none, or a negative number, for whole rows."""
    if type(bits) is not int or not 0 < bits <= 8:
        return None
    is_whole = type(size) is int and (size < 0 or size % _GROUP_COLUMNS == 0)
    if size is not None and not is_whole:
        return None
    return KeptGroups(4 if bits <= 4 else 8)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def check_stored_weights(read: ConfigReader, architecture: str) -> None:
    """Raises UnsupportedModelError for weights that this architecture cannot have."""
    stored = read_stored_weights(read)
    if stored is not None and stored.method == MXFP4 and architecture != _HAS_MXFP4:
        raise _unsupported(KEYS[0], MXFP4)


def reject_quantized(read: ConfigReader) -> None:
    """Raises UnsupportedModelError for weights that are not floats."""
    for key in KEYS:
        if (values := read.get(key)) is not None:
            method = values.get("quant_method") if isinstance(values, Mapping) else None
            raise UnsupportedModelError(
                f"config.json: {key} asks for {method or 'an unknown method'}, which is not"
                " supported for a model that runs through transformers; use one that is not"
                " quantised"
            )


def _unsupported(key: str, method: str | None) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json: {key} asks for {method or 'an unknown method'}, which is not supported;"
        f" supported are {', '.join(METHODS)}, GGUF files, and models that are not quantised"
    )


def _format(own: ConfigReader, method: str) -> str:
    if method not in _FORMATS:
        return method
    for key in _FORMAT_KEYS[method]:
        if own.get(key) is not None:
            return own.text(key, default="")
    return _FORMATS[method][0]


def _check_format(own: ConfigReader, method: str, key: str) -> None:
    if method in _FORMATS:
        name, known = _format(own, method), _FORMATS[method]
        if name.lower() not in [one.lower() for one in known]:
            raise UnsupportedModelError(
                f"config.json: {key} asks for {method} in the format {name!r}, which is not"
                f" supported; supported are {', '.join(known)}"
            )
    if method == "compressed-tensors":
        sparsity = own.child("sparsity_config")
        is_sparse = sparsity is not None and sparsity.text("format", default="") != "dense"
        is_turned = own.child("transform_config") is not None
        for part, is_there in (("sparsity_config", is_sparse), ("transform_config", is_turned)):
            if is_there:
                raise UnsupportedModelError(
                    f"config.json: {key}.{part} is not supported: only quantised weights are"
                )


def _block(own: ConfigReader) -> tuple[int, int] | None:
    block = own.get("weight_block_size")
    if block is None:
        return None
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or any(type(size) is not int or not 0 < size <= 2**20 for size in block):
        own.fail("weight_block_size", f"must be two positive whole numbers, not {block!r}")
    rows, columns = block
    return rows, columns
