"""Paged attention in plain torch, one row after the other: what every backend must compute.

The file to read first. Tests compare every backend and kernel with it.

A step has one row per request. The tokens of all rows lie one after another: those of row b are
[query_start_loc[b], query_start_loc[b + 1]), one in a decode and more in a prefill. They are the
last tokens of a sequence of seq_lens[b] tokens, whose keys and values, this step's among them, are
in the KV cache already.

The cache of a layer is cut into blocks of block_size tokens. The blocks of one sequence lie
anywhere; its row of the block table names them in the order of the sequence:

    kv_cache      [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim]
    block_table   [B, max_blocks]

    position p of row b  ->  kv_cache[block_table[b, p // block_size], p % block_size]

A token sees itself and the tokens before it; under a sliding window of w, the last w of these; in
chunks of c, those from the last multiple of c on. Query heads share key heads in equal groups.

Two things are for the families that have them. A soft cap of c turns every score s into
c * tanh(s / c). A sink is one more score for a head's softmax, which belongs to no token: it takes
its share of the weight, and nothing comes of it.

From here: `base.py` has the interface of a backend, `triton_paged.py` is the one of a GPU, and
`torch_reference.py` that of a CPU.
"""

from __future__ import annotations

import torch

from termgen.vocabulary.cache_groups import Chunk, Window


def paged_attention(
    q: torch.Tensor,  # [T, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [B, max_blocks]
    seq_lens: torch.Tensor,  # [B]; 0 for a row of padding, which sees nothing and gives zeros
    query_start_loc: torch.Tensor,  # [B + 1]
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
) -> torch.Tensor:  # [T, num_heads, head_dim] float64
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            tokens = slice(starts[row], starts[row + 1])
            keys, values = gather(kv_cache, block_table[row], seq_len)
            scaled = q[tokens].double() * scale
            out[tokens] = attend(scaled, keys, values, window, softcap, sinks)
    return out


def gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:  # two of [seq_len, num_kv_heads, head_dim] float64
    """The keys and values of one sequence, from its blocks."""
    position = torch.arange(seq_len, device=kv_cache.device)
    block_size = kv_cache.shape[1]
    block = blocks[position // block_size].long()
    keys, values = kv_cache[block, position % block_size].double().unbind(1)
    return keys, values


def attend(
    q: torch.Tensor,  # [n, num_heads, head_dim]: the last n tokens of a sequence, scaled
    keys: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    values: torch.Tensor,
    window: Window | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
) -> torch.Tensor:  # [n, num_heads, head_dim]
    """softmax(q @ keys) @ values over what each token sees, head by head."""
    group_size = q.shape[1] // keys.shape[1]
    keys, values = (heads.repeat_interleave(group_size, 1) for heads in (keys, values))
    key_position = torch.arange(len(keys), device=q.device)
    query_position = key_position[len(keys) - len(q) :, None]
    is_seen = key_position <= query_position  # [n, seq_len]
    if isinstance(window, Chunk):
        is_seen &= key_position >= query_position - query_position % window.size
    elif window is not None:
        is_seen &= key_position > query_position - window
    scores = torch.einsum("qhd,khd->hqk", q, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)
