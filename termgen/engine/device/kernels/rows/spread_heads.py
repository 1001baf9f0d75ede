"""Writes keys and values to a cache with scales, keys spread over their heads, and queries with
them: what `qk_rope_kv` and `store_kv` are for other caches, chosen by these.

A few channels of a key are far larger than the others, and would set the scale of all. An
orthogonal transform of queries and keys leaves their products as they are, and one of Hadamard
makes each number of a head a sum of all of them, with signs; `kv_cache.spread` is the reference.
After QuaRot (Ashkboos et al., 2024), which turns keys behind the rotation by position; SpinQuant
(Liu et al., 2024) learns the transform. KVQuant (Hooper et al., 2024) measures the channels.

Queries are spread where they are written, so that attention reads them as ever and a step has no
launch more. Values are not: it was measured to help little, and results would have to be turned
back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.kv_cache import (
    cache_constants,
    heads_of,
    scales_at,
    spread_width,
)
from termgen.engine.device.kernels.launch import next_power_of_2, pdl_options
from termgen.engine.device.kernels.rows.store_heads import normed_head, scale_pointer, store_head

_HEADS = 4
_MANY_TOKENS, _HEADS_OF_MANY = 1024, 16
"""Heads of one program, as in `qk_rope_kv`."""


@triton.constexpr_function
def _num_turns(span: int) -> int:
    return span.bit_length() - 1


@triton.jit
def _add_partners(x, STEP: tl.constexpr):
    """x + p and p - x in turn for every STEP numbers, p being those STEP further on or back. They
    are found by an exclusive or of both numbers' bits: a few shuffles, no shared memory."""
    pairs = tl.reshape(x, [x.numel // (2 * STEP), 2, STEP])
    bits = pairs.to(tl.int32, bitcast=True)
    partner = (bits ^ tl.xor_sum(bits, 1, keep_dims=True)).to(tl.float32, bitcast=True)
    is_first = tl.arange(0, 2)[None, :, None] == 0
    return tl.reshape(partner + tl.where(is_first, pairs, -pairs), x.shape)


@triton.jit
def spread_rows(x, SPAN: tl.constexpr):
    """float32 [H, D] -> the Hadamard transform of every SPAN numbers of a row."""
    for turn in tl.static_range(_num_turns(SPAN)):
        x = _add_partners(x, SPAN >> (turn + 1))
    return x * SPAN**-0.5


@triton.jit
def _write_heads(
    x,
    q_at,
    cache_ptr,
    slot,
    heads,
    dims,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """x [H, D] of heads [H, 1], queries' at `q_at` [H, 1], keys and values at their slot."""
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    in_head = dims < HEAD_DIM
    spread = spread_rows(x.to(tl.float32), SPAN)
    tl.store(q_at + dims, spread.to(x.dtype), mask=is_query & in_head)
    if NUM_KV_HEADS > 0:
        kept = tl.where(is_value, x.to(tl.float32), spread)
        kv_head = heads - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
        kv_offset = tl.where(is_value, V_OFFSET, 0)
        to = cache_ptr + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE
        to = to + kv_head * HEAD_STRIDE + kv_offset
        at_scale = scale_pointer(
            cache_ptr, slot, kv_head, kv_offset, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE,
            BLOCK_SIZE, HEAD_DIM, SCALES,
        )  # fmt: skip
        is_kept = ~is_query & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
        store_head(to, at_scale, kept, dims, is_kept, is_kept & in_head, SCALES, HEAD_DIM)


@triton.jit
def _rotate_and_spread_kernel(
    qkv_ptr,
    q_ptr,
    cache_ptr,
    cos_ptr,
    sin_ptr,
    slot_mapping_ptr,
    norm_weight_ptr,
    qkv_stride,
    q_stride,
    rotation_stride,
    eps,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NUM_NORMED: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr,
    SPAN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (dims < HEAD_DIM)
    turns = dims < ROTARY_DIM
    if NUM_NORMED > 0:
        # The weights are in flight while qkv is waited for.
        weights = norm_weight_ptr + heads * HEAD_DIM
        is_normed = inside & (heads < NUM_NORMED)
        weight = tl.load(weights + dims, mask=is_normed, other=0.0).to(tl.float32)
        mask = is_normed & turns
        partner_weight = tl.load(weights + partners, mask=mask, other=0.0).to(tl.float32)
    at = token * rotation_stride + dims
    cos = tl.load(cos_ptr + at, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + at, mask=turns, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    if USE_PDL:
        gdc_wait()
    source = heads
    if not HAS_VALUES:
        source = heads - tl.where(is_value, NUM_KV_HEADS, 0)
    at = qkv_ptr + token * qkv_stride + source * HEAD_DIM
    x = tl.load(at + dims, mask=inside, other=0.0)
    partner = tl.load(at + partners, mask=inside & turns, other=0.0)
    if NUM_NORMED > 0:
        ROUND_TWICE: tl.constexpr = norm_weight_ptr.dtype.element_ty != tl.float32
        square = x.to(tl.float32) * x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(square, axis=1) / HEAD_DIM + eps)[:, None]
        x = tl.where(is_normed, normed_head(x, scale, weight, ROUND_TWICE), x)
        normed_partner = normed_head(partner, scale, partner_weight, ROUND_TWICE)
        partner = tl.where(is_normed, normed_partner, partner)
    rotated = (x.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(x.dtype)
    x = tl.where(is_value, x, rotated)
    tl.debug_barrier()  # queries may be written over what other threads read as partners
    _write_heads(
        x, q_ptr + token * q_stride + heads * HEAD_DIM, cache_ptr, slot, heads, dims,
        NUM_HEADS, NUM_KV_HEADS, BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, HEAD_STRIDE, BLOCK_SIZE,
        HEAD_DIM, SCALES, SPAN,
    )  # fmt: skip


def rotate_and_spread(
    qkv: torch.Tensor,  # [T, n * head_dim]: q, k and v, or q and k, or q alone
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, stored width]
    cos: torch.Tensor,  # [T, 1, rotary_dim] float32, as `layers.ops.Rotation` has them
    sin: torch.Tensor,  # [T, 1, rotary_dim] float32
    slot_mapping: torch.Tensor,  # [T] int64
    q: torch.Tensor,  # [T, num_heads, head_dim]
    *,
    norm_weight: torch.Tensor | None,  # [q and k, or all heads, head_dim]
    eps: float,
    pdl: bool,
) -> None:
    """`qk_rope_kv` for a cache with scales."""
    num_tokens, num_heads, head_dim = q.shape
    constants = cache_constants(cache)
    given = qkv.shape[1] // head_dim
    if given == num_heads:
        constants["NUM_KV_HEADS"] = 0
    total_heads = num_heads + 2 * constants["NUM_KV_HEADS"]
    is_many = num_tokens >= _MANY_TOKENS
    heads = _HEADS_OF_MANY if is_many else _HEADS
    _rotate_and_spread_kernel[(num_tokens, triton.cdiv(total_heads, heads))](
        qkv,
        q,
        cache,
        cos,
        sin,
        slot_mapping,
        norm_weight,
        qkv.stride(0),
        q.stride(0),
        cos.stride(0),
        eps,
        **constants,
        NUM_HEADS=num_heads,
        ROTARY_DIM=cos.shape[-1],
        NUM_NORMED=0 if norm_weight is None else norm_weight.shape[0],
        HAS_VALUES=given == total_heads,
        BLOCK_H=heads,
        BLOCK_D=next_power_of_2(head_dim),
        SCALES=scales_at(cache),
        SPAN=spread_width(head_dim),
        num_warps=4 if is_many else 2,
        **pdl_options(qkv.device, enabled=pdl),
    )


@triton.jit
def _spread_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cache_ptr,
    slot_mapping_ptr,
    q_token_stride,
    k_token_stride,
    v_token_stride,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr,
    SPAN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    in_head = dims < HEAD_DIM
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    is_key = ~is_query & ~is_value
    key_at = k_ptr + token * k_token_stride + (heads - NUM_HEADS) * HEAD_DIM
    x = tl.load(key_at + dims, mask=is_key & in_head, other=0.0)
    value_at = v_ptr + token * v_token_stride + (heads - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    is_value = is_value & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    x = tl.where(is_value, tl.load(value_at + dims, mask=is_value & in_head, other=0.0), x)
    if NUM_HEADS > 0:
        query_at = q_ptr + token * q_token_stride + heads * HEAD_DIM
        x = tl.where(is_query, tl.load(query_at + dims, mask=is_query & in_head, other=0.0), x)
    _write_heads(
        x, out_ptr + (token * NUM_HEADS + heads) * HEAD_DIM, cache_ptr,
        tl.load(slot_mapping_ptr + token), heads, dims, NUM_HEADS, NUM_KV_HEADS, BLOCK_STRIDE,
        TOKEN_STRIDE, V_OFFSET, HEAD_STRIDE, BLOCK_SIZE, HEAD_DIM, SCALES, SPAN,
    )  # fmt: skip


def store_and_spread(
    k: torch.Tensor,  # [T, num_kv_heads, head_dim]
    v: torch.Tensor,  # [T, num_kv_heads, head_dim]
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, stored width]
    slot_mapping: torch.Tensor,  # [T] int64
    q: torch.Tensor,  # [T, num_heads, head_dim]
) -> torch.Tensor:
    """`store_kv` for a cache with scales; also spreads the queries, into a tensor of their own."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = heads_of(cache)[0]
    assert q.stride()[1:] == (head_dim, 1) or not num_heads, q.stride()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    total_heads = num_heads + 2 * num_kv_heads
    _spread_kernel[(num_tokens, triton.cdiv(total_heads, _HEADS))](
        q,
        k,
        v,
        out,
        cache,
        slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        **cache_constants(cache),
        NUM_HEADS=num_heads,
        BLOCK_H=_HEADS,
        BLOCK_D=next_power_of_2(head_dim),
        SCALES=scales_at(cache),
        SPAN=spread_width(head_dim),
        num_warps=2,
    )
    return out
