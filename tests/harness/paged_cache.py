"""A paged cache for tests of attention kernels: random where sequences are, NaN elsewhere."""

from __future__ import annotations

import random

import torch
from triton_device import poison


def make_paged_cache(
    seq_lens: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    heads_first: bool,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache [num_blocks, block_size, 2, num_kv_heads, head_dim], and a block table [B, width]
    int32 of random blocks, with invalid ids beyond each sequence."""
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = 1 + sum(needed)
    free = list(range(1, num_blocks))
    random.Random(seed).shuffle(free)
    table = torch.full((len(seq_lens), 1 + max(1, *needed)), 2**30, dtype=torch.int32)
    cache = poison(num_blocks, block_size, 2, num_kv_heads, head_dim, dtype=dtype, device="cpu")
    for row, length in enumerate(seq_lens):
        for start in range(0, length, block_size):
            block = free.pop()
            table[row, start // block_size] = block
            used = min(block_size, length - start)
            cache[block, :used] = torch.randn(used, 2, num_kv_heads, head_dim).to(dtype)
    if heads_first:
        cache = cache.permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4)
    moved = cache.to(device)
    assert moved.stride() == cache.stride()
    return moved, table.to(device)
