"""The two ends of a decode step, a kernel each: its inputs read from the request state, and its
samples taken into it.

`prepare_decode` and `append_sampled` do what the torch operations of
`runner.input_batch.InputBuffers.prepare_decode` and
`runner.request_state.RequestState.append_sampled` do, which are the references. Everything is read
from device memory, so a recorded launch stays right. Rows of one step have different slots, but for
padded ones, which change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "counts_ptr"])
def _prepare_decode_kernel(
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
    slot_mapping_ptr += group * GROUP_SLOTS
    table_ptr += group * GROUP_TABLE
    slot = tl.load(slots_ptr + row)
    position = tl.load(num_computed_ptr + slot)
    seq_len = (position + 1) * tl.load(counts_ptr + row)
    # A finished row runs on for as long as the host does not know: its place may not exist.
    token = tl.load(
        token_ids_ptr + slot * MAX_TOKENS + position, mask=position < MAX_TOKENS, other=0
    )
    ids = state_table_ptr + group * GROUP_STATE + slot * MAX_BLOCKS
    place = position // BLOCK_SIZE
    # Finished rows and padded ones, which are finished too, write to the null block.
    is_running = (tl.load(finished_ptr + slot) == 0) & (place < MAX_BLOCKS)
    block = tl.load(ids + place, mask=is_running, other=0).to(tl.int64)
    tl.store(slot_mapping_ptr + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    if group == 0:
        tl.store(positions_ptr + row, position)
        tl.store(input_ids_ptr + row, token)
        tl.store(seq_lens_ptr + row, seq_len.to(tl.int32))
        tl.store(query_start_loc_ptr + row + 1, (row + 1).to(tl.int32))
        if row == 0:
            tl.store(query_start_loc_ptr, 0)

    num_blocks = tl.minimum((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE, MAX_BLOCKS)
    for first in range(0, num_blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        used = at < num_blocks
        tl.store(table_ptr + row * TABLE_STRIDE + at, tl.load(ids + at, mask=used), mask=used)


def prepare_decode(
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64: 1, or 0 for a padded row
    *,
    num_computed: torch.Tensor,  # [R] int64
    finished: torch.Tensor,  # [R] bool
    token_ids: torch.Tensor,  # [R, max_model_len] int32
    state_tables: torch.Tensor,  # [groups, R, max_blocks] int32
    block_size: int,
    input_ids: torch.Tensor,  # out, [B] int32
    positions: torch.Tensor,  # out, [B] int64
    slot_mappings: torch.Tensor,  # out, [groups, B] int64, rows dense
    seq_lens: torch.Tensor,  # out, [B] int32
    query_start_loc: torch.Tensor,  # out, [B + 1] int32
    block_tables: torch.Tensor,  # out, [groups, B, max_blocks] int32, rows dense
) -> None:
    """Inputs of a step with one token per row. A row's block ids are copied only as far as its
    length uses them; what lies beyond is left as it was."""
    num_rows = slots.shape[0]
    assert token_ids.is_contiguous() and state_tables.is_contiguous()
    num_groups, _, max_blocks = state_tables.shape
    assert block_tables.shape == (num_groups, num_rows, max_blocks)
    assert block_tables.stride(2) == slot_mappings.stride(1) == 1
    if not num_rows:
        return
    _prepare_decode_kernel[(num_rows, num_groups)](
        slots,
        num_tokens,
        num_computed,
        finished,
        token_ids,
        state_tables,
        input_ids,
        positions,
        slot_mappings,
        seq_lens,
        query_start_loc,
        block_tables,
        MAX_TOKENS=token_ids.shape[1],
        MAX_BLOCKS=max_blocks,
        GROUP_STATE=state_tables.stride(0),
        GROUP_SLOTS=slot_mappings.stride(0),
        GROUP_TABLE=block_tables.stride(0),
        TABLE_STRIDE=block_tables.stride(1),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "counts_ptr", "sampled_ptr", "tokens_ptr"])
def _append_sampled_kernel(
    slots_ptr,
    counts_ptr,
    sampled_ptr,
    tokens_ptr,
    token_ids_ptr,
    total_len_ptr,
    num_computed_ptr,
    min_total_ptr,
    limit_ptr,
    finished_ptr,
    stop_ids_ptr,
    edit_kinds_ptr,
    token_counts_ptr,
    ring_ptr,
    ring_index_ptr,
    ring_arrivals_ptr,
    MAX_TOKENS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_RING: tl.constexpr,
    RING_SIZE: tl.constexpr,
    RING_STRIDE: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    sampled = tl.load(sampled_ptr + row)
    total = tl.load(total_len_ptr + slot)
    computed = tl.load(num_computed_ptr + slot) + tl.load(counts_ptr + row)
    was_finished = tl.load(finished_ptr + slot) != 0
    takes = (computed >= total) & (was_finished == 0)
    where = tl.minimum(total, MAX_TOKENS - 1)
    # A corrupt row ends here; the steps that run it on read an id that exists.
    is_corrupt = sampled < 0
    known = tl.maximum(sampled, 0).to(tl.int32)
    tl.store(token_ids_ptr + slot * MAX_TOKENS + where, known, mask=takes)

    stops = tl.arange(0, BLOCK_STOPS)
    stop_ids = tl.load(stop_ids_ptr + slot * NUM_STOPS + stops, mask=stops < NUM_STOPS, other=-1)
    is_stop = tl.max((stop_ids == sampled).to(tl.int32), axis=0) > 0
    total += takes.to(tl.int64)
    stopped = is_stop & (total > tl.load(min_total_ptr + slot))
    stopped |= is_corrupt | (total >= tl.load(limit_ptr + slot))
    tl.store(finished_ptr + slot, was_finished | (takes & stopped))
    tl.store(total_len_ptr + slot, total)
    tl.store(num_computed_ptr + slot, computed)
    if HAS_COUNTS:
        count = token_counts_ptr + slot * VOCAB_SIZE + known
        has_penalties = (tl.load(edit_kinds_ptr + slot) & _HAS_PENALTIES) != 0
        counts = takes & (is_corrupt == 0) & has_penalties
        tl.store(count, tl.load(count, mask=counts, other=0) + 1, mask=counts)
    token = tl.where(takes, sampled, -1).to(tl.int32)
    tl.store(tokens_ptr + row, token)
    if HAS_RING:
        index = tl.load(ring_index_ptr)
        tl.store(ring_ptr + index * RING_STRIDE + row, token)
        tl.debug_barrier()  # every thread has read the index before it can move on
        arrived = tl.atomic_add(ring_arrivals_ptr, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            tl.store(ring_arrivals_ptr, 0)  # ready for the next launch
            tl.store(ring_index_ptr, (index + 1) % RING_SIZE)


def append_sampled(
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64
    sampled: torch.Tensor,  # [B] int64, CORRUPT_TOKEN in a row that ends by it
    *,
    token_ids: torch.Tensor,  # [R, max_model_len] int32
    total_len: torch.Tensor,  # [R] int64
    num_computed: torch.Tensor,  # [R] int64
    min_total: torch.Tensor,  # [R] int64
    limit: torch.Tensor,  # [R] int64
    finished: torch.Tensor,  # [R] bool
    stop_ids: torch.Tensor,  # [R, K] int64, padded with -1
    token_counts: torch.Tensor,  # [R, V] int32, see `sampling.metadata`
    edit_kinds: torch.Tensor | None = None,  # [R] int64, see `sampling.metadata`
    ring: TokenRing | None = None,
) -> torch.Tensor:  # [B] int32
    """Takes a step's samples into the rows of the state, in place; into the counts where
    `edit_kinds`, if given, says that a row has penalties. With a ring, the tokens that are returned
    are its next row too, and the row after it comes next."""
    num_rows = slots.shape[0]
    assert token_ids.is_contiguous() and stop_ids.is_contiguous()
    assert token_counts.is_contiguous()
    tokens = torch.empty(num_rows, dtype=torch.int32, device=slots.device)
    if not num_rows:
        return tokens
    _append_sampled_kernel[(num_rows,)](
        slots,
        num_tokens,
        sampled,
        tokens,
        token_ids,
        total_len,
        num_computed,
        min_total,
        limit,
        finished,
        stop_ids,
        edit_kinds,
        token_counts,
        None if ring is None else ring.tokens,
        None if ring is None else ring.index,
        None if ring is None else ring.arrivals,
        MAX_TOKENS=token_ids.shape[1],
        NUM_STOPS=stop_ids.shape[1],
        VOCAB_SIZE=token_counts.shape[1],
        HAS_COUNTS=edit_kinds is not None,
        HAS_RING=ring is not None,
        RING_SIZE=0 if ring is None else ring.tokens.shape[0],
        RING_STRIDE=0 if ring is None else ring.tokens.stride(0),
        BLOCK_STOPS=next_power_of_2(stop_ids.shape[1]),
        num_warps=1,
    )
    return tokens
