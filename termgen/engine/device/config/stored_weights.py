"""The `quantization_config` of a config.json: how a checkpoint stores quantised weights.

Methods are accepted or refused here. Which matrices are quantised, with how many bits and in groups
of which size, the tensors themselves say: `loader.quantized_tensors` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
GROUP_COLUMNS = 32
"""Columns, of which those of a group of integers that stay what they are are multiples."""
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
class KeptNumbers:
    """Numbers of layers' matrices that stay what they are in memory."""

    num_bits: int
    on_gpu_alone: bool = False
    """True if a CPU rounds them, and experts are rounded anywhere."""


def kept_numbers(read: ConfigReader) -> KeptNumbers | None:
    """What config.json says of integers in groups and of floats of 4 bits; None where there are
    none that stay. The tensors decide: this is for an estimate without them."""
    stored = read_stored_weights(read)
    if stored is None or stored.method == MXFP4:
        return None
    key = next(key for key in KEYS if read.get(key) is not None)
    own = ConfigReader(read.get(key), prefix=key)
    form = _format(own, stored.method).lower()
    if form.startswith("nvfp4"):
        return KeptNumbers(4, on_gpu_alone=True)
    if stored.method in ("awq", "gptq"):
        sizes = own.present()
        bits_of = sizes.get("bits", sizes.get("w_bit", 4))
        groups: list[Mapping[str, object]] = [
            {"num_bits": bits_of, "group_size": sizes.get("group_size", sizes.get("q_group_size"))}
        ]
        is_sorted = stored.method == "gptq" and own.get("desc_act") is True
    elif form in ("pack-quantized", "mixed-precision"):
        groups = [_weights_of(group) for group in _values(own.get("config_groups"))]
        is_sorted = any(group.get("actorder") in ("dynamic", "group") for group in groups)
    else:
        return None
    bits = [group.get("num_bits") for group in groups]
    known = [n for n in bits if type(n) is int and 0 < n <= 8]
    if not known or len(known) < len(bits) or not all(map(_is_even, groups)):
        return None
    return KeptNumbers(max(known), on_gpu_alone=is_sorted)


def _values(groups: object) -> list[object]:
    return list(groups.values()) if isinstance(groups, Mapping) else []


def _weights_of(group: object) -> Mapping[str, object]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _is_even(group: Mapping[str, object]) -> bool:
    """True for integers in groups of whole blocks of columns, or with a scale for each row."""
    size = group.get("group_size")
    if group.get("type", "int") != "int":
        return False
    is_whole = type(size) is int and size > 0 and size % GROUP_COLUMNS == 0
    return is_whole or size is None or size == -1


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
