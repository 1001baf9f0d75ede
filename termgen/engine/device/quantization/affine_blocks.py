"""GGUF blocks as numbers of eight bits with a scale and an offset for every 32; none is rounded.

    value = scale * number + low

Only for types whose blocks have no more scales than that: of those with one for every 16 numbers,
`halved_blocks` keeps Q3_K and Q6_K, and Q2_K has to be dequantised. Numbers of four bits are spread
over all levels, 17 apart, by which `native.int8_blocks` knows them. `gguf_blocks` says how the
bytes lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.quantization.gguf_blocks import NONLINEAR, fifth_bits, k_scales
from termgen.engine.device.quantization.mxfp4 import VALUES, ZERO_POWER

BLOCK = 32
LARGEST_NIBBLE = 15
OF_16_LEVELS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Kinds of blocks whose numbers are spread over all levels."""
COARSE = 17
"""Levels between the numbers of four bits: 255 / 15."""
GROUPS = "GROUPS"
"""Kind of integers of up to 8 bits: 32 bytes of numbers, their scale and their offset."""
ORDERED_GROUPS = "ORDERED_GROUPS"
"""Kind of the same with columns in another order, so that neighbours share a scale."""
GROUPS_BLOCK = BLOCK
_LOWEST = 127
"""Added to what the four bits of IQ4_NL and IQ4_XS stand for, all are positive."""
_MXFP4_STEP, _MXFP4_LOWEST = 0.5, 12
"""All values of MXFP4 are multiples of a half, from -12 of them."""


class Affine(NamedTuple):
    numbers: torch.Tensor  # [n, BLOCK] uint8
    scale: torch.Tensor  # [n] float32
    low: torch.Tensor  # [n] float32


def affine(rows: StoredRows) -> Affine:
    """The blocks of 32 numbers of all rows, one after another."""
    kind = GROUPS if rows.kind == ORDERED_GROUPS else rows.kind
    return _EXPANDERS[kind](rows.blocks.flatten(0, 1))


def _float16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The 16-bit number at a byte offset of every block, float32 [n]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()[:, 0]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, k] -> [n, 2 * k]: low halves, then high halves."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _q8_0(blocks: torch.Tensor) -> Affine:
    scale = _float16(blocks, 0)
    return Affine(blocks[:, 2:] ^ 128, scale, scale * -128.0)


def _q4_0(blocks: torch.Tensor) -> Affine:
    scale = _float16(blocks, 0)
    return Affine(_nibbles(blocks[:, 2:]) * COARSE, scale / COARSE, scale * -8.0)


def _q4_1(blocks: torch.Tensor) -> Affine:
    scale = _float16(blocks, 0)
    return Affine(_nibbles(blocks[:, 4:]) * COARSE, scale / COARSE, _float16(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Affine:
    scale = _float16(blocks, 0)
    numbers = _nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return Affine(numbers, scale, scale * -16.0)


def _q5_1(blocks: torch.Tensor) -> Affine:
    numbers = _nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return Affine(numbers, _float16(blocks, 0), _float16(blocks, 2))


def _k_numbers(packed: torch.Tensor) -> torch.Tensor:
    """128 bytes -> [n, 8, 32]: each 32 bytes have two runs, the one of low nibbles first."""
    packed = packed.reshape(-1, 4, 1, BLOCK)
    return torch.cat((packed & 15, packed >> 4), 2).view(-1, 8, BLOCK)


def _k_factors(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the offset of each of eight runs, [n * 8] float32 each."""
    scales, minima = k_scales(blocks[:, 4:16])
    scale = _float16(blocks, 0)[:, None] * scales
    low = _float16(blocks, 2)[:, None] * minima
    return scale.flatten(), low.flatten().neg()


def _q4_k(blocks: torch.Tensor) -> Affine:
    scale, low = _k_factors(blocks)
    numbers = _k_numbers(blocks[:, 16:]) * COARSE
    return Affine(numbers.view(-1, BLOCK), scale / COARSE, low)


def _q5_k(blocks: torch.Tensor) -> Affine:
    scale, low = _k_factors(blocks)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return Affine((_k_numbers(blocks[:, 48:]) | fifth).view(-1, BLOCK), scale, low)


def _looked_up(table: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    return table.to(nibbles.device).index_select(0, nibbles.flatten().int()).view(nibbles.shape)


def _iq4_nl(blocks: torch.Tensor) -> Affine:
    scale = _float16(blocks, 0)
    numbers = _looked_up(_nonlinear(), _nibbles(blocks[:, 2:]))
    return Affine(numbers, scale, scale * -float(_LOWEST))


def _iq4_xs(blocks: torch.Tensor) -> Affine:
    packed = blocks[:, 8:].reshape(-1, 8, 16)
    numbers = _looked_up(_nonlinear(), torch.cat((packed & 15, packed >> 4), 2).view(-1, BLOCK))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(1, 1, 4)
    upper = ((blocks[:, 2:4].unsqueeze(-1) >> shifts) & 3).view(-1, 8)
    lower = blocks[:, 4:8].unsqueeze(-1)
    lower = torch.cat((lower & 15, lower >> 4), 2).view(-1, 8)
    scale = (_float16(blocks, 0)[:, None] * ((lower | (upper << 4)).float() - 32)).flatten()
    return Affine(numbers, scale, scale * -float(_LOWEST))


def _nonlinear() -> torch.Tensor:
    return torch.tensor([value + _LOWEST for value in NONLINEAR], dtype=torch.uint8)


def _mxfp4(blocks: torch.Tensor) -> Affine:
    steps = [int(value / _MXFP4_STEP) + _MXFP4_LOWEST for value in VALUES]
    numbers = _looked_up(torch.tensor(steps, dtype=torch.uint8), _nibbles(blocks[:, 1:]))
    powers = torch.tensor([2.0 ** (scale - ZERO_POWER) for scale in range(256)])
    powers[255] = float("nan")  # stands for no number
    scale = powers.to(blocks.device).index_select(0, blocks[:, 0].int()) * _MXFP4_STEP
    return Affine(numbers, scale, scale * -float(_MXFP4_LOWEST))


def _groups(blocks: torch.Tensor) -> Affine:
    numbers = blocks[:, :BLOCK].contiguous()
    scale, low = blocks[:, BLOCK:].contiguous().view(torch.float32).unbind(1)
    if int(numbers.max()) > LARGEST_NIBBLE:
        return Affine(numbers, scale, low)
    return Affine(numbers * COARSE, scale / COARSE, low)


_EXPANDERS: dict[str, Callable[[torch.Tensor], Affine]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    GROUPS: _groups,
}
KINDS = frozenset(_EXPANDERS)
