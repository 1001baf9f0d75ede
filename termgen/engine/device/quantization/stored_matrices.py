"""Quantised matrices as files store them in several tensors, as float32 rows.

    ScaledNumbers     8 bits a number, as floats or integers, with scales for parts of any size
    PackedRows        integers packed along a row (compressed-tensors' pack-quantized)
    PackedColumns     integers packed along the inputs (GPTQ) or the outputs (AWQ), [in, out]
    FourBitFloats     pairs of E2M1 numbers, with a scale for every 16 or 32

Each takes its tensors by role and gives some of its rows at a time, so that no matrix exists twice.
The layouts are those of the formats' own packages: compressed-tensors, AutoGPTQ, AutoAWQ, ModelOpt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.quantization.affine_blocks import (
    GROUPS,
    GROUPS_BLOCK,
    ORDERED_GROUPS,
)
from termgen.engine.device.quantization.mxfp4 import VALUES, ZERO_POWER

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each four bits of a word, from the lowest."""
Tensors = Mapping[str, torch.Tensor]
"""Tensors by their role."""
FLOAT8_ROWS = "FLOAT8_ROWS"
"""Kind of rows of float8_e4m3fn: one block, the numbers and their scale in float32."""
FLOAT8_BLOCKS = "FLOAT8_BLOCKS"
"""Kind of the same with a scale for every 128 columns, the last block filled up with zeros. The
rows of a matrix share the scales of whole runs of 16."""
FLOAT8_KINDS = frozenset((FLOAT8_ROWS, FLOAT8_BLOCKS))
FLOAT8_COLUMNS, FLOAT8_RUN = 128, 16
NVFP4 = "NVFP4"
"""Kind of pairs of floats of 4 bits: 16 bytes, the scales of the first 16 numbers and of the last,
float8_e4m3fn, and the matrix's in float32."""
NVFP4_COLUMNS, NVFP4_BLOCK = 32, 22
SIGNED_ZERO = 128
_SCALE_BYTES = 4


