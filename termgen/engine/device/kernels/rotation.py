"""Cosines and sines of a step's positions, in one kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2


@triton.jit
def _rotation_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angles = position * tl.load(frequencies_ptr + lanes, mask=inside, other=0.0)
    cos, sin = tl.cos(angles) * scale, tl.sin(angles) * scale
    at = token * (2 * HALF) + lanes
    tl.store(cos_ptr + at, cos, mask=inside)
    tl.store(cos_ptr + at + HALF, cos, mask=inside)
    tl.store(sin_ptr + at, -sin, mask=inside)
    tl.store(sin_ptr + at + HALF, sin, mask=inside)


def rotation(
    positions: torch.Tensor,  # [T] int64
    frequencies: torch.Tensor,  # [rotary_dim / 2] float32
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, rotary_dim] float32, as `layers.rotary.Rotation` has them."""
    num_tokens, half = positions.shape[0], frequencies.shape[0]
    shape = (num_tokens, 1, 2 * half)
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))
    if num_tokens:
        _rotation_kernel[(num_tokens,)](
            positions,
            frequencies,
            cos,
            sin,
            scale,
            HALF=half,
            BLOCK=next_power_of_2(half),
            num_warps=1,
        )
    return cos, sin


def rotation_reference(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
