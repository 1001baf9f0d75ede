"""The gated delta net of rows with drafts, in one launch: the state takes up the drafts of the last
step that stayed, then the row's own token, and is written; the outputs of its new drafts go on from
there without writing it.

For engines with drafts, in the place of `delta_decode`, whose cut this has: a program takes some
rows of one head's state and reads and writes them once, however many tokens there are. What is
pending, it takes up before it waits for the kernel ahead, which writes none of it.

The inputs of a step's tokens go to the slot's rings, where the next step finds those that stayed.
Other programs may read a slot's rings at that time: rows that a step writes are none of those that
it reads (`recurrent.base.ring_rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import pdl_options
from termgen.engine.device.kernels.recurrent.delta_decode import check_inputs, default_cut
from termgen.engine.device.kernels.recurrent.gates import (
    L2_EPS,
    RING,
    log_decay,
    ring_row,
    sigmoid,
    silu,
)
from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape


@triton.jit
def _earlier(
    ring, channels, position, has_state,
    NUM_CHANNELS: tl.constexpr, RING_ROWS: tl.constexpr,
):  # fmt: skip
    """Inputs of the three tokens before `position`, the newest first: zeros for those of none."""
    one = ring + ring_row(position - 1, RING_ROWS) * NUM_CHANNELS + channels
    two = ring + ring_row(position - 2, RING_ROWS) * NUM_CHANNELS + channels
    three = ring + ring_row(position - 3, RING_ROWS) * NUM_CHANNELS + channels
    return (
        tl.load(one, mask=has_state, other=0.0).to(tl.float32),
        tl.load(two, mask=has_state, other=0.0).to(tl.float32),
        tl.load(three, mask=has_state, other=0.0).to(tl.float32),
    )


@triton.jit
def _taps(conv_ptr, channels, CONV_CHANNEL: tl.constexpr, CONV_TAP: tl.constexpr):
    """Weights of these channels' convolution, the newest token's first."""
    at = conv_ptr + channels * CONV_CHANNEL
    return (
        tl.load(at + 3 * CONV_TAP).to(tl.float32),
        tl.load(at + 2 * CONV_TAP).to(tl.float32),
        tl.load(at + CONV_TAP).to(tl.float32),
        tl.load(at).to(tl.float32),
    )


@triton.jit
def _store_inputs(
    ring, channels, x, position, is_begin,
    NUM_CHANNELS: tl.constexpr, RING_ROWS: tl.constexpr,
):  # fmt: skip
    """A token's raw input; and zeros before it, if it is the first of its sequence."""
    tl.store(ring + ring_row(position, RING_ROWS) * NUM_CHANNELS + channels, x)
    if is_begin:
        for back in tl.static_range(1, RING):
            at = ring + ring_row(position - back, RING_ROWS) * NUM_CHANNELS + channels
            tl.store(at, tl.zeros_like(x))


