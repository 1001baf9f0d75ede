"""Kernels for the tiles of `int8_blocks`: products with rows of x, and the numbers themselves.

A word of 32 bits holds several columns of a row. One of them is cut out with a mask and turned into
a float where it stands, 2 ** k times too large, which is two instructions; the x it meets is
2 ** k times too small instead. Scale and low are applied to a block's sums: a block contributes
scale * sum(q * x) + low * sum(x).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from termgen.engine.device.native.jit import (
    FLOAT,
    FLOAT_BYTES,
    FLOATS,
    HALVES,
    INT64,
    INTS,
    LANES,
    POINTER,
    VECTOR_BYTES,
    Definition,
    Emitter,
    Kernel,
    Value,
    compile_kernels,
    has_wide_vectors,
)

_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Places in a tile, in bytes."""

    block: int
    tile: int
    num_bits: int
    """8, 6 or 4."""
    coarse: int
    """Levels of 8 bits between two of 4."""
    zero: int = 0
    """The number that is 0, where blocks have scales alone; 0: they have lows."""

    @property
    def vectors(self) -> range:
        """Vectors of outputs in a tile."""
        return range(self.tile // LANES)

    @property
    def header_bytes(self) -> int:
        return (1 if self.zero else 2) * self.tile * _HALF_BYTES

    @property
    def block_bytes(self) -> int:
        return self.header_bytes + self.block * self.tile * self.num_bits // 8

    @property
    def words_together(self) -> int:
        """Words of a row that hold whole columns."""
        return 3 if self.num_bits == 6 else 1

    @property
    def places(self) -> range:
        """Columns in them."""
        return range(32 * self.words_together // self.num_bits)

    def factor(self, place: int) -> float:
        """The number in a place, over the float that `numbers` makes of it."""
        within = place % (32 // self.num_bits)
        return 1.0 if place == self.places[-1] else 2.0 ** -(self.num_bits * within)

    def numbers(self, e: Emitter, words: Sequence[Value], place: int) -> Value:
        """Floats of the columns in a place. words: vectors, `words_together` of them."""
        of_word = 32 // self.num_bits
        if place < self.places[-1]:
            mask = ((1 << self.num_bits) - 1) << self.num_bits * (place % of_word)
            return e.sitofp(e.and_(words[place // of_word], INTS([mask] * LANES)), FLOATS)
        if self.num_bits != 6:  # its upper bit would be a sign
            return e.sitofp(e.lshr(words[0], INTS([self.num_bits * place] * LANES)), FLOATS)
        number = e.lshr(words[0], INTS([30] * LANES))
        for i, word in enumerate(words[1:], 1):
            part = e.lshr(word, INTS([30 - 2 * i] * LANES))
            number = e.or_(number, e.and_(part, INTS([3 << 2 * i] * LANES)))
        return e.sitofp(number, FLOATS)

    def headers(self, e: Emitter, block: Value) -> list[tuple[Value, Value]]:
        """Scales and lows of a block, as floats."""

        def half(index: int) -> Value:
            return e.fpext(e.read(HALVES, block, index * LANES * _HALF_BYTES), FLOATS)

        found = []
        for vector in self.vectors:
            scale = half(vector)
            if self.zero:
                low = e.fmul(scale, FLOATS([-float(self.zero)] * LANES))
            else:
                low = half(len(self.vectors) + vector)
            if self.num_bits == 4:
                scale = e.fmul(scale, FLOATS([float(self.coarse)] * LANES))
            found.append((scale, low))
        return found

    @contextmanager
    def words(self, e: Emitter, block: Value) -> Iterator[tuple[Value, list[list[Value]]]]:
        """A loop over the words of a block: the first column, and of each vector of rows the words
        that `numbers` takes."""
        with e.loop(0, self.block, len(self.places)) as first:
            # A column's bits of all rows are whole bytes, but a place's need not be.
            passed = e.times(e.udiv(first, e.number(len(self.places))), self.words_together)
            at = e.plus(self.header_bytes, e.times(passed, self.tile * 4))
            found = []
            for vector in self.vectors:
                places = [
                    vector * VECTOR_BYTES + i * self.tile * 4 for i in range(self.words_together)
                ]
                found.append([e.read(INTS, block, e.plus(at, place)) for place in places])
            yield first, found

    def row_scales(self, e: Emitter, row_scale: Value, tile: Value) -> list[Value]:
        first = e.times(tile, self.tile * FLOAT_BYTES)
        return [
            e.read(FLOATS, row_scale, e.plus(first, vector * VECTOR_BYTES))
            for vector in self.vectors
        ]


@functools.cache
def int8_kernels(layout: Layout) -> dict[str, Kernel]:
    """int8_product(tiles, row_scale, x, y, scratch, num_rows, num_blocks, y_stride, num_tiles,
    threads): writes y [num_rows, num_tiles * tile] whose rows lie `y_stride` bytes apart, for
    contiguous x [num_rows, num_blocks * block], both float32. scratch: room for
    num_rows * num_blocks * (block + 1) floats.

    int8_columns(tiles, row_scale, columns, stride, num_blocks, num_tiles, threads): writes the
    numbers, columns [num_blocks * block, any] float32 whose rows lie `stride` bytes apart.
    """
    # Numbers cut out once serve as many rows of x as have their sums in registers: 32 vectors of
    # AVX-512 hold two of eight rows, 16 of AVX2 (each half as wide) two of two.
    rows_together = (8, 4, 2, 1) if has_wide_vectors() else (2, 1)
    product = functools.partial(_emit_product, layout, rows_together)
    return compile_kernels(
        {
            "int8_product": Definition(
                (*[POINTER] * 5, INT64, INT64, INT64),
                product,
                functools.partial(_prepare_x, layout),
            ),
            "int8_columns": Definition(
                (POINTER, POINTER, POINTER, INT64, INT64), functools.partial(_emit_columns, layout)
            ),
        },
        key=("int8_kernels", layout, rows_together),
    )


def _prepare_x(layout: Layout, e: Emitter, arguments: Sequence[Value]) -> None:
    """To scratch: x with the factors of the places, and behind it the sum of each block."""
    _, _, x, _, scratch, num_rows, num_blocks, _ = arguments
    factors = [layout.factor(lane % len(layout.places)) for lane in range(LANES)]
    sums = e.move(scratch, e.times(num_rows, num_blocks, layout.block * FLOAT_BYTES))
    with e.loop(0, e.times(num_rows, num_blocks)) as index:
        first = e.times(index, layout.block * FLOAT_BYTES)
        total = FLOATS([0.0] * LANES)
        for at in range(0, layout.block * FLOAT_BYTES, VECTOR_BYTES):
            numbers = e.read(FLOATS, x, e.plus(first, at))
            e.write(e.fmul(numbers, FLOATS(factors)), scratch, e.plus(first, at))
            total = e.fadd(total, numbers)
        e.write(e.add_up(total), sums, e.times(index, FLOAT_BYTES))


def _emit_product(
    layout: Layout,
    rows_together: Sequence[int],
    e: Emitter,
    arguments: Sequence[Value],
    first: Value,
    end: Value,
) -> None:
    tiles, row_scale, _, y, x, num_rows, num_blocks, y_stride = arguments
    x_stride = e.times(num_blocks, layout.block * FLOAT_BYTES)
    sums = e.move(x, e.times(num_rows, x_stride))
    sums_stride = e.times(num_blocks, FLOAT_BYTES)
    with e.loop(first, end) as tile:
        weights = e.move(tiles, e.times(tile, num_blocks, layout.block_bytes))
        outputs = e.move(y, e.times(tile, layout.tile * FLOAT_BYTES))
        scales = layout.row_scales(e, row_scale, tile)
        done = e.number(0)
        for count in rows_together:
            until = e.sub(num_rows, e.urem(e.sub(num_rows, done), e.number(count)))
            with e.loop(done, until, count) as row:
                rows = [e.plus(row, i) for i in range(count)]
                emit_rows(
                    layout,
                    e,
                    weights,
                    [e.move(x, e.times(each, x_stride)) for each in rows],
                    [e.move(sums, e.times(each, sums_stride)) for each in rows],
                    [e.move(outputs, e.times(each, y_stride)) for each in rows],
                    scales,
                    num_blocks,
                )
            done = until


def emit_rows(
    layout: Layout,
    e: Emitter,
    weights: Value,
    inputs: Sequence[Value],
    input_sums: Sequence[Value],
    outputs: Sequence[Value],
    row_scales: Sequence[Value],
    num_blocks: Value,
) -> None:
    """One tile's outputs for some rows."""
    zeros = FLOATS([0.0] * LANES)
    totals = [[e.variable(zeros) for _ in layout.vectors] for _ in inputs]
    with e.loop(0, num_blocks) as index:
        block = e.move(weights, e.times(index, layout.block_bytes))
        start = e.times(index, layout.block * FLOAT_BYTES)
        sums = [[e.variable(zeros) for _ in layout.vectors] for _ in inputs]
        with layout.words(e, block) as (first, words):
            for place in layout.places:
                numbers = [layout.numbers(e, own, place) for own in words]
                at = e.plus(start, e.times(e.plus(first, place), FLOAT_BYTES))
                for row, address in enumerate(inputs):
                    factor = e.splat(e.read(FLOAT, address, at))
                    for number, total in zip(numbers, sums[row], strict=True):
                        e.store(e.multiply_add(number, factor, e.load(total)), total)
        headers = layout.headers(e, block)
        for row, address in enumerate(input_sums):
            x_sum = e.splat(e.read(FLOAT, address, e.times(index, FLOAT_BYTES)))
            for (scale, low), added, total in zip(headers, sums[row], totals[row], strict=True):
                with_low = e.multiply_add(low, x_sum, e.load(total))
                e.store(e.multiply_add(scale, e.load(added), with_low), total)
    for row, address in enumerate(outputs):
        for vector, (total, scale) in enumerate(zip(totals[row], row_scales, strict=True)):
            e.write(e.fmul(e.load(total), scale), address, vector * VECTOR_BYTES)


def _emit_columns(
    layout: Layout, e: Emitter, arguments: Sequence[Value], first: Value, end: Value
) -> None:
    tiles, row_scale, columns, stride, num_blocks = arguments
    with e.loop(first, end) as tile:
        weights = e.move(tiles, e.times(tile, num_blocks, layout.block_bytes))
        outputs = e.move(columns, e.times(tile, layout.tile * FLOAT_BYTES))
        scales = layout.row_scales(e, row_scale, tile)
        with e.loop(0, num_blocks) as index:
            block = e.move(weights, e.times(index, layout.block_bytes))
            rows = e.move(outputs, e.times(index, stride, layout.block))
            headers = layout.headers(e, block)
            with layout.words(e, block) as (column, words):
                for place in layout.places:
                    address = e.move(rows, e.times(stride, e.plus(column, place)))
                    factor = FLOATS([layout.factor(place)] * LANES)
                    for vector, (scale, low) in enumerate(headers):
                        number = e.fmul(layout.numbers(e, words[vector], place), factor)
                        number = e.fmul(e.multiply_add(number, scale, low), scales[vector])
                        e.write(number, address, vector * VECTOR_BYTES)