class StoredMatrix(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""

    def rows(self, tensors: Tensors, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) as float32."""


@dataclass(frozen=True, slots=True)
class ScaledNumbers:
    """value = scale * (number - zero point). Roles: weight, scale, zero_point."""

    shape: tuple[int, int]
    block: tuple[int, int]
    """Rows and columns that share a scale."""

    def rows(self, tensors: Tensors, first: int, last: int) -> torch.Tensor:
        numbers = tensors["weight"][first:last].float()
        if (zero := tensors.get("zero_point")) is not None:
            numbers -= self._spread(zero.float(), first, last)
        return numbers.mul_(self._spread(tensors["scale"].float(), first, last))

    @property
    def float8_kind(self) -> str | None:
        """The kind of rows that keep these numbers, which are float8_e4m3fn."""
        rows, columns = self.block
        if columns >= self.shape[1]:
            return FLOAT8_ROWS
        is_even = columns % FLOAT8_COLUMNS == 0
        is_run = rows % FLOAT8_RUN == 0 or rows >= self.shape[0]
        return FLOAT8_BLOCKS if is_even and is_run else None

    def float8(self, tensors: Tensors, first: int, last: int) -> StoredRows:
        """Rows [first, last) of float8_e4m3fn, of the kind that `float8_kind` says."""
        kind, num_columns = self.float8_kind, self.shape[1]
        assert kind is not None
        size = num_columns if kind == FLOAT8_ROWS else FLOAT8_COLUMNS
        numbers = tensors["weight"][first:last].contiguous().view(torch.uint8)
        numbers = F.pad(numbers, (0, -num_columns % size)).view(last - first, -1, size)
        grid = (-(-self.shape[0] // self.block[0]), -(-num_columns // self.block[1]))
        scale = tensors["scale"].float().reshape(grid)[torch.arange(first, last) // self.block[0]]
        if kind == FLOAT8_BLOCKS:
            scale = scale.repeat_interleave(self.block[1] // size, 1)[:, : numbers.shape[1]]
        scale_bytes = scale.contiguous().view(torch.uint8).view(*numbers.shape[:2], _SCALE_BYTES)
        return StoredRows(kind, torch.cat((numbers, scale_bytes), 2))

    @property
    def has_groups(self) -> bool:
        """True if integers are those of `GROUPS`."""
        columns = min(self.block[1], self.shape[1])
        return columns % GROUPS_BLOCK == 0 and self.shape[1] % columns == 0

    def integers(self, tensors: Tensors, first: int, last: int) -> Integers:
        """Rows [first, last) of integers with a sign, which have none here."""
        grid = (-(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1]))
        rows = torch.arange(first, last) // self.block[0]
        scale = tensors["scale"].float().reshape(grid)[rows]
        zero = torch.full_like(scale, SIGNED_ZERO)
        if (own := tensors.get("zero_point")) is not None:
            zero += own.float().reshape(grid)[rows]
        return Integers(tensors["weight"][first:last].int() + SIGNED_ZERO, zero, scale)

    def _spread(self, values: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """One for each number of these rows."""
        num_rows, num_columns = self.shape
        block_rows, block_columns = self.block
        grid = (-(-num_rows // block_rows), -(-num_columns // block_columns))
        values = values.reshape(grid)[torch.arange(first, last) // block_rows]
        if grid[1] == 1:
            return values
        return values.repeat_interleave(block_columns, dim=1)[:, :num_columns]


class Integers(NamedTuple):
    """Rows as value = scale * (number - zero), each group of columns with its own."""

    numbers: torch.Tensor  # [n, columns] int32
    zero: torch.Tensor  # [n, groups] float32
    scale: torch.Tensor  # [n, groups] float32

    def values(self, places: torch.Tensor | None) -> torch.Tensor:
        """[n, columns] float32. places [columns]: the group of each column; None: runs of them."""
        num_columns = self.numbers.shape[1]
        values = self.numbers.float()
        values -= spread(self.zero, num_columns, places)
        return values.mul_(spread(self.scale, num_columns, places))


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Roles: weight_packed [rows, words], weight_scale [rows, groups], weight_zero_point
    [words, groups], weight_g_idx [columns]: the group of each column."""

    shape: tuple[int, int]
    bits: int
    num_groups: int

    def rows(self, tensors: Tensors, first: int, last: int) -> torch.Tensor:
        return self.integers(tensors, first, last).values(tensors.get("weight_g_idx"))

    def integers(self, tensors: Tensors, first: int, last: int) -> Integers:
        num_rows, num_columns = self.shape
        numbers = unpack(tensors["weight_packed"][first:last], self.bits, num_columns)
        scale = tensors["weight_scale"].reshape(num_rows, self.num_groups)[first:last].float()
        zeros = tensors.get("weight_zero_point")
        if zeros is None:
            return Integers(numbers, torch.full_like(scale, 1 << (self.bits - 1)), scale)
        zero = unpack(zeros.T.contiguous(), self.bits, num_rows).T[first:last].float()
        return Integers(numbers, zero, scale)


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Roles: qweight, qzeros [groups, words], scales [groups, outputs], g_idx [inputs]."""

    shape: tuple[int, int]
    bits: int
    num_groups: int
    is_awq: bool
    zero_offset: int

    def rows(self, tensors: Tensors, first: int, last: int) -> torch.Tensor:
        return self.integers(tensors, first, last).values(tensors.get("g_idx"))

    def integers(self, tensors: Tensors, first: int, last: int) -> Integers:
        if self.is_awq:
            numbers = self._outputs(tensors["qweight"], first, last)
        else:
            words = tensors["qweight"][:, first:last].T.contiguous()
            numbers = unpack(words, self.bits, self.shape[1])
        zero = self._outputs(tensors["qzeros"], first, last) + self.zero_offset
        return Integers(numbers, zero.float(), tensors["scales"][:, first:last].T.float())

    def _outputs(self, words: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """words [n, outputs / numbers of a word] -> [last - first, n]: outputs [first, last)."""
        per_word = WORD_BITS // self.bits
        begin = first // per_word
        part = words[:, begin : -(-last // per_word)]
        order = AWQ_ORDER if self.is_awq else None
        numbers = unpack(part, self.bits, part.shape[1] * per_word, order)
        return numbers[:, first - begin * per_word : last - begin * per_word].T.contiguous()


@dataclass(frozen=True, slots=True)
class FourBitFloats:
    """Roles: weight_packed [rows, columns / 2] uint8, the lower half first; scale [rows, groups],
    powers of two plus 127 if uint8; global_scale, by which it is divided or multiplied."""

    shape: tuple[int, int]
    is_divided: bool = False

    def rows(self, tensors: Tensors, first: int, last: int) -> torch.Tensor:
        packed = tensors["weight_packed"][first:last]
        pairs = _pairs().index_select(0, packed.flatten().int())
        numbers = pairs.view(len(packed), self.shape[1])
        scale = tensors["scale"][first:last]
        if scale.dtype is torch.uint8:
            factors = torch.ldexp(torch.ones(scale.shape), scale.int() - ZERO_POWER)
            # 255 stands for no number
            factors.masked_fill_(scale == 255, float("nan"))
        else:
            factors = scale.float()
        if (whole := tensors.get("global_scale")) is not None:
            whole = whole.float().reshape(())
            factors = factors / whole if self.is_divided else factors * whole
        factors = factors.repeat_interleave(self.shape[1] // scale.shape[1], dim=1)
        values: torch.Tensor = numbers * factors
        return values


def nvfp4_rows(tensors: Tensors, first: int, last: int, *, is_divided: bool) -> StoredRows:
    """Rows [first, last) of `FourBitFloats` with a scale of float8_e4m3fn for every 16."""
    num_rows = last - first
    numbers = tensors["weight_packed"][first:last].reshape(num_rows, -1, NVFP4_COLUMNS // 2)
    scale = tensors["scale"][first:last].contiguous().view(torch.uint8).view(num_rows, -1, 2)
    whole = tensors["global_scale"].float().reshape(1)
    whole = (whole.reciprocal() if is_divided else whole).view(torch.uint8)
    wide = whole.expand(*numbers.shape[:2], _SCALE_BYTES)
    return StoredRows(NVFP4, torch.cat((numbers, scale, wide), 2))


def kept(integers: Integers, order: torch.Tensor | None = None) -> StoredRows:
    """The rows with their numbers as they are: for groups of whole `GROUPS_BLOCK`s of columns.
    order [columns]: the columns, group after group; None: as they are."""
    numbers, zero, scale = integers
    if order is not None:
        numbers = numbers.index_select(1, order)
    num_rows, num_columns = numbers.shape
    blocks = num_columns // GROUPS_BLOCK // scale.shape[1]
    low = zero.neg() * scale
    parts = [numbers.to(torch.uint8).view(num_rows, -1, GROUPS_BLOCK)]
    for factor in (scale, low):
        wide = factor.repeat_interleave(blocks, dim=1)
        parts.append(wide.contiguous().view(torch.uint8).view(num_rows, -1, 4))
    return StoredRows(GROUPS if order is None else ORDERED_GROUPS, torch.cat(parts, 2), order)


def split_float8(rows: StoredRows, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `FLOAT8_KINDS` -> their numbers [n, num_columns], uint8, and scales [n, blocks]."""
    assert rows.kind in FLOAT8_KINDS, rows.kind
    numbers = rows.blocks[:, :, :-_SCALE_BYTES].flatten(1)[:, :num_columns]
    scale = rows.blocks[:, :, -_SCALE_BYTES:].contiguous().view(torch.float32)[:, :, 0]
    return numbers, scale


def spread(
    values: torch.Tensor, num_columns: int, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """values [n, groups] -> [n, num_columns]: each column's own. groups [num_columns]: the group of
    each column; None: they are runs of columns, all as long."""
    size = num_columns // values.shape[1]
    if groups is None or torch.equal(groups, torch.arange(num_columns) // size):
        return values.repeat_interleave(size, dim=1)
    return values.index_select(1, groups)


def unpack(
    words: torch.Tensor, bits: int, count: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """words [n, k] int32, full of numbers of `bits` bits, some in two words -> [n, count] int32.

    order: the place among its neighbours of each number of a word, from the lowest bits on; None:
    one after another.
    """
    mask = (1 << bits) - 1
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        if order is not None:
            shifts = shifts[[order.index(place) for place in range(len(order))]]
        return ((words[..., None] >> shifts) & mask).flatten(1)[:, :count]
    assert order is None, "such numbers lie in one word"
    wide = words.long() & (2**WORD_BITS - 1)
    starts = torch.arange(count) * bits
    at, shift = starts // WORD_BITS, starts % WORD_BITS
    following = wide[:, (at + 1).clamp_(max=words.shape[1] - 1)]
    numbers: torch.Tensor = (wide[:, at] >> shift) | (following << (WORD_BITS - shift))
    return (numbers & mask).int()


def words_of(count: int, bits: int) -> int:
    """Words that `count` numbers take."""
    return math.ceil(count * bits / WORD_BITS)


@functools.cache
def _pairs() -> torch.Tensor:
    """The two numbers of each byte, float32 [256, 2]."""
    return torch.tensor([(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)])
