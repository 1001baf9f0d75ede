"""What chunks of prompts need of their own tokens alone, for all chunks of a step at once.

Two launches. The first convolves, activates and normalises a head's channels of a chunk; the second
computes, for each value head, the decays within a chunk and what follows from them. Called by
`delta_prefill`, which has the formula.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import pdl_options
from termgen.engine.device.kernels.recurrent.chunk_plan import CHUNK_FIELDS, ChunkPlan
from termgen.engine.device.kernels.recurrent.gates import (
    L2_EPS,
    RING,
    log_decay,
    ring_row,
    sigmoid,
    silu,
    to_operand,
)
from termgen.engine.device.kernels.recurrent.layout import CHUNK, GatedDeltaShape

_SUB = tl.constexpr(16)
"""Tokens of the blocks on the diagonal that are inverted one row after another."""
_CONVOLVE_WARPS = 8
_FACTOR_WARPS = 4


class ChunkFactors(NamedTuple):
    """Heads first, so that a chunk of a head is one piece of memory."""

    q: torch.Tensor
    """[num_k_heads, T, k_dim]: of unit length, divided by sqrt(k_dim)."""
    k: torch.Tensor
    """[num_k_heads, T, k_dim]: of unit length."""
    v: torch.Tensor
    """[num_v_heads, T, v_dim]"""
    solve: torch.Tensor
    """[num_v_heads, T, CHUNK]: rows of (1 + M)^-1."""
    scores: torch.Tensor
    """[num_v_heads, T, CHUNK]: rows of (q k^T) D."""
    gates: torch.Tensor
    """[num_v_heads, 2, T] float32: the running sum of log decays within the chunk, and beta."""


def empty_factors(
    shape: GatedDeltaShape, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> ChunkFactors:
    """dtype: of the operands of products."""
    k_size = (shape.num_k_heads, num_tokens, shape.k_dim)
    v_size = (shape.num_v_heads, num_tokens, shape.v_dim)
    square = (shape.num_v_heads, num_tokens, CHUNK)
    q, k, v, solve, scores = (
        torch.empty(size, dtype=dtype, device=device)
        for size in (k_size, k_size, v_size, square, square)
    )
    gates = torch.empty((shape.num_v_heads, 2, num_tokens), dtype=torch.float32, device=device)
    return ChunkFactors(q, k, v, solve, scores, gates)


@triton.jit
def _convolve(
    mixed, ring, conv_ptr, first_channel, offset, num_tokens, position, has_state, mixed_stride,
    NUM_CHANNELS: tl.constexpr, RING_ROWS: tl.constexpr, CONV_CHANNEL: tl.constexpr,
    CONV_TAP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Activated [SIZE, DIM] float32 of a chunk; zeros for tokens beyond it.

    mixed: the chunk's first token. offset: tokens of its row before it in this step; position: of
    the row's first token in this step.
    """
    channels = first_channel + tl.arange(0, DIM)
    tokens = tl.arange(0, SIZE)
    total = tl.zeros([SIZE, DIM], tl.float32)
    for back in tl.static_range(0, RING):
        source = tokens - back
        inside = (tokens < num_tokens) & (offset + source >= 0)
        x_at = mixed + source.to(tl.int64)[:, None] * mixed_stride + channels[None, :]
        x = tl.load(x_at, mask=inside[:, None], other=0.0).to(tl.float32)
        tap_at = conv_ptr + (RING - 1 - back) * CONV_TAP + channels * CONV_CHANNEL
        tap = tl.load(tap_at).to(tl.float32)
        total += x * tap[None, :]
        if back > 0:
            if offset == 0:
                is_earlier = (source < 0) & (tokens < num_tokens) & has_state
                at = ring + ring_row(position + source, RING_ROWS)[:, None] * NUM_CHANNELS
                earlier = tl.load(at + channels[None, :], mask=is_earlier[:, None], other=0.0)
                total += earlier.to(tl.float32) * tap[None, :]
    return silu(total)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=[
        *("slots_ptr", "positions_ptr", "has_state_ptr", "chunks_ptr"),
    ],
)
def _convolve_kernel(
    mixed_ptr,
    conv_ptr,
    ring_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    positions_ptr,
    has_state_ptr,
    chunks_ptr,
    num_tokens,
    mixed_stride,
    NUM_K_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TAP: tl.constexpr,
    RING_ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry = chunks_ptr + tl.program_id(1) * CHUNK_FIELDS
    row = tl.load(entry)
    if row < 0:
        return
    NUM_CHANNELS: tl.constexpr = 2 * NUM_K_HEADS * K_DIM + NUM_V_HEADS * V_DIM
    OPERAND: tl.constexpr = q_ptr.dtype.element_ty
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    offset = tl.load(entry + 3)
    position = tl.load(positions_ptr + row)
    has_state = tl.load(has_state_ptr + row) != 0
    ring = ring_ptr + tl.load(slots_ptr + row).to(tl.int64) * (RING_ROWS * NUM_CHANNELS)
    mixed = mixed_ptr + first * mixed_stride
    tokens = tl.arange(0, SIZE)
    inside = (tokens < count)[:, None]
    place = tl.program_id(0)
    # Names differ between the branches, as one name cannot have two shapes.
    if place < 2 * NUM_K_HEADS:
        qk = _convolve(
            mixed, ring, conv_ptr, place * K_DIM, offset, count, position, has_state, mixed_stride,
            NUM_CHANNELS, RING_ROWS, CONV_CHANNEL, CONV_TAP, K_DIM, SIZE,
        )  # fmt: skip
        unit = tl.rsqrt(tl.sum(qk * qk, axis=1) + L2_EPS)
        k_head = (place % NUM_K_HEADS).to(tl.int64)
        k_dims = tl.arange(0, K_DIM)[None, :]
        k_at = (k_head * num_tokens + first + tokens)[:, None] * K_DIM + k_dims
        if place < NUM_K_HEADS:
            tl.store(q_ptr + k_at, (qk * (unit * SCALE)[:, None]).to(OPERAND), mask=inside)
        else:
            tl.store(k_ptr + k_at, (qk * unit[:, None]).to(OPERAND), mask=inside)
    else:
        v_head = (place - 2 * NUM_K_HEADS).to(tl.int64)
        channel = 2 * NUM_K_HEADS * K_DIM + (place - 2 * NUM_K_HEADS) * V_DIM
        v = _convolve(
            mixed, ring, conv_ptr, channel, offset, count, position, has_state, mixed_stride,
            NUM_CHANNELS, RING_ROWS, CONV_CHANNEL, CONV_TAP, V_DIM, SIZE,
        )  # fmt: skip
        v_dims = tl.arange(0, V_DIM)[None, :]
        v_at = (v_head * num_tokens + first + tokens)[:, None] * V_DIM + v_dims
        tl.store(v_ptr + v_at, to_operand(v, OPERAND), mask=inside)


@triton.jit
def _inverse(m, SIZE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + m)^-1 of a strictly lower triangular m [SIZE, SIZE] float32.

    Blocks on the diagonal by substitution, all of them at once. Then, with B the part of 1 + m in
    these blocks, L the rest and N = B^-1 L, of which the fourth power is zero, the inverse is
    (1 - N) (1 + N N) B^-1. A series of powers of m itself would not do: where keys are alike, its
    terms reach 10^18 before they cancel.
    """
    BLOCKS: tl.constexpr = SIZE // _SUB
    rows = tl.arange(0, SIZE)
    is_diagonal = (rows[:, None] // _SUB) == (rows[None, :] // _SUB)
    one = (rows[:, None] == rows[None, :]).to(tl.float32)
    rest = tl.where(is_diagonal, 0.0, m)
    # [block of the row, row, block of the column, column] with one block per row: sum it away.
    blocks = tl.reshape(tl.where(is_diagonal, m, 0.0), [BLOCKS, _SUB, BLOCKS, _SUB])
    transposed = tl.permute(tl.sum(blocks, axis=2), [0, 2, 1])
    sub = tl.arange(0, _SUB)
    inverse = tl.zeros([BLOCKS, _SUB, _SUB], tl.float32)
    inverse += (sub[:, None] == sub[None, :]).to(tl.float32)[None]
    for row in range(1, _SUB):
        factors = tl.sum(tl.where((sub == row)[None, None, :], transposed, 0.0), axis=2)
        change = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where((sub == row)[None, :, None], inverse - change[:, None, :], inverse)
    spread = tl.broadcast_to(inverse[:, :, None, :], [BLOCKS, _SUB, BLOCKS, _SUB])
    diagonal = tl.where(is_diagonal, tl.reshape(spread, [SIZE, SIZE]), 0.0).to(OPERAND)
    n = tl.dot(diagonal, rest.to(OPERAND), input_precision=PRECISION)
    n_operand = n.to(OPERAND)
    square = tl.dot(n_operand, n_operand, input_precision=PRECISION)
    series = one - n
    series += tl.dot(series.to(OPERAND), square.to(OPERAND), input_precision=PRECISION)
    return tl.dot(series.to(OPERAND), diagonal, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=["num_tokens", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["a_ptr", "b_ptr", "chunks_ptr"],
)
def _factors_kernel(
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    q_ptr,
    k_ptr,
    solve_ptr,
    scores_ptr,
    gates_ptr,
    chunks_ptr,
    num_tokens,
    a_stride,
    b_stride,
    NUM_K_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    entry = chunks_ptr + tl.program_id(1) * CHUNK_FIELDS
    if tl.load(entry) < 0:
        return
    OPERAND: tl.constexpr = q_ptr.dtype.element_ty
    if IS_TILED:
        k_head = head % NUM_K_HEADS
    else:
        k_head = head // (NUM_V_HEADS // NUM_K_HEADS)
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    tokens = tl.arange(0, SIZE)
    inside = tokens < count
    k_at = (k_head.to(tl.int64) * num_tokens + first + tokens)[:, None] * K_DIM
    k_at += tl.arange(0, K_DIM)[None, :]
    k = tl.load(k_ptr + k_at, mask=inside[:, None], other=0.0)
    q = tl.load(q_ptr + k_at, mask=inside[:, None], other=0.0)
    a_at = a_ptr + (first + tokens) * a_stride + head
    b_at = b_ptr + (first + tokens) * b_stride + head
    a = tl.load(a_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_at, mask=inside, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    # Beyond the chunk's end nothing decays and nothing is updated.
    c = tl.cumsum(tl.where(inside, log_decay(a, a_log, dt_bias), 0.0), axis=0)
    rate = tl.where(inside, sigmoid(b), 0.0)
    c_at = gates_ptr + 2 * head.to(tl.int64) * num_tokens + first + tokens
    tl.store(c_at, c, mask=inside)
    tl.store(c_at + num_tokens, rate, mask=inside)
    # Above the diagonal the differences are positive, and large: left out before the exp.
    is_seen = tokens[:, None] >= tokens[None, :]
    decays = tl.exp(tl.where(is_seen, c[:, None] - c[None, :], float("-inf")))
    square_at = (head.to(tl.int64) * num_tokens + first + tokens)[:, None] * SIZE
    square_at += tokens[None, :]
    q_k = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    tl.store(scores_ptr + square_at, (q_k * decays).to(OPERAND), mask=inside[:, None])
    k_k = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    m = tl.where(tokens[:, None] > tokens[None, :], k_k * decays * rate[:, None], 0.0)
    solve = _inverse(m, SIZE, OPERAND, PRECISION)
    tl.store(solve_ptr + square_at, solve.to(OPERAND), mask=inside[:, None])


def compute_factors(
    mixed: torch.Tensor,  # [T, channels], rows of any stride
    a: torch.Tensor,  # [T, num_v_heads], rows of any stride
    b: torch.Tensor,  # [T, num_v_heads], rows of any stride
    conv: torch.Tensor,  # [channels, CONV_TAPS]
    a_log: torch.Tensor,  # [num_v_heads]
    dt_bias: torch.Tensor,  # [num_v_heads]
    ring: torch.Tensor,  # [num_slots, R, channels]
    slots: torch.Tensor,  # [B] int32
    positions: torch.Tensor,  # [B] int32
    has_state: torch.Tensor,  # [B] bool
    plan: ChunkPlan,
    *,
    shape: GatedDeltaShape,
    num_chunks: int,
    pdl: bool,
) -> ChunkFactors:
    """Factors of the chunks that `plan` lists, at most `num_chunks`; those of other tokens are left
    unwritten."""
    num_tokens, device = mixed.shape[0], mixed.device
    operand = torch.float32 if mixed.dtype == torch.float32 else torch.float16
    factors = empty_factors(shape, num_tokens, operand, device)
    _convolve_kernel[(2 * shape.num_k_heads + shape.num_v_heads, num_chunks)](
        mixed,
        conv,
        ring,
        factors.q,
        factors.k,
        factors.v,
        slots,
        positions,
        has_state,
        plan.chunks,
        num_tokens,
        mixed.stride(0),
        NUM_K_HEADS=shape.num_k_heads,
        NUM_V_HEADS=shape.num_v_heads,
        K_DIM=shape.k_dim,
        V_DIM=shape.v_dim,
        CONV_CHANNEL=conv.stride(0),
        CONV_TAP=conv.stride(1),
        RING_ROWS=ring.shape[1],
        SCALE=shape.k_dim**-0.5,
        SIZE=CHUNK,
        num_warps=_CONVOLVE_WARPS,
        **pdl_options(device, enabled=pdl),
    )
    _factors_kernel[(shape.num_v_heads, num_chunks)](
        a,
        b,
        a_log,
        dt_bias,
        factors.q,
        factors.k,
        factors.solve,
        factors.scores,
        factors.gates,
        plan.chunks,
        num_tokens,
        a.stride(0),
        b.stride(0),
        NUM_K_HEADS=shape.num_k_heads,
        NUM_V_HEADS=shape.num_v_heads,
        K_DIM=shape.k_dim,
        IS_TILED=shape.is_tiled,
        SIZE=CHUNK,
        PRECISION=product_precision(operand),
        num_warps=_FACTOR_WARPS,
        **pdl_options(device, enabled=pdl),
    )
    return factors


def product_precision(operand: torch.dtype) -> str:
    """float32 in three parts of tf32; the option means nothing to float16."""
    return "tf32x3" if operand == torch.float32 else "tf32"
