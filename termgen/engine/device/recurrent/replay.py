"""Which tokens a step's recurrent states take up: those that stayed of the last step's drafts, and
the row's own, but none of its new drafts.

How many of them stay is known when the step has ended. The next one finds it in the row's counts.
"""

from __future__ import annotations

from typing import Protocol

import torch


class ReplayedRows(Protocol):
    """Rows of the request state. R slots, and behind them those of copies of states."""

    total_len: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64
    num_taken_up: torch.Tensor  # [slots of states] int64, none in an engine without drafts


def take_up(
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
    state: ReplayedRows,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Pending tokens and drafts of each row [B] int32, for `RecurrentMetadata`; they count as taken
    up from here on. Once per step."""
    if not len(state.num_taken_up):
        return None, None
    computed = state.num_computed[slots]
    ends = computed + num_tokens
    # A row that was finished on the device may run on: its tokens count as its own.
    drafts = torch.minimum(ends - state.total_len[slots], num_tokens - 1).clamp_(min=0)
    pending = computed - state.num_taken_up[slots]
    state.num_taken_up.index_copy_(0, slots, ends - drafts)
    return pending.int(), drafts.int()
