"""Attention by FlashAttention 2, an optional package: used only when asked for.

Its kernels read every length from device memory, and the host gives only bounds, so whole steps
can be recorded. A block of its paged cache holds a multiple of 256 tokens.
"""

from __future__ import annotations

import torch

from termgen.engine.device.attention.base import (
    AttentionCapabilities,
    AttentionForm,
    AttentionMetadata,
    AttentionShape,
)
from termgen.errors import ConfigError
from termgen.vocabulary.cache_groups import Chunk


class FlashAttnAttention:
    """AttentionBackend. Decode rows go through the call that splits long contexts, other rows
    through the one for ragged queries."""

    name = "flash_attn"
    max_queries = 1
    kv_cache_order = (0, 2, 3, 1, 4)
    """Any order is read as it lies; in this one a head's keys of a block are one long read."""
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        graph_modes=frozenset({"NONE", "PIECEWISE", "FULL"}),
        head_dims=frozenset(range(8, 257, 8)),
        block_sizes=frozenset({256}),
        preferred_block_size=256,
        min_compute_capability=(8, 0),
    )

    def __init__(self, shape: AttentionShape) -> None:
        try:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        except ImportError as error:
            raise ConfigError(
                f"attention_backend flash_attn: the package does not load: {error}",
                param="attention_backend",
            ) from error
        self._decode = flash_attn_with_kvcache
        self._ragged = flash_attn_varlen_func
        self._num_decodes = 0
        # [n+1] int32 each, for rows that are not decodes: where their queries and keys would start
        # if they lay one after another.
        self._query_starts = torch.zeros(1, dtype=torch.int32, device=shape.device)
        self._key_starts = self._query_starts
        self._prepared: AttentionMetadata | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        first, end = metadata.num_decodes or 0, metadata.num_rows
        self._num_decodes = first
        if first < end:
            self._query_starts = metadata.query_start_loc[first : end + 1] - first
            lens = metadata.seq_lens[first:end]
            starts = torch.zeros(end - first + 1, dtype=torch.int32, device=lens.device)
            torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
            self._key_starts = starts
        self._prepared = metadata

    def forward(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
        form: AttentionForm,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        assert self._prepared is metadata, "prepare was not called for this step"
        num_decodes, num_rows = self._num_decodes, metadata.num_rows
        keys, values = kv_cache[:, :, 0], kv_cache[:, :, 1]
        # Both sides inclusive: a window of one is (0, 0).
        assert not isinstance(form.window, Chunk), "not among its features"
        window = (-1, -1) if form.window is None else (form.window - 1, 0)
        parts = []
        if num_decodes:
            decoded = self._decode(
                q[:num_decodes, None],
                keys,
                values,
                cache_seqlens=metadata.seq_lens[:num_decodes],
                block_table=metadata.block_table[:num_decodes],
                softmax_scale=form.scale,
                causal=True,
                window_size=window,
            )
            parts.append(decoded[:, 0])
        if num_decodes < num_rows:
            ragged = self._ragged(
                q[num_decodes:],
                keys,
                values,
                self._query_starts,
                self._key_starts,
                max(metadata.max_query_len, 2),  # 1 would mean that every token is a row
                metadata.max_seq_len,
                softmax_scale=form.scale,
                causal=True,
                window_size=window,
                block_table=metadata.block_table[num_decodes:num_rows],
            )
            parts.append(ragged)
        if out is not None:
            return torch.cat(parts, out=out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
