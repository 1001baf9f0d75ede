"""Blocks of four bits against transformers' own reading of them."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from termgen.engine.device.quantization.mxfp4 import dequantize


def random_blocks(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [*shape, 16] and scales [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 140, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_equals_transformers() -> None:
    blocks, scales = random_blocks(3, 10, 4, seed=1)
    expected = convert_moe_packed_tensors(blocks, scales)  # [experts, in, out]
    actual = dequantize(blocks, scales)
    assert actual.dtype is torch.bfloat16 and actual.shape == (3, 10, 128)
    assert torch.equal(actual.transpose(1, 2), expected)


def test_every_byte_is_two_numbers_the_low_half_first() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 1] = 0x2F, 0x71
    values = dequantize(blocks, torch.full((1, 1), 127, dtype=torch.uint8))
    assert values[0, :5].tolist() == [-6.0, 1.0, 0.5, 6.0, 0.0]


def test_scales_are_powers_of_two() -> None:
    blocks = torch.full((1, 4, 16), 0x22, dtype=torch.uint8)  # ones
    scales = torch.tensor([[0, 126, 128, 250]], dtype=torch.uint8)
    expected = [2.0**-127, 0.5, 2.0, 2.0**123]
    assert dequantize(blocks, scales)[0, ::32].tolist() == expected
    assert not dequantize(blocks, scales + 255 - scales).isfinite().any()
