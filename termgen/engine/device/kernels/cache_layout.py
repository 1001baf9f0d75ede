"""How kernels find a token's keys and values in a paged cache.

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] whatever its
layout in memory: only the last dimension must be dense.
"""

from __future__ import annotations

import torch

from termgen.engine.device.quantization.kv_cache import to_cache_dtype


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
    cache[blocks, offsets, 0] = to_cache_dtype(k, cache.dtype)
    cache[blocks, offsets, 1] = to_cache_dtype(v, cache.dtype)
