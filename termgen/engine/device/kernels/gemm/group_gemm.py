"""x @ weight.T for a few rows of x and a weight of 4- or 8-bit integers in groups of 32.

    weight = row_scale * (scale * number + low)

Scale and low are those of 32 columns of a row, float16; a row's scale is a power of two.

    words   [N, K / numbers of a word] int32: number i of word j, in a stretch of as many groups as
            a word has numbers, is column 32 * i + j; the first lies in the lowest bits
    pairs   [K / 32, N] int32: a group's scale in the lower half, its low in the upper

So a word in a thread's registers becomes one number of each of several operands, which meet groups
of x in their natural order, and nothing crosses threads. Numbers of 4 bits are those of 8 bits that
are multiples of 17, and have scales as if they were. Two kernels, as in `small_gemm`: gemv
multiplies in registers, in float32; mma on the matrix units, the weight rounded to x's type as if
it had been dequantised before. For many rows of x it is widened in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.float8_gemm import sum_of_parts
from termgen.engine.device.kernels.gemm.small_gemm import (
    SmallGemmWorkspace,
    prefetch_plan,
    prefetch_weight,
    split_buffers,
)
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.kernels.launch import dot_precision, pdl_options

GROUP: tl.constexpr = tl.constexpr(32)
"""Columns that share a scale, and words in a row that hold a stretch."""
COARSE: tl.constexpr = tl.constexpr(17)
"""Levels of 8 bits between those of 4."""
_ONE_ULP: tl.constexpr = tl.constexpr(0x4B000000)
"""2 ** 23 as float32: with an integer in its lowest bits it is that much larger. Converting the
integer takes eight times as long."""
_POWER: tl.constexpr = tl.constexpr(8388608.0)
_WIDEN_ROWS = 16
"""Rows of a weight that a program widens."""


def stretch(num_bits: int) -> int:
    """Columns that one word of each place of a stretch holds: 128 in 8 bits, 256 in 4. A weight has
    whole stretches, the last filled up with zeros."""
    columns: int = GROUP.value * (32 // num_bits)
    return columns


def pack(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """numbers [N, K] uint8 -> words [N, K * num_bits / 32] int32, K a multiple of `stretch`.
    num_bits 4: each is a multiple of `COARSE`, so its halves are alike."""
    n, k = numbers.shape
    planes = numbers.view(n, k // stretch(num_bits), 32 // num_bits, GROUP.value)
    if num_bits == 4:
        planes = (planes[:, :, ::2] & 15) | (planes[:, :, 1::2] & 240)
    return planes.transpose(2, 3).contiguous().view(n, -1).view(torch.int32)


def pack_pairs(scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """scale, low [N, K / GROUP] float16 -> [K / GROUP, N] int32."""
    pairs = torch.stack((scale, low), -1).view(torch.int32)[..., 0]
    return pairs.T.contiguous()


@triton.jit
def _numbers(w, place: tl.constexpr, BITS: tl.constexpr):
    """A number of each word, times the power of two that its place in a half of the word has."""
    PER_HALF: tl.constexpr = 16 // BITS
    within: tl.constexpr = BITS * (place % PER_HALF)
    if place >= PER_HALF:
        w = w >> 16
    bits = (w & (((1 << BITS) - 1) << within)) | _ONE_ULP
    return bits.to(tl.float32, bitcast=True) - _POWER


@triton.jit
def _halves(pair, place: tl.constexpr, BITS: tl.constexpr):
    """The scale of what `_numbers` gives, and the low, float32."""
    within: tl.constexpr = BITS * (place % (16 // BITS))
    factor: tl.constexpr = (17.0 if BITS == 4 else 1.0) / (1 << within)
    scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * factor
    return scale, (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _values(w, pair, place: tl.constexpr, BITS: tl.constexpr):
    """The weight without its rows' scales, float32, as `w`. pair: [rows, 1]."""
    scale, low = _halves(pair, place, BITS)
    return _numbers(w, place, BITS) * scale + low


