"""Read a GGUF file: metadata, tensor directory and raw tensor bytes, memory-mapped.

Torch-free, as the tokenizer (host half) and the weight loader (device half) share it. It knows the
container only; its callers know the meaning of keys, dequantisation and tensor names. Files are
untrusted: every count, length, offset and product is checked against the file's size before use. A
bad file raises `CorruptFileError` with one line, never a large allocation, a crash or an endless
loop.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from termgen.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Far above any real model: limits on the work and memory that a hostile file can cause.
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ELEMENTS = 1 << 23
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 17

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGUFBytes:
    """Bounds-checked reads at explicit positions. `what` names the thing read, for the error.

    `skip` walks a value and checks that it lies inside the file; `value` decodes it.
    """

    def __init__(self, path: Path, memory_map: mmap.mmap) -> None:
        self.path = path
        self.map = memory_map
        self.size = len(memory_map)
        self._elements_left = MAX_ARRAY_ELEMENTS

    def fail(self, reason: str) -> NoReturn:
        raise CorruptFileError(f"{self.path}: {reason}")

    def check(self, position: int, num_bytes: int, what: str) -> None:
        if position + num_bytes > self.size:
            self.fail(
                f"truncated: {what} needs bytes up to {position + num_bytes}, "
                f"but the file has {self.size}"
            )

    def check_count(self, count: int, limit: int, min_bytes: int, position: int, what: str) -> None:
        if count > limit:
            self.fail(f"{count} {what} announced; at most {limit} are accepted")
        if position + count * min_bytes > self.size:
            self.fail(f"truncated: {count} {what} do not fit in a file of {self.size} bytes")

    def u32(self, position: int, what: str) -> int:
        self.check(position, 4, what)
        return int(_U32.unpack_from(self.map, position)[0])

    def u64(self, position: int, what: str) -> int:
        self.check(position, 8, what)
        return int(_U64.unpack_from(self.map, position)[0])

    def string(self, position: int, what: str, *, limit: int = MAX_STRING_BYTES) -> tuple[str, int]:
        length = self.u64(position, what)
        if length > limit:
            self.fail(f"{what} is a text of {length} bytes; at most {limit} are accepted")
        position += 8
        self.check(position, length, what)
        try:
            return self.map[position : position + length].decode("utf-8"), position + length
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def name(self, position: int, what: str) -> tuple[str, int]:
        name, position = self.string(position, what, limit=MAX_NAME_BYTES)
        if not name:
            self.fail(f"{what} is empty")
        return name, position

    def array_header(self, position: int, key: str, depth: int) -> tuple[int, int, int]:
        """(element type, count, position of the first element), with the count checked."""
        if depth >= MAX_ARRAY_DEPTH:
            self.fail(f"{key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        element_type = self.u32(position, f"{key!r}")
        count = self.u64(position + 4, f"{key!r}")
        scalar = _SCALARS.get(element_type)
        min_bytes = scalar.size if scalar else 12 if element_type == _ARRAY else 8
        position += 12
        self.check_count(count, MAX_ARRAY_ELEMENTS, min_bytes, position, f"elements of {key!r}")
        return element_type, count, position

    def skip(self, value_type: int, position: int, key: str, depth: int = 0) -> int:
        """The position after a value, having checked that it lies within the file."""
        scalar = _SCALARS.get(value_type)
        if scalar is not None:
            self.check(position, scalar.size, f"{key!r}")
            return position + scalar.size
        if value_type == _STRING:
            end = position + 8 + self.u64(position, f"{key!r}")
            self.check(end, 0, f"{key!r}")
            return end
        if value_type != _ARRAY:
            self.fail(f"{key!r} has the unknown value type {value_type}")
        element_type, count, position = self.array_header(position, key, depth)
        element = _SCALARS.get(element_type)
        if element is not None:
            return position + count * element.size
        # These are skipped one by one, unlike numbers: limit their sum over the file.
        self._elements_left -= count
        if self._elements_left < 0:
            self.fail(f"arrays of more than {MAX_ARRAY_ELEMENTS} elements, up to {key!r}")
        if element_type == _STRING:
            return self._skip_strings(count, position, key)
        for _ in range(count):
            position = self.skip(element_type, position, key, depth + 1)
        return position

    def _skip_strings(self, count: int, position: int, key: str) -> int:
        # A vocabulary: the only hot loop of opening a file.
        unpack, memory_map, last = _U64.unpack_from, self.map, self.size - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + unpack(memory_map, position)[0]
        else:
            self.check(position, 0, f"{key!r}")
            return position
        self.fail(f"truncated: the texts of {key!r} run past the end of the file")

    def value(self, value_type: int, position: int, key: str) -> tuple[Any, int]:
        """Decode a value that `skip` has walked; returns it and the position after it."""
        scalar = _SCALARS.get(value_type)
        if scalar is not None:
            raw = scalar.unpack_from(self.map, position)[0]
            return (self._bools([raw], key)[0] if value_type == _BOOL else raw), (
                position + scalar.size
            )
        if value_type == _STRING:
            return self.string(position, f"{key!r}")
        element_type, count, position = self.array_header(position, key, 0)
        element = _SCALARS.get(element_type)
        if element is not None:
            numbers = np.frombuffer(
                self.map[position : position + count * element.size], dtype=element.format
            ).tolist()
            if element_type == _BOOL:
                numbers = self._bools(numbers, key)
            return numbers, position + count * element.size
        values = []
        for _ in range(count):
            value, position = self.value(element_type, position, key)
            values.append(value)
        return values, position

    def _bools(self, raw: list[int], key: str) -> list[bool]:
        if any(value > 1 for value in raw):
            self.fail(f"{key!r} holds a truth value that is neither 0 nor 1")
        return [bool(value) for value in raw]


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A tensor type: `block_size` elements are stored in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch; GGUF stores the reverse."""
    type: GGMLType
    offset: int
    """Position of the first byte in the file."""
    nbytes: int
    _map: mmap.mmap = field(repr=False, compare=False)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """[nbytes] the raw bytes, a read-only view of the file."""
        return np.frombuffer(self._map, dtype=np.uint8, count=self.nbytes, offset=self.offset)


