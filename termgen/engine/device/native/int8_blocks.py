"""Weights in 8 bits with a scale and an offset for every 32 numbers of a row, and their products.

A number is row_scale * (scale * q + low), q one of 0..255. `row_scale` is a power of two that keeps
scale and low, 16-bit floats, in range whatever the row's magnitude. A matrix that comes from a GGUF
file of 4-bit blocks of 32 (Q4_0, Q4_1) loses next to nothing: their 16 levels are among the 256,
17 apart. A tile whose numbers are all such keeps them in 4 bits, with the same results: a matrix
may hold rows of several GGUF types, as q, k and v of a Q4_K_M file do. Rows of Q6_K have numbers of
6 bits and a scale for every 16, without an offset: q stands for q - 32 there. Neighbouring tiles of
one width are a run.

The layout is made for the kernel, which computes `TILE` outputs at once, one in each lane:

    tiles   [tiles of a run, num_blocks, bytes of a block] uint8: the scales of the tile's rows
            (float16), their lows (float16), then words of 32 bits that hold neighbouring columns of
            a row, 4 or 8, the first in the lowest bits: all rows' first words, then their second

In 6 bits a block is 16 columns, without lows. Three words hold 15 of them, five each in the lower
30 bits, and two bits each of the last.

So a row of x is read number by number, and no sum crosses lanes. Sums are float32 and run along the
columns in the same order always: a row's result does not depend on the rows beside it. At one row
the kernel is about as fast as memory can be read; from 8 rows on the multiplications take longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from termgen.engine.device.native import why_unusable

BLOCK = 32
TILE = 32
LEVELS = 255
_STRIDE_PADDING = 16
_PART_NUMBERS = 2**18
"""Numbers that are laid out at a time: what a part needs stays in the processor's cache."""
COARSE = 17
"""Levels between those of 4 bits: 255 / 15."""
_SMALLEST_SCALE = 2.0**-24
"""The smallest float16 above 0. A block of equal numbers has it too, and q is 0 in it."""
_MOST_RUNS = 8
"""A matrix with more is kept in 8 bits: each run is a call of the kernel."""
HALVED_BITS, HALVED_ZERO = 6, 32
"""Width of numbers with a scale for every half of a block, and the one that stands for 0."""
_HALF = BLOCK // 2


_memory = threading.local()


class Quantized(NamedTuple):
    """Rows as they are filled, before tiles are made of them."""

    numbers: torch.Tensor  # [rows, columns] uint8
    scale: torch.Tensor  # [rows, columns / BLOCK] float16
    low: torch.Tensor  # [rows, columns / BLOCK] float16
    row_scale: torch.Tensor  # [rows] float32


def quantize_rows(rows: torch.Tensor, num_bits: int = 8) -> Quantized:
    """rows [n, columns] of any float type, finite; columns a multiple of BLOCK. num_bits: 8, or 4
    for 16 of the levels."""
    rows = rows.float()
    largest = rows.abs().amax(1)
    # Above the largest, or half of it: beyond these ends the power, or one over it, is no float32.
    exponent = torch.frexp(largest).exponent.clamp(-125, 127)
    row_scale = torch.ldexp(torch.ones_like(largest), exponent)
    blocks = (rows * row_scale.reciprocal()[:, None]).view(len(rows), -1, BLOCK)
    low = blocks.amin(2).half()
    # float16 may have rounded the offset up; then the block's least number is off by that little.
    scale = ((blocks.amax(2) - low.float()) / LEVELS).half().clamp_(min=_SMALLEST_SCALE)
    step = 1 if num_bits == 8 else COARSE
    numbers = _nearest(blocks, scale, low, step)
    if num_bits == 4:
        scale, low = _fitted(blocks, numbers, scale, low)
        numbers = _nearest(blocks, scale, low, step)
    return Quantized(numbers.to(torch.uint8).flatten(1), scale, low, row_scale)


