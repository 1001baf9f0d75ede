"""RMS normalisation of whole rows, alone or fused with the residual addition before it, which
may itself be of a normalised row.

Called by the decoder's layers. Rounds where `layers.norm` does: the sum of the residual stream to
the stream's type before it is normalised, a normalised and weighted row once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import next_power_of_2, pdl_options


@triton.jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    """float32, of a row x with zeros beyond SIZE and its float32 weight."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight


@triton.jit
def _rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    first_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    first_eps,
    eps,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    # Weights depend on no earlier kernel: their loads are in flight while x is waited for.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_FIRST:
        first = tl.load(first_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_FIRST:
        x = _normed(x, first, first_eps, SIZE).to(x.dtype)
    if HAS_RESIDUAL:
        at = residual_ptr + row * SIZE + columns
        residual = tl.load(at, mask=inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(residual.dtype)
        if HAS_SCALE:
            x = (x.to(tl.float32) * scale).to(residual.dtype)
        tl.store(at, x, mask=inside)
    normed = _normed(x, weight, eps, SIZE)
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
    return _launch(x, None, None, weight, eps, eps, None, out, pdl)


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
    return _launch(x, residual, None, weight, eps, eps, None, out, pdl)


def norm_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    first_eps: float,
    second_eps: float,
    scale: float | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """residual [T, size] += x [T, size] normalised by weight `first`, then *= scale if there is
    one, in place; returns its rows normalised by weight `second`, [T, size]."""
    return _launch(x, residual, first, second, first_eps, second_eps, scale, out, pdl)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    first: torch.Tensor | None,
    weight: torch.Tensor,
    first_eps: float,
    eps: float,
    scale: float | None,
    out: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    num_rows, size = x.shape
    assert x.stride(1) == 1 and weight.shape == (size,), (x.stride(), weight.shape)
    assert first is None or first.shape == (size,), first.shape
    if residual is not None:
        assert residual.is_contiguous() and residual.shape == x.shape, (residual.shape, x.shape)
    if out is None:
        out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    assert out.is_contiguous()
    if num_rows:
        block = next_power_of_2(size)
        _rmsnorm_kernel[(num_rows,)](
            x,
            residual,
            first,
            weight,
            out,
            # A lone row's stride means nothing and must not choose another variant.
            x.stride(0) if num_rows > 1 else size,
            first_eps,
            eps,
            1.0 if scale is None else scale,
            SIZE=size,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            HAS_FIRST=first is not None,
            HAS_SCALE=scale is not None,
            # Eight elements of a half type make one 16-byte access of a thread.
            num_warps=min(16, max(1, block // 256)),
            **pdl_options(x.device, enabled=pdl),
        )
    return out


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rmsnorm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return rmsnorm_reference(residual.add_(x), weight, eps)


def norm_add_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    first_eps: float,
    second_eps: float,
    scale: float | None = None,
) -> torch.Tensor:
    residual.add_(rmsnorm_reference(x, first, first_eps))
    if scale is not None:
        residual.mul_(scale)
    return rmsnorm_reference(residual, second, second_eps)
