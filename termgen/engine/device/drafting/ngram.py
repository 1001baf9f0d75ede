"""Drafts from a row's own text: what followed the newest tokens the last time.

Prompt lookup decoding (Saxena, 2023). The newest tokens are searched in the row's prompt and
answer, as many of them as were there before; what stood behind them is the guess. It costs nothing
but the search, and answers that repeat their prompt (edits, summaries, code) keep most of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from termgen.engine.device.drafting.base import DraftedRows
from termgen.engine.device.drafting.payoff import DraftPayoff
from termgen.engine.device.sampling.metadata import HAS_GRAMMAR
from termgen.vocabulary.step import StepPlan


class NgramDrafter:
    """Searches in memory that the host reads: for a CPU."""

    def __init__(self, num_tokens: int, *, num_slots: int, shortest: int, longest: int) -> None:
        """shortest, longest: tokens that must have been there before."""
        self.num_tokens = num_tokens
        self._shortest, self._longest = shortest, longest
        self._payoff = DraftPayoff(num_slots)
        self._lengths = np.zeros(num_slots, np.int64)
        """Tokens of each row when its step began."""

    def step_ended(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> None:
        """See `Drafter`. Rows under a grammar get none: the host masks one place of a row."""
        for added in plan.added:
            self._payoff.begin(added.slot)
            self._lengths[added.slot] = len(added.token_ids)
        lengths = state.total_len.numpy()
        slots, is_over = plan.slots, state.finished.numpy()[plan.slots]
        gained = lengths[slots] - self._lengths[slots]
        self._lengths[slots] = lengths[slots]
        for row in np.flatnonzero((gained > 0) & ~is_over).tolist():
            num_drafts = int(plan.num_draft_tokens[row])
            self._payoff.note_row(int(slots[row]), num_drafts, int(gained[row]) - 1)
        if plan.is_decode:
            self._payoff.note_step(plan.total_tokens, took_ns)
        state.num_drafts.numpy()[slots] = 0
        kinds = state.edit_kinds.numpy()[slots] & HAS_GRAMMAR
        self._write(slots[(gained > 0) & ~is_over & (kinds == 0)], int((~is_over).sum()), state)

    def _write(self, slots: npt.NDArray[np.int32], num_rows: int, state: DraftedRows) -> None:
        ids, lengths = state.token_ids.numpy(), state.total_len.numpy()
        found = []
        for slot in slots.tolist():
            length = int(lengths[slot])
            guess = self.guess(ids[slot, :length])[: ids.shape[1] - length]
            ids[slot, length : length + len(guess)] = guess
            found.append(len(guess))
        if any(found):
            counts = self._payoff.choose(slots, np.asarray(found), num_rows)
            state.num_drafts.numpy()[slots] = counts

    def guess(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[n] tokens that may follow, n <= num_tokens: those behind the newest of the places where
        the longest part of the end stands."""
        end = len(tokens) - 1
        places = np.flatnonzero(tokens[:end] == tokens[end])
        matched = 1
        while matched < self._longest and len(places):
            before = places[places >= matched]
            longer = before[tokens[before - matched] == tokens[end - matched]]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        if matched < self._shortest or not len(places):
            return tokens[:0]
        behind = int(places[-1]) + 1
        # A guess that reaches the end goes on with itself: the text repeats from `behind` on.
        return tokens[behind + np.arange(self.num_tokens) % (len(tokens) - behind)]
