"""Lists of a step's chunks of prompts and of the rows they belong to, made on the device.

`delta_prefill` reads them: one of its kernels goes over chunks, the other over rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2
from termgen.engine.device.kernels.recurrent.layout import CHUNK

CHUNK_FIELDS = tl.constexpr(4)
"""int32 fields of a chunk: its row, -1 where none is left; its first token; its number of tokens;
the tokens of its row in this step that come before it."""
_PLAN_CHUNKS = 16
_PLAN_ROWS = 256


class ChunkPlan:
    """Buffers of one engine's plans; one step at a time may use them."""

    def __init__(self, *, max_rows: int, max_tokens: int, device: torch.device) -> None:
        size = (max_chunks(max_tokens, max_rows), CHUNK_FIELDS.value)
        self.chunks = torch.zeros(size, dtype=torch.int32, device=device)
        self.rows = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        """The number of rows, and behind it the rows themselves."""


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "num_chunks"],
    do_not_specialize_on_alignment=[
        *("query_start_loc_ptr", "num_drafts_ptr", "chunks_ptr", "rows_ptr"),
    ],
)
def _plan_kernel(
    query_start_loc_ptr,
    num_drafts_ptr,
    chunks_ptr,
    rows_ptr,
    first_row,
    num_rows,
    num_chunks,
    CHUNK_SIZE: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
    SKIP_DRAFTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    starts = tl.load(query_start_loc_ptr + rows, mask=inside, other=0)
    lengths = tl.load(query_start_loc_ptr + rows + 1, mask=inside, other=0) - starts
    if SKIP_SINGLE:
        lengths = tl.where(lengths == 1, 0, lengths)
    if SKIP_DRAFTS:
        num_drafts = tl.load(num_drafts_ptr + rows, mask=inside, other=0)
        lengths = tl.where(num_drafts > 0, 0, lengths)
    if tl.program_id(0) == 0:
        is_listed = lengths > 0
        rank = tl.cumsum(is_listed.to(tl.int32), axis=0)
        tl.store(rows_ptr + rank, rows, mask=is_listed)
        tl.store(rows_ptr, tl.sum(is_listed.to(tl.int32), axis=0))
    ends = tl.cumsum((lengths + CHUNK_SIZE - 1) // CHUNK_SIZE, axis=0)
    chunks = tl.program_id(0) * BLOCK_CHUNKS + tl.arange(0, BLOCK_CHUNKS)
    is_before = ends[None, :] <= chunks[:, None]
    row = first_row + tl.sum(is_before.to(tl.int32), axis=1)
    row_start = tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    is_live = row < num_rows
    offset = (chunks - row_start) * CHUNK_SIZE
    first_token = tl.load(query_start_loc_ptr + row, mask=is_live, other=0)
    end_token = tl.load(query_start_loc_ptr + row + 1, mask=is_live, other=0)
    entry = chunks_ptr + chunks * CHUNK_FIELDS
    is_planned = chunks < num_chunks
    tl.store(entry, tl.where(is_live, row, -1), mask=is_planned)
    tl.store(entry + 1, first_token + offset, mask=is_planned)
    num_tokens = tl.minimum(end_token - first_token - offset, CHUNK_SIZE)
    tl.store(entry + 2, num_tokens, mask=is_planned)
    tl.store(entry + 3, offset, mask=is_planned)


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """The most chunks that so many tokens in so many rows can make."""
    return num_tokens // CHUNK + min(num_rows, num_tokens)


def plan_chunks(
    query_start_loc: torch.Tensor,  # [B+1] int32
    plan: ChunkPlan,
    *,
    first_row: int,
    num_rows: int,
    num_tokens: int,
    skip_single: bool = False,
    num_drafts: torch.Tensor | None = None,  # [B] int32
) -> int:
    """List the chunks of rows [first_row, num_rows), which have at most `num_tokens` tokens;
    returns the most chunks that there can be.

    skip_single: leave out rows of one token, which `delta_decode` computes. num_drafts: leave out
    rows that have any, which `delta_replay` computes.
    Once per step for all layers.
    """
    num_chunks = max_chunks(num_tokens, num_rows - first_row)
    assert num_chunks <= plan.chunks.shape[0] and num_rows < plan.rows.shape[0]
    _plan_kernel[(triton.cdiv(num_chunks, _PLAN_CHUNKS),)](
        query_start_loc,
        query_start_loc if num_drafts is None else num_drafts,
        plan.chunks,
        plan.rows,
        first_row,
        num_rows,
        num_chunks,
        CHUNK_SIZE=CHUNK,
        SKIP_SINGLE=skip_single,
        SKIP_DRAFTS=num_drafts is not None,
        BLOCK_ROWS=max(_PLAN_ROWS, next_power_of_2(num_rows - first_row)),
        BLOCK_CHUNKS=_PLAN_CHUNKS,
        num_warps=8,
    )
    return num_chunks