def _nearest(
    blocks: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, step: int
) -> torch.Tensor:
    """The number nearest to each value among the multiples of `step`, as floats."""
    width = scale.float()[..., None] * step
    numbers = (blocks - low.float()[..., None]).div_(width).round_()
    return numbers.clamp_(0, LEVELS // step).mul_(step)


def _fitted(
    blocks: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, low: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset with which these numbers are nearest to the values in the least squares, as
    in GGUF's 4-bit types. With few levels that matters: a tenth less of squared error."""
    mean = numbers.mean(2, keepdim=True)
    from_mean = numbers - mean
    slope = (from_mean * blocks).sum(2) / from_mean.square().sum(2)
    # Where all numbers are alike there is no slope.
    slope = torch.where(slope > 0, slope, scale.float()).half().clamp_(min=_SMALLEST_SCALE)
    offset = blocks.mean(2) - slope.float() * mean[..., 0]
    is_flat = (from_mean == 0).all(2)
    return torch.where(is_flat, scale, slope), torch.where(is_flat, low, offset.half())


def keep_rows(
    numbers: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    num_rows: int,
    num_bits: int = 8,
) -> Quantized:
    """Rows whose blocks have numbers, scales and offsets already: numbers [n, BLOCK] uint8, scale
    and low [n] float32, n = num_rows * columns / BLOCK. The latter two are rounded to 16 bits.
    num_bits: 4 rounds numbers of more levels than 16 anew."""
    if num_bits == 4 and not _is_coarse(numbers):
        values = numbers.float().mul_(scale[:, None]).add_(low[:, None])
        return quantize_rows(values.view(num_rows, -1), 4)
    scale, low = scale.view(num_rows, -1), low.view(num_rows, -1)
    largest = torch.maximum(low.abs(), (low + LEVELS * scale).abs()).amax(1)
    exponent = torch.frexp(largest).exponent.clamp(-125, 127)
    row_scale = torch.ldexp(torch.ones_like(largest), exponent)
    factor = row_scale.reciprocal()[:, None]
    parts = (scale * factor).half(), (low * factor).half()
    return Quantized(numbers.view(num_rows, -1), *parts, row_scale)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """[rows, columns] float32."""
    numbers, scale, low, row_scale = quantized
    blocks = numbers.view(len(numbers), -1, BLOCK).float()
    blocks = blocks * scale.float()[..., None] + low.float()[..., None]
    return blocks.flatten(1).mul_(row_scale[:, None])


def halved_values(quantized: Quantized) -> torch.Tensor:
    """[rows, columns] float32 of rows with 6 bits a number, whose lows are the scales of the last
    half of each block."""
    numbers, first, last, row_scale = quantized
    scale = torch.stack((first, last), -1).flatten(1).float()
    halves = (numbers.view(len(numbers), -1, _HALF).float() - HALVED_ZERO) * scale[..., None]
    return halves.flatten(1).mul_(row_scale[:, None])


def _pack_halved(numbers: torch.Tensor) -> torch.Tensor:
    """numbers [rows, columns] uint8 below 64 -> words [rows, columns / 16 * 3] int32."""
    halves = numbers.view(len(numbers), -1, _HALF).int()
    words = (halves[..., 15:] >> torch.arange(0, 6, 2, device=numbers.device)) << 30
    for place in range(5):
        words |= halves[..., place:15:5] << HALVED_BITS * place
    return words.flatten(1)


def _unpack_halved(words: torch.Tensor) -> torch.Tensor:
    """words [..., 3 n] int32 -> numbers [..., 16 n], float32."""
    words = words.view(*words.shape[:-1], -1, 3)
    shifts = torch.arange(0, 30, HALVED_BITS, device=words.device)
    first = (words[..., None] >> shifts & 63).flatten(-2)
    last = ((words >> 30 & 3) << torch.arange(0, 6, 2, device=words.device)).sum(-1, keepdim=True)
    return torch.cat((first, last), -1).flatten(-2).float()


def _columns_of_block(num_bits: int) -> int:
    return _HALF if num_bits == HALVED_BITS else BLOCK


def _header_bytes(num_bits: int) -> int:
    """Bytes of a block's scales, and of its lows where it has them."""
    return TILE * 2 if num_bits == HALVED_BITS else 2 * TILE * 2


class _Run:
    """Neighbouring tiles whose numbers have one width."""

    def __init__(self, first: int, num_bits: int, tiles: torch.Tensor) -> None:
        """first: index of the first tile in the matrix. tiles: to be filled."""
        self.first, self.end = first, first + len(tiles)
        self.num_bits = num_bits
        """8, 6 or 4."""
        self.is_halved = num_bits == HALVED_BITS
        self._header = _header_bytes(num_bits)
        self.tiles = tiles
        self.kernels: Mapping[str, Callable[..., None]] = {}

    def fill(self, quantized: Quantized, rows_together: int) -> None:
        num_blocks = self.tiles.shape[1]
        rows = slice(self.first * TILE, self.end * TILE)
        parts = (torch.split(part[rows], rows_together) for part in quantized[:3])
        places = torch.split(self.tiles, rows_together // TILE)
        for numbers, scale, low, place in zip(*parts, places, strict=True):
            halves = place.view(torch.float16)
            if self.is_halved:
                words = _pack_halved(numbers)
                scale = torch.stack((scale, low), -1).flatten(1)
            else:
                if self.num_bits == 4:
                    numbers = (numbers[:, ::2] & 15) | (numbers[:, 1::2] & 240)
                # Whole words are moved: moving bytes takes four times as long.
                words = numbers.view(torch.int32)
                lows = low.view(-1, TILE, num_blocks).transpose(1, 2)
                halves[:, :, TILE : 2 * TILE].copy_(lows)
            words = words.view(-1, TILE, num_blocks, words.shape[1] // num_blocks)
            to = place.view(torch.int32)[:, :, self._header // 4 :]
            to.unflatten(2, (-1, TILE)).copy_(words.permute(0, 2, 3, 1))
            halves[:, :, :TILE].copy_(scale.view(-1, TILE, num_blocks).transpose(1, 2))

    def columns(self, first_tile: int, end_tile: int) -> torch.Tensor:
        """[num_columns, rows] float32, without the scales of rows."""
        numbers, scale, low = self._read(
            self.tiles[first_tile - self.first : end_tile - self.first]
        )
        columns = numbers.mul_(scale[:, :, None]).add_(low[:, :, None])  # [tiles, blocks, n, TILE]
        return columns.flatten(1, 2).transpose(0, 1).flatten(1)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[T, num_columns] float32, without the scales of rows."""
        tile, lane = ids // TILE - self.first, ids % TILE
        # Views, so that only the chosen rows of the tiles are read.
        halves = _split(self.tiles[:, :, : self._header], -1, TILE, 2)[tile, :, :, lane]
        words = _split(self.tiles[:, :, self._header :], -1, TILE, 4)[tile, :, :, lane]
        scale, low = self._factors(halves.view(torch.float16).float(), 2)  # [T, blocks, 1] each
        return self._numbers(words).mul_(scale).add_(low).flatten(1)

    def quantized(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers, scales and lows as they were given, on a device."""
        assert not self.is_halved, "no scales of whole blocks"
        tiles = self.tiles.to(device)
        words = _split(tiles[:, :, self._header :], -1, TILE, 4).permute(0, 3, 1, 2, 4).flatten(3)
        if self.num_bits == 4:
            words = torch.stack((words & 15, words >> 4), -1).flatten(-2) * COARSE
        halves = tiles[:, :, : self._header].contiguous().view(torch.float16)
        scale, low = (part.transpose(1, 2).flatten(0, 1) for part in torch.split(halves, TILE, 2))
        return words.flatten(2).flatten(0, 1), scale, low

    def _read(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers [tiles, blocks, columns of one, TILE], scales and lows [tiles, blocks, TILE],
        float32."""
        words = _split(tiles[:, :, self._header :], -1, TILE, 4).transpose(2, 3)
        numbers = self._numbers(words).transpose(2, 3)
        halves = tiles[:, :, : self._header].contiguous().view(torch.float16).float()
        scale, low = self._factors(_split(halves, -1, TILE), 2)
        return numbers, scale, low

    def _factors(self, halves: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and the lows of a header, whose parts lie along a dimension."""
        if self.is_halved:
            scale = halves.squeeze(dim)
            return scale, scale * -HALVED_ZERO
        scale, low = halves.unbind(dim)
        return scale, low

    def _numbers(self, words: torch.Tensor) -> torch.Tensor:
        """words [..., words of a block, 4] uint8 -> the block's numbers, float32."""
        if self.is_halved:
            return _unpack_halved(words.contiguous().view(torch.int32)[..., 0])
        if self.num_bits == 4:
            words = torch.stack((words & 15, words >> 4), -1).flatten(-2) * COARSE
        return words.flatten(-2).float()


class Int8Blocks:
    """A matrix [num_rows, num_columns] in tiles. num_rows need not be a multiple of TILE."""

    def __init__(
        self,
        quantized: Quantized,
        num_bits: int | None = None,
        halved: torch.Tensor | None = None,
    ) -> None:
        """quantized: on any device, which lays it out; the tiles lie in main memory. num_bits: of
        all tiles; None: the fewest that each can have. halved: [rows] bool in main memory, those of
        6 bits whose lows are the scales of the last half of each block; in tiles that are not all
        such, and where there would be too many runs, they are rounded to 8 bits."""
        self.num_rows, self.num_columns = quantized.numbers.shape
        if padding := -self.num_rows % TILE:
            # Rows of zeros: the scale of a padded row is 0.
            numbers, scale, low = (F.pad(part, (0, 0, 0, padding)) for part in quantized[:3])
            row_scale = F.pad(quantized.row_scale, (0, padding))
            quantized = Quantized(numbers, scale, low, row_scale)
        self._width = len(quantized.row_scale)
        rows_together = max(TILE, _PART_NUMBERS // self.num_columns // TILE * TILE)
        if num_bits is None:
            quantized, widths = _in_runs(quantized, halved)
        else:
            widths = [(num_bits, self._width // TILE)]
        self.row_scale = quantized.row_scale.cpu()
        bytes_of = [count * self._tile_bytes(bits) for bits, count in widths]
        made = torch.empty(sum(bytes_of), dtype=torch.uint8, device=quantized.numbers.device)
        self.runs: list[_Run] = []
        first = 0
        for (bits, count), part in zip(widths, torch.split(made, bytes_of), strict=True):
            run = _Run(
                first, bits, part.view(count, self.num_columns // _columns_of_block(bits), -1)
            )
            run.fill(quantized, rows_together)
            self.runs.append(run)
            first += count
        self.tiles = made.cpu()
        """The tiles of all runs."""
        for run, part in zip(self.runs, torch.split(self.tiles, bytes_of), strict=True):
            run.tiles = part.view(run.tiles.shape)
        self._has_kernels = not why_unusable()
        if self._has_kernels:
            from termgen.engine.device.native import int8_kernels, jit

            self._threads = jit.threads_for
            for run in self.runs:
                zero = HALVED_ZERO if run.is_halved else 0
                sizes = (_columns_of_block(run.num_bits), TILE, run.num_bits, COARSE, zero)
                run.kernels = int8_kernels.int8_kernels(int8_kernels.Layout(*sizes))

    def _tile_bytes(self, num_bits: int) -> int:
        columns = _columns_of_block(num_bits)
        return (
            self.num_columns // columns * (_header_bytes(num_bits) + columns * TILE * num_bits // 8)
        )

    @property
    def num_bits(self) -> int:
        """The most bits that a tile has."""
        return max(run.num_bits for run in self.runs)

    def quantized(self, device: torch.device | None = None) -> Quantized:
        """The matrix as it was given, on a device; None: in main memory."""
        device = torch.device("cpu") if device is None else device
        parts = zip(*(run.quantized(device) for run in self.runs), strict=True)
        numbers, scale, low = (torch.cat(part)[: self.num_rows] for part in parts)
        return Quantized(numbers, scale, low, self.row_scale[: self.num_rows].to(device))

    @property
    def num_tiles(self) -> int:
        return self._width // TILE

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, num_columns] float32 -> x @ matrix.T, [M, num_rows] float32. By the kernel: for
        machines that have it."""
        x = x.contiguous()
        count, width = x.shape[0], self._width
        y = torch.empty(count, width)
        scratch = _scratch(count * (self.num_columns + self.num_columns // _HALF)).data_ptr()
        for run in self.runs:
            place = run.first * TILE * y.itemsize
            run.kernels["int8_product"](
                run.tiles.data_ptr(),
                self.row_scale.data_ptr() + place,
                x.data_ptr(),
                y.data_ptr() + place,
                scratch,
                count,
                run.tiles.shape[1],
                width * y.itemsize,
                run.end - run.first,
                self._threads(run.tiles.nbytes * count),
            )
        return y if width == self.num_rows else y[:, : self.num_rows].contiguous()

    def columns_of(
        self, first_tile: int, end_tile: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rows of some tiles, transposed: [num_columns, rows] float32. Those past num_rows are
        zeros. end_tile may be past the last. out: memory to use, any shape, if it is large enough:
        new memory takes longer to fill than the numbers take to compute."""
        end_tile = min(end_tile, self.num_tiles)
        num_tiles = end_tile - first_tile
        if not self._has_kernels:
            parts = [run.columns(*ends) for run, ends in self._within(first_tile, end_tile)]
            return torch.cat(parts, 1).mul_(self.row_scale[first_tile * TILE : end_tile * TILE])
        # A column's place in the cache goes by its address: a power of two between them is slow.
        stride = num_tiles * TILE + _STRIDE_PADDING
        if out is None or out.numel() < self.num_columns * stride:
            out = torch.empty(self.num_columns * stride)
        columns = out.view(-1)[: self.num_columns * stride].view(self.num_columns, stride)
        for run, (first, end) in self._within(first_tile, end_tile):
            run.kernels["int8_columns"](
                run.tiles[first - run.first].data_ptr(),
                self.row_scale[first * TILE].data_ptr(),
                columns[0, (first - first_tile) * TILE].data_ptr(),
                stride * columns.itemsize,
                run.tiles.shape[1],
                end - first,
                self._threads(columns.nbytes),
            )
        return columns[:, : num_tiles * TILE]

    def _within(self, first_tile: int, end_tile: int) -> Iterator[tuple[_Run, tuple[int, int]]]:
        """The runs between two tiles, and the first and the last of their tiles between them."""
        for run in self.runs:
            first, end = max(run.first, first_tile), min(run.end, end_tile)
            if first < end:
                yield run, (first, end)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows of the matrix: ids [T] -> [T, num_columns] float32."""
        ids = ids.long()
        if len(self.runs) == 1:
            found = self.runs[0].rows(ids)
        else:
            found = torch.empty(len(ids), self.num_columns)
            for run in self.runs:
                at = ((ids >= run.first * TILE) & (ids < run.end * TILE)).nonzero()[:, 0]
                found[at] = run.rows(ids[at])
        return found.mul_(self.row_scale[ids][:, None])


def _scratch(size: int) -> torch.Tensor:
    """This thread's memory for what products compute from x first, at least `size` floats: making
    new memory takes as long as a tenth of a small product."""
    kept: torch.Tensor | None = getattr(_memory, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _memory.scratch = torch.empty(size)
    return kept


Runs = list[tuple[int, int]]
"""Bits and number of tiles of each run."""


def _in_runs(quantized: Quantized, halved: torch.Tensor | None) -> tuple[Quantized, Runs]:
    """The rows, a multiple of TILE, and their runs."""
    if halved is None or not halved.any():
        return quantized, _widths(quantized.numbers)
    # Padding goes with the rows before it.
    halved = F.pad(halved, (0, len(quantized.numbers) - len(halved)), value=bool(halved[-1]))
    whole = halved.view(-1, TILE).all(1).tolist()
    found = _widths(quantized.numbers, whole)
    if len(found) > _MOST_RUNS:
        whole = [False] * len(whole)
        found = [(8, len(whole))]
    others = halved & ~torch.tensor(whole).repeat_interleave(TILE)
    if others.any():
        quantized = Quantized(*(part.clone() for part in quantized))
        for own in torch.split(others.nonzero()[:, 0].to(quantized.numbers.device), TILE):
            values = halved_values(Quantized(*(part[own] for part in quantized)))
            for part, rounded in zip(quantized, quantize_rows(values), strict=True):
                part[own] = rounded
    return quantized, found


def _widths(numbers: torch.Tensor, halved: Sequence[bool] = ()) -> Runs:
    """numbers: [rows, columns], rows a multiple of TILE. halved: the tiles of 6 bits."""
    flags = halved or [False] * (len(numbers) // TILE)
    bits = [
        HALVED_BITS if flag else 4 if _is_coarse(tile) else 8
        for flag, tile in zip(flags, torch.split(numbers, TILE), strict=True)
    ]
    runs = [(own, len(list(tiles))) for own, tiles in groupby(bits)]
    return runs if len(runs) <= _MOST_RUNS or halved else [(8, len(bits))]


def _is_coarse(tile: torch.Tensor) -> bool:
    """True if all numbers are multiples of 17: these have two equal halves. In others the first row
    nearly always shows it, and the rest is not read."""
    return all(torch.equal(rows & 15, rows >> 4) for rows in (tile[:1], tile))


def _split(bytes_: torch.Tensor, *sizes: int) -> torch.Tensor:
    """[tiles, blocks, n] -> [tiles, blocks, *sizes], a view."""
    return bytes_.view(*bytes_.shape[:2], *sizes)
