"""A paged KV cache as kernels see it: where a token's keys and values lie, and in which type.

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] whatever its
layout in memory: only the last dimension must be dense.

fp8 is e4m3: four bits of exponent, three of mantissa, up to 448, no infinity. Values are kept as
they are (a scale of 1): what is larger becomes the largest, the rest is rounded to nearest even.
Kernels do the same in `rows.qk_rope_kv`. Imports no triton.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_NAN_BYTE = 0x7F


def kv_cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The setting's type: `auto` is the model's."""
    return model_dtype if name == "auto" else FP8


def to_cache_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the type of a cache. Some releases of torch turn what is too large into NaN."""
    if dtype == FP8:
        x = x.clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def movable(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can copy by index: bytes, for an 8-bit cache."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def read_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """slots: [N] int64 -> their keys and values, [N, 2, num_kv_heads, head_dim]"""
    if cache.is_contiguous():
        found = movable(cache).flatten(0, 1).index_select(0, slots)
    else:  # slots have no view where blocks lie apart
        found = movable(cache)[slots // cache.shape[1], slots % cache.shape[1]]
    return found.view(cache.dtype)


def fill_with_nan(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """blocks: [N] int64"""
    nan = FP8_NAN_BYTE if cache.dtype == FP8 else float("nan")
    movable(cache).index_fill_(0, blocks, nan)


def cache_constants(cache: torch.Tensor) -> dict[str, int]:
    """The layout of a cache, as constants by which every kernel finds a head of a token."""
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
    cache[blocks, offsets, 0] = to_cache_dtype(k, cache.dtype)
    cache[blocks, offsets, 1] = to_cache_dtype(v, cache.dtype)
