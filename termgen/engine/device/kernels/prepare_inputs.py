"""Inputs of a step with one token per row, from the rows of the request state, in one kernel.

Does what the torch operations of `runner.input_batch.InputBuffers.prepare_decode` do, which is the
reference: everything is read from device memory, so a recorded launch stays right. A row's block
ids are copied only as far as its length uses them; what lies beyond is left as it was.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    position = tl.load(num_computed_ptr + slot)
    seq_len = (position + 1) * tl.load(counts_ptr + row)
    # A finished row runs on for as long as the host does not know: its place may not exist.
    token = tl.load(
        token_ids_ptr + slot * MAX_TOKENS + position, mask=position < MAX_TOKENS, other=0
    )
    ids = state_table_ptr + slot * MAX_BLOCKS
    place = position // BLOCK_SIZE
    # Finished rows and padded ones, which are finished too, write to the null block.
    is_running = (tl.load(finished_ptr + slot) == 0) & (place < MAX_BLOCKS)
    block = tl.load(ids + place, mask=is_running, other=0).to(tl.int64)
    tl.store(positions_ptr + row, position)
    tl.store(input_ids_ptr + row, token)
    tl.store(slot_mapping_ptr + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
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
    state_table: torch.Tensor,  # [R, max_blocks] int32
    block_size: int,
    input_ids: torch.Tensor,  # out, [B] int32
    positions: torch.Tensor,  # out, [B] int64
    slot_mapping: torch.Tensor,  # out, [B] int64
    seq_lens: torch.Tensor,  # out, [B] int32
    query_start_loc: torch.Tensor,  # out, [B + 1] int32
    block_table: torch.Tensor,  # out, [B, max_blocks] int32, rows dense
) -> None:
    num_rows = slots.shape[0]
    assert token_ids.is_contiguous() and state_table.is_contiguous()
    assert block_table.stride(1) == 1 and block_table.shape == (num_rows, state_table.shape[1])
    if not num_rows:
        return
    _prepare_decode_kernel[(num_rows,)](
        slots,
        num_tokens,
        num_computed,
        finished,
        token_ids,
        state_table,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        query_start_loc,
        block_table,
        MAX_TOKENS=token_ids.shape[1],
        MAX_BLOCKS=state_table.shape[1],
        TABLE_STRIDE=block_table.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
