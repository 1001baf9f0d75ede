"""Prompt lookup of rows on the device, in one kernel; see `drafting.prompt_lookup`.

A row's text is divided among programs. Each compares the end of the text with what stands before
every place of its part, and leaves the longest match, of equal ones the newest, in a workspace. The
last to arrive takes the best of them and writes what followed it behind the row's tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2
from termgen.engine.device.sampling.metadata import HAS_GRAMMAR

_BLOCK = 1024
_BLOCKS_EACH = 4
"""Blocks of the longest context that one program looks at, unless its programs were too many."""
_MOST_PARTS = 32
_HAS_GRAMMAR = tl.constexpr(HAS_GRAMMAR)
_LOW_BITS = tl.constexpr(0xFFFFFFFF)


class LookedUpRows(Protocol):
    """Rows of the request state. R slots."""

    token_ids: torch.Tensor  # [R, max_model_len] int32
    total_len: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    edit_kinds: torch.Tensor  # [R] int64
    num_drafts: torch.Tensor  # [R] int64


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _lookup_kernel(
    slots_ptr,
    token_ids_ptr,
    total_len_ptr,
    finished_ptr,
    edit_kinds_ptr,
    num_drafts_ptr,
    partial_ptr,
    arrivals_ptr,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    is_bound = (tl.load(edit_kinds_ptr + slot) & _HAS_GRAMMAR) != 0
    total = tl.load(total_len_ptr + slot)
    if (tl.load(finished_ptr + slot) != 0) | is_bound | (total >= MAX_TOKENS):
        if part == 0:
            tl.store(num_drafts_ptr + slot, 0)
        return
    ids = token_ids_ptr + slot * MAX_TOKENS
    end = total - 1
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(part * BLOCK, end, PARTS * BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        is_same = place < end
        length = tl.zeros([BLOCK], tl.int64)
        for i in tl.static_range(LONGEST):
            is_same = is_same & (place >= i)
            wanted = tl.load(ids + tl.maximum(end - i, 0))
            is_same = is_same & (tl.load(ids + place - i, mask=is_same, other=-1) == wanted)
            length += is_same.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, (length << 32) | place, -1))
    tl.store(partial_ptr + row * PARTS + part, tl.max(best, axis=0))
    tl.debug_barrier()  # the store comes before the arrival
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if arrived == PARTS - 1:
        tl.store(arrivals_ptr + row, 0)  # ready for the next launch
        # L1 may hold what an earlier launch left in the workspace: read past it.
        parts = tl.load(partial_ptr + row * PARTS + tl.arange(0, PARTS), cache_modifier=".cg")
        found = tl.max(parts, axis=0)
        draft = tl.arange(0, BLOCK_DRAFTS)
        behind = (found & _LOW_BITS) + 1
        is_found = (found >> 32) >= SHORTEST
        count = tl.where(is_found, tl.minimum(NUM_DRAFTS, MAX_TOKENS - total), 0)
        # A guess that reaches the end goes on with itself: the text repeats from `behind` on.
        source = behind + draft % tl.maximum(total - behind, 1)
        is_draft = draft < count
        tokens = tl.load(ids + source, mask=is_draft, other=0)
        tl.store(ids + total + draft, tokens, mask=is_draft)
        tl.store(num_drafts_ptr + slot, count)


class LookupWorkspace:
    """Buffers of one engine's lookups; one launch at a time may use them."""

    def __init__(self, *, max_rows: int, max_model_len: int, device: torch.device) -> None:
        parts = next_power_of_2(-(-max_model_len // (_BLOCK * _BLOCKS_EACH)))
        self.num_parts = min(_MOST_PARTS, parts)
        self.partial = torch.empty((max_rows, self.num_parts), dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)


def look_up(
    slots: torch.Tensor,  # [B] int64, all different but for padded rows, which are finished
    state: LookedUpRows,
    workspace: LookupWorkspace,
    *,
    num_drafts: int,
    shortest: int,
    longest: int,
) -> None:
    """Write up to `num_drafts` drafts behind the tokens of these rows, and their number. shortest,
    longest: tokens of the end that must stand somewhere before, and that are compared at most."""
    assert state.token_ids.is_contiguous() and len(slots) <= len(workspace.arrivals)
    if not len(slots):
        return
    _lookup_kernel[(len(slots), workspace.num_parts)](
        slots,
        state.token_ids,
        state.total_len,
        state.finished,
        state.edit_kinds,
        state.num_drafts,
        workspace.partial,
        workspace.arrivals,
        NUM_DRAFTS=num_drafts,
        BLOCK_DRAFTS=next_power_of_2(num_drafts),
        SHORTEST=shortest,
        LONGEST=longest,
        MAX_TOKENS=state.token_ids.shape[1],
        PARTS=workspace.num_parts,
        BLOCK=_BLOCK,
        num_warps=4,
    )
