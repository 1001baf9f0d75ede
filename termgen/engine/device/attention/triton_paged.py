"""Attention by Triton kernels: `paged_decode` for rows of one query, and for rows of a few where
all have as many, `paged_prefill` for others.

The default on CUDA. Plans made on the device from the lengths, once per step, divide the work, so a
recorded step stays right for every context length and every mix of prompts.
"""

from __future__ import annotations

import torch

from termgen.engine.device.attention.base import (
    CHUNKS,
    SINKS,
    SOFTCAP,
    UNEQUAL_LAYERS,
    AttentionCapabilities,
    AttentionForm,
    AttentionMetadata,
    AttentionShape,
)
from termgen.engine.device.kernels.attention import (
    decode_plan,
    paged_decode,
    paged_prefill,
    prefill_plan,
)
from termgen.engine.device.kernels.kv_cache import FP8, INT4, INT8
from termgen.engine.device.kernels.launch import shared_bytes

MAX_HEAD_DIM = 512


class TritonPagedAttention:
    """AttentionBackend. Its plans and workspace serve one step at a time, in stream order."""

    name = "triton"
    kv_cache_order = (0, 3, 2, 1, 4)
    """A head's keys of a block lie together, its values behind them: a tile is two long reads."""
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        graph_modes=frozenset({"NONE", "PIECEWISE", "FULL"}),
        head_dims=frozenset(range(16, MAX_HEAD_DIM + 1, 8)),
        preferred_block_size=64,  # a tile of keys lies within a block
        kv_cache_dtypes=frozenset({FP8, INT8, INT4}),
        int4_head_dims=frozenset({32, 64, 128, 256, 512}),
        shares_plans=True,
        features=frozenset({SOFTCAP, SINKS, CHUNKS, UNEQUAL_LAYERS}),
    )

    def __init__(self, shape: AttentionShape) -> None:
        assert shape.block_size is not None, "chosen before a backend is made"
        self._shape = shape
        self._block_size = shape.block_size
        self._group = shape.num_heads // shape.num_kv_heads
        most = decode_plan.most_queries(self._group, shape.head_dim)
        self.max_queries = shape.max_queries if shape.max_queries <= most else 1
        self._workspace = decode_plan.DecodeWorkspace(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_rows=shape.max_num_seqs,
            max_queries=self.max_queries,
            config=decode_plan.default_config(shape.head_dim, shape.dtype, shape.kv_cache_dtype),
            device=shape.device,
        )
        # The kernel of the specialised warps computes no soft caps, as its registers are full, and
        # copies a cache as lines that lie one behind the other.
        left_to_others = {SOFTCAP, UNEQUAL_LAYERS} & shape.needs
        self._can_specialise = not left_to_others and prefill_plan.can_specialise(
            shape.device,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            kv_cache_dtype=shape.kv_cache_dtype,
            block_size=shape.block_size,
        )
        self._decode_plans = {window: self._workspace.new_plan() for window in set(shape.windows)}
        most = max(
            self._num_tiles(self._prefill_config(length), shape.max_num_tokens, shape.max_num_seqs)
            for length in (1, shape.max_num_tokens)
        )
        plan = (most, prefill_plan.PLAN_FIELDS.value)
        self._prefill_plan = torch.zeros(plan, dtype=torch.int32, device=shape.device)
        self._config = self._prefill_config(1)
        self._tiles = 0
        self._decode_rows = 0
        self._queries = 1
        self._decode_lens = torch.zeros(0, dtype=torch.int32, device=shape.device)
        self._prepared: torch.Tensor | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        is_even = metadata.positions is not None
        num_decodes = metadata.num_rows if is_even else metadata.num_decodes
        self._queries = metadata.max_query_len if is_even else 1
        self._decode_rows = metadata.num_rows if num_decodes is None else num_decodes
        self._decode_lens = metadata.seq_lens
        if num_decodes is None:
            # Rows of several tokens are length 0 to the decode kernel, and rows of one are skipped
            # by the prefill plan: what each does is settled on the device.
            query_lens = metadata.query_start_loc.diff()
            self._decode_lens = metadata.seq_lens * (query_lens == 1)
        if self._decode_rows:
            for window, plan in self._decode_plans.items():
                decode_plan.plan_decode(
                    self._decode_lens,
                    self._workspace,
                    plan,
                    num_rows=self._decode_rows,
                    num_kv_heads=self._shape.num_kv_heads,
                    num_queries=self._queries,
                    window=window,
                )
        self._tiles = 0
        if not is_even:
            self._plan_prefill(metadata)
        self._prepared = metadata.seq_lens  # which the groups of a step share

    def _plan_prefill(self, metadata: AttentionMetadata) -> None:
        first_row = metadata.num_decodes or 0
        if first_row == metadata.num_rows:
            return
        self._config = self._prefill_config(metadata.max_query_len)
        num_tokens = metadata.num_tokens - first_row
        self._tiles = self._num_tiles(self._config, num_tokens, metadata.num_rows - first_row)
        prefill_plan.plan_prefill(
            metadata.query_start_loc,
            metadata.seq_lens,
            self._prefill_plan,
            config=self._config,
            group=self._group,
            first_row=first_row,
            num_rows=metadata.num_rows,
            num_tiles=self._tiles,
            skip_single=metadata.num_decodes is None,
        )

    def forward(
        self,
        q: torch.Tensor,  # [T, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        metadata: AttentionMetadata,
        form: AttentionForm,
        *,
        out: torch.Tensor | None = None,  # [T, num_heads, head_dim], contiguous
    ) -> torch.Tensor:  # [T, num_heads, head_dim]
        assert self._prepared is metadata.seq_lens, "prepare was not called for this step"
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decode_rows:
            # First: it writes zeros for rows of length 0, which are other rows' tokens further on.
            paged_decode.paged_decode(
                q,
                kv_cache,
                metadata.block_table,
                self._decode_lens,
                self._decode_plans[form.window],
                self._workspace,
                num_rows=self._decode_rows,
                positions=metadata.positions if self._queries > 1 else None,
                num_queries=self._queries,
                scale=form.score_scale,
                value_scale=form.value_scale,
                window=form.window,
                softcap=form.softcap,
                sinks=form.sinks,
                out=out,
            )
        if self._tiles:
            paged_prefill.paged_prefill(
                q,
                kv_cache,
                metadata.block_table,
                self._prefill_plan,
                config=self._config,
                num_tiles=self._tiles,
                scale=form.score_scale,
                value_scale=form.value_scale,
                window=form.window,
                softcap=form.softcap,
                sinks=form.sinks,
                out=out,
            )
        return out

    def _prefill_config(self, max_query_len: int) -> prefill_plan.PrefillConfig:
        shape = self._shape
        return prefill_plan.default_config(
            shape.head_dim,
            shape.dtype,
            group=self._group,
            max_query_len=max_query_len,
            block_size=self._block_size,
            can_specialise=self._can_specialise,
            shared_bytes=shared_bytes(shape.device),
        )

    def _num_tiles(self, config: prefill_plan.PrefillConfig, num_tokens: int, num_rows: int) -> int:
        return prefill_plan.max_tiles(num_tokens, num_rows, config=config, group=self._group)
