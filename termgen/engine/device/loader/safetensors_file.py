"""A folder with config.json and safetensors as a checkpoint, memory-mapped.

Opened through `open_checkpoint`. The safetensors library maps the files and checks them; here its
complaints become one line that names the file, and the files are checked against their index.
Pickled weights are refused, and code that a repository brings along (`auto_map`) is never run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.loader.checkpoint import (
    MAX_INDEX_BYTES,
    PICKLE_SUFFIXES,
    check_sizes,
    parse_config,
    read_config,
    read_json,
)
from termgen.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 25

_BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2}
# Tables that old exports stored among the weights; they follow from the configuration.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
_SHARD_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


class SafetensorsFile:
    """One open file. With `any_type`, tensors of types that termgen does not read are let pass."""

    def __init__(self, path: Path, *, any_type: bool = False) -> None:
        self.path = path
        self._any_type = any_type
        self._check_header_size()
        try:
            library: Any = safe_open  # its own types say less than it accepts
            self._handle = library(path, framework="pt", device="cpu")
            self.shapes = {name: self._shape(name) for name in self._handle.keys()}
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise _corrupt(path, error) from error

    def nbytes(self, name: str) -> int:
        dtype = str(self._handle.get_slice(name).get_dtype())
        return math.prod(self.shapes[name]) * _BYTES_PER_ELEMENT[dtype]

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

    def _shape(self, name: str) -> tuple[int, ...]:
        view = self._handle.get_slice(name)
        dtype = str(view.get_dtype())
        is_read = not self._any_type and not _DERIVED.fullmatch(name)
        if is_read and dtype not in _BYTES_PER_ELEMENT:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has the type {dtype}; "
                f"supported are {', '.join(_BYTES_PER_ELEMENT)}"
            )
        return tuple(view.get_shape())


def _corrupt(path: Path, error: Exception) -> CorruptFileError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return CorruptFileError(f"{path}: {reason[0][:300]}")


class WeightFiles:
    """The safetensors files of a folder, open and checked against their index."""

    def __init__(self, folder: Path, *, any_type: bool = False) -> None:
        self._any_type = any_type
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

    def _open_single(self, path: Path) -> dict[str, SafetensorsFile]:
        file = SafetensorsFile(path, any_type=self._any_type)
        self._files.append(file)
        return {name: file for name in file.shapes if not _DERIVED.fullmatch(name)}

    def _open_shards(self, index: Path) -> dict[str, SafetensorsFile]:
        """Shard by shard, so that each is read once through; then what the index is missing."""
        wanted = _read_index(index)
        where = {}
        for shard in sorted(set(wanted.values())):
            path = index.parent / shard
            if not path.is_file():
                raise CorruptFileError(f"{index}: the file {shard} that it names is missing")
            file = SafetensorsFile(path, any_type=self._any_type)
            self._files.append(file)
            for name in file.shapes:
                if wanted.get(name) == shard and not _DERIVED.fullmatch(name):
                    where[name] = file
        for name, shard in wanted.items():
            if name not in where and not _DERIVED.fullmatch(name):
                raise CorruptFileError(f"{index}: tensor {name!r} is not in {shard}")
        return where


class FolderCheckpoint(WeightFiles):
    """A `Checkpoint` from a folder with config.json and safetensors."""

    def __init__(self, folder: Path) -> None:
        source = folder / "config.json"
        self.config: ModelConfig = parse_config(read_config(source), source)
        super().__init__(folder)
        # Beside a text model there may be others, whose tensors are left where they are.
        prefix = self.config.weight_prefix
        self._where = {name: file for name, file in self._where.items() if name.startswith(prefix)}
        stored = self._where.items()
        shapes = {name.removeprefix(prefix): file.shapes[name] for name, file in stored}
        check_sizes(self.config, shapes, folder)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes(name) for name, file in self._where.items())

    def names(self) -> Sequence[str]:
        return [name.removeprefix(self.config.weight_prefix) for name in self._where]

    def tensor(self, name: str) -> torch.Tensor:
        stored = self.config.weight_prefix + name
        return self._where[stored].tensor(stored)


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
