"""The kernel of `small_gemm` whose programs hold their part of the weight before x exists.

In a chain of short kernels the memory idles while one ends and the next begins. A program of this
kernel reads whole rows of the weight, its K spread over the warps, while the kernel ahead still
runs; what is left after the wait is to read x, to multiply, and to add up the warps' sums in a
fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_rows"])
def held_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    # A batch of products is spread over the warps: one warp, one run of K.
    columns = tl.arange(0, WARPS)[:, None] * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)[None, :]
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[None, :, None] * k + columns[:, None, :]
    held = ()
    for step in tl.static_range(STEPS):
        start = step * BLOCK_K
        if EVEN_K:
            tile = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            inside = (columns + start < k)[:, None, :]
            tile = tl.load(w_at + start, mask=inside, other=0, eviction_policy="evict_first")
        held += (tile,)  # type: ignore[assignment]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    x_at = x_ptr + tokens[None, None, :] * x_stride + columns[:, :, None]
    xs = ()
    for step in tl.static_range(STEPS):
        start = step * BLOCK_K
        inside = (tokens < num_rows)[None, None, :]
        if not EVEN_K:
            inside = inside & (columns + start < k)[:, :, None]
        xs += (tl.load(x_at + start, mask=inside, other=0),)  # type: ignore[assignment]
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.static_range(STEPS):
        acc = tl.dot(held[step], xs[step], acc, input_precision=PRECISION)
    y = tl.sum(acc, axis=0)
    if HAS_BIAS:
        y += bias[:, None]
    out_at = out_ptr + tokens[None, :] * n + rows[:, None]
    mask = (tokens < num_rows)[None, :] & (rows < n)[:, None]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)
