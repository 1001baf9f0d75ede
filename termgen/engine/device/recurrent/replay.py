"""What a step's recurrent states continue, and which tokens they take up: those that stayed of
the last step's drafts, and the row's own, but none of its new drafts.

How many of them stay is known when the step has ended. The next one finds it in the row's counts.
"""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.engine.device.recurrent.base import RecurrentMetadata


class ReplayedRows(Protocol):
    """Rows of the request state. R slots, and behind them those of copies of states."""

    total_len: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64
    num_taken_up: torch.Tensor  # [slots of states] int64, none in an engine without drafts


class StepRows(Protocol):
    """The part of `AttentionMetadata` that recurrent layers need as well."""

    query_start_loc: torch.Tensor
    num_rows: int
    num_tokens: int
    num_decodes: int | None
    max_query_len: int


def take_up(
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
    state: ReplayedRows,
    of_step: StepRows,
    *,
    is_even: bool = False,
) -> RecurrentMetadata:
    """The rows of a step, and their states, which lie at their places among the request rows. Once
    per step: what they take up counts as taken up from here on.

    A row that has computed nothing starts from zeros. is_even: each row has `max_query_len` tokens,
    its newest one and others, which count as drafts even where they are none.
    """
    computed = state.num_computed[slots]
    found = RecurrentMetadata(
        query_start_loc=of_step.query_start_loc,
        slots=slots.int(),
        positions=computed.int(),
        has_state=computed > 0,
        num_rows=of_step.num_rows,
        num_tokens=of_step.num_tokens,
        num_decodes=of_step.num_decodes,
        max_query_len=of_step.max_query_len,
    )
    if not len(state.num_taken_up):
        return found
    found.num_pending = (computed - state.num_taken_up[slots]).int()
    if is_even:
        found.num_decodes = of_step.num_rows
        found.num_drafts = torch.full_like(found.num_pending, of_step.max_query_len - 1)
        state.num_taken_up.index_copy_(0, slots, computed + num_tokens.clamp(max=1))
        return found
    ends = computed + num_tokens
    # A row that was finished on the device may run on: its tokens count as its own.
    drafts = torch.minimum(ends - state.total_len[slots], num_tokens - 1).clamp_(min=0)
    found.num_drafts = drafts.int()
    state.num_taken_up.index_copy_(0, slots, ends - drafts)
    return found
