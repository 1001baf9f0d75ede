"""Inputs of a step whose rows have drafts, as a recording has them: as many tokens of each row, and
as many samples.

Skip on a first reading: a step that is not recorded has its rows' tokens side by side.
"""

from __future__ import annotations

import torch

from termgen.engine.device.runner.input_batch import InputBatch, InputBuffers
from termgen.engine.device.runner.request_state import RequestState


def prepare_even(
    buffers: InputBuffers,
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64: from 1 to num_queries, or 0 for a padded row
    state: RequestState,
    *,
    num_queries: int,
    max_seq_len: int,
    by_kernels: bool,
) -> InputBatch:
    """Inputs of a step with up to `num_queries` tokens of each row. by_kernels: attention can take
    `AttentionMetadata.positions`. Else the tokens in use come first, as in any step with prompts,
    and the padding behind them all."""
    if by_kernels:
        return _prepare_with_kernel(buffers, slots, num_tokens, state, num_queries, max_seq_len)
    total = slots.shape[0] * num_queries
    batch = buffers.prepare_ragged(
        slots,
        num_tokens,
        state,
        total=total,
        num_decodes=0,
        max_query_len=num_queries,
        max_seq_len=max_seq_len,
    )
    rows = buffers.arange[:total] // num_queries
    places = buffers.arange[:total] - rows * num_queries
    last = (num_tokens - 1).clamp_(min=0)[rows]
    first = (num_tokens.cumsum(0) - num_tokens)[rows]
    batch.logits_indices = (first + torch.minimum(places, last)).clamp_(max=total - 1)
    return batch


def _prepare_with_kernel(
    buffers: InputBuffers,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    state: RequestState,
    num_queries: int,
    max_seq_len: int,
) -> InputBatch:
    """Fast path: the same in one kernel, each row's tokens in places of their own."""
    from termgen.engine.device.kernels.drafting.row_ends import prepare_even as launch

    num_rows = slots.shape[0]
    total = num_rows * num_queries
    input_ids, positions = buffers.input_ids[:total], buffers.positions[:total]
    block_tables = buffers.tables(state)[:, :num_rows]
    launch(
        slots,
        num_tokens,
        state,
        num_queries=num_queries,
        block_size=buffers.block_size,
        input_ids=input_ids,
        positions=positions,
        slot_mappings=buffers.slot_mappings[:, :total],
        seq_lens=buffers.seq_lens[:num_rows],
        query_start_loc=buffers.query_start_loc[: num_rows + 1],
        block_tables=block_tables,
    )
    metadata = buffers.metadata(
        block_tables[:, :, : -(-max_seq_len // buffers.block_size)],
        num_rows=num_rows,
        num_tokens=total,
        num_decodes=0,
        max_query_len=num_queries,
        max_seq_len=max_seq_len,
        positions=positions,
    )
    return InputBatch(slots, num_tokens, input_ids, positions, None, metadata)
