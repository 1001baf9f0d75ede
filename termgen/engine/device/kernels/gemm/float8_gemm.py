"""x @ weight.T for a few rows of x and a weight of 8-bit floats, as fast as its bytes are read.

A weight lies in words of four numbers: byte i of word j in a group of 256 columns is the number of
column 64 * i + j. So a word in a thread's registers becomes one number of each of four operands,
which meet four runs of x in their natural order, and nothing crosses threads. Each row of the
weight has a scale, by which sums are multiplied. Every 128 columns of some rows may have another,
which float32 takes up: x in gemv, and sums of 128 columns in mma; no weight is rounded. Two
kernels, as in `small_gemm`: gemv multiplies in registers, mma on the matrix units, where K may be
cut between programs. For more rows of x the weight is widened in memory.

In bfloat16 the bits of the exponent are moved, not converted: the conversion that Hopper has goes
by float16 and float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.small_gemm import (
    SmallGemmWorkspace,
    prefetch_plan,
    prefetch_weight,
    split_buffers,
)
from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.kernels.launch import dot_precision, pdl_options

FLOAT8 = torch.float8_e4m3fn
RUN: tl.constexpr = tl.constexpr(64)
"""Columns in a row that one byte of the words stands for."""
WORD: tl.constexpr = tl.constexpr(4)
_WIDEN_ROWS = 16
"""Rows of a weight that a program widens."""
GROUP = RUN.value * WORD.value
"""Columns of a group; a weight has whole ones, the last filled up with zeros."""
BLOCK_COLUMNS = 2 * RUN.value
"""Columns that share a block's scale: two in a group."""
BLOCK_ROWS = 16
"""Rows that share it, or 1."""


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """numbers [N, K] float8_e4m3fn -> words [N, K / 4] int32, K a multiple of `GROUP`."""
    n, k = numbers.shape
    planes = numbers.view(torch.uint8).view(n, k // GROUP, WORD.value, RUN.value)
    return planes.transpose(2, 3).contiguous().view(n, k).view(torch.int32)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    n, k = words.shape[0], words.shape[1] * WORD.value
    planes = words.view(torch.uint8).view(n, k // GROUP, RUN.value, WORD.value)
    return planes.transpose(2, 3).contiguous().view(n, k).view(FLOAT8)


# A product is one with -0 added, as Ada has no other one for bfloat16.
@triton.jit
def _four_bfloat16(w):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, z;
        mov.b32 c, 0x7B807B80;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $4, $5, 0x4000;
        and.b32 b, a, 0x80008000;
        shr.u32 a, a, 4;
        lop3.b32 a, a, 0x07F007F0, b, 0xEA;
        fma.rn.bf16x2 $0, a, c, z;
        prmt.b32 a, $4, $5, 0x5010;
        and.b32 b, a, 0x80008000;
        shr.u32 a, a, 4;
        lop3.b32 a, a, 0x07F007F0, b, 0xEA;
        fma.rn.bf16x2 $1, a, c, z;
        prmt.b32 a, $4, $5, 0x6020;
        and.b32 b, a, 0x80008000;
        shr.u32 a, a, 4;
        lop3.b32 a, a, 0x07F007F0, b, 0xEA;
        fma.rn.bf16x2 $2, a, c, z;
        prmt.b32 a, $4, $5, 0x7030;
        and.b32 b, a, 0x80008000;
        shr.u32 a, a, 4;
        lop3.b32 a, a, 0x07F007F0, b, 0xEA;
        fma.rn.bf16x2 $3, a, c, z;
        }""",
        "=&r,=&r,=&r,=&r,r,r",
        [w],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _four_float32(w):
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 l, h;
        .reg .b32 a, b;
        mov.b32 {l, h}, $4;
        cvt.rn.f16x2.e4m3x2 a, l;
        cvt.rn.f16x2.e4m3x2 b, h;
        mov.b32 {l, h}, a;
        cvt.f32.f16 $0, l;
        cvt.f32.f16 $1, h;
        mov.b32 {l, h}, b;
        cvt.f32.f16 $2, l;
        cvt.f32.f16 $3, h;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [w],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _number(w, byte: tl.constexpr, dtype: tl.constexpr):
    bits = ((w >> (8 * byte)) & 255).to(tl.uint8)
    return bits.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def four_numbers(w, dtype: tl.constexpr, USE_PTX: tl.constexpr):
    """The four numbers of each word, in a tensor each. USE_PTX: on a GPU, not interpreted."""
    if USE_PTX and dtype == tl.bfloat16:
        a, b, c, d = _four_bfloat16(w)
    elif USE_PTX and dtype == tl.float32:
        a, b, c, d = _four_float32(w)
    else:
        a = _number(w, 0, dtype)
        b = _number(w, 1, dtype)
        c = _number(w, 2, dtype)
        d = _number(w, 3, dtype)
    return a, b, c, d


@triton.jit
def _run(at, columns, byte: tl.constexpr, k, is_token, EVEN_K: tl.constexpr):
    """x of the columns that a byte of the words stands for; zeros for those that x lacks."""
    if EVEN_K:
        x = tl.load(at + (columns + byte * RUN), mask=is_token, other=0)
    else:
        x = tl.load(
            at + (columns + byte * RUN), mask=is_token & (columns + byte * RUN < k), other=0
        )
    return x


@triton.jit
def _block_scales(
    blocks_ptr,
    first_row,
    rows,
    words,
    n,
    num_words,
    BLOCK_N: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
):
    """The scales of each word's two blocks: one row of them where the rows of a tile share them."""
    groups = num_words // RUN
    if BLOCK_N <= SCALE_ROWS:
        at = blocks_ptr + first_row // SCALE_ROWS * (2 * groups)
    else:
        at = blocks_ptr + (tl.minimum(rows, n - 1) // SCALE_ROWS * (2 * groups))[:, None]
    at += (words // RUN * 2)[None, :]
    is_word = (words < num_words)[None, :]
    return tl.load(at, mask=is_word, other=0.0), tl.load(at + 1, mask=is_word, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "row_bytes"])
def _gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    blocks_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    num_words,
    x_stride,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * num_words
    if USE_PDL:
        if PREFETCH_THREADS > 0:
            prefetch_weight(w_ptr, first_row, 0, n, num_words, row_bytes, BLOCK_N, PREFETCH_THREADS)
    scale = tl.load(scale_ptr + rows, mask=rows < n, other=0.0)
    if USE_PDL:
        gdc_wait()
    sums = ()
    for _ in tl.static_range(BLOCK_M):
        sums += (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),)  # type: ignore[assignment]
    for start in tl.range(0, num_words, BLOCK_K, num_stages=NUM_STAGES):
        words = start + tl.arange(0, BLOCK_K)
        is_word = (words < num_words)[None, :]
        w = tl.load(w_at + words[None, :], mask=is_word, other=0, eviction_policy="evict_first")
        a, b, c, d = four_numbers(w, tl.float32, USE_PTX)
        columns = (words // RUN * (WORD * RUN) + words % RUN)[None, :]
        if SCALE_ROWS > 0:
            s, t = _block_scales(
                blocks_ptr, first_row, rows, words, n, num_words, BLOCK_N, SCALE_ROWS
            )
        new_sums = ()
        for token in tl.static_range(BLOCK_M):
            # A token past the last repeats it; its sums go nowhere.
            at = x_ptr + tl.minimum(token, num_rows - 1) * x_stride
            y = sums[token]  # type: ignore[var-annotated]
            if SCALE_ROWS > 0:
                y += a * (_run(at, columns, 0, k, is_word, EVEN_K).to(tl.float32) * s)
                y += b * (_run(at, columns, 1, k, is_word, EVEN_K).to(tl.float32) * s)
                y += c * (_run(at, columns, 2, k, is_word, EVEN_K).to(tl.float32) * t)
                y += d * (_run(at, columns, 3, k, is_word, EVEN_K).to(tl.float32) * t)
            else:
                y += a * _run(at, columns, 0, k, is_word, EVEN_K).to(tl.float32)
                y += b * _run(at, columns, 1, k, is_word, EVEN_K).to(tl.float32)
                y += c * _run(at, columns, 2, k, is_word, EVEN_K).to(tl.float32)
                y += d * _run(at, columns, 3, k, is_word, EVEN_K).to(tl.float32)
            new_sums += (y,)  # type: ignore[assignment]
        sums = new_sums
    for token in tl.static_range(BLOCK_M):
        y = tl.sum(sums[token], axis=1) * scale
        if HAS_BIAS:
            y += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
        mask = (rows < n) & (token < num_rows)
        tl.store(out_ptr + token * n + rows, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_parts(acc, partial_ptr, arrivals_ptr, tile, split, SPLITS: tl.constexpr):
    """(the sum over all splits, in a fixed order, and whether this program is the last to come)"""
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    PART: tl.constexpr = BLOCK_N * BLOCK_M
    within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    parts_at = partial_ptr + tile * (SPLITS * PART) + within
    tl.store(parts_at + split * PART, acc)
    tl.debug_barrier()  # every thread's stores come before the one thread's arrival
    is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for part in tl.static_range(SPLITS):
            # L1 may hold what an earlier launch left in the workspace: read past it.
            acc += tl.load(parts_at + part * PART, cache_modifier=".cg")
    return acc, is_last


@triton.jit(do_not_specialize=["num_rows", "row_bytes"])
def _mma_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    blocks_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_rows,
    n,
    k,
    num_words,
    x_stride,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH_THREADS: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(num_words, BLOCK_K), SPLITS)
    first_word = split * steps * BLOCK_K
    end_word = tl.minimum(first_word + steps * BLOCK_K, num_words)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    is_token = (tokens < num_rows)[:, None]
    w_at = w_ptr + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * num_words
    x_at = x_ptr + tokens[:, None] * x_stride
    if SCALE_ROWS > 0:
        blocks_at = blocks_ptr + tl.minimum(rows, n - 1) // SCALE_ROWS * (num_words // RUN * 2)
    scale = tl.load(scale_ptr + rows, mask=rows < n, other=0.0)
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
        a, b, c, d = four_numbers(w, dtype, USE_PTX)
        # A tile is one run of each byte: its x lies in a row.
        columns = start * WORD + tl.arange(0, BLOCK_K)[None, :]
        x0 = _run(x_at, columns, 0, k, is_token, EVEN_K)
        x1 = _run(x_at, columns, 1, k, is_token, EVEN_K)
        x2 = _run(x_at, columns, 2, k, is_token, EVEN_K)
        x3 = _run(x_at, columns, 3, k, is_token, EVEN_K)
        if SCALE_ROWS > 0:
            at = blocks_at + start // RUN * 2
            part = tl.dot(a, tl.trans(x0), input_precision=PRECISION)
            part = tl.dot(b, tl.trans(x1), part, input_precision=PRECISION)
            acc += part * tl.load(at)[:, None]
            part = tl.dot(c, tl.trans(x2), input_precision=PRECISION)
            part = tl.dot(d, tl.trans(x3), part, input_precision=PRECISION)
            acc += part * tl.load(at + 1)[:, None]
        else:
            acc = tl.dot(a, tl.trans(x0), acc, input_precision=PRECISION)
            acc = tl.dot(b, tl.trans(x1), acc, input_precision=PRECISION)
            acc = tl.dot(c, tl.trans(x2), acc, input_precision=PRECISION)
            acc = tl.dot(d, tl.trans(x3), acc, input_precision=PRECISION)
    is_last = True
    if SPLITS > 1:
        acc, is_last = sum_of_parts(acc, partial_ptr, arrivals_ptr, tile, split, SPLITS)
    if is_last:
        acc *= scale[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
            acc += bias[:, None]
        out_at = out_ptr + tokens[None, :] * n + rows[:, None]
        mask = (tokens < num_rows)[None, :] & (rows < n)[:, None]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _widen_kernel(
    w_ptr,
    scale_ptr,
    blocks_ptr,
    out_ptr,
    n,
    k,
    num_words,
    BLOCK_N: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    group = tl.program_id(1)
    is_row = rows < n
    runs = tl.arange(0, RUN)[None, :]
    w = tl.load(w_ptr + rows.to(tl.int64) * num_words + group * RUN + runs, mask=is_row, other=0)
    scale = tl.load(scale_ptr + rows, mask=is_row, other=0.0)
    low, high = scale, scale
    if SCALE_ROWS > 0:
        at_block = blocks_ptr + rows // SCALE_ROWS * (num_words // RUN * 2) + group * 2
        low *= tl.load(at_block, mask=is_row, other=0.0)
        high *= tl.load(at_block + 1, mask=is_row, other=0.0)
    a, b, c, d = four_numbers(w, tl.float32, USE_PTX)
    columns = group * (WORD * RUN) + runs
    at = out_ptr + rows.to(tl.int64) * k + columns
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(at, (a * low).to(dtype), mask=is_row & (columns < k))
    tl.store(at + RUN, (b * low).to(dtype), mask=is_row & (columns + RUN < k))
    tl.store(at + 2 * RUN, (c * high).to(dtype), mask=is_row & (columns + 2 * RUN < k))
    tl.store(at + 3 * RUN, (d * high).to(dtype), mask=is_row & (columns + 3 * RUN < k))


def widen(
    words: torch.Tensor,  # [N, ceil(K / GROUP) * GROUP / 4] int32, from `pack`
    scale: torch.Tensor,  # [N] float32
    num_columns: int,  # K
    dtype: torch.dtype,
    blocks: torch.Tensor | None = None,  # as `float8_gemm` takes them
) -> torch.Tensor:  # [N, K]
    """The weight in a wider type."""
    n, num_words = words.shape
    scale_rows = _scale_rows(blocks, n, num_words)
    out = torch.empty(n, num_columns, dtype=dtype, device=words.device)
    grid = (-(-n // _WIDEN_ROWS), num_words // RUN.value)
    if n:
        _widen_kernel[grid](
            *(words, scale, scale if blocks is None else blocks, out, n, num_columns, num_words),
            BLOCK_N=_WIDEN_ROWS,
            SCALE_ROWS=scale_rows,
            USE_PTX=words.is_cuda,
        )
    return out


def _scale_rows(blocks: torch.Tensor | None, n: int, num_words: int) -> int:
    """Rows that share the scales of blocks; 0 where there are none."""
    if blocks is None:
        return 0
    scale_rows = 1 if len(blocks) == n else BLOCK_ROWS
    assert blocks.shape == (-(-n // scale_rows), num_words // RUN.value * 2), blocks.shape
    assert blocks.is_contiguous() and blocks.dtype == torch.float32, blocks.dtype
    return scale_rows


def float8_gemm(
    x: torch.Tensor,  # [M, K], its rows dense
    words: torch.Tensor,  # [N, ceil(K / GROUP) * GROUP / 4] int32, from `pack`
    scale: torch.Tensor,  # [N] float32
    bias: torch.Tensor | None = None,  # [N]
    *,
    config: SmallGemmConfig,
    workspace: SmallGemmWorkspace | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = True,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:  # [M, N]
    """x @ (numbers * scale).T + bias in x's type, no number being NaN. `workspace` is needed where
    `config` cuts K.

    config: of the kind gemv or mma, its block_k in words; an mma's is `RUN`.
    blocks: [ceil(N / r), ceil(K / GROUP) * 2] float32, r `BLOCK_ROWS` or 1: further scales of
    `BLOCK_COLUMNS` columns of r rows.
    """
    num_rows, k = x.shape
    n, num_words = words.shape
    assert words.dtype == torch.int32 and words.is_contiguous(), (words.dtype, words.stride())
    assert num_words == -(-k // GROUP) * RUN.value, (k, num_words)
    assert x.stride(1) == 1 and scale.shape == (n,), (x.stride(), scale.shape)
    assert num_rows <= config.block_m, (num_rows, config)
    if out is None:
        out = torch.empty((num_rows, n), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, n) and out.is_contiguous(), (out.shape, out.stride())
    if not num_rows:
        return out
    scale_rows = _scale_rows(blocks, n, num_words)
    own_blocks = scale if blocks is None else blocks
    row_bytes, threads = prefetch_plan(config, num_words, words)
    # The stride of a lone row must not choose a variant.
    sizes = (num_rows, n, k, num_words, x.stride(0) if num_rows > 1 else k, row_bytes)
    options: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "NUM_STAGES": config.num_stages,
        "EVEN_K": k % GROUP == 0,
        "HAS_BIAS": bias is not None,
        "SCALE_ROWS": scale_rows,
        "PREFETCH_THREADS": threads,
        "USE_PTX": x.is_cuda,
        "num_warps": config.num_warps,
        **pdl_options(x.device, enabled=pdl),
    }
    tiles = config.tiles(n)
    if config.kind == "gemv":
        _gemv_kernel[(tiles,)](x, words, bias, scale, own_blocks, out, *sizes, **options)
        return out
    assert config.kind == "mma" and config.block_k == RUN.value, config
    partial, arrivals = split_buffers(config, n, workspace)
    options |= {"SPLITS": config.splits, "PRECISION": dot_precision(x.dtype)}
    _mma_kernel[(tiles, config.splits)](
        x, words, bias, scale, own_blocks, out, partial, arrivals, *sizes, **options
    )
    return out


def float8_gemm_reference(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    weight = unpack(words).to(x.dtype) * scale[:, None].to(x.dtype)
    if blocks is not None:
        rows = _scale_rows(blocks, *words.shape)
        wide = blocks.repeat_interleave(rows, 0)[: len(words)]
        weight *= wide.repeat_interleave(BLOCK_COLUMNS, 1).to(x.dtype)
    return F.linear(x, weight[:, : x.shape[1]], bias)
