"""GGUF blocks as numbers with a scale and an offset for every 32 stand for the same values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from test_gguf_blocks import TYPE_IDS, random_blocks

from termgen.engine.device.layers.linear import LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.native.int8_blocks import BLOCK, dequantize, keep_rows
from termgen.engine.device.quantization.affine_blocks import KINDS, affine
from termgen.engine.device.quantization.gguf_blocks import dequantize as dequantize_blocks
from termgen.engine.device.quantization.int8 import Int8Linear
from termgen.engine.device.quantization.planned import OF_16_LEVELS
from termgen.engine.gguf.gguf_file import GGML_TYPES

CPU = torch.device("cpu")
GGUF_KINDS = sorted(KINDS & {*TYPE_IDS})


def stored(kind: str, num_rows: int, size: int, seed: int) -> tuple[StoredRows, torch.Tensor]:
    """Random rows, and their values."""
    ggml_type = GGML_TYPES[TYPE_IDS[kind]]
    blocks = num_rows * size // ggml_type.block_size
    raw = random_blocks(ggml_type, blocks, seed)
    if kind == "MXFP4":  # within the range of weights
        raw.reshape(blocks, -1)[:, 0] = np.random.default_rng(seed).integers(110, 130, blocks)
    values = dequantize_blocks(raw, ggml_type, (num_rows, size), name="t")
    return StoredRows(
        kind, torch.from_numpy(raw.reshape(num_rows, -1, ggml_type.block_bytes))
    ), values


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_no_value_is_rounded(kind: str) -> None:
    rows, values = stored(kind, 6, 512, seed=3)
    numbers, scale, low = affine(rows)
    assert numbers.dtype is torch.uint8 and numbers.shape == (6 * 512 // BLOCK, BLOCK)
    found = numbers.double() * scale.double()[:, None] + low.double()[:, None]
    expected = values.view(found.shape).double()
    largest = scale.double().abs()[:, None] * 255 + low.double().abs()[:, None]
    assert ((found - expected).abs() <= largest * 1e-6).all()
    is_coarse = bool((numbers % 17 == 0).all())
    assert is_coarse == (kind in OF_16_LEVELS)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_scales_of_16_bits_are_all_that_is_lost(kind: str) -> None:
    rows, values = stored(kind, 5, 1024, seed=4)
    numbers, scale, low = affine(rows)
    kept = keep_rows(numbers, scale, low, 5)
    assert torch.equal(kept.numbers.view(-1, BLOCK), numbers)
    error = (dequantize(kept) - values).abs().view(5, -1, BLOCK).amax(2)
    of_block = (scale.abs() * 255 + low.abs()).view(5, -1)
    # Half of the last of 11 digits; beside a far larger block, the digits that are left.
    assert (error <= of_block * 2.0**-11 + of_block.amax(1, keepdim=True) * 2.0**-16).all()


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "IQ4_XS"])
def test_a_layer_multiplies_by_what_the_file_has(kind: str) -> None:
    first, some = stored(kind, 40, 256, seed=5)
    second, others = stored(kind, 24, 256, seed=6)
    layer = Int8Linear(LinearSpec(256, 64, torch.float32, CPU, is_looked_up=True))
    layer.load_stored(first, 0)
    layer.load_stored(second, 40)
    layer.finalize()
    assert layer._blocks is not None
    assert [run.num_bits for run in layer._blocks.runs] == [4 if kind in OF_16_LEVELS else 8]
    weight = torch.cat((some, others))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([63, 0, 40])
    assert (
        (layer.embed(ids) - weight[ids]).abs() <= 2e-3 * weight[ids].abs().amax(1)[:, None]
    ).all()
    kept = layer.embed(torch.arange(64))
    torch.testing.assert_close(layer.multiply(x, None), x @ kept.T, rtol=1e-4, atol=1e-2)


def test_a_layer_of_two_types_keeps_four_bits_where_it_can() -> None:
    """A Q4_K_M file has such layers: q and k in 4 bits, v in 6."""
    layer = Int8Linear(LinearSpec(256, 128, torch.float32, CPU, is_looked_up=True))
    weights = []
    for kind, first_row, num_rows in (("Q4_K", 0, 64), ("Q5_K", 96, 32), ("Q4_0", 64, 32)):
        rows, numbers = stored(kind, num_rows, 256, seed=num_rows)
        layer.load_stored(rows, first_row)
        weights.append((first_row, numbers))
    layer.finalize()
    assert layer._blocks is not None
    assert [(r.first, r.end, r.num_bits) for r in layer._blocks.runs] == [(0, 3, 4), (3, 4, 8)]
    weight = torch.cat([numbers for _, numbers in sorted(weights, key=lambda one: one[0])])
    kept = layer.embed(torch.arange(128))
    assert ((kept - weight).abs() <= 2e-3 * weight.abs().amax(1)[:, None]).all()
    for num_rows in (1, 5, 60):
        x = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(num_rows))
        torch.testing.assert_close(layer.multiply(x, None), x @ kept.T, rtol=1e-4, atol=1e-2)


def test_a_block_without_a_number_for_a_scale_shows() -> None:
    rows, _ = stored("Q4_K", 3, 256, seed=7)
    rows.blocks[1, 0, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # NaN
    kept = keep_rows(*affine(rows), 3)
    assert [bool(part.isfinite().all()) for part in (kept.scale[1], kept.scale[0])] == [False, True]
    assert gguf.GGMLQuantizationType.Q4_K == TYPE_IDS["Q4_K"]
