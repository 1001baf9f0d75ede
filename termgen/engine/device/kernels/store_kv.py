"""Keys and values of a step's tokens into the paged cache, as they are.

For models whose own code rotates (`models.transformers_backend`); `qk_rope_kv` does both at once
for the families here. Called before attention.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.cache_layout import cache_constants
from termgen.engine.device.kernels.launch import next_power_of_2
from termgen.engine.device.kernels.qk_rope_kv import to_cache

_HEADS = 4
"""Heads of one program: enough programs for a step of one token."""


@triton.jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_mapping_ptr,
    k_token_stride,
    v_token_stride,
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
    kv_dtype = cache_ptr.dtype.element_ty
    tl.store(to, to_cache(k, kv_dtype), mask=inside)
    tl.store(to + V_OFFSET, to_cache(v, kv_dtype), mask=inside)


def store_kv(
    k: torch.Tensor,  # [T, num_kv_heads, head_dim]
    v: torch.Tensor,  # [T, num_kv_heads, head_dim]
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    slot_mapping: torch.Tensor,  # [T] int64
) -> None:
    """Of k and v each token's heads must lie together. `cache_layout.kv_store_reference` is what
    this does."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.shape == v.shape and k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert cache.shape[3:] == k.shape[1:], (cache.shape, k.shape)
    if not num_tokens:
        return
    _store_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, _HEADS))](
        k,
        v,
        cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        **cache_constants(cache),
        BLOCK_H=_HEADS,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=2,
    )
