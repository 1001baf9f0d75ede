"""Blocks with a scale for every 16 numbers, and no offset: numbers, and scales of the halves of 32.

    value = row_scale * scale * (number - zero)

As `group_layout` has them (HALVED): the numbers of Q6_K and Q3_K are those of the file, in 8 bits,
and those of NVFP4 their codes in 4, which stand for twice their values. Scales are rounded to 16
bits; those of NVFP4 have no more. `gguf_blocks` says how the bytes of GGUF's types lie.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.native.int8_blocks import (
    COARSE,
    HALVED_ZERO,
    Quantized,
    quantize_rows,
)
from termgen.engine.device.quantization.gguf_blocks import K_BLOCK, q3_k_parts, q6_k_parts
from termgen.engine.device.quantization.mxfp4 import VALUES
from termgen.engine.device.quantization.stored_matrices import NVFP4, NVFP4_BLOCK

WIDTHS = {NVFP4: 4, "Q3_K": 8, "Q6_K": 8}
"""Bits of a number in memory, by kind."""
HALF = 16
"""Numbers that share a scale."""
_STEP = 0.5
"""The values of floats of 4 bits are multiples of it."""


def halved(rows: StoredRows) -> Quantized:
    """Rows of Q3_K, Q6_K or NVFP4: in the place of scales and offsets the scales of the first 16
    numbers of 32, and of the last."""
    return _READERS[rows.kind](rows.blocks)


def _in_k_blocks(
    parts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], Quantized]:
    def read(blocks: torch.Tensor) -> Quantized:
        num_rows, num_blocks = blocks.shape[:2]
        values = torch.empty(num_rows * num_blocks, K_BLOCK, device=blocks.device)
        scale = parts(blocks.flatten(0, 1), values).view(num_rows, -1)
        numbers = values.add_(HALVED_ZERO).to(torch.uint8).view(num_rows, -1)
        exponent = torch.frexp(scale.abs().amax(1)).exponent.clamp(-125, 127)
        row_scale = torch.ldexp(torch.ones_like(scale[:, 0]), exponent)
        scale = (scale * row_scale.reciprocal()[:, None]).half()
        return Quantized(numbers, scale[:, ::2], scale[:, 1::2], row_scale)

    return read


def _nvfp4(blocks: torch.Tensor) -> Quantized:
    """16 bytes of pairs, the lower half first, two scales of float8_e4m3fn, one of float32."""
    num_rows = len(blocks)
    packed = blocks[:, :, :16]
    codes = torch.stack((packed & 15, packed >> 4), 3).view(num_rows, -1) * COARSE
    scales = blocks[:, :, 16:18].contiguous().view(torch.float8_e4m3fn).to(torch.float16)
    first, last = (scales * _STEP).unbind(2)
    row_scale = blocks[:, 0, 18:NVFP4_BLOCK].contiguous().view(torch.float32)[:, 0]
    return Quantized(codes, first, last, row_scale)


def rounded(whole: Quantized) -> Quantized:
    """Rows of NVFP4, from `halved`, in 8 bits with a scale and an offset for every 32."""
    codes, first, last, row_scale = whole
    num_rows = len(codes)
    values = torch.tensor(VALUES, device=codes.device)[(codes & 15).int()] / _STEP
    scales = torch.stack((first, last), 2).float().view(num_rows, -1, 1)
    values = (values.view(num_rows, -1, HALF) * scales).flatten(1)
    return quantize_rows(values.mul_(row_scale[:, None]))


_READERS: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "Q3_K": _in_k_blocks(q3_k_parts),
    "Q6_K": _in_k_blocks(q6_k_parts),
    NVFP4: _nvfp4,
}
