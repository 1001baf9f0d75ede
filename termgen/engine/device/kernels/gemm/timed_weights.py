"""Random weights in every form that is measured, and how they are multiplied: by the kernels whose
cuts are candidates, and by cuBLAS, which gets numbers of 16 bits that are made for each product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from termgen.engine.device.kernels.gemm import float8_gemm as float8
from termgen.engine.device.kernels.gemm import group_gemm as groups
from termgen.engine.device.kernels.gemm.float8_gemm import BLOCK_ROWS, FLOAT8
from termgen.engine.device.kernels.gemm.group_layout import GROUP, pack_pairs
from termgen.engine.device.kernels.gemm.small_gemm import small_gemm
from termgen.engine.device.kernels.gemm.small_gemm_config import Weights

PART_NUMBERS = 2**26
"""Numbers that are widened at a time, as the layers do."""
_SCALE = 0.5
"""That of each row is a power of two, so that a number times it is exact."""
_STEP = 2.0**-7
"""Between two numbers of a group, about."""

Weight = tuple[torch.Tensor, ...]
"""The tensors of one weight."""


class Form(NamedTuple):
    """One way to store a weight."""

    item_bytes: float
    """Bytes of a number, with its share of the scales."""
    make: Callable[[int, int, torch.Generator], Weight]
    """(n, k, of a device) -> a random weight there."""
    multiply: Callable[..., torch.Tensor]
    """(x, weight, options of the kernel) -> x @ weight.T"""
    widen: Callable[[Weight, slice, int], torch.Tensor]
    """(weight, rows, k) -> these rows in bfloat16; the first is a multiple of 16."""

    def multiply_wide(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
        """x @ weight.T by cuBLAS."""
        n, k = out.shape[1], x.shape[1]
        if self is FORMS["half"]:
            torch.mm(x, weight[0].t(), out=out)
            return
        step = max(1, PART_NUMBERS // k // BLOCK_ROWS) * BLOCK_ROWS
        for first in range(0, n, step):
            part = slice(first, min(first + step, n))
            torch.mm(x, self.widen(weight, part, k).t(), out=out[:, part])


def _random(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    return torch.randn(n, k, dtype=torch.bfloat16, device=device, generator=generator)


def _make_half(n: int, k: int, generator: torch.Generator) -> Weight:
    return (_random(n, k, generator),)


def _multiply_half(x: torch.Tensor, weight: Weight, **options: Any) -> torch.Tensor:
    return small_gemm(x, *weight, **options)


def _widen_half(weight: Weight, rows: slice, k: int) -> torch.Tensor:
    return weight[0][rows]


def _make_float8(n: int, k: int, generator: torch.Generator) -> Weight:
    padded = -(-k // float8.GROUP) * float8.GROUP
    numbers = _random(n, padded, generator)
    numbers[:, k:] = 0
    scale = torch.full((n,), _SCALE, device=generator.device)
    return float8.pack(numbers.to(FLOAT8)), scale


def _make_float8_blocks(n: int, k: int, generator: torch.Generator) -> Weight:
    words, scale = _make_float8(n, k, generator)
    size = (-(-n // BLOCK_ROWS), -(-k // float8.GROUP) * 2)
    blocks = torch.rand(size, device=generator.device, generator=generator)
    return words, scale, blocks.add_(_SCALE)


def _multiply_float8(x: torch.Tensor, weight: Weight, **options: Any) -> torch.Tensor:
    words, scale, *blocks = weight
    return float8.float8_gemm(x, words, scale, blocks=blocks[0] if blocks else None, **options)


def _widen_float8(weight: Weight, rows: slice, k: int) -> torch.Tensor:
    words, scale, *blocks = weight
    own = None
    if blocks:
        own = blocks[0][rows.start // BLOCK_ROWS : -(-rows.stop // BLOCK_ROWS)]
    return float8.widen(words[rows], scale[rows], k, torch.bfloat16, own)


def _make_groups(num_bits: int) -> Callable[[int, int, torch.Generator], Weight]:
    def make(n: int, k: int, generator: torch.Generator) -> Weight:
        device, num_groups = generator.device, -(-k // GROUP.value)
        size = (n, num_groups * num_bits)
        low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        words = torch.randint(
            low, high, size, dtype=torch.int32, device=device, generator=generator
        )
        scale = torch.rand(n, num_groups, device=device, generator=generator).add_(_SCALE)
        scale *= _STEP
        pairs = pack_pairs(scale.half(), (scale * -127.5).half(), num_bits)
        return words, pairs, torch.full((n,), _SCALE, device=device)

    return make


def _multiply_groups(num_bits: int) -> Callable[..., torch.Tensor]:
    def multiply(x: torch.Tensor, weight: Weight, **options: Any) -> torch.Tensor:
        words, pairs, row_scale = weight
        return groups.group_gemm(x, words, pairs, row_scale, num_bits=num_bits, **options)

    return multiply


def _widen_groups(num_bits: int) -> Callable[[Weight, slice, int], torch.Tensor]:
    def widen(weight: Weight, rows: slice, k: int) -> torch.Tensor:
        words, pairs, row_scale = weight
        return groups.widen(words, pairs, row_scale, k, torch.bfloat16, num_bits, rows)

    return widen


def _groups(num_bits: int) -> Form:
    return Form(
        num_bits / 8 + 4 / GROUP.value,
        _make_groups(num_bits),
        _multiply_groups(num_bits),
        _widen_groups(num_bits),
    )


FORMS: dict[Weights, Form] = {
    "half": Form(2, _make_half, _multiply_half, _widen_half),
    "int8": _groups(8),
    "int4": _groups(4),
    "fp8": Form(1, _make_float8, _multiply_float8, _widen_float8),
    "fp8-blocks": Form(1, _make_float8_blocks, _multiply_float8, _widen_float8),
}
