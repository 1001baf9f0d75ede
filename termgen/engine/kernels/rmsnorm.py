"""RMS normalisation of whole rows, alone or behind the residual addition that precedes it.

Called by the decoder's layers. Rounds where `layers.norm` does: the sum of the residual stream to
the stream's type before it is normalised, the normalised and weighted row once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.kernels.launch import next_power_of_2, pdl_options


@triton.jit
def _rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    # The weight depends on no earlier kernel: its load is in flight while x is waited for.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        at = residual_ptr + row * SIZE + columns
        residual = tl.load(at, mask=inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)
        tl.store(at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = x * scale * weight
    tl.store(out_ptr + row * SIZE + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """x [T, size] -> its rows normalised, [T, size]."""
    return _launch(x, None, weight, eps, out, pdl)


def add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """residual [T, size] += x [T, size], in place; returns its rows normalised, [T, size]."""
    assert residual.is_contiguous() and residual.shape == x.shape, (residual.shape, x.shape)
    return _launch(x, residual, weight, eps, out, pdl)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    num_rows, size = x.shape
    assert x.stride(1) == 1 and weight.shape == (size,), (x.stride(), weight.shape)
    if out is None:
        out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    assert out.is_contiguous()
    if num_rows:
        block = next_power_of_2(size)
        _rmsnorm_kernel[(num_rows,)](
            x,
            residual,
            weight,
            out,
            # A lone row's stride means nothing and must not choose another variant.
            x.stride(0) if num_rows > 1 else size,
            eps,
            SIZE=size,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            # Eight elements of a half type make one 16-byte access of a thread.
            num_warps=min(16, max(1, block // 256)),
            **pdl_options(x.device, enabled=pdl),
        )
    return out


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rmsnorm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return rmsnorm_reference(residual.add_(x), weight, eps)