@triton.jit(
    do_not_specialize=["a_stride", "b_stride"],
    do_not_specialize_on_alignment=[
        *("a_ptr", "b_ptr", "query_start_loc_ptr", "slots_ptr", "positions_ptr", "has_state_ptr"),
        *("num_pending_ptr", "num_drafts_ptr"),
    ],
)
def _delta_replay_kernel(
    mixed_ptr,
    a_ptr,
    b_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    ring_ptr,
    gates_ptr,
    out_ptr,
    query_start_loc_ptr,
    slots_ptr,
    positions_ptr,
    has_state_ptr,
    num_pending_ptr,
    num_drafts_ptr,
    mixed_stride,
    a_stride,
    b_stride,
    NUM_K_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TAP: tl.constexpr,
    RING_ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    PARTS: tl.constexpr = V_DIM // BLOCK_V
    GROUP: tl.constexpr = NUM_V_HEADS // NUM_K_HEADS
    NUM_CHANNELS: tl.constexpr = 2 * NUM_K_HEADS * K_DIM + NUM_V_HEADS * V_DIM
    program = tl.program_id(0)
    row = program // (NUM_V_HEADS * PARTS)
    head = program // PARTS % NUM_V_HEADS
    part = program % PARTS
    if IS_TILED:
        k_head = head % NUM_K_HEADS
        is_first = (head < NUM_K_HEADS) & (part == 0)
    else:
        k_head = head // GROUP
        is_first = (head % GROUP == 0) & (part == 0)

    token = tl.load(query_start_loc_ptr + row).to(tl.int64)
    count = (tl.load(query_start_loc_ptr + row + 1) - token).to(tl.int32)
    num_pending = tl.load(num_pending_ptr + row)
    num_drafts = tl.load(num_drafts_ptr + row)
    is_prompt = (count > 1) & (num_drafts == 0)
    if (count == 0) | (is_prompt & (num_pending == 0)):
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    has_state = tl.load(has_state_ptr + row) != 0
    k_dims = tl.arange(0, K_DIM)
    v_dims = part * BLOCK_V + tl.arange(0, BLOCK_V)
    state_at = state_ptr + (slot * NUM_V_HEADS + head) * (K_DIM * V_DIM)
    state_at += v_dims[:, None] * K_DIM + k_dims[None, :]
    s = tl.load(state_at, mask=has_state, other=0.0)
    q_channels = k_head * K_DIM + k_dims
    k_channels = NUM_K_HEADS * K_DIM + q_channels
    v_channels = 2 * NUM_K_HEADS * K_DIM + head * V_DIM + v_dims
    ring = ring_ptr + slot * (RING_ROWS * NUM_CHANNELS)
    gates = gates_ptr + slot * (RING_ROWS * 2 * NUM_V_HEADS) + head
    k_tap0, k_tap1, k_tap2, k_tap3 = _taps(conv_ptr, k_channels, CONV_CHANNEL, CONV_TAP)
    v_tap0, v_tap1, v_tap2, v_tap3 = _taps(conv_ptr, v_channels, CONV_CHANNEL, CONV_TAP)

    taken_up = position - num_pending
    k1, k2, k3 = _earlier(ring, k_channels, taken_up, has_state, NUM_CHANNELS, RING_ROWS)
    v1, v2, v3 = _earlier(ring, v_channels, taken_up, has_state, NUM_CHANNELS, RING_ROWS)
    for pending in range(num_pending):
        at = ring_row(taken_up + pending, RING_ROWS)
        k0 = tl.load(ring + at * NUM_CHANNELS + k_channels).to(tl.float32)
        v0 = tl.load(ring + at * NUM_CHANNELS + v_channels).to(tl.float32)
        decay = tl.exp(tl.load(gates + at * (2 * NUM_V_HEADS)))
        rate = tl.load(gates + at * (2 * NUM_V_HEADS) + NUM_V_HEADS)
        k = silu(k0 * k_tap0 + k1 * k_tap1 + k2 * k_tap2 + k3 * k_tap3)
        v = silu(v0 * v_tap0 + v1 * v_tap1 + v2 * v_tap2 + v3 * v_tap3)
        k_unit = tl.rsqrt(tl.sum(k * k, axis=0) + L2_EPS)
        s_k = tl.sum(s * k[None, :], axis=1)
        update = rate * (v - s_k * (decay * k_unit))
        s = s * decay + (update * k_unit)[:, None] * k[None, :]
        k1, k2, k3 = k0, k1, k2
        v1, v2, v3 = v0, v1, v2
    if is_prompt:  # which another kernel computes from there
        tl.store(state_at, s)
        return

    q_tap0, q_tap1, q_tap2, q_tap3 = _taps(conv_ptr, q_channels, CONV_CHANNEL, CONV_TAP)
    q1, q2, q3 = _earlier(ring, q_channels, position, has_state, NUM_CHANNELS, RING_ROWS)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    mixed = mixed_ptr + token * mixed_stride
    a_at = a_ptr + token * a_stride + head
    b_at = b_ptr + token * b_stride + head
    out_at = out_ptr + (token * NUM_V_HEADS + head) * V_DIM + v_dims
    x_q = tl.load(mixed + q_channels)
    x_k = tl.load(mixed + k_channels)
    x_v = tl.load(mixed + v_channels)
    a = tl.load(a_at)
    b = tl.load(b_at)
    last_own = count - num_drafts - 1
    for i in range(count):
        # The next token's, on their way while this one is computed.
        later = tl.minimum(i + 1, count - 1)
        next_q = tl.load(mixed + later * mixed_stride + q_channels)
        next_k = tl.load(mixed + later * mixed_stride + k_channels)
        next_v = tl.load(mixed + later * mixed_stride + v_channels)
        next_a = tl.load(a_at + later * a_stride)
        next_b = tl.load(b_at + later * b_stride)
        log_of_decay = log_decay(a.to(tl.float32), a_log, dt_bias)
        rate = sigmoid(b.to(tl.float32))
        decay = tl.exp(log_of_decay)
        q0, k0, v0 = x_q.to(tl.float32), x_k.to(tl.float32), x_v.to(tl.float32)
        q = silu(q0 * q_tap0 + q1 * q_tap1 + q2 * q_tap2 + q3 * q_tap3)
        k = silu(k0 * k_tap0 + k1 * k_tap1 + k2 * k_tap2 + k3 * k_tap3)
        v = silu(v0 * v_tap0 + v1 * v_tap1 + v2 * v_tap2 + v3 * v_tap3)
        s_k = tl.sum(s * k[None, :], axis=1)
        s_q = tl.sum(s * q[None, :], axis=1)
        k_k = tl.sum(k * k, axis=0)
        q_q = tl.sum(q * q, axis=0)
        q_k = tl.sum(q * k, axis=0)
        k_unit = tl.rsqrt(k_k + L2_EPS)
        q_unit = tl.rsqrt(q_q + L2_EPS) * SCALE
        update = rate * (v - s_k * (decay * k_unit))
        s = s * decay + (update * k_unit)[:, None] * k[None, :]
        o = s_q * (decay * q_unit) + update * (q_k * k_unit * q_unit)
        if i == last_own:
            tl.store(state_at, s)
        tl.store(out_at + i * (NUM_V_HEADS * V_DIM), o.to(out_ptr.dtype.element_ty))
        is_begin = (i == 0) & (not has_state)
        here = position + i
        _store_inputs(ring, v_channels, x_v, here, is_begin, NUM_CHANNELS, RING_ROWS)
        if is_first:
            _store_inputs(ring, q_channels, x_q, here, is_begin, NUM_CHANNELS, RING_ROWS)
            _store_inputs(ring, k_channels, x_k, here, is_begin, NUM_CHANNELS, RING_ROWS)
        if part == 0:
            gate_at = gates + ring_row(here, RING_ROWS) * (2 * NUM_V_HEADS)
            tl.store(gate_at, log_of_decay)
            tl.store(gate_at + NUM_V_HEADS, rate)
        q1, q2, q3 = q0, q1, q2
        k1, k2, k3 = k0, k1, k2
        v1, v2, v3 = v0, v1, v2
        x_q, x_k, x_v, a, b = next_q, next_k, next_v, next_a, next_b


def delta_replay(
    mixed: torch.Tensor,  # [T, channels], rows of any stride
    a: torch.Tensor,  # [T, num_v_heads], rows of any stride
    b: torch.Tensor,  # [T, num_v_heads], rows of any stride
    conv: torch.Tensor,  # [channels, CONV_TAPS]
    a_log: torch.Tensor,  # [num_v_heads]
    dt_bias: torch.Tensor,  # [num_v_heads]
    state: torch.Tensor,  # [num_slots, num_v_heads, v_dim, k_dim] float32
    ring: torch.Tensor,  # [num_slots, R, channels]
    gates: torch.Tensor,  # [num_slots, R, 2, num_v_heads] float32
    query_start_loc: torch.Tensor,  # [B+1] int32
    slots: torch.Tensor,  # [B] int32
    positions: torch.Tensor,  # [B] int32
    has_state: torch.Tensor,  # [B] bool
    num_pending: torch.Tensor,  # [B] int32
    num_drafts: torch.Tensor,  # [B] int32
    *,
    shape: GatedDeltaShape,
    num_rows: int,
    out: torch.Tensor,  # [T, num_v_heads, v_dim]
    block_v: int | None = None,
    num_warps: int | None = None,
    pdl: bool = True,
) -> None:
    """Rows [0, num_rows) that have one token, or drafts behind their own. Of other rows, which are
    parts of prompts, the states take up what is pending, and no more.

    State, rings and weights must not be written by the kernel launched before.
    block_v, num_warps: as for `delta_decode`.
    """
    check_inputs(mixed, a, b, conv, state, ring, shape, out)
    assert gates.shape == (*ring.shape[:2], 2, shape.num_v_heads), gates.shape
    assert gates.dtype == torch.float32 and gates.is_contiguous()
    block_v, num_warps = default_cut(num_rows, shape, block_v, num_warps)
    programs = num_rows * shape.num_v_heads * (shape.v_dim // block_v)
    if not programs:
        return
    _delta_replay_kernel[(programs,)](
        mixed,
        a,
        b,
        conv,
        a_log,
        dt_bias,
        state,
        ring,
        gates,
        out,
        query_start_loc,
        slots,
        positions,
        has_state,
        num_pending,
        num_drafts,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        NUM_K_HEADS=shape.num_k_heads,
        NUM_V_HEADS=shape.num_v_heads,
        K_DIM=shape.k_dim,
        V_DIM=shape.v_dim,
        IS_TILED=shape.is_tiled,
        CONV_CHANNEL=conv.stride(0),
        CONV_TAP=conv.stride(1),
        RING_ROWS=ring.shape[1],
        SCALE=shape.k_dim**-0.5,
        BLOCK_V=block_v,
        num_warps=num_warps,
        **pdl_options(mixed.device, enabled=pdl),
    )
