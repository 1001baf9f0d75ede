"""The two ends of a step whose rows have drafts, a kernel each: its inputs read from the request
state, and its samples taken into it.

As `kernels.rows.step_ends`, with Q = 1 + k tokens of each row. Token j of row b lies at b * Q + j.
A row uses as many of them as the step computes for it; the others repeat its first one and write to
the null block, so that all that is computed stays finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2
from termgen.engine.device.sampling.metadata import HAS_PENALTIES

if TYPE_CHECKING:
    from termgen.engine.device.sampling.token_ring import TokenRing

_HAS_PENALTIES = tl.constexpr(HAS_PENALTIES)
_BLOCK = 512
"""Block ids copied at once."""


class PreparedRows(Protocol):
    """Rows of the request state. R slots."""

    num_computed: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    token_ids: torch.Tensor  # [R, max_model_len] int32
    block_tables: torch.Tensor  # [groups, R, max_blocks] int32


class CheckedRows(Protocol):
    """Rows of the request state, with what ends them. R slots."""

    token_ids: torch.Tensor  # [R, max_model_len] int32
    total_len: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64
    num_drafts: torch.Tensor  # [R] int64
    min_total: torch.Tensor  # [R] int64
    limit: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    stop_ids: torch.Tensor  # [R, K] int64, padded with -1
    edit_kinds: torch.Tensor  # [R] int64, see `sampling.metadata`
    token_counts: torch.Tensor  # [R, V] int32, see `sampling.metadata`


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "counts_ptr"])
def _prepare_even_kernel(
    slots_ptr,
    counts_ptr,
    num_computed_ptr,
    finished_ptr,
    token_ids_ptr,
    state_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    table_ptr,
    QUERIES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    GROUP_STATE: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    GROUP_TABLE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    count = tl.load(counts_ptr + row)
    first = tl.load(num_computed_ptr + slot)
    query = tl.arange(0, BLOCK_QUERIES)
    inside = query < QUERIES
    is_live = query < count
    position = first + tl.where(is_live, query, 0)
    # A finished row runs on for as long as the host does not know: its place may not exist.
    token = tl.load(
        token_ids_ptr + slot * MAX_TOKENS + position,
        mask=inside & (position < MAX_TOKENS),
        other=0,
    )
    ids = state_table_ptr + group * GROUP_STATE + slot * MAX_BLOCKS
    place = position // BLOCK_SIZE
    is_written = is_live & (tl.load(finished_ptr + slot) == 0) & (place < MAX_BLOCKS)
    block = tl.load(ids + place, mask=is_written, other=0).to(tl.int64)
    at = row * QUERIES + query
    mapping = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slot_mapping_ptr + group * GROUP_SLOTS + at, mapping, mask=inside)
    seq_len = tl.minimum(first + count, MAX_BLOCKS * BLOCK_SIZE)
    seq_len = tl.where(count > 0, seq_len, 0)
    if group == 0:
        tl.store(positions_ptr + at, position, mask=inside)
        tl.store(input_ids_ptr + at, token, mask=inside)
        tl.store(seq_lens_ptr + row, seq_len.to(tl.int32))
        tl.store(query_start_loc_ptr + row + 1, ((row + 1) * QUERIES).to(tl.int32))
        if row == 0:
            tl.store(query_start_loc_ptr, 0)

    table_ptr += group * GROUP_TABLE
    num_blocks = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    for start in range(0, num_blocks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        used = column < num_blocks
        tl.store(
            table_ptr + row * TABLE_STRIDE + column, tl.load(ids + column, mask=used), mask=used
        )


def prepare_even(
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64: from 1 to Q, or 0 for a padded row
    state: PreparedRows,
    *,
    num_queries: int,
    block_size: int,
    input_ids: torch.Tensor,  # out, [B * Q] int32
    positions: torch.Tensor,  # out, [B * Q] int64
    slot_mappings: torch.Tensor,  # out, [groups, B * Q] int64, rows dense
    seq_lens: torch.Tensor,  # out, [B] int32
    query_start_loc: torch.Tensor,  # out, [B + 1] int32
    block_tables: torch.Tensor,  # out, [groups, B, max_blocks] int32, rows dense
) -> None:
    """Inputs of a step with `num_queries` (Q) tokens per row. A row's block ids are copied only as
    far as its length uses them; what lies beyond is left as it was."""
    num_rows, tables, token_ids = slots.shape[0], state.block_tables, state.token_ids
    assert token_ids.is_contiguous() and tables.is_contiguous()
    num_groups, _, max_blocks = tables.shape
    assert block_tables.shape == (num_groups, num_rows, max_blocks)
    assert block_tables.stride(2) == slot_mappings.stride(1) == 1
    if not num_rows:
        return
    _prepare_even_kernel[(num_rows, num_groups)](
        slots,
        num_tokens,
        state.num_computed,
        state.finished,
        token_ids,
        tables,
        input_ids,
        positions,
        slot_mappings,
        seq_lens,
        query_start_loc,
        block_tables,
        QUERIES=num_queries,
        BLOCK_QUERIES=next_power_of_2(num_queries),
        MAX_TOKENS=token_ids.shape[1],
        MAX_BLOCKS=max_blocks,
        GROUP_STATE=tables.stride(0),
        GROUP_SLOTS=slot_mappings.stride(0),
        GROUP_TABLE=block_tables.stride(0),
        TABLE_STRIDE=block_tables.stride(1),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "counts_ptr", "sampled_ptr", "tokens_ptr"])
def _keep_drawn_kernel(
    slots_ptr,
    counts_ptr,
    sampled_ptr,
    tokens_ptr,
    token_ids_ptr,
    total_len_ptr,
    num_computed_ptr,
    num_drafts_ptr,
    min_total_ptr,
    limit_ptr,
    finished_ptr,
    stop_ids_ptr,
    edit_kinds_ptr,
    token_counts_ptr,
    ring_ptr,
    ring_drafts_ptr,
    ring_index_ptr,
    ring_arrivals_ptr,
    QUERIES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_RING: tl.constexpr,
    RING_SIZE: tl.constexpr,
    RING_STRIDE: tl.constexpr,
    DRAFTS_STRIDE: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    count = tl.load(counts_ptr + row)
    num_drafts = tl.minimum(tl.load(num_drafts_ptr + slot), tl.maximum(count - 1, 0))
    total = tl.load(total_len_ptr + slot)
    first = tl.load(num_computed_ptr + slot) + tl.minimum(count, 1)
    was_finished = tl.load(finished_ptr + slot) != 0
    takes = (first >= total) & (was_finished == 0)
    place = tl.arange(0, BLOCK_QUERIES)
    inside = place < QUERIES
    drawn = tl.load(sampled_ptr + row * QUERIES + place, mask=inside, other=-1)
    where = total + place
    ids = token_ids_ptr + slot * MAX_TOKENS + where
    draft = tl.load(ids, mask=inside & (where < MAX_TOKENS), other=-1)

    stops = tl.arange(0, BLOCK_STOPS)
    stop_ids = tl.load(stop_ids_ptr + slot * NUM_STOPS + stops, mask=stops < NUM_STOPS, other=-1)
    is_stop = tl.max((stop_ids[None, :] == drawn[:, None]).to(tl.int32), axis=1) > 0
    length = where + 1  # of the row with this token
    ends = is_stop & (length > tl.load(min_total_ptr + slot))
    ends = ends | (length >= tl.load(limit_ptr + slot)) | (drawn < 0)  # CORRUPT_TOKEN
    goes_on = inside & (place < num_drafts) & (drawn == draft) & (ends == 0)
    # The first sample that nothing follows is the last that the row takes.
    last = tl.min(tl.where(goes_on, BLOCK_QUERIES, place), axis=0)
    kept = takes & (place <= last)
    num_kept = tl.sum(kept.to(tl.int32), axis=0)
    known = tl.maximum(drawn, 0).to(tl.int32)  # the steps that run on read an id that exists
    tl.store(ids, known, mask=kept & (where < MAX_TOKENS))
    is_over = tl.max((kept & ends).to(tl.int32), axis=0) > 0
    tl.store(finished_ptr + slot, was_finished | is_over)
    tl.store(total_len_ptr + slot, total + num_kept)
    tl.store(num_computed_ptr + slot, first + tl.maximum(num_kept - 1, 0))
    if HAS_COUNTS:
        has_penalties = (tl.load(edit_kinds_ptr + slot) & _HAS_PENALTIES) != 0
        counted = token_counts_ptr + slot * VOCAB_SIZE + known
        tl.atomic_add(counted, 1, mask=kept & (drawn >= 0) & has_penalties, sem="relaxed")
    token = tl.where(kept, drawn, -1).to(tl.int32)
    tl.store(tokens_ptr + row * QUERIES + place, token, mask=inside)
    if HAS_RING:
        index = tl.load(ring_index_ptr)
        tl.store(ring_ptr + index * RING_STRIDE + row * QUERIES + place, token, mask=inside)
        tl.store(ring_drafts_ptr + index * DRAFTS_STRIDE + row, num_drafts.to(tl.int32))
        tl.debug_barrier()  # every thread has read the index before it can move on
        arrived = tl.atomic_add(ring_arrivals_ptr, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            tl.store(ring_arrivals_ptr, 0)  # ready for the next launch
            tl.store(ring_index_ptr, (index + 1) % RING_SIZE)


def keep_drawn(
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64, 0 for a padded row
    sampled: torch.Tensor,  # [B * Q] int64, CORRUPT_TOKEN where a row would end by it
    state: CheckedRows,
    *,
    num_queries: int,
    has_penalties: bool,
    ring: TokenRing | None = None,
) -> torch.Tensor:  # [B * Q] int32
    """`drafting.acceptance.keep_drawn` of samples that are even: takes those that equal a row's
    drafts, and one more, into the rows of the state, in place. With a ring, the tokens that are
    returned are its next row too, with the number of each row's drafts."""
    num_rows = slots.shape[0]
    assert state.token_ids.is_contiguous() and state.stop_ids.is_contiguous()
    assert state.token_counts.is_contiguous()
    tokens = torch.empty(num_rows * num_queries, dtype=torch.int32, device=slots.device)
    if not num_rows:
        return tokens
    _keep_drawn_kernel[(num_rows,)](
        slots,
        num_tokens,
        sampled,
        tokens,
        state.token_ids,
        state.total_len,
        state.num_computed,
        state.num_drafts,
        state.min_total,
        state.limit,
        state.finished,
        state.stop_ids,
        state.edit_kinds,
        state.token_counts,
        None if ring is None else ring.tokens,
        None if ring is None else ring.drafts,
        None if ring is None else ring.index,
        None if ring is None else ring.arrivals,
        QUERIES=num_queries,
        BLOCK_QUERIES=next_power_of_2(num_queries),
        MAX_TOKENS=state.token_ids.shape[1],
        NUM_STOPS=state.stop_ids.shape[1],
        VOCAB_SIZE=state.token_counts.shape[1],
        HAS_COUNTS=has_penalties,
        HAS_RING=ring is not None,
        RING_SIZE=0 if ring is None else ring.tokens.shape[0],
        RING_STRIDE=0 if ring is None else ring.tokens.stride(0),
        DRAFTS_STRIDE=0 if ring is None else ring.drafts.stride(0),
        BLOCK_STOPS=next_power_of_2(state.stop_ids.shape[1]),
        num_warps=1,
    )
    return tokens
