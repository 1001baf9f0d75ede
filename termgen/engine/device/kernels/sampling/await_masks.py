"""The wait of a recorded step for the masks of its constrained rows.

The host posts a row's mask in pinned memory, and then the position of the token that it is for (see
`sampling.posted_masks`). A program per row reads that position until the row's samples are those
for which it was posted, or until the patience is over. The time is bounded since a step must end:
the host may wait for the device, and another process's pause must not become the device's. Kernels
that start after this one see the masks, as their stores came before those of the positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from termgen.engine.device.sampling.metadata import HAS_GRAMMAR
from termgen.engine.device.sampling.posted_masks import FORCED_SHIFT, MASKED, AwaitingRows
from termgen.vocabulary.token_mask import IDLE_PATIENCE_S, PATIENCE_S, WITHHELD

_HAS_GRAMMAR = tl.constexpr(HAS_GRAMMAR)
_WITHHELD = tl.constexpr(WITHHELD)
_FORCED_SHIFT = tl.constexpr(FORCED_SHIFT)
_MASKED = tl.constexpr(MASKED)
_BLOCK = tl.constexpr(128)
_PATIENCE_NS = tl.constexpr(round(PATIENCE_S * 1e9))
_IDLE_PATIENCE_NS = tl.constexpr(round(IDLE_PATIENCE_S * 1e9))


@triton.jit
def _covers(posted, first, last):
    """True if this was posted for all tokens from `first` to `last`."""
    masked = posted & _MASKED
    return (posted >= 0) & (masked - (posted >> _FORCED_SHIFT) <= first) & (last <= masked)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr", "counts_ptr"]
)
def _await_kernel(
    slots_ptr,
    counts_ptr,
    num_computed_ptr,
    total_len_ptr,
    finished_ptr,
    edit_kinds_ptr,
    num_drafts_ptr,
    positions_ptr,
    given_up_ptr,
    out_ptr,
    num_rows,
    IS_EVEN: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    count = tl.load(counts_ptr + row)
    first = tl.load(total_len_ptr + slot)
    last = tl.load(num_computed_ptr + slot) + count
    samples = last >= first
    if IS_EVEN:
        last = first + tl.minimum(tl.load(num_drafts_ptr + slot), tl.maximum(count - 1, 0))
    is_running = tl.load(finished_ptr + slot) == 0
    is_bound = (tl.load(edit_kinds_ptr + slot) & _HAS_GRAMMAR) != 0
    if is_bound & is_running & samples:
        posted = tl.load(positions_ptr + slot, volatile=True)
        is_there = _covers(posted, first, last)
        if HAS_CLOCK:
            is_new = tl.load(given_up_ptr + slot) != last
            if is_new & (is_there == 0) & (posted != _WITHHELD):
                # Rows that are free have no reason to wait for long.
                num_free = 0
                for start in range(0, num_rows, _BLOCK):
                    others = start + tl.arange(0, _BLOCK)
                    inside = others < num_rows
                    places = tl.load(slots_ptr + others, mask=inside, other=0)
                    runs = tl.load(finished_ptr + places, mask=inside, other=1) == 0
                    kinds = tl.load(edit_kinds_ptr + places, mask=inside, other=_HAS_GRAMMAR)
                    is_free = runs & ((kinds & _HAS_GRAMMAR) == 0)
                    num_free += tl.sum(is_free.to(tl.int32), axis=0)
                patience = tl.where(num_free > 0, _PATIENCE_NS, _IDLE_PATIENCE_NS)
                end = globaltimer() + patience
                while (is_there == 0) & (posted != _WITHHELD) & (globaltimer() < end):
                    posted = tl.load(positions_ptr + slot, volatile=True)
                    is_there = _covers(posted, first, last)
        if is_there == 0:
            count = count * 0 if IS_EVEN else count - 1
            tl.store(given_up_ptr + slot, last)
    tl.store(out_ptr + row, count)


def await_masks(
    slots: torch.Tensor,  # [B] int64, all different but for padded rows
    num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
    state: AwaitingRows,
    *,
    is_even: bool = False,
) -> torch.Tensor:  # [B] int64
    """Wait for the masks of the rows that sample. Returns `num_tokens`, less 1 for rows whose mask
    is late: short of their newest token, they sample nothing. is_even: see
    `PostedMasks.wait_on_host`. Interpreted, it does not wait."""
    out = torch.empty_like(num_tokens)
    if not len(slots):
        return out
    _await_kernel[(len(slots),)](
        slots,
        num_tokens,
        state.num_computed,
        state.total_len,
        state.finished,
        state.edit_kinds,
        state.num_drafts,
        state.masks.positions,
        state.masks.given_up,
        out,
        len(slots),
        IS_EVEN=is_even,
        HAS_CLOCK=slots.device.type == "cuda",
        num_warps=1,
    )
    return out
