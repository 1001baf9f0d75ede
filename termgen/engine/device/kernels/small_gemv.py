"""The kernel of `small_gemm` for 1 to 4 rows: products of a few rows of the weight in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.prefetch import prefetch_weight, weight_tile

VECTOR: tl.constexpr = tl.constexpr(4)
"""Words whose products are added up within a thread before anything crosses threads."""


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The two values of a half type in each 32-bit word, as float32."""
    if DTYPE == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def add_products(
    sums,
    w,
    x_ptr,
    start,
    num_rows,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """sums, of each token [N, K / VECTOR]: + its x times w [N, K], added up within threads only.

    Nothing crosses threads where all warps lie along K: 128 words of 32 bits a warp.
    """
    BLOCK_N: tl.constexpr = w.shape[0]
    BLOCK_K: tl.constexpr = w.shape[1]
    columns = start + tl.arange(0, BLOCK_K)
    new_sums = ()
    for token in tl.static_range(BLOCK_M):
        # A token past the last repeats it; its sums go nowhere.
        x_at = x_ptr + tl.minimum(token, num_rows - 1) * x_stride + columns[None, :]
        if EVEN_K:
            x = tl.load(x_at)
        else:
            x = tl.load(x_at, mask=(columns < k)[None, :], other=0)
        if w.dtype == tl.int32:
            w_low, w_high = halves(w, DTYPE)
            x_low, x_high = halves(x, DTYPE)
            products = w_low * x_low + w_high * x_high
        else:
            products = w.to(tl.float32) * x.to(tl.float32)
        products = tl.reshape(products, [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
        new_sums += (sums[token] + tl.sum(products, axis=2),)  # type: ignore[assignment]
    return new_sums


@triton.jit(do_not_specialize=["num_rows", "row_bytes"])
def gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    x_stride,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * k + columns[None, :]
    HOLDS_FIRST: tl.constexpr = NUM_STAGES == 1
    if USE_PDL:
        if PREFETCH_THREADS > 0:
            head = BLOCK_K if HOLDS_FIRST else 0
            prefetch_weight(w_ptr, first_row, head, n, k, row_bytes, BLOCK_N, PREFETCH_THREADS)
    if HOLDS_FIRST:
        w = weight_tile(w_at, columns, k, EVEN_K)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    sums = ()
    for _ in tl.static_range(BLOCK_M):
        sums += (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)  # type: ignore[assignment]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HOLDS_FIRST:
        last = (tl.cdiv(k, BLOCK_K) - 1) * BLOCK_K
        for start in range(0, last, BLOCK_K):
            columns += BLOCK_K
            next_w = weight_tile(w_at + (start + BLOCK_K), columns, k, EVEN_K)
            sums = add_products(sums, w, x_ptr, start, num_rows, k, x_stride, BLOCK_M, True, dtype)
            w = next_w
        sums = add_products(sums, w, x_ptr, last, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype)
    else:
        for start in tl.range(0, k, BLOCK_K, num_stages=NUM_STAGES):
            w = weight_tile(w_at + start, columns + start, k, EVEN_K)
            sums = add_products(
                sums, w, x_ptr, start, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype
            )
    for token in tl.static_range(BLOCK_M):
        y = tl.sum(sums[token], axis=1)
        if HAS_BIAS:
            y += bias
        mask = (rows < n) & (token < num_rows)
        tl.store(out_ptr + token * n + rows, y.to(out_ptr.dtype.element_ty), mask=mask)
