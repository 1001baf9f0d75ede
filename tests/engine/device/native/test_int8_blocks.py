from __future__ import annotations

import pytest
import torch

from termgen.engine.device.native import int8_blocks
from termgen.engine.device.native.int8_blocks import (
    _MOST_RUNS,
    BLOCK,
    HALVED_BITS,
    TILE,
    Int8Blocks,
    Quantized,
    dequantize,
    halved_values,
    quantize_rows,
)

SIZES = [(96, 64), (70, 96), (33, 32), (1, 160), (32, 1536)]
NUM_ROWS = [0, 1, 2, 3, 5, 8, 9, 17]


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


def quantized_matrix(rows: int, columns: int, num_bits: int) -> Quantized:
    quantized = quantize_rows(random_matrix(rows, columns) * torch.logspace(-9, 9, rows)[:, None])
    if num_bits == 4:
        return quantized._replace(numbers=quantized.numbers // 17 * 17)
    return quantized


def mixed_matrix(tile_bits: list[int], columns: int = 96) -> Quantized:
    """Rows of these widths, a tile each; six rows are missing in the last."""
    whole = quantized_matrix(len(tile_bits) * TILE, columns, 8)
    bits = torch.tensor(tile_bits).repeat_interleave(TILE)[:, None]
    numbers = torch.where(bits == 4, whole.numbers // 17 * 17, whole.numbers)
    return Quantized(*(part[:-6].contiguous() for part in whole._replace(numbers=numbers)))


def test_each_number_is_within_half_a_step_of_its_block() -> None:
    matrix = random_matrix(64, 96) * torch.logspace(-30, 30, 64)[:, None]
    blocks = matrix.view(64, -1, BLOCK)
    step = (blocks.amax(2) - blocks.amin(2)) / 255
    error = (dequantize(quantize_rows(matrix)).view_as(blocks) - blocks).abs().amax(2)
    # float16 rounds the scale and the offset: 11 bits each.
    assert (error <= 0.5 * step + blocks.abs().amax(2) * 2**-10).all()
    assert (error.mean() < 0.6 * step.mean()).all()


@pytest.mark.parametrize("number", [0.0, 1.0, -3.5, 1e-30, -1e30, 1e-42, 3.4e38, -1.8e38])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_rows_of_one_number_stay_what_they_are(number: float, num_bits: int) -> None:
    rows = torch.full((2, 64), number)
    rows[1] = 0.0
    restored = dequantize(quantize_rows(rows, num_bits))
    assert restored.isfinite().all()
    torch.testing.assert_close(restored, rows, rtol=2e-3, atol=1e-38)


def test_sixteen_levels_are_fitted_to_the_block() -> None:
    matrix = random_matrix(64, 96) * torch.logspace(-9, 9, 64)[:, None]
    quantized = quantize_rows(matrix, 4)
    assert [run.num_bits for run in Int8Blocks(quantized).runs] == [4]
    blocks = matrix.view(64, 3, 32)
    spread = blocks.amax(2) - blocks.amin(2)
    error = (dequantize(quantized).view_as(blocks) - blocks).abs() / spread[..., None]
    assert error.max() < 1 / 15, "half a step, and what the fit moved the ends by"
    # The ends of a block as its first and last level, as with 256 of them.
    low, step = blocks.amin(2, keepdim=True), spread[..., None] / 15
    plain = low + ((blocks - low) / step).round() * step
    of_plain = ((plain - blocks) / spread[..., None]).square().mean()
    assert error.square().mean() < 0.95 * of_plain


def test_numbers_of_sixteen_levels_are_kept_in_four_bits_without_loss() -> None:
    """The levels of GGUF's Q4_1: a scale and an offset for each block, both float16."""
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 16, (64, 6, BLOCK), generator=generator)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = torch.rand(64, 6, 1, generator=generator).half().float() * 0.01
    low = -(torch.rand(64, 6, 1, generator=generator) * 0.1).half().float()
    matrix = (levels * scale + low).flatten(1)
    quantized = quantize_rows(matrix)
    assert [run.num_bits for run in Int8Blocks(quantized).runs] == [4]
    assert torch.equal(quantized.numbers.view_as(levels), (levels * 17).to(torch.uint8))
    error = (dequantize(quantized) - matrix).abs().view(64, 6, BLOCK).amax(2)
    assert (error <= scale[..., 0] * 0.02 + 1e-4 * low[..., 0].abs()).all()


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_products(rows: int, columns: int, num_bits: int) -> None:
    quantized = quantized_matrix(rows, columns, num_bits)
    blocks, matrix = Int8Blocks(quantized), dequantize(quantized).double()
    assert {run.num_bits for run in blocks.runs} == {num_bits} or rows == 1
    for num_rows in NUM_ROWS:
        x = random_matrix(num_rows, columns, seed=num_rows)
        y = blocks.product(x)
        assert y.shape == (num_rows, rows) and y.dtype is torch.float32
        magnitude = x.double().abs() @ matrix.abs().T
        assert ((y - x.double() @ matrix.T).abs() <= 2e-6 * magnitude).all()


@pytest.mark.parametrize("num_bits", [8, 4])
def test_a_row_does_not_depend_on_the_rows_beside_it(num_bits: int) -> None:
    blocks = Int8Blocks(quantized_matrix(70, 96, num_bits))
    x = random_matrix(17, 96, seed=5)
    together = blocks.product(x)
    for first, end in ((0, 1), (3, 5), (4, 12), (16, 17)):
        assert torch.equal(blocks.product(x[first:end]), together[first:end])


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_numbers_are_read_back(rows: int, columns: int, num_bits: int) -> None:
    quantized = quantized_matrix(rows, columns, num_bits)
    blocks, matrix = Int8Blocks(quantized), dequantize(quantized)
    close = {"rtol": 1e-6, "atol": 0.0}
    for out in (None, torch.empty(100 * columns), torch.empty(3)):
        whole = blocks.columns_of(0, 100, out)
        torch.testing.assert_close(whole[:, :rows].T, matrix, **close)
        assert not whole[:, rows:].any()
        last = blocks.columns_of(blocks.num_tiles - 1, blocks.num_tiles)
        assert torch.equal(last, whole[:, -last.shape[1] :])
    ids = torch.tensor([rows - 1, 0, rows // 2, 0])
    torch.testing.assert_close(blocks.rows(ids), matrix[ids], **close)


@pytest.mark.parametrize("num_bits", [8, 4])
def test_numbers_are_read_back_without_kernels(
    num_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "termgen.engine.device.native.int8_blocks.why_unusable", lambda: "not installed"
    )
    quantized = quantized_matrix(70, 96, num_bits)
    columns = Int8Blocks(quantized).columns_of(1, 3)
    torch.testing.assert_close(columns[:, :38].T, dequantize(quantized)[32:], rtol=1e-6, atol=0.0)


MIXED = [[4, 8], [8, 4], [4, 4, 8, 8, 4], [8, 4, 8]]


@pytest.mark.parametrize("tile_bits", MIXED)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_tiles_of_a_matrix_have_widths_of_their_own(
    tile_bits: list[int], has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(int8_blocks, "why_unusable", lambda: "not installed")
    quantized = mixed_matrix(tile_bits)
    blocks, matrix = Int8Blocks(quantized), dequantize(quantized)
    assert [b for r in blocks.runs for b in [r.num_bits] * (r.end - r.first)] == tile_bits
    assert blocks.tiles.nbytes == sum(3 * (TILE * 4 + 4 * TILE * bits) for bits in tile_bits)
    close = {"rtol": 1e-6, "atol": 0.0}
    for first, end in ((0, 100), (1, 2), (1, 9), (0, 2)):
        rows = matrix[first * TILE : end * TILE]
        columns = blocks.columns_of(first, end)
        torch.testing.assert_close(columns[:, : len(rows)].T, rows, **close)
        assert not columns[:, len(rows) :].any()
    ids = torch.tensor([len(matrix) - 1, 0, TILE, TILE - 1, 40, 0])
    torch.testing.assert_close(blocks.rows(ids), matrix[ids], **close)
    assert blocks.rows(ids[:0]).shape == (0, 96)
    for num_rows in NUM_ROWS if has_kernels else ():
        x = random_matrix(num_rows, 96, seed=num_rows)
        y, exact = blocks.product(x), x.double() @ matrix.double().T
        magnitude = x.double().abs() @ matrix.double().abs().T
        assert ((y - exact).abs() <= 2e-6 * magnitude).all()


def halved_matrix(rows: int, columns: int) -> Quantized:
    """Numbers of 6 bits, and scales of the halves of blocks, some below zero."""
    generator = torch.Generator().manual_seed(rows + columns)
    numbers = torch.randint(0, 64, (rows, columns), generator=generator).to(torch.uint8)
    scales = (torch.randn(2, rows, columns // BLOCK, generator=generator) / 40).half()
    return Quantized(numbers, *scales, torch.exp2(torch.arange(rows) % 7 - 3.0))


ALL = torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_numbers_of_six_bits(
    rows: int, columns: int, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(int8_blocks, "why_unusable", lambda: "not installed")
    quantized = halved_matrix(rows, columns)
    blocks, matrix = Int8Blocks(quantized, halved=ALL.expand(rows)), halved_values(quantized)
    assert [run.num_bits for run in blocks.runs] == [HALVED_BITS] and blocks.num_bits == 6
    assert blocks.tiles.nbytes == -(-rows // TILE) * TILE * columns * 7 // 8
    close = {"rtol": 1e-6, "atol": 1e-7}
    whole = blocks.columns_of(0, 100)
    torch.testing.assert_close(whole[:, :rows].T, matrix, **close)
    assert not whole[:, rows:].any()
    ids = torch.tensor([rows - 1, 0, rows // 2, 0])
    torch.testing.assert_close(blocks.rows(ids), matrix[ids], **close)
    for num_rows in NUM_ROWS if has_kernels else ():
        x = random_matrix(num_rows, columns, seed=num_rows)
        y = blocks.product(x)
        magnitude = x.double().abs() @ matrix.double().abs().T
        # A sum of numbers is 32 times that of x too large, until its scale comes.
        assert ((y - x.double() @ matrix.double().T).abs() <= 2e-5 * magnitude + 1e-6).all()
        if num_rows > 2:
            assert torch.equal(blocks.product(x[1:2]), y[1:2])


@pytest.mark.parametrize(
    ("first", "end", "bits"),
    [
        (0, 64, [6, 6, 8, 4]),
        (32, 96, [8, 6, 6, 4]),
        (70, 122, [8, 8, 8, 6]),  # rows of the third tile are rounded
        (40, 60, [8, 8, 8, 4]),
    ],
)
def test_rows_of_six_bits_beside_others(first: int, end: int, bits: list[int]) -> None:
    others = mixed_matrix([8, 8, 8, 4])
    own, halved = halved_matrix(128, 96), torch.zeros(122, dtype=torch.bool)
    halved[first:end] = True
    matrix = torch.where(halved[:, None], halved_values(own)[:122], dequantize(others))
    parts = zip(own, others, strict=True)
    both = Quantized(
        *(
            torch.where(halved.view(-1, *[1] * (other.ndim - 1)), part[:122], other)
            for part, other in parts
        )
    )
    before = both.numbers.clone()
    blocks = Int8Blocks(both, halved=halved)
    assert torch.equal(both.numbers, before), "what was given is not changed"
    assert [b for r in blocks.runs for b in [r.num_bits] * (r.end - r.first)] == bits
    kept = blocks.rows(torch.arange(122))
    is_rounded = halved & (torch.tensor(bits).repeat_interleave(TILE)[:122] == 8)
    torch.testing.assert_close(kept[~is_rounded], matrix[~is_rounded], rtol=1e-6, atol=1e-7)
    step = matrix.view(122, -1, BLOCK).amax(2) - matrix.view(122, -1, BLOCK).amin(2)
    error = (kept - matrix).abs().view(122, -1, BLOCK).amax(2)
    assert (error <= step / 255).all()
    x = random_matrix(3, 96)
    torch.testing.assert_close(blocks.product(x), x @ kept.T, rtol=1e-4, atol=1e-3)


def test_rows_of_six_bits_that_change_too_often_are_rounded() -> None:
    rows = TILE * (_MOST_RUNS + 2)
    own, others = halved_matrix(rows, 64), quantized_matrix(rows, 64, 8)
    halved = (torch.arange(rows) // TILE % 2).bool()
    both = Quantized(
        *(
            torch.where(halved.view(-1, *[1] * (other.ndim - 1)), part, other)
            for part, other in zip(own, others, strict=True)
        )
    )
    blocks = Int8Blocks(both, halved=halved)
    assert [run.num_bits for run in blocks.runs] == [8]
    matrix = torch.where(halved[:, None], halved_values(own), dequantize(others))
    error = (blocks.rows(torch.arange(rows)) - matrix).abs().amax(1)
    assert (error <= matrix.abs().amax(1) / 100).all()


def test_a_run_computes_what_it_computes_alone() -> None:
    """Bit for bit: whatever the width of the tiles beside it."""
    quantized = mixed_matrix([4, 8, 8, 4])
    x = random_matrix(9, 96, seed=2)
    together = Int8Blocks(quantized).product(x)
    for first, end in ((0, 1), (1, 3), (3, 4)):
        rows = slice(first * TILE, end * TILE)
        alone = Int8Blocks(Quantized(*(part[rows] for part in quantized)))
        assert len(alone.runs) == 1
        assert torch.equal(alone.product(x), together[:, rows])


def test_widths_that_change_too_often_are_all_eight_bits() -> None:
    """A run is a call of the kernel."""
    quantized = mixed_matrix([4, 8] * (_MOST_RUNS // 2))
    assert len(Int8Blocks(quantized).runs) == _MOST_RUNS
    quantized = mixed_matrix([4, 8] * (_MOST_RUNS // 2) + [4])
    blocks, matrix = Int8Blocks(quantized), dequantize(quantized)
    assert [run.num_bits for run in blocks.runs] == [8]
    x = random_matrix(2, 96)
    torch.testing.assert_close(blocks.product(x), x @ matrix.T, rtol=1e-4, atol=1e-3)


def test_one_row_decides_over_its_tile() -> None:
    """Wherever it lies: the first row of a tile is looked at before the others."""
    for row in (0, 1, TILE - 1):
        quantized = mixed_matrix([4, 4])
        quantized.numbers[TILE + min(row, TILE - 7), 95] = 1
        blocks = Int8Blocks(quantized)
        assert [run.num_bits for run in blocks.runs] == [4, 8]
        ids = torch.arange(blocks.num_rows)
        torch.testing.assert_close(blocks.rows(ids), dequantize(quantized), rtol=1e-6, atol=0.0)