@triton.jit(do_not_specialize=["num_rows", "out_stride"])
def _gemv_kernel(
    x_ptr,
    w_ptr,
    pairs_ptr,
    bias_ptr,
    row_scale_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    num_words,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    WORD: tl.constexpr = 32 // BITS
    first_row = tl.program_id(0) * BLOCK_N
    # A thread has four words in a row, which are of the same groups. Rows are a loop of their own:
    # in two dimensions a thread's words and scales would be of several rows, and cross threads.
    quads = tl.arange(0, BLOCK_K)
    four = tl.arange(0, 4)[None, :]
    sums = ()
    for _ in tl.static_range(BLOCK_M * BLOCK_N):
        sums += (tl.zeros([BLOCK_K], tl.float32),)  # type: ignore[assignment]
    for start in tl.range(0, num_words // 4, BLOCK_K, num_stages=1):
        quad = start + quads
        is_quad = quad < num_words // 4
        quad = tl.minimum(quad, num_words // 4 - 1)
        words = ()
        for r in tl.static_range(BLOCK_N):
            row = tl.minimum(first_row + r, n - 1).to(tl.int64)
            at = w_ptr + row * num_words + quad[:, None] * 4 + four
            words += (tl.load(at, eviction_policy="evict_first"),)  # type: ignore[assignment]
        stretch_of = quad // 8
        first_column = stretch_of * (WORD * GROUP) + quad % 8 * 4
        for place in tl.static_range(WORD):
            columns = (first_column + place * GROUP)[:, None] + four
            x_sums = ()
            xs = ()
            for token in tl.static_range(BLOCK_M):
                # A token past the last repeats it; its sums go nowhere.
                at = x_ptr + tl.minimum(token, num_rows - 1) * x_stride + columns
                if EVEN_K:
                    x = tl.load(at, mask=is_quad[:, None], other=0).to(tl.float32)
                else:
                    is_column = is_quad[:, None] & (columns < k)
                    x = tl.load(at, mask=is_column, other=0).to(tl.float32)
                xs += (x,)  # type: ignore[assignment]
                x_sums += (tl.sum(x, axis=1),)  # type: ignore[assignment]
            new_sums = ()
            for r in tl.static_range(BLOCK_N):
                row = tl.minimum(first_row + r, n - 1)
                pair = tl.load(pairs_ptr + (stretch_of * WORD + place) * n + row)
                scale, low = _halves(pair, place, BITS)
                numbers = _numbers(words[r], place, BITS)
                for token in tl.static_range(BLOCK_M):
                    y = sums[r * BLOCK_M + token]  # type: ignore[var-annotated]
                    y += tl.sum(numbers * xs[token], axis=1) * scale
                    y += low * x_sums[token]
                    new_sums += (y,)  # type: ignore[assignment]
            sums = new_sums
    for r in tl.static_range(BLOCK_N):
        row = first_row + r
        is_row = row < n
        row_scale = tl.load(row_scale_ptr + row, mask=is_row, other=0.0)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
        for token in tl.static_range(BLOCK_M):
            y = tl.sum(sums[r * BLOCK_M + token], axis=0) * row_scale + bias
            at = out_ptr + token * out_stride + row
            tl.store(at, y.to(out_ptr.dtype.element_ty), mask=is_row & (token < num_rows))


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
    num_words,
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
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    WORD: tl.constexpr = 32 // BITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(num_words, BLOCK_K), SPLITS)
    first_word = split * steps * BLOCK_K
    end_word = tl.minimum(first_word + steps * BLOCK_K, num_words)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    kept_rows = tl.minimum(rows, n - 1)
    tokens = tl.arange(0, BLOCK_M)
    is_token = (tokens < num_rows)[:, None]
    w_at = w_ptr + kept_rows.to(tl.int64)[:, None] * num_words
    pairs_at = pairs_ptr + kept_rows[:, None]
    x_at = x_ptr + tokens[:, None] * x_stride
    row_scale = tl.load(row_scale_ptr + rows, mask=rows < n, other=0.0)
    if USE_PDL:
        if PREFETCH_THREADS > 0:
            prefetch_weight(
                *(w_ptr, tile * BLOCK_N, first_word, n, num_words, row_bytes),
                BLOCK_N,
                PREFETCH_THREADS,
            )
        gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first_word, end_word, BLOCK_K, num_stages=NUM_STAGES):
        words = start + tl.arange(0, BLOCK_K)
        w = tl.load(w_at + words[None, :], eviction_policy="evict_first")
        for place in tl.static_range(WORD):
            # A tile is one group of each place: its x lies in a row, its scales in a column.
            columns = start * WORD + place * GROUP + tl.arange(0, BLOCK_K)[None, :]
            # A thirty-second of the weight's size: no overflow.
            pair = tl.load(pairs_at + (start // GROUP * WORD + place) * n)
            if EVEN_K:
                x = tl.load(x_at + columns, mask=is_token, other=0)
            else:
                x = tl.load(x_at + columns, mask=is_token & (columns < k), other=0)
            weight = _values(w, pair, place, BITS).to(dtype)
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


@triton.jit
def _widen_kernel(
    w_ptr,
    pairs_ptr,
    row_scale_ptr,
    out_ptr,
    n,
    k,
    num_words,
    pairs_stride,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    WORD: tl.constexpr = 32 // BITS
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    part = tl.program_id(1)
    is_row = rows < n
    lanes = tl.arange(0, GROUP)[None, :]
    w = tl.load(w_ptr + rows.to(tl.int64) * num_words + part * GROUP + lanes, mask=is_row, other=0)
    row_scale = tl.load(row_scale_ptr + rows, mask=is_row, other=0.0)
    at = out_ptr + rows.to(tl.int64) * k
    for place in tl.static_range(WORD):
        group = part * WORD + place
        pair = tl.load(pairs_ptr + group * pairs_stride + rows, mask=is_row, other=0)
        columns = group * GROUP + lanes
        value = _values(w, pair, place, BITS) * row_scale
        tl.store(at + columns, value.to(out_ptr.dtype.element_ty), mask=is_row & (columns < k))


def widen(
    words: torch.Tensor,  # [N, words of a row] int32, from `pack`
    pairs: torch.Tensor,  # [groups of a row, N] int32, its columns dense
    row_scale: torch.Tensor,  # [N] float32
    num_columns: int,  # K
    dtype: torch.dtype,
    num_bits: int,
) -> torch.Tensor:  # [N, K]
    """The weight in a wider type."""
    n, num_words = words.shape
    assert pairs.shape[1] == n and pairs.stride(1) == 1, (pairs.shape, pairs.stride())
    out = torch.empty(n, num_columns, dtype=dtype, device=words.device)
    if n:
        _widen_kernel[(-(-n // _WIDEN_ROWS), num_words // GROUP.value)](
            *(words, pairs, row_scale, out, n, num_columns, num_words, pairs.stride(0)),
            BITS=num_bits,
            BLOCK_N=_WIDEN_ROWS,
        )
    return out


def group_gemm(
    x: torch.Tensor,  # [M, K], its rows dense
    words: torch.Tensor,  # [N, words of a row] int32, from `pack`
    pairs: torch.Tensor,  # [groups of a row, N] int32, from `pack_pairs`
    row_scale: torch.Tensor,  # [N] float32
    bias: torch.Tensor | None = None,  # [N]
    *,
    num_bits: int,
    config: SmallGemmConfig,
    workspace: SmallGemmWorkspace | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:  # [M, N]
    """x @ weight.T + bias in x's type. `workspace` is needed where `config` cuts K.

    config: of the kind mma, its block_k in words, `GROUP` of them; or gemv, its block_k in fours of
    words. out: its rows dense.
    """
    num_rows, k = x.shape
    n, num_words = words.shape
    assert words.dtype == torch.int32 and words.is_contiguous(), (words.dtype, words.stride())
    assert num_words == -(-k // stretch(num_bits)) * GROUP.value, (k, num_words)
    assert pairs.shape == (num_words * 32 // num_bits // GROUP.value, n), pairs.shape
    assert pairs.is_contiguous() and row_scale.shape == (n,), (pairs.stride(), row_scale.shape)
    assert x.stride(1) == 1 and num_rows <= config.block_m, (x.stride(), num_rows, config)
    assert config.kind == "gemv" or config.block_k == GROUP.value, config
    if out is None:
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, n) and out.stride(1) == 1, (out.shape, out.stride())
    if not num_rows:
        return out
    options: dict[str, Any] = {
        "BITS": num_bits,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVEN_K": k % stretch(num_bits) == 0,
        "HAS_BIAS": bias is not None,
        "num_warps": config.num_warps,
        **pdl_options(x.device, enabled=pdl),
    }
    # The stride of a lone row must not choose a variant.
    x_stride, out_stride = (x.stride(0), out.stride(0)) if num_rows > 1 else (k, n)
    tiles = config.tiles(n)
    if config.kind == "gemv":
        _gemv_kernel[(tiles,)](
            *(x, words, pairs, bias, row_scale, out),
            *(num_rows, n, k, num_words, x_stride, out_stride),
            **options,
        )
        return out
    row_bytes, threads = prefetch_plan(config, num_words, words)
    partial, arrivals = split_buffers(config, n, workspace)
    options |= {
        "SPLITS": config.splits,
        "NUM_STAGES": config.num_stages,
        "PRECISION": dot_precision(x.dtype),
        "PREFETCH_THREADS": threads,
    }
    _mma_kernel[(tiles, config.splits)](
        *(x, words, pairs, bias, row_scale, out, partial, arrivals),
        *(num_rows, n, k, num_words, x_stride, row_bytes, out_stride),
        **options,
    )
    return out


def group_gemm_reference(
    x: torch.Tensor,
    words: torch.Tensor,
    pairs: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_bits: int,
) -> torch.Tensor:
    num_words = 32 // num_bits
    n = len(words)
    bytes_ = words.view(torch.uint8).view(n, -1, GROUP.value, 4).transpose(2, 3)
    if num_bits == 4:
        bytes_ = torch.stack((bytes_ & 15, bytes_ >> 4), 3).flatten(2, 3) * COARSE.value
    numbers = bytes_.reshape(n, -1, num_words, GROUP.value).flatten(1, 2).to(x.dtype)
    scale, low = pairs.T.contiguous().view(torch.float16).view(n, -1, 2).to(x.dtype).unbind(2)
    weight = (numbers * scale[..., None] + low[..., None]).flatten(1)[:, : x.shape[1]]
    return F.linear(x, weight * row_scale[:, None].to(x.dtype), bias)