class GGUFMetadata(Mapping[str, Any]):
    """The key-value section. Values are decoded on first access and cached.

    Values are plain Python: int, float, bool, str, and lists of those. Most of the section is a
    tokenizer's vocabulary, which readers of the model's shape do not decode.
    """

    def __init__(self, file: GGUFBytes, places: dict[str, tuple[int, int]]) -> None:
        self._file = file
        self._places = places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            value_type, position = self._places[key]
            self._values[key], _ = self._file.value(value_type, position, key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class GGUFFile:
    """An open GGUF file. Use as a context manager, or call `close`.

    Arrays handed out by `GGUFTensor.data` stay valid after `close`; undecoded metadata does not.
    """

    def __init__(
        self,
        path: Path,
        memory_map: mmap.mmap,
        *,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, GGUFTensor],
        version: int,
        metadata_end: int,
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.version = version
        self._map = memory_map
        self._metadata_end = metadata_end

    @property
    def raw_metadata(self) -> bytes:
        """The file up to the end of its key-value section."""
        return self._map[: self._metadata_end]

    @classmethod
    def open(cls, path: Path | str) -> GGUFFile:
        path = Path(path)
        memory_map = _map_file(path)
        try:
            return _parse(path, memory_map)
        except BaseException:
            memory_map.close()
            raise

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:
            # A caller still holds a view of a tensor: the map is freed with that view.
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            head = file.read(24)
            if head[:4] in (MAGIC, MAGIC[::-1]) and len(head) < 24:
                raise CorruptFileError(f"{path}: truncated: {len(head)} bytes, no full header")
            if head[:4] == MAGIC[::-1]:
                raise CorruptFileError(f"{path}: big-endian GGUF files are not supported")
            if head[:4] != MAGIC:
                raise CorruptFileError(f"{path}: not a GGUF file (it starts with {head[:4]!r})")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise CorruptFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, memory_map: mmap.mmap) -> GGUFFile:
    file = GGUFBytes(path, memory_map)
    version = file.u32(4, "the version")
    if version not in SUPPORTED_VERSIONS:
        if version & 0xFFFF == 0:
            file.fail("big-endian GGUF files are not supported")
        file.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    num_tensors = file.u64(8, "the tensor count")
    num_keys = file.u64(16, "the metadata count")
    # The smallest entry of each kind: an empty name, a one-byte value; a name, no dimensions.
    file.check_count(num_keys, MAX_METADATA_KEYS, 8 + 4 + 1, 24, "metadata keys")
    file.check_count(num_tensors, MAX_TENSORS, 8 + 4 + 4 + 8, 24, "tensors")
    places, metadata_end = _metadata_places(file, num_keys)
    metadata = GGUFMetadata(file, places)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        file.fail(f"general.alignment {alignment!r} is not a power of two up to {MAX_ALIGNMENT}")
    tensors = _tensors(file, num_tensors, metadata_end, alignment=alignment)
    return GGUFFile(
        path,
        memory_map,
        metadata=metadata,
        tensors=tensors,
        version=version,
        metadata_end=metadata_end,
    )


