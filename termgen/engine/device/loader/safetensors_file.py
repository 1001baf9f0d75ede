"""A folder with config.json and safetensors as a checkpoint, memory-mapped.

Opened through `open_checkpoint`. The safetensors library maps the files and checks them; here its
complaints become one line that names the file, and the files are checked against their index.
Pickled weights are refused, and code that a repository brings along (`auto_map`) is never run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from termgen.engine.device.config.config_reader import ConfigReader
from termgen.engine.device.config.model_config import MTP_WEIGHTS, ModelConfig
from termgen.engine.device.config.stored_weights import (
    KEYS,
    MXFP4,
    StoredWeights,
    read_stored_weights,
)
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.loader.cache_scales import read_cache_scales
from termgen.engine.device.loader.checkpoint import (
    MAX_INDEX_BYTES,
    PICKLE_SUFFIXES,
    check_sizes,
    parse_config,
    read_config,
    read_json,
)
from termgen.engine.device.loader.quantized_tensors import (
    TYPES,
    QuantizedTensor,
    QuantizedTensors,
    StoredTensor,
)
from termgen.engine.device.quantization.mxfp4 import BLOCK, KIND, dequantize, with_scales
from termgen.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from termgen.vocabulary.device.kv_cache_types import LayerScales

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 25

_BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2}
# Tables that old exports stored among the weights; they follow from the configuration.
# Tensors that hold experts in blocks of four bits, and the ends of their names.
_PACKED = re.compile(r".*\.experts\.\w+_(blocks|scales)", re.ASCII)
_BLOCKS, _SCALES = "_blocks", "_scales"
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
_SHARD_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_WITHOUT_HEAD = "embed_tokens.weight"
"""A tensor of files that hold the body of a model without its head, as those of embedding models
are: their names begin further inside."""


class SafetensorsFile:
    """One open file. With `any_type`, tensors of types that termgen does not read are let pass, and
    with `quantized` those of quantised weights."""

    def __init__(self, path: Path, *, any_type: bool = False, quantized: bool = False) -> None:
        self.path = path
        self._any_type = any_type
        self._types = {**_BYTES_PER_ELEMENT, **TYPES} if quantized else _BYTES_PER_ELEMENT
        self._check_header_size()
        try:
            library: Any = safe_open  # its own types say less than it accepts
            self._handle = library(path, framework="pt", device="cpu")
            self.tensors = {name: self._tensor(name) for name in self._handle.keys()}
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise _corrupt(path, error) from error

    def nbytes(self, name: str) -> int:
        tensor = self.tensors[name]
        return math.prod(tensor.shape) * {**_BYTES_PER_ELEMENT, **TYPES}[tensor.dtype]

    def tensor(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _corrupt(self.path, error) from error
        return tensor

    def close(self) -> None:
        # The library unmaps with the last tensor; a file has no close of its own.
        self._handle = None

    def _check_header_size(self) -> None:
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                head = file.read(8)
        except FileNotFoundError:
            raise CorruptFileError(f"{self.path} is missing") from None
        except OSError as error:
            raise _corrupt(self.path, error) from error
        if len(head) < 8:
            raise CorruptFileError(f"{self.path}: truncated: {size} bytes, no header")
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER_BYTES:
            raise CorruptFileError(
                f"{self.path}: not a safetensors file: a header of {length} bytes is announced"
            )
        if 8 + length > size:
            raise CorruptFileError(
                f"{self.path}: truncated: a header of {length} bytes in a file of {size}"
            )

    def _tensor(self, name: str) -> StoredTensor:
        view = self._handle.get_slice(name)
        dtype = str(view.get_dtype())
        is_read = not self._any_type and not _DERIVED.fullmatch(name)
        is_packed = dtype == "U8" and _PACKED.fullmatch(name) is not None
        if is_read and dtype not in self._types and not is_packed:
            raise self.foreign_type(name, dtype)
        return StoredTensor(tuple(view.get_shape()), dtype)

    def foreign_type(self, name: str, dtype: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: tensor {name!r} has the type {dtype}; "
            f"supported are {', '.join(_BYTES_PER_ELEMENT)}"
        )


def _corrupt(path: Path, error: Exception) -> CorruptFileError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CorruptFileError(f"{path}: {reason[0][:300]}")


class WeightFiles:
    """The safetensors files of a folder, open and checked against their index."""

    def __init__(self, folder: Path, *, any_type: bool = False, quantized: bool = False) -> None:
        self._options = {"any_type": any_type, "quantized": quantized}
        self._files: list[SafetensorsFile] = []
        if (folder / SINGLE).is_file():
            self._where = self._open_single(folder / SINGLE)
        elif (folder / INDEX).is_file():
            self._where = self._open_shards(folder / INDEX)
        else:
            raise _no_weights(folder)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def tensor_names(self) -> Sequence[str]:
        """Names in the files."""
        return list(self._where)

    def read(self, stored: str) -> torch.Tensor:
        return self._where[stored].tensor(stored)

    def _open_single(self, path: Path) -> dict[str, SafetensorsFile]:
        file = SafetensorsFile(path, **self._options)
        self._files.append(file)
        return {name: file for name in file.tensors if not _DERIVED.fullmatch(name)}

    def _open_shards(self, index: Path) -> dict[str, SafetensorsFile]:
        """Shard by shard, so that each is read once through; then what the index is missing."""
        wanted = _read_index(index)
        where = {}
        for shard in sorted(set(wanted.values())):
            path = index.parent / shard
            if not path.is_file():
                raise CorruptFileError(f"{index}: the file {shard} that it names is missing")
            file = SafetensorsFile(path, **self._options)
            self._files.append(file)
            for name in file.tensors:
                if wanted.get(name) == shard and not _DERIVED.fullmatch(name):
                    where[name] = file
        for name, shard in wanted.items():
            if name not in where and not _DERIVED.fullmatch(name):
                raise CorruptFileError(f"{index}: tensor {name!r} is not in {shard}")
        return where


class FolderCheckpoint(WeightFiles):
    """A `Checkpoint` from a folder with config.json and safetensors."""

    def __init__(self, folder: Path, *, mtp: bool = False) -> None:
        """mtp: the tensors of its MTP layer alone."""
        source = folder / "config.json"
        raw = read_config(source)
        self.config: ModelConfig = parse_config(raw, source)
        self._prefixes = MTP_WEIGHTS if mtp else self.config.weight_prefixes
        stored = _stored_weights(raw)
        super().__init__(folder, quantized=stored is not None)
        self._quantized: dict[str, QuantizedTensor] = {}
        self._unused: set[str] = set()
        names = list(self._where) if stored is None else self._find_quantized(folder, stored)
        if _WITHOUT_HEAD in names and self._prefixes == (("", ""),):
            self._prefixes = (("", "model."),)
        # Beside a text model there may be others, whose tensors are left where they are.
        named = {name: self._own(name) for name in names}
        own = {name: ours for name, ours in named.items() if ours is not None}
        by_ours: dict[str, str] = {}
        for name, ours in own.items():
            if (other := by_ours.setdefault(ours, name)) != name:
                raise CorruptFileError(f"{folder} has {other} and {name} for one tensor")
        self._own_tensors = [member for name in own for member in self._members(name)]
        self._packed = _packed_shapes(
            {name: self._where[name] for name in own if name in self._where}
        )
        self._stored: dict[str, str] = {}
        """Our name -> the files'. A packed tensor is one name, at the place of its blocks."""
        for name, ours in own.items():
            stem = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
            if stem not in self._packed:
                self._stored[ours] = name
            elif name.endswith(_BLOCKS):
                self._stored[ours.removesuffix(_BLOCKS)] = stem
        if not mtp:
            check_sizes(self.config, {name: self.shape(name) for name in self.names()}, folder)

    @property
    def nbytes(self) -> int:
        return sum(self._where[name].nbytes(name) for name in self._own_tensors)

    def names(self) -> Sequence[str]:
        return list(self._stored)

    def kind(self, name: str) -> str | None:
        if self._stored[name] in self._packed:
            return KIND
        made = self._quantized.get(self._stored[name])
        return None if made is None else made.kind(self.read)

    def stored(self, name: str) -> Iterator[StoredRows]:
        stored = self._stored[name]
        if stored not in self._packed:
            yield from self._quantized[stored].stored(self.read)
            return
        for blocks, scales in self._experts(stored):
            yield StoredRows(KIND, with_scales(blocks, scales))

    def _experts(self, stored: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The blocks and the scales of each expert."""
        ends = (_BLOCKS, _SCALES)
        parts = (self._where[stored + end].tensor(stored + end) for end in ends)
        yield from zip(*parts, strict=True)

    def cache_scales(self) -> dict[int, LayerScales]:
        """The scales for an fp8 KV cache by layer; empty: there are none."""
        named = {ours: name for name in self._unused if (ours := self._own(name)) is not None}
        return read_cache_scales(named, lambda ours: self.read(named[ours]))

    def _find_quantized(self, folder: Path, stored: StoredWeights) -> list[str]:
        """Names of all tensors, quantised matrices among them, in the order of the files."""
        tensors = {name: file.tensors[name] for name, file in self._where.items()}
        try:
            found = QuantizedTensors(tensors, stored, self.read)
        except CorruptFileError as error:
            raise CorruptFileError(f"{folder}: {error}") from error
        self._quantized, self._unused = found.found, found.unused
        of_member = {
            member: name for name, made in found.found.items() for member in made.members.values()
        }
        names: dict[str, None] = {}
        for name, tensor in tensors.items():
            if name in of_member:
                names[of_member[name]] = None
            elif name not in found.unused:
                if tensor.dtype in TYPES and not _PACKED.fullmatch(name):
                    raise self._where[name].foreign_type(name, tensor.dtype)
                names[name] = None
        return list(names)

    def _members(self, name: str) -> list[str]:
        """The tensors in the files that make up one."""
        made = self._quantized.get(name)
        return [name] if made is None else list(made.members.values())

    def _own(self, stored: str) -> str | None:
        """The model's name of a tensor in the files; None if it is another model's."""
        for prefix, ours in self._prefixes:
            if stored.startswith(prefix):
                return None if ours is None else ours + stored.removeprefix(prefix)
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored[name]
        if stored in self._quantized:
            return self._quantized[stored].shape
        return self._packed.get(stored) or self._where[stored].tensors[stored].shape

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        if stored in self._packed or stored in self._quantized:
            return torch.cat(list(self.parts(name)))
        return self._where[stored].tensor(stored)

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor whole, some rows at a time where it is quantised, or expert by expert."""
        stored = self._stored[name]
        if stored in self._quantized:
            yield from self._quantized[stored].parts(self.read)
            return
        if stored not in self._packed:
            yield self.tensor(name)
            return
        for blocks, scales in self._experts(stored):
            yield dequantize(blocks, scales).T[None]


def _stored_weights(raw: Mapping[str, Any]) -> StoredWeights | None:
    """None for floats, and for experts in MXFP4, which have tensors of their own."""
    parts = [raw, *(raw[key] for key in ("text_config",) if isinstance(raw.get(key), Mapping))]
    part = next((part for part in parts if any(part.get(key) for key in KEYS)), raw)
    stored = read_stored_weights(ConfigReader(part))
    return None if stored is None or stored.method == MXFP4 else stored


def _packed_shapes(where: Mapping[str, SafetensorsFile]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that are kept as blocks and scales: the matrices of all experts
    [num_experts, out, in], which other files of these families have as [num_experts, in, out]."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in where:
        stem = name.removesuffix(_BLOCKS)
        if stem == name or stem + _SCALES not in where or not _PACKED.fullmatch(name):
            continue
        blocks = where[name].tensors[name].shape
        scales = where[stem + _SCALES].tensors[stem + _SCALES].shape
        if len(blocks) != 4 or blocks != (*scales, BLOCK // 2):
            raise CorruptFileError(
                f"{where[name].path}: tensor {name!r} is {list(blocks)}, but its scales are"
                f" {list(scales)}"
            )
        num_experts, size_out, num_blocks, _ = blocks
        shapes[stem] = (num_experts, num_blocks * BLOCK, size_out)
    return shapes


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index, limit=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{index}: it has no weight_map")
    for name, shard in weight_map.items():
        # A name, not a path: an index must not reach outside its folder.
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CorruptFileError(f"{index}: {str(shard)[:80]!r} for {name!r} is not a file name")
    return weight_map


def _no_weights(folder: Path) -> ModelNotFoundError | UnsupportedModelError:
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickled:
        return UnsupportedModelError(
            f"{folder} has its weights only as {pickled[0]}: pickle files are refused because "
            "loading one can run code; convert them to safetensors"
        )
    return ModelNotFoundError(f"{folder} has a config.json but no {SINGLE}")
