"""silu(x @ gate.T) * (x @ up.T) for a few rows of x, in one kernel.

Saves a gated MLP the round trip of its widest activation and a launch. The two kernels are those of
`small_gemm` with a tile of each half of the weight, and K is never cut. Rounds where the product
and `silu_mul` do: gate and up, the activated gate, and what is stored, each once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.kernels.launch import dot_precision, pdl_options
from termgen.engine.kernels.silu_mul import gated_activation_reference
from termgen.engine.kernels.small_gemm import (
    VECTOR,
    add_products,
    are_words,
    prefetch_plan,
    prefetch_weight,
    weight_tile,
)
from termgen.engine.kernels.small_gemm_config import SmallGemmConfig


@triton.jit
def _gated(gate, up, DTYPE: tl.constexpr):
    gate = gate.to(DTYPE).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    return (activated * up.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def _prefetch_both(
    w_ptr, first_row, head, size, k, row_bytes, ROWS: tl.constexpr, THREADS: tl.constexpr
):
    if THREADS > 0:
        prefetch_weight(w_ptr, first_row, head, size, k, row_bytes, ROWS, THREADS)
        prefetch_weight(w_ptr, size + first_row, head, 2 * size, k, row_bytes, ROWS, THREADS)


@triton.jit(do_not_specialize=["num_rows", "row_bytes"])
def _gated_gemv_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    num_rows,
    size,
    k,
    x_stride,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    gate_at = w_ptr + tl.minimum(rows, size - 1).to(tl.int64)[:, None] * k + columns[None, :]
    up_at = gate_at + tl.cast(size, tl.int64) * k
    HOLDS_FIRST: tl.constexpr = NUM_STAGES == 1
    if USE_PDL:
        head = BLOCK_K if HOLDS_FIRST else 0
        _prefetch_both(w_ptr, first_row, head, size, k, row_bytes, BLOCK_N, PREFETCH_THREADS)
    if HOLDS_FIRST:
        gate = weight_tile(gate_at, columns, k, EVEN_K)
        up = weight_tile(up_at, columns, k, EVEN_K)
    if USE_PDL:
        gdc_wait()
    gates, ups = (), ()
    for _ in tl.static_range(BLOCK_M):
        zeros = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
        gates += (zeros,)  # type: ignore[assignment]
        ups += (zeros,)  # type: ignore[assignment]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HOLDS_FIRST:
        last = (tl.cdiv(k, BLOCK_K) - 1) * BLOCK_K
        for start in range(0, last, BLOCK_K):
            columns += BLOCK_K
            next_gate = weight_tile(gate_at + (start + BLOCK_K), columns, k, EVEN_K)
            next_up = weight_tile(up_at + (start + BLOCK_K), columns, k, EVEN_K)
            gates = add_products(
                gates, gate, x_ptr, start, num_rows, k, x_stride, BLOCK_M, True, dtype
            )
            ups = add_products(ups, up, x_ptr, start, num_rows, k, x_stride, BLOCK_M, True, dtype)
            gate, up = next_gate, next_up
        gates = add_products(
            gates, gate, x_ptr, last, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype
        )
        ups = add_products(ups, up, x_ptr, last, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype)
    else:
        for start in tl.range(0, k, BLOCK_K, num_stages=NUM_STAGES):
            gate = weight_tile(gate_at + start, columns + start, k, EVEN_K)
            up = weight_tile(up_at + start, columns + start, k, EVEN_K)
            gates = add_products(
                gates, gate, x_ptr, start, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype
            )
            ups = add_products(ups, up, x_ptr, start, num_rows, k, x_stride, BLOCK_M, EVEN_K, dtype)
    for token in tl.static_range(BLOCK_M):
        y = _gated(tl.sum(gates[token], axis=1), tl.sum(ups[token], axis=1), dtype)
        mask = (rows < size) & (token < num_rows)
        tl.store(out_ptr + token * size + rows, y, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "row_bytes"])
def _gated_mma_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    num_rows,
    size,
    k,
    x_stride,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    is_token = tokens < num_rows
    gate_at = w_ptr + tl.minimum(rows, size - 1).to(tl.int64)[:, None] * k
    up_at = gate_at + tl.cast(size, tl.int64) * k
    x_at = x_ptr + tokens[:, None] * x_stride
    if USE_PDL:
        _prefetch_both(w_ptr, first_row, 0, size, k, row_bytes, BLOCK_N, PREFETCH_THREADS)
        gdc_wait()
    gates = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        gate = weight_tile(gate_at + columns[None, :], columns, k, EVEN_K)
        up = weight_tile(up_at + columns[None, :], columns, k, EVEN_K)
        x_mask = is_token[:, None]
        if not EVEN_K:
            x_mask = x_mask & (columns < k)[None, :]
        x = tl.trans(tl.load(x_at + columns[None, :], mask=x_mask, other=0))
        gates = tl.dot(gate, x, gates, input_precision=PRECISION)
        ups = tl.dot(up, x, ups, input_precision=PRECISION)
    out_at = out_ptr + tokens[None, :] * size + rows[:, None]
    mask = is_token[None, :] & (rows < size)[:, None]
    tl.store(out_at, _gated(gates, ups, out_ptr.dtype.element_ty), mask=mask)


def gate_up_silu(
    x: torch.Tensor,  # [M, K], its rows dense
    weight: torch.Tensor,  # [2 * size, K], contiguous: the gate's rows, then up's
    *,
    config: SmallGemmConfig,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:  # [M, size]
    """What `silu_mul(small_gemm(x, weight))` gives. `config` is for `size` output features."""
    num_rows, k = x.shape
    size = weight.shape[0] // 2
    assert weight.shape == (2 * size, k) and weight.is_contiguous(), weight.shape
    assert x.stride(1) == 1 and x.dtype == weight.dtype, (x.stride(), x.dtype, weight.dtype)
    assert num_rows <= config.block_m and config.splits == 1, (num_rows, config)
    if out is None:
        out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, size) and out.is_contiguous(), (out.shape, out.stride())
    if not num_rows:
        return out
    row_bytes, threads = prefetch_plan(config, k, weight)
    sizes = (num_rows, size, k, x.stride(0) if num_rows > 1 else k)
    common = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "EVEN_K": k % config.block_k == 0,
        "PREFETCH_THREADS": threads,
        "num_warps": config.num_warps,
        **pdl_options(x.device, enabled=pdl),
    }
    grid = (config.tiles(size),)
    if config.kind == "mma":
        precision = dot_precision(x.dtype)
        _gated_mma_kernel[grid](
            x, weight, out, *sizes, row_bytes, BLOCK_K=config.block_k, PRECISION=precision, **common
        )
        return out
    block_k = config.block_k
    if are_words(x, weight):
        x, weight = x.view(torch.int32), weight.view(torch.int32)
        block_k //= 2
        sizes = (num_rows, size, k // 2, sizes[3] // 2)
    _gated_gemv_kernel[grid](x, weight, out, *sizes, row_bytes, BLOCK_K=block_k, **common)
    return out


def gate_up_silu_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gated_activation_reference(F.linear(x, weight), activation="silu")
