"""Rotates q and k and writes k and v to the KV cache, in one kernel after the q/k/v projection.

Per token and head: the optional RMS norm of q and k heads (Qwen3, Gemma 3) and those of v (Gemma
4), rotation of the first `rotary_dim` values of q and k, q into its own buffer, k and v straight
into the paged cache. The projection may be without v, which is k then as it was before its norm,
or without both, for a layer that reads what another one stored. Called by the decoder's layers
before attention. Rounds where `layers.norm` and `layers.ops` do: the normed head (unless its weight
is float32), its product with the weight, and the rotated head, each once.

`rotation` makes a step's cosines and sines; `store_kv` writes keys and values as they are, for
models whose own code rotates (`models.transformers_backend`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.kv_cache import (
    cache_constants,
    heads_of,
    kv_store_reference,
    queries_for,
    scales_at,
)
from termgen.engine.device.kernels.launch import next_power_of_2, pdl_options
from termgen.engine.device.kernels.rows.spread_heads import rotate_and_spread, store_and_spread
from termgen.engine.device.kernels.rows.store_heads import (
    in_cache_units,
    normed_head,
    store_parts,
    to_cache,
)
from termgen.vocabulary.device.kv_cache_types import LayerScales

_HEADS = 4
_MANY_TOKENS, _HEADS_OF_MANY = 1024, 16
"""Heads of one program: enough programs for one token, enough bytes a program for many."""


@triton.jit
def _qk_rope_kv_kernel(
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
    key_factor,
    value_factor,
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
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = ROTARY_DIM // 2
    HAS_REST: tl.constexpr = ROTARY_DIM < HEAD_DIM
    NORMS_VALUES: tl.constexpr = NUM_NORMED > NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    is_head = heads < NUM_HEADS + 2 * NUM_KV_HEADS
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS

    halves = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = halves < HALF
    half_mask = is_head & in_half
    if HAS_REST:
        rests = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = is_head & (rests < HEAD_DIM)
    if NUM_NORMED > 0:
        # The weights are in flight while qkv is waited for.
        weights = norm_weight_ptr + heads * HEAD_DIM
        has_weight = heads < NUM_NORMED
        mask = half_mask & has_weight
        first_weight = tl.load(weights + halves, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(weights + HALF + halves, mask=mask, other=0.0).to(tl.float32)
        if HAS_REST:
            mask = rest_mask & has_weight
            rest_weight = tl.load(weights + rests, mask=mask, other=0.0).to(tl.float32)
    # The sines of the second half are those without a sign (`layers.ops.Rotation`).
    cos = tl.load(cos_ptr + token * rotation_stride + halves, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + token * rotation_stride + HALF + halves, mask=in_half, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    if USE_PDL:
        gdc_wait()
    source = heads
    if not HAS_VALUES:
        source = heads - tl.where(is_value, NUM_KV_HEADS, 0)
    at = qkv_ptr + token * qkv_stride + source * HEAD_DIM
    first = tl.load(at + halves, mask=half_mask, other=0.0)
    second = tl.load(at + HALF + halves, mask=half_mask, other=0.0)
    raw_first, raw_second = first, second
    if HAS_REST:
        rest = tl.load(at + rests, mask=rest_mask, other=0.0)
        raw_rest = rest

    if NUM_NORMED > 0:
        ROUND_TWICE: tl.constexpr = norm_weight_ptr.dtype.element_ty != tl.float32
        x, y = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(x * x + y * y, axis=1)
        if HAS_REST:
            z = rest.to(tl.float32)
            squares += tl.sum(z * z, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = normed_head(first, scale, first_weight, ROUND_TWICE)
        second = normed_head(second, scale, second_weight, ROUND_TWICE)
        if HAS_REST:
            rest = normed_head(rest, scale, rest_weight, ROUND_TWICE)
            if not NORMS_VALUES:
                rest = tl.where(is_value, raw_rest, rest)
        if NORMS_VALUES:
            raw_first, raw_second = first, second

    x, y = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(is_value, raw_first, (x * cos - y * sin).to(first.dtype))
    second = tl.where(is_value, raw_second, (y * cos + x * sin).to(second.dtype))

    to = q_ptr + token * q_stride + heads * HEAD_DIM
    tl.store(to + halves, first, mask=half_mask & is_query)
    tl.store(to + HALF + halves, second, mask=half_mask & is_query)
    kv_head = heads - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    to = cache_ptr + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE
    to = to + kv_head * HEAD_STRIDE + tl.where(is_value, V_OFFSET, 0)
    if HAS_REST:
        q_rest = q_ptr + token * q_stride + heads * HEAD_DIM + rests
        tl.store(q_rest, rest, mask=rest_mask & is_query)
    else:
        rest, rests, rest_mask = first, halves, half_mask
    first = in_cache_units(first, is_value, key_factor, value_factor)
    second = in_cache_units(second, is_value, key_factor, value_factor)
    rest = in_cache_units(rest, is_value, key_factor, value_factor)
    is_stored = is_head & ~is_query
    store_parts(
        to, first, second, rest, halves, rests, half_mask & is_stored, rest_mask & is_stored,
        HALF, HAS_REST,
    )  # fmt: skip


def factors_of(scales: LayerScales | None) -> tuple[float | None, float | None]:
    """What kernels multiply keys and values by."""
    return (None, None) if scales is None else (1 / scales.key, 1 / scales.value)


def qk_rope_kv(
    qkv: torch.Tensor,  # [T, n * head_dim]: q, k and v, or q and k, or q alone
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    cos: torch.Tensor,  # [T, 1, rotary_dim] float32, as `layers.ops.Rotation` has them
    sin: torch.Tensor,  # [T, 1, rotary_dim] float32
    slot_mapping: torch.Tensor,  # [T] int64
    *,
    num_heads: int,
    norm_weight: torch.Tensor | None = None,  # [q and k, or all heads, head_dim]
    eps: float = 0.0,
    q: torch.Tensor | None = None,
    cache_scales: LayerScales | None = None,
    pdl: bool = True,
) -> torch.Tensor:  # [T, num_heads, head_dim]
    """Writes k and v at their slots, if there are any, and returns q, spread for a cache with
    scales (`kv_cache.spread`); a part of `qkv` may be given for q.

    With `pdl` the kernel reads cos, sin and slots before the kernel ahead of it has ended: between
    what writes them and this must lie a launch without early start, as a step's embedding is.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = heads_of(cache)
    rotary_dim = cos.shape[-1]
    constants = cache_constants(cache)
    given = qkv.shape[1] // head_dim
    if given == num_heads:
        num_kv_heads = constants["NUM_KV_HEADS"] = 0
    total_heads = num_heads + 2 * num_kv_heads
    assert given in (total_heads, num_heads + num_kv_heads), (qkv.shape, cache.shape)
    assert qkv.shape[1] == given * head_dim and qkv.stride(1) == 1, qkv.shape
    num_normed = 0 if norm_weight is None else norm_weight.shape[0]
    assert num_normed in (0, num_heads + num_kv_heads, total_heads), norm_weight
    assert cos.stride() == sin.stride() and cos.stride(-1) == 1
    if q is None:
        q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    assert q.stride()[1:] == (head_dim, 1), q.stride()
    if not num_tokens:
        return q
    if scales_at(cache):
        assert cache_scales is None, "which an fp8 cache has"
        rotate_and_spread(
            qkv, cache, cos, sin, slot_mapping, q, norm_weight=norm_weight, eps=eps, pdl=pdl
        )
        return q
    is_many = num_tokens >= _MANY_TOKENS
    heads = _HEADS_OF_MANY if is_many else _HEADS
    _qk_rope_kv_kernel[(num_tokens, triton.cdiv(total_heads, heads))](
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
        *factors_of(cache_scales),
        **constants,
        NUM_HEADS=num_heads,
        ROTARY_DIM=rotary_dim,
        NUM_NORMED=num_normed,
        HAS_VALUES=given == total_heads,
        BLOCK_H=heads,
        BLOCK_HALF=next_power_of_2(rotary_dim // 2),
        BLOCK_REST=next_power_of_2(head_dim - rotary_dim),
        num_warps=4 if is_many else 2,
        **pdl_options(qkv.device, enabled=pdl),
    )
    return q


def qk_rope_kv_reference(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_heads: int,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    cache_scales: LayerScales | None = None,
) -> torch.Tensor:
    num_kv_heads, head_dim = heads_of(cache)
    rotary_dim = cos.shape[-1]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    if heads.shape[1] == num_heads + num_kv_heads:  # v is k
        heads = torch.cat((heads, heads[:, num_heads:]), 1)
    if norm_weight is not None:
        some = heads[:, : len(norm_weight)]
        normed = F.rms_norm(some.float(), (head_dim,), None, eps)
        normed = normed.to(qkv.dtype) if norm_weight.dtype == qkv.dtype else normed
        some = (normed * norm_weight).to(qkv.dtype)
        heads = torch.cat((some, heads[:, len(norm_weight) :]), 1)
    qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    turned = qk[..., :rotary_dim]
    swapped = turned.roll(rotary_dim // 2, -1)
    turned = (turned * cos + swapped * sin).to(qkv.dtype)
    qk = torch.cat((turned, qk[..., rotary_dim:]), -1)
    if v.shape[1]:
        kv_store_reference(qk[:, num_heads:], v, cache, slot_mapping, cache_scales)
    return queries_for(cache, qk[:, :num_heads]).contiguous()


@triton.jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_mapping_ptr,
    k_token_stride,
    v_token_stride,
    key_factor,
    value_factor,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    k = tl.load(k_ptr + token * k_token_stride + heads * HEAD_DIM + dims, mask=inside)
    v = tl.load(v_ptr + token * v_token_stride + heads * HEAD_DIM + dims, mask=inside)
    slot = tl.load(slot_mapping_ptr + token)
    to = cache_ptr + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE
    to = to + heads * HEAD_STRIDE + dims
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if key_factor is not None:
        k, v = k.to(tl.float32) * key_factor, v.to(tl.float32) * value_factor
    tl.store(to, to_cache(k, dtype), mask=inside)
    tl.store(to + V_OFFSET, to_cache(v, dtype), mask=inside)


def store_kv(
    k: torch.Tensor,  # [T, num_kv_heads, head_dim]
    v: torch.Tensor,  # [T, num_kv_heads, head_dim]
    kv_cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    slot_mapping: torch.Tensor,  # [T] int64
    q: torch.Tensor,  # [T, num_heads, head_dim]
    cache_scales: LayerScales | None = None,
) -> torch.Tensor:  # [T, num_heads, head_dim]
    """Writes k and v at the tokens' slots, and returns q as attention to this cache takes it: as it
    is, or spread. The heads of a token lie together. `kv_cache.kv_store_reference` and
    `queries_for` are the reference."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.shape == v.shape and k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert heads_of(kv_cache) == k.shape[1:], (kv_cache.shape, k.shape)
    if not num_tokens:
        return q
    if scales_at(kv_cache):
        assert cache_scales is None, "which an fp8 cache has"
        return store_and_spread(k, v, kv_cache, slot_mapping, q)
    _store_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, _HEADS))](
        k,
        v,
        kv_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        *factors_of(cache_scales),
        **cache_constants(kv_cache),
        BLOCK_H=_HEADS,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=2,
    )
    return q


@triton.jit
def _rotation_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angles = position * tl.load(frequencies_ptr + lanes, mask=inside, other=0.0)
    cos, sin = tl.cos(angles) * scale, tl.sin(angles) * scale
    at = token * (2 * HALF) + lanes
    tl.store(cos_ptr + at, cos, mask=inside)
    tl.store(cos_ptr + at + HALF, cos, mask=inside)
    tl.store(sin_ptr + at, -sin, mask=inside)
    tl.store(sin_ptr + at + HALF, sin, mask=inside)


def rotation(
    positions: torch.Tensor,  # [T] int64
    frequencies: torch.Tensor,  # [rotary_dim / 2] float32
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, rotary_dim] float32, as `layers.ops.Rotation` has them."""
    num_tokens, half = positions.shape[0], frequencies.shape[0]
    shape = (num_tokens, 1, 2 * half)
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))
    if num_tokens:
        _rotation_kernel[(num_tokens,)](
            positions,
            frequencies,
            cos,
            sin,
            scale,
            HALF=half,
            BLOCK=next_power_of_2(half),
            num_warps=1,
        )
    return cos, sin


def rotation_reference(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
