"""x @ weight.T for a few rows of x and a weight of 4- or 8-bit integers in groups of 32.

`group_layout` says how it lies in memory. Two kernels, as in `small_gemm`: gemv (`group_gemv`)
adds up integers; mma multiplies on the matrix units, the weight rounded to x's type as if it had
been dequantised before. For many rows of x it is widened in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.float8_gemm import sum_of_parts
from termgen.engine.device.kernels.gemm.group_gemv import gemv_kernel
from termgen.engine.device.kernels.gemm.group_layout import (
    COARSE,
    GROUP,
    numbers_and_scales,
    rows_aside,
    weight_at,
)
from termgen.engine.device.kernels.gemm.small_gemm import (
    SmallGemmWorkspace,
    prefetch_plan,
    prefetch_weight,
    split_buffers,
)
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.kernels.launch import dot_precision, num_sms, pdl_options
from termgen.engine.device.kernels.rows.gated_activation import ACTIVATIONS

_WIDEN_ROWS = 16
"""Rows of a weight that a program widens."""
_WIDEN_GROUPS = 8


@triton.jit(do_not_specialize=["num_rows", "row_bytes", "out_stride"])
def _mma_kernel(
    x_ptr,
    w_ptr,
    pairs_ptr,
    bias_ptr,
    row_scale_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_rows,
    n,
    k,
    num_groups,
    x_stride,
    row_bytes,
    out_stride,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    HALVED: tl.constexpr = False,
    FLOATS: tl.constexpr = False,
):
    if USE_PDL:
        gdc_launch_dependents()
    ELEMENTS: tl.constexpr = 2 * BITS
    ROWS: tl.constexpr = 32 // BITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(num_groups, BLOCK_K), SPLITS)
    first_group = split * steps * BLOCK_K
    end_group = tl.minimum(first_group + steps * BLOCK_K, num_groups)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (rows < n)[:, None]
    tokens = tl.arange(0, BLOCK_M)
    is_token = (tokens < num_rows)[:, None]
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * (num_groups * ELEMENTS)
    # A thirty-second of the weight's size: no overflow. With `minimum` no run would be seen.
    pairs_at = pairs_ptr + (rows // ROWS * (num_groups * ROWS) + rows % ROWS)[:, None]
    x_at = x_ptr + tokens[:, None] * x_stride
    row_scale = tl.load(row_scale_ptr + rows, mask=rows < n, other=0.0)
    if USE_PDL:
        if PREFETCH_THREADS > 0:
            prefetch_weight(
                *(w_ptr, tile * BLOCK_N, first_group * ELEMENTS, n, num_groups * ELEMENTS),
                *(row_bytes, BLOCK_N, PREFETCH_THREADS),
            )
        gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    elements = tl.arange(0, BLOCK_K * ELEMENTS)[None, :]
    # A group's elements are those of a run of columns.
    columns = elements // ELEMENTS * GROUP + elements % ELEMENTS
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first_group, end_group, BLOCK_K, num_stages=NUM_STAGES):
        at = w_at + (start * ELEMENTS + elements)
        groups = start + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            w = tl.load(at, eviction_policy="evict_first")
            pair = tl.load(pairs_at + groups * ROWS, mask=is_row, other=0)
        else:
            is_element = elements < (num_groups - start) * ELEMENTS
            w = tl.load(at, mask=is_element, other=0, eviction_policy="evict_first")
            is_group = is_row & (groups < num_groups)
            pair = tl.load(pairs_at + groups * ROWS, mask=is_group, other=0)
        kept = numbers_and_scales(w, pair, BITS, FLOATS, USE_PTX, HALVED)
        for place in tl.static_range(16 // BITS):
            of_x = start * GROUP + place * ELEMENTS + columns
            if EVEN_K:
                x = tl.load(x_at + of_x, mask=is_token, other=0)
            else:
                x = tl.load(x_at + of_x, mask=is_token & (of_x < k), other=0)
            weight = weight_at(place, *kept, dtype, BITS, FLOATS, HALVED)
            acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    is_last = True
    if SPLITS > 1:
        acc, is_last = sum_of_parts(acc, partial_ptr, arrivals_ptr, tile, split, SPLITS)
    if is_last:
        acc *= row_scale[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
            acc += bias[:, None]
        out_at = out_ptr + tokens[None, :] * out_stride + rows[:, None]
        mask = (tokens < num_rows)[None, :] & (rows < n)[:, None]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "first_row"])
def _widen_kernel(
    w_ptr,
    pairs_ptr,
    row_scale_ptr,
    ids_ptr,
    out_ptr,
    num_rows,
    first_row,
    k,
    num_groups,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PTX: tl.constexpr,
    HALVED: tl.constexpr = False,
    FLOATS: tl.constexpr = False,
):
    ELEMENTS: tl.constexpr = 2 * BITS
    ROWS: tl.constexpr = 32 // BITS
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_row = own < num_rows
    if ids_ptr is None:
        rows = (own + first_row).to(tl.int64)
    else:
        rows = tl.load(ids_ptr + own, mask=is_row, other=0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_K
    groups = start + tl.arange(0, BLOCK_K)[None, :]
    elements = tl.arange(0, BLOCK_K * ELEMENTS)[None, :]
    is_element = is_row & (elements < (num_groups - start) * ELEMENTS)
    at = w_ptr + rows * (num_groups * ELEMENTS) + start * ELEMENTS + elements
    w = tl.load(at, mask=is_element, other=0)
    pairs_at = pairs_ptr + (rows // ROWS * num_groups + groups) * ROWS + rows % ROWS
    pair = tl.load(pairs_at, mask=is_row & (groups < num_groups), other=0)
    row_scale = tl.load(row_scale_ptr + rows, mask=is_row, other=0.0)
    kept = numbers_and_scales(w, pair, BITS, FLOATS, USE_PTX, HALVED)
    columns = start * GROUP + elements // ELEMENTS * GROUP + elements % ELEMENTS
    for place in tl.static_range(16 // BITS):
        value = weight_at(place, *kept, tl.float32, BITS, FLOATS, HALVED) * row_scale
        at = columns + place * ELEMENTS
        out_at = out_ptr + own.to(tl.int64) * k + at
        tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=is_row & (at < k))


def widen(
    words: torch.Tensor,  # [N, words of a row] int32, from `pack`
    pairs: torch.Tensor,  # int32, from `pack_pairs`
    row_scale: torch.Tensor,  # [N] float32
    num_columns: int,  # K
    dtype: torch.dtype,
    num_bits: int,
    rows: slice | torch.Tensor,  # [M], integers
    *,
    is_halved: bool = False,
) -> torch.Tensor:  # [M, K]
    """Rows of the weight in a wider type. is_halved: as of `group_gemm`."""
    num_groups = pairs.shape[1]
    assert words.shape[1] == num_groups * num_bits, (words.shape, pairs.shape)
    assert words.is_contiguous() and pairs.is_contiguous(), (words.stride(), pairs.stride())
    if isinstance(rows, slice):
        first, num_rows, ids = rows.start, rows.stop - rows.start, None
        assert 0 <= first <= rows.stop <= len(words) and rows.step is None, rows
    else:
        first, num_rows, ids = 0, len(rows), rows
        assert not rows.is_floating_point() and rows.is_contiguous(), (rows.dtype, rows.stride())
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=words.device)
    if num_rows:
        _widen_kernel[(-(-num_rows // _WIDEN_ROWS), -(-num_groups // _WIDEN_GROUPS))](
            *(words.view(torch.int16), pairs, row_scale, ids, out),
            *(num_rows, first, num_columns, num_groups),
            BITS=num_bits,
            BLOCK_N=_WIDEN_ROWS,
            BLOCK_K=_WIDEN_GROUPS,
            USE_PTX=words.is_cuda,
            **_halves(num_bits, is_halved),
        )
    return out


def group_gemm(
    x: torch.Tensor,  # [M, K], its rows dense
    words: torch.Tensor,  # [N, words of a row] int32, from `pack`
    pairs: torch.Tensor,  # int32, from `pack_pairs`
    row_scale: torch.Tensor,  # [N] float32
    bias: torch.Tensor | None = None,  # [N]
    *,
    num_bits: int,
    is_halved: bool = False,
    config: SmallGemmConfig,
    workspace: SmallGemmWorkspace | None = None,
    out: torch.Tensor | None = None,
    activation: str | None = None,
    pdl: bool = True,
) -> torch.Tensor:  # [M, N], or [M, N / 2] with an activation
    """x @ weight.T + bias in x's type. `workspace` is needed where `config` cuts K.

    is_halved: 16 columns share a scale; numbers of 4 bits are floats then.
    config: of the kind mma, or gemv with a multiple of 4 rows; its block_k in groups. out: its rows
    dense. activation: the weight is that of a gate and as many rows, a multiple of 4, that it
    opens for; the result is `gated_activation` of the product. config is
    of the kind gemv then, with a multiple of 8 rows.
    """
    num_rows, k = x.shape
    n, num_groups = len(words), pairs.shape[1]
    assert words.dtype == torch.int32 and words.is_contiguous(), (words.dtype, words.stride())
    assert num_groups == -(-k // GROUP.value), (k, num_groups)
    assert words.shape[1] == num_groups * num_bits, (words.shape, num_groups)
    assert len(pairs) == -(-n // rows_aside(num_bits)) and pairs.is_contiguous(), (n, pairs.shape)
    assert row_scale.shape == (n,), row_scale.shape
    assert x.stride(1) == 1 and num_rows <= config.block_m, (x.stride(), num_rows, config)
    is_gemv = config.kind == "gemv"
    if activation is not None:
        assert is_gemv and config.block_n % 8 == 0 and n % 8 == 0, (config, n)
        assert activation in ACTIVATIONS, activation
        n //= 2
    if out is None:
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, n) and out.stride(1) == 1, (out.shape, out.stride())
    if not num_rows:
        return out
    # The stride of a lone row must not choose a variant.
    x_stride, out_stride = (x.stride(0), out.stride(0)) if num_rows > 1 else (k, n)
    options: dict[str, Any] = {
        "BITS": num_bits,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVEN_K": k % (GROUP.value if is_gemv else GROUP.value * config.block_k) == 0,
        "HAS_BIAS": bias is not None,
        "USE_PTX": x.is_cuda,
        "num_warps": config.num_warps,
        **pdl_options(x.device, enabled=pdl),
        **_halves(num_bits, is_halved),
    }
    tiles = config.tiles(n)
    if is_gemv:
        tiles = config.tiles(len(words))
        walks = bool(config.resident) and num_groups <= config.block_k
        programs = min(tiles, config.resident * num_sms(x.device)) if walks else tiles
        gemv_kernel[(programs,)](
            *(x, words, pairs, bias, row_scale, out),
            *(num_rows, n, k, num_groups, x_stride, out_stride),
            WALKS=walks,
            ACTIVATION=activation,
            **options,
        )
        return out
    elements = words.view(torch.int16)
    row_bytes, threads = prefetch_plan(config, elements.shape[1], elements, 2 * num_bits)
    partial, arrivals = split_buffers(config, n, workspace)
    options |= {
        "SPLITS": config.splits,
        "NUM_STAGES": config.num_stages,
        "PRECISION": dot_precision(x.dtype),
        "PREFETCH_THREADS": threads,
    }
    _mma_kernel[(tiles, config.splits)](
        *(x, elements, pairs, bias, row_scale, out, partial, arrivals),
        *(num_rows, n, k, num_groups, x_stride, row_bytes, out_stride),
        **options,
    )
    return out


def _halves(num_bits: int, is_halved: bool) -> dict[str, bool]:
    return {"HALVED": True, "FLOATS": num_bits == 4} if is_halved else {}


def group_gemm_reference(
    x: torch.Tensor,
    words: torch.Tensor,
    pairs: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_bits: int,
) -> torch.Tensor:
    n, num_groups = len(words), pairs.shape[1]
    bytes_ = words.view(torch.uint8).view(n, num_groups, -1, 2).transpose(2, 3)
    if num_bits == 4:
        bytes_ = torch.stack((bytes_ & 15, bytes_ >> 4), 3).flatten(2, 3) * COARSE.value
    numbers = bytes_.reshape(n, num_groups, GROUP.value).to(x.dtype)
    halves = pairs.transpose(1, 2).flatten(0, 1)[:n].contiguous().view(torch.float16)
    scale, low = halves.view(n, num_groups, 2).to(x.dtype).unbind(2)
    weight = (numbers * scale[..., None] + low[..., None]).flatten(1)[:, : x.shape[1]]
    return F.linear(x, weight * row_scale[:, None].to(x.dtype), bias)
