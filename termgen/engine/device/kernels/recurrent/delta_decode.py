"""The gated delta net of rows with one token, in one launch: convolution, norms, gates, the step of
the recurrence, and the new convolution input in its ring.

A program takes some rows of one head's state [v_dim, k_dim], which are independent of each other,
and reads and writes them once: all sums are over raw q and k, and what normalises them is applied
to the sums. Before it waits for the kernel ahead it reads the state, the ring and the convolution's
weights, none of which that kernel writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import pdl_options
from termgen.engine.device.kernels.recurrent.gates import L2_EPS, RING, log_decay, sigmoid, silu
from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape

_FEW_ROWS = 4
"""Up to so many rows, programs are larger: fewer of them share a row's convolution."""


@triton.jit
def _earlier_taps(
    ring_ptr, conv_ptr, channels, position, has_state,
    NUM_CHANNELS: tl.constexpr, CONV_CHANNEL: tl.constexpr, CONV_TAP: tl.constexpr,
):  # fmt: skip
    """The convolution's sum over the tokens before this one, and the weight of this one."""
    total = tl.zeros(channels.shape, tl.float32)
    for back in tl.static_range(1, RING):
        at = ring_ptr + ((position - back) & (RING - 1)) * NUM_CHANNELS + channels
        x = tl.load(at, mask=has_state, other=0.0).to(tl.float32)
        tap = conv_ptr + (RING - 1 - back) * CONV_TAP + channels * CONV_CHANNEL
        total += x * tl.load(tap).to(tl.float32)
    return total, tl.load(conv_ptr + (RING - 1) * CONV_TAP + channels * CONV_CHANNEL)


@triton.jit
def _store_input(ring_ptr, channels, x, position, has_state, NUM_CHANNELS: tl.constexpr):
    """The token's raw input; and zeros before it, if it is the first of its sequence."""
    tl.store(ring_ptr + (position & (RING - 1)) * NUM_CHANNELS + channels, x)
    if not has_state:
        for back in tl.static_range(1, RING - 1):
            at = ring_ptr + ((position - back) & (RING - 1)) * NUM_CHANNELS + channels
            tl.store(at, tl.zeros_like(x))


