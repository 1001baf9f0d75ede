"""Weights in MXFP4, as gpt-oss has its experts: 32 numbers of four bits share a power of two.

    blocks   [..., rows, size / 32, 16] uint8: byte j has number 2j in its low half
    scales   [..., rows, size / 32] uint8: the power of two, plus 127

Every value is exact in bfloat16.
"""

from __future__ import annotations

import functools

import torch

BLOCK = 32
KIND = "MXFP4"
"""The kind of the blocks of 17 bytes that GGUF has: the scale, then numbers j and j + 16."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
ZERO_POWER, NO_POWER = 127, 255


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, size] bfloat16. A scale of 255 stands for no number: it gives infinity or NaN."""
    pairs, powers = _tables()
    values = pairs.index_select(0, blocks.flatten().int()).view(*scales.shape, BLOCK)
    factors = powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1)
    return values.mul_(factors).flatten(-2)


def with_scales(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, size / 32, 17] uint8: blocks of `KIND`."""
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    halves = numbers[..., : BLOCK // 2] | (numbers[..., BLOCK // 2 :] << 4)
    return torch.cat((scales.unsqueeze(-1), halves), -1)


@functools.cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of each byte [256, 2], and the factor of each scale [256]."""
    pairs = [(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)]
    powers = [2.0 ** (scale - ZERO_POWER) for scale in range(256)]
    return torch.tensor(pairs, dtype=torch.bfloat16), torch.tensor(powers, dtype=torch.bfloat16)