def _metadata_places(file: GGUFBytes, num_keys: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Key -> (value type, position) of each value, and the end of the section."""
    position = 24
    places: dict[str, tuple[int, int]] = {}
    for index in range(num_keys):
        key, position = file.name(position, f"metadata key {index}")
        if key in places:
            file.fail(f"metadata key {key!r} appears twice")
        value_type = file.u32(position, f"the type of {key!r}")
        places[key] = (value_type, position + 4)
        position = file.skip(value_type, position + 4, key)
    return places, position


def _tensors(
    file: GGUFBytes, num_tensors: int, position: int, *, alignment: int
) -> dict[str, GGUFTensor]:
    entries: dict[str, tuple[tuple[int, ...], GGMLType, int, int]] = {}
    for index in range(num_tensors):
        name, position = file.name(position, f"tensor name {index}")
        if name in entries:
            file.fail(f"tensor {name!r} appears twice")
        num_dims = file.u32(position, f"the rank of tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            file.fail(f"tensor {name!r} has {num_dims} dimensions (1 to {MAX_DIMS} are possible)")
        position += 4
        dims = tuple(
            file.u64(position + 8 * axis, f"the shape of tensor {name!r}")
            for axis in range(num_dims)
        )
        position += 8 * num_dims
        type_id = file.u32(position, f"the type of tensor {name!r}")
        offset = file.u64(position + 4, f"the offset of tensor {name!r}")
        position += 12
        tensor_type = GGML_TYPES.get(type_id)
        if tensor_type is None:
            raise UnsupportedModelError(
                f"{file.path}: tensor {name!r} has the unknown type number {type_id}"
            )
        nbytes = _tensor_bytes(file, name, dims, tensor_type)
        if offset % alignment:
            file.fail(f"tensor {name!r} starts at {offset}, which is not a multiple of {alignment}")
        entries[name] = (dims[::-1], tensor_type, offset, nbytes)
    data_start = -(-position // alignment) * alignment
    tensors = {
        name: GGUFTensor(name, shape, tensor_type, data_start + offset, nbytes, file.map)
        for name, (shape, tensor_type, offset, nbytes) in entries.items()
    }
    _check_extents(file, tensors)
    return tensors


def _tensor_bytes(file: GGUFBytes, name: str, dims: tuple[int, ...], tensor_type: GGMLType) -> int:
    if min(dims) < 1:
        file.fail(f"tensor {name!r} has an empty dimension: {list(dims[::-1])}")
    if dims[0] % tensor_type.block_size:
        file.fail(
            f"tensor {name!r} has rows of {dims[0]} elements, "
            f"not a multiple of {tensor_type.name}'s {tensor_type.block_size}"
        )
    return math.prod(dims) // tensor_type.block_size * tensor_type.block_bytes


def _check_extents(file: GGUFBytes, tensors: Mapping[str, GGUFTensor]) -> None:
    """Check that every tensor lies inside the file, and that no two overlap."""
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for tensor in ordered:
        if tensor.offset + tensor.nbytes > file.size:
            file.fail(
                f"truncated: tensor {tensor.name!r} ends at byte {tensor.offset + tensor.nbytes}, "
                f"but the file has {file.size}"
            )
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            file.fail(f"tensors {before.name!r} and {after.name!r} overlap")
