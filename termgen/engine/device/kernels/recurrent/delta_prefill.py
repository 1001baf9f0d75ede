"""The gated delta net of prompts: what chunks need of their own tokens (`chunk_factors`), then the
recurrence of the state from chunk to chunk, with the outputs.

A chunk of 64 tokens from state S, with c the running sum of the log decays, D_ij = exp(c_i - c_j)
for i >= j, M_ij = beta_i (k_i . k_j) D_ij for i > j, and row vectors q, k, v:

    U = (1 + M)^-1 beta (v - exp(c) k S^T)
    o = exp(c) q S^T + ((q k^T) D) U
    S = exp(c_n) S + U^T (exp(c_n - c) k)

Operands of products are float16 where the model's type has 16 bits (float32 is multiplied in three
parts of tf32); sums, the state, gates and norms are float32. float16 and not bfloat16: its rounding
is 8 times finer, and nearly all operands are at most 1: q, k, decays, and the inverse, whose
entries are the response to one token's update after others have overwritten part of it. v, U and S
are of the size of v, far from the limits of float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import num_sms, pdl_options
from termgen.engine.device.kernels.recurrent.chunk_factors import compute_factors, product_precision
from termgen.engine.device.kernels.recurrent.chunk_plan import ChunkPlan
from termgen.engine.device.kernels.recurrent.delta_decode import check_inputs
from termgen.engine.device.kernels.recurrent.gates import RING, ring_row, to_operand
from termgen.engine.device.kernels.recurrent.layout import CHUNK, GatedDeltaShape

_ROWS_AT_ONCE = 8
"""Rows of a batch whose recurrences are launched side by side; others follow them."""
_DEEP_BYTES = 195 * 1024
"""Shared memory of a program that has two chunks in flight while it computes a third."""


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """How the recurrence is cut; it changes its time alone."""

    block_v: int
    """Columns of v of a program."""
    num_stages: int
    num_warps: int


def default_config(
    shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device
) -> RecurrenceConfig:
    """For one prompt, a chain of chunks whose length no width shortens: one program for each
    multiprocessor, its next chunks on their way. Elsewhere two programs wait in turn."""
    if dtype == torch.float32:  # whose tiles would not fit in Ada's shared memory twice
        return RecurrenceConfig(block_v=32, num_stages=1, num_warps=4)
    if shared_bytes(device) < _DEEP_BYTES:
        return RecurrenceConfig(block_v=32, num_stages=2, num_warps=4)
    if shape.num_v_heads * shape.v_dim <= 32 * num_sms(device):
        return RecurrenceConfig(block_v=32, num_stages=3, num_warps=4)
    return RecurrenceConfig(block_v=64, num_stages=3, num_warps=8)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; 0 where that is not known."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0))


@triton.jit
def _keep_inputs(
    mixed, ring, first_channel, count, position, has_state, mixed_stride,
    NUM_CHANNELS: tl.constexpr, RING_ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A row's last inputs of some channels to its ring, or zeros from before its sequence."""
    channels = first_channel + tl.arange(0, DIM)
    for back in tl.static_range(1, RING):
        token = count - back
        at = ring + ring_row(position + token, RING_ROWS) * NUM_CHANNELS + channels
        if (token >= 0) | (not has_state):
            source = mixed + token.to(tl.int64) * mixed_stride + channels
            tl.store(at, tl.load(source, mask=token >= 0, other=0.0))


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=[
        *("query_start_loc_ptr", "slots_ptr", "positions_ptr", "has_state_ptr", "rows_ptr"),
    ],
)
def _recurrence_kernel(
    mixed_ptr,
    state_ptr,
    ring_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    solve_ptr,
    scores_ptr,
    gates_ptr,
    out_ptr,
    query_start_loc_ptr,
    slots_ptr,
    positions_ptr,
    has_state_ptr,
    rows_ptr,
    num_tokens,
    mixed_stride,
    NUM_K_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
    RING_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    PARTS: tl.constexpr = V_DIM // BLOCK_V
    GROUP: tl.constexpr = NUM_V_HEADS // NUM_K_HEADS
    NUM_CHANNELS: tl.constexpr = 2 * NUM_K_HEADS * K_DIM + NUM_V_HEADS * V_DIM
    OPERAND: tl.constexpr = q_ptr.dtype.element_ty
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    if IS_TILED:
        k_head = head % NUM_K_HEADS
        is_first = (head < NUM_K_HEADS) & (part == 0)
    else:
        k_head = head // GROUP
        is_first = (head % GROUP == 0) & (part == 0)
    tokens = tl.arange(0, SIZE)
    k_dims = tl.arange(0, K_DIM)
    v_dims = part * BLOCK_V + tl.arange(0, BLOCK_V)
    num_listed = tl.load(rows_ptr)
    for listed in range(tl.program_id(1), num_listed, tl.num_programs(1)):
        row = tl.load(rows_ptr + 1 + listed)
        first = tl.load(query_start_loc_ptr + row)
        count = tl.load(query_start_loc_ptr + row + 1) - first
        slot = tl.load(slots_ptr + row).to(tl.int64)
        has_state = tl.load(has_state_ptr + row) != 0
        state_at = state_ptr + (slot * NUM_V_HEADS + head) * (K_DIM * V_DIM)
        state_at += v_dims[:, None] * K_DIM + k_dims[None, :]
        # [k_dim, BLOCK_V]: the many rows of a product, the few columns.
        s = tl.trans(tl.load(state_at, mask=has_state, other=0.0))
        k_first = k_head.to(tl.int64) * num_tokens + first
        v_first = head.to(tl.int64) * num_tokens + first
        c_first = gates_ptr + 2 * head.to(tl.int64) * num_tokens + first
        for start in tl.range(0, count, SIZE, num_stages=NUM_STAGES):
            within = start + tokens
            inside = within < count
            here = inside[:, None]
            k_at = (k_first + within)[:, None] * K_DIM + k_dims[None, :]
            square_at = (v_first + within)[:, None] * SIZE + tokens[None, :]
            v_at = (v_first + within)[:, None] * V_DIM + v_dims[None, :]
            k = tl.load(k_ptr + k_at, mask=here, other=0.0)
            q = tl.load(q_ptr + k_at, mask=here, other=0.0)
            v = tl.load(v_ptr + v_at, mask=here, other=0.0).to(tl.float32)
            solve = tl.load(solve_ptr + square_at, mask=here, other=0.0)
            scores = tl.load(scores_ptr + square_at, mask=here, other=0.0)
            c = tl.load(c_first + within, mask=inside, other=0.0)
            rate = tl.load(c_first + num_tokens + within, mask=inside, other=0.0)
            decay = tl.exp(c)[:, None]
            total = tl.min(c, axis=0)  # the last token's, since no log decay is positive
            s_operand = to_operand(s, OPERAND)
            known = tl.dot(k, s_operand, input_precision=PRECISION)
            error = to_operand((v - known * decay) * rate[:, None], OPERAND)
            update = tl.dot(solve, error, input_precision=PRECISION)
            o = tl.dot(q, s_operand, input_precision=PRECISION) * decay
            o = tl.dot(scores, to_operand(update, OPERAND), o, input_precision=PRECISION)
            # Beyond the row's end c is 0: so is the update there, and its factor is at most 1.
            kept = to_operand(update * tl.exp(total - c)[:, None], OPERAND)
            s = tl.dot(tl.trans(k), kept, s * tl.exp(total), input_precision=PRECISION)
            out_at = (first + within).to(tl.int64)[:, None] * (NUM_V_HEADS * V_DIM)
            out_at += head * V_DIM + v_dims[None, :]
            tl.store(out_ptr + out_at, o.to(out_ptr.dtype.element_ty), mask=here)
        tl.store(state_at, tl.trans(s))
        position = tl.load(positions_ptr + row)
        mixed = mixed_ptr + first.to(tl.int64) * mixed_stride
        ring = ring_ptr + slot * (RING_ROWS * NUM_CHANNELS)
        channel = 2 * NUM_K_HEADS * K_DIM + head * V_DIM + part * BLOCK_V
        _keep_inputs(
            mixed, ring, channel, count, position, has_state, mixed_stride,
            NUM_CHANNELS, RING_ROWS, BLOCK_V,
        )  # fmt: skip
        if is_first:
            channel = k_head * K_DIM
            _keep_inputs(
                mixed, ring, channel, count, position, has_state, mixed_stride,
                NUM_CHANNELS, RING_ROWS, K_DIM,
            )  # fmt: skip
            channel = (NUM_K_HEADS + k_head) * K_DIM
            _keep_inputs(
                mixed, ring, channel, count, position, has_state, mixed_stride,
                NUM_CHANNELS, RING_ROWS, K_DIM,
            )  # fmt: skip


def delta_prefill(
    mixed: torch.Tensor,  # [T, channels], rows of any stride
    a: torch.Tensor,  # [T, num_v_heads], rows of any stride
    b: torch.Tensor,  # [T, num_v_heads], rows of any stride
    conv: torch.Tensor,  # [channels, CONV_TAPS]
    a_log: torch.Tensor,  # [num_v_heads]
    dt_bias: torch.Tensor,  # [num_v_heads]
    state: torch.Tensor,  # [num_slots, num_v_heads, v_dim, k_dim] float32
    ring: torch.Tensor,  # [num_slots, R, channels]
    query_start_loc: torch.Tensor,  # [B+1] int32
    slots: torch.Tensor,  # [B] int32
    positions: torch.Tensor,  # [B] int32
    has_state: torch.Tensor,  # [B] bool
    plan: ChunkPlan,
    *,
    shape: GatedDeltaShape,
    max_rows: int,
    num_chunks: int,
    out: torch.Tensor,  # [T, num_v_heads, v_dim]
    config: RecurrenceConfig | None = None,
    pdl: bool = True,
) -> None:
    """The rows that `plan` lists, at most `max_rows` of at most `num_chunks` chunks in all."""
    check_inputs(mixed, a, b, conv, state, ring, shape, out)
    factors = compute_factors(
        mixed, a, b, conv, a_log, dt_bias, ring, slots, positions, has_state, plan,
        shape=shape, num_chunks=num_chunks, pdl=pdl,
    )  # fmt: skip
    config = config or default_config(shape, mixed.dtype, mixed.device)
    block_v = min(config.block_v, shape.v_dim)
    parts = shape.num_v_heads * (shape.v_dim // block_v)
    _recurrence_kernel[(parts, min(max_rows, _ROWS_AT_ONCE))](
        mixed,
        state,
        ring,
        *factors,
        out,
        query_start_loc,
        slots,
        positions,
        has_state,
        plan.rows,
        mixed.shape[0],
        mixed.stride(0),
        NUM_K_HEADS=shape.num_k_heads,
        NUM_V_HEADS=shape.num_v_heads,
        K_DIM=shape.k_dim,
        V_DIM=shape.v_dim,
        IS_TILED=shape.is_tiled,
        RING_ROWS=ring.shape[1],
        BLOCK_V=block_v,
        SIZE=CHUNK,
        NUM_STAGES=config.num_stages,
        PRECISION=product_precision(factors.q.dtype),
        num_warps=config.num_warps,
        **pdl_options(mixed.device, enabled=pdl),
    )
