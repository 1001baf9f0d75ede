"""Writes keys and values of a step's tokens into the paged cache.

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] whatever its
layout in memory: only the last dimension must be dense. Used where rotation and cache write are not
one kernel (`qk_rope_kv`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.kernels.launch import next_power_of_2


@triton.jit(do_not_specialize=["k_stride", "v_stride"])
def _kv_store_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_mapping_ptr,
    k_stride,
    v_stride,
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
    slot = tl.load(slot_mapping_ptr + token)
    base = cache_ptr + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    at = heads * HEAD_DIM + dims
    k = tl.load(k_ptr + token * k_stride + at, mask=inside)
    v = tl.load(v_ptr + token * v_stride + at, mask=inside)
    to = base + heads * HEAD_STRIDE + dims
    tl.store(to, k.to(cache_ptr.dtype.element_ty), mask=inside)
    tl.store(to + V_OFFSET, v.to(cache_ptr.dtype.element_ty), mask=inside)


def kv_store(
    k: torch.Tensor,  # [T, num_kv_heads, head_dim]
    v: torch.Tensor,  # [T, num_kv_heads, head_dim]
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    slot_mapping: torch.Tensor,  # [T] int64
) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    assert k.stride(1) == v.stride(1) == head_dim and k.stride(2) == v.stride(2) == 1
    if not num_tokens:
        return
    block_h, block_d = next_power_of_2(num_kv_heads), next_power_of_2(head_dim)
    _kv_store_kernel[(num_tokens,)](
        k,
        v,
        cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        **cache_constants(cache),
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=min(8, max(1, block_h * block_d // 256)),
    )


def cache_constants(cache: torch.Tensor) -> dict[str, int]:
    """What every kernel must know of a cache's layout to find a head of a token."""
    block, token, kv, head, dim = cache.stride()
    assert dim == 1, "a head of a token must be dense"
    return {
        "BLOCK_STRIDE": block,
        "TOKEN_STRIDE": token,
        "V_OFFSET": kv,
        "HEAD_STRIDE": head,
        "BLOCK_SIZE": cache.shape[1],
        "NUM_KV_HEADS": cache.shape[3],
        "HEAD_DIM": cache.shape[4],
    }


def kv_store_reference(
    k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    block_size = cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    cache[blocks, offsets, 0] = k.to(cache.dtype)
    cache[blocks, offsets, 1] = v.to(cache.dtype)
