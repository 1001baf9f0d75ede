"""Bounds-checked reads from a memory-mapped GGUF file: numbers, texts and metadata values.

Used by `gguf_file` alone. It knows how a value is encoded, not what the sections of a file are.
Walking a value (`skip`) checks that it lies inside the file; decoding one (`value`) makes Python
objects of it. Every failure is a `CorruptFileError` that names the file and the thing read.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from termgen.errors import CorruptFileError

# Far above any real model; they bound the work and memory that a hostile file can ask for.
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ELEMENTS = 1 << 23
MAX_ARRAY_DEPTH = 4

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
    """Bounds-checked reads at explicit positions. `what` names the thing read, for the error."""

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
        """(element type, count, position of the first element), with the count plausible."""
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
        # Numbers are skipped at once, these one by one: bound their sum over the whole file.
        self._elements_left -= count
        if self._elements_left < 0:
            self.fail(f"arrays of more than {MAX_ARRAY_ELEMENTS} elements, up to {key!r}")
        if element_type == _STRING:
            return self._skip_strings(count, position, key)
        for _ in range(count):
            position = self.skip(element_type, position, key, depth + 1)
        return position

    def _skip_strings(self, count: int, position: int, key: str) -> int:
        # A vocabulary: the one hot loop of opening a file.
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