@triton.jit(
    do_not_specialize=["a_stride", "b_stride"],
    do_not_specialize_on_alignment=[
        *("a_ptr", "b_ptr", "query_start_loc_ptr", "slots_ptr", "positions_ptr", "has_state_ptr"),
    ],
)
def _delta_decode_kernel(
    mixed_ptr,
    a_ptr,
    b_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    ring_ptr,
    out_ptr,
    query_start_loc_ptr,
    slots_ptr,
    positions_ptr,
    has_state_ptr,
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
    is_single = tl.load(query_start_loc_ptr + row + 1) == token + 1
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    has_state = is_single & (tl.load(has_state_ptr + row) != 0)
    k_dims = tl.arange(0, K_DIM)
    v_dims = part * BLOCK_V + tl.arange(0, BLOCK_V)
    state_at = state_ptr + (slot * NUM_V_HEADS + head) * (K_DIM * V_DIM)
    state_at += v_dims[:, None] * K_DIM + k_dims[None, :]
    s = tl.load(state_at, mask=has_state, other=0.0)
    q_channels = k_head * K_DIM + k_dims
    k_channels = NUM_K_HEADS * K_DIM + q_channels
    v_channels = 2 * NUM_K_HEADS * K_DIM + head * V_DIM + v_dims
    ring = ring_ptr + slot * (RING * NUM_CHANNELS)
    q, q_tap = _earlier_taps(
        ring, conv_ptr, q_channels, position, has_state, NUM_CHANNELS, CONV_CHANNEL, CONV_TAP
    )
    k, k_tap = _earlier_taps(
        ring, conv_ptr, k_channels, position, has_state, NUM_CHANNELS, CONV_CHANNEL, CONV_TAP
    )
    v, v_tap = _earlier_taps(
        ring, conv_ptr, v_channels, position, has_state, NUM_CHANNELS, CONV_CHANNEL, CONV_TAP
    )
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if USE_PDL:
        gdc_wait()
    if not is_single:
        return

    mixed = mixed_ptr + token * mixed_stride
    x_q = tl.load(mixed + q_channels)
    x_k = tl.load(mixed + k_channels)
    x_v = tl.load(mixed + v_channels)
    a = tl.load(a_ptr + token * a_stride + head).to(tl.float32)
    rate = sigmoid(tl.load(b_ptr + token * b_stride + head).to(tl.float32))
    decay = tl.exp(log_decay(a, a_log, dt_bias))
    q = silu(q + x_q.to(tl.float32) * q_tap.to(tl.float32))
    k = silu(k + x_k.to(tl.float32) * k_tap.to(tl.float32))
    v = silu(v + x_v.to(tl.float32) * v_tap.to(tl.float32))
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
    tl.store(state_at, s)
    out_at = out_ptr + (token * NUM_V_HEADS + head) * V_DIM + v_dims
    tl.store(out_at, o.to(out_ptr.dtype.element_ty))
    _store_input(ring, v_channels, x_v, position, has_state, NUM_CHANNELS)
    if is_first:
        _store_input(ring, q_channels, x_q, position, has_state, NUM_CHANNELS)
        _store_input(ring, k_channels, x_k, position, has_state, NUM_CHANNELS)


def delta_decode(
    mixed: torch.Tensor,  # [T, channels], rows of any stride
    a: torch.Tensor,  # [T, num_v_heads], rows of any stride
    b: torch.Tensor,  # [T, num_v_heads], rows of any stride
    conv: torch.Tensor,  # [channels, CONV_TAPS]
    a_log: torch.Tensor,  # [num_v_heads]
    dt_bias: torch.Tensor,  # [num_v_heads]
    state: torch.Tensor,  # [num_slots, num_v_heads, v_dim, k_dim] float32
    ring: torch.Tensor,  # [num_slots, CONV_TAPS, channels]
    query_start_loc: torch.Tensor,  # [B+1] int32
    slots: torch.Tensor,  # [B] int32
    positions: torch.Tensor,  # [B] int32
    has_state: torch.Tensor,  # [B] bool
    *,
    shape: GatedDeltaShape,
    num_rows: int,
    out: torch.Tensor,  # [T, num_v_heads, v_dim]
    block_v: int | None = None,
    num_warps: int | None = None,
    pdl: bool = True,
) -> None:
    """Rows [0, num_rows) that have one token; other rows are left out.

    State, ring and weights must not be written by the kernel launched before.
    block_v, num_warps: how the work is cut; by default as measured on an H200.
    """
    check_inputs(mixed, a, b, conv, state, ring, shape, out)
    assert ring.shape[1] == RING.value, "a slot has pending tokens, which this would pass over"
    block_v, num_warps = default_cut(num_rows, shape, block_v, num_warps)
    programs = num_rows * shape.num_v_heads * (shape.v_dim // block_v)
    if not programs:
        return
    _delta_decode_kernel[(programs,)](
        mixed,
        a,
        b,
        conv,
        a_log,
        dt_bias,
        state,
        ring,
        out,
        query_start_loc,
        slots,
        positions,
        has_state,
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
        SCALE=shape.k_dim**-0.5,
        BLOCK_V=block_v,
        num_warps=num_warps,
        **pdl_options(mixed.device, enabled=pdl),
    )


def default_cut(
    num_rows: int, shape: GatedDeltaShape, block_v: int | None, num_warps: int | None
) -> tuple[int, int]:
    """block_v and num_warps, by default as measured on an H200."""
    few = num_rows <= _FEW_ROWS
    return min(block_v or (16 if few else 8), shape.v_dim), num_warps or (4 if few else 1)


def check_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv: torch.Tensor,
    state: torch.Tensor,
    ring: torch.Tensor,
    shape: GatedDeltaShape,
    out: torch.Tensor,
) -> None:
    channels, heads = shape.num_channels, shape.num_v_heads
    for dim in (shape.k_dim, shape.v_dim):
        assert dim >= 16 and dim & (dim - 1) == 0, shape
    assert mixed.shape[1] == channels and mixed.stride(1) == 1, (mixed.shape, mixed.stride())
    for gate in (a, b):
        assert gate.shape[1] == heads and gate.stride(1) == 1, (gate.shape, gate.stride())
    assert conv.shape == (channels, RING.value), conv.shape
    assert state.shape[1:] == (heads, shape.v_dim, shape.k_dim), state.shape
    assert state.dtype == torch.float32 and state.is_contiguous()
    assert ring.shape[1] >= RING.value and ring.shape[2] == channels, ring.shape
    assert ring.is_contiguous()
    assert ring.dtype == mixed.dtype, (ring.dtype, mixed.dtype)
    assert out.shape == (mixed.shape[0], heads, shape.v_dim) and out.is_contiguous(), out.shape
