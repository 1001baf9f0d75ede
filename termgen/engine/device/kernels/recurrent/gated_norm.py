"""RMS norm of each head's output, times the activated gate.

Called by layers with a gated delta net. Rounds once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import next_power_of_2, pdl_options
from termgen.engine.device.kernels.recurrent.gates import silu

_HEADS = 8


@triton.jit
def _gated_norm_kernel(
    o_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    z_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK)
    inside = (heads < NUM_HEADS)[:, None] & (dims < DIM)[None, :]
    weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    at = heads[:, None] * DIM + dims[None, :]
    x = tl.load(o_ptr + token * (NUM_HEADS * DIM) + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + at, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None] * weight[None, :]
    to = out_ptr + token * (NUM_HEADS * DIM) + at
    tl.store(to, (x * silu(z)).to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(
    o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = True
) -> torch.Tensor:
    """o [T, heads, dim], z [T, heads * dim] with rows of any stride -> [T, heads * dim]."""
    num_tokens, num_heads, dim = o.shape
    assert o.is_contiguous() and z.shape == (num_tokens, num_heads * dim), (o.shape, z.shape)
    assert z.stride(1) == 1 and weight.shape == (dim,), (z.stride(), weight.shape)
    out = torch.empty((num_tokens, num_heads * dim), dtype=o.dtype, device=o.device)
    if num_tokens:
        _gated_norm_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            o,
            z,
            weight,
            out,
            # A lone row's stride means nothing and must not choose another variant.
            z.stride(0) if num_tokens > 1 else num_heads * dim,
            eps,
            NUM_HEADS=num_heads,
            DIM=dim,
            BLOCK=next_power_of_2(dim),
            HEADS=_HEADS,
            num_warps=4,
            **pdl_options(o.device, enabled=pdl),
        )
    return out
