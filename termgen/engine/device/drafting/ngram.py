"""Drafts from a row's own text: what followed the newest tokens the last time.

Prompt lookup decoding (Saxena, 2023). The newest tokens are searched in the row's prompt and
answer, as many of them as were there before; what stood behind them is the guess. It costs nothing
but the search, and answers that repeat their prompt (edits, summaries, code) keep most of it.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from termgen.engine.device.drafting.base import DraftedRows
from termgen.engine.device.drafting.payoff import DraftPayoff
from termgen.engine.device.sampling.metadata import HAS_GRAMMAR
from termgen.vocabulary.step import StepPlan

KIND_FROM = (1, 3, 6)
"""Tokens that stood before, from which on a guess is of the first, second and third kind: the more
of them, the more often it is right."""


class NgramDrafter:
    """Searches in memory that the host reads: for a CPU."""

    def __init__(self, num_tokens: int, *, num_slots: int, shortest: int, longest: int) -> None:
        """shortest, longest: tokens that must have been there before."""
        self.num_tokens = num_tokens
        self._shortest, self._longest = shortest, longest
        self._payoff = DraftPayoff(num_slots, len(KIND_FROM))
        self._kinds = np.zeros(num_slots, np.int64)
        """Kind of each row's drafts."""
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
            slot, num_drafts = int(slots[row]), int(plan.num_draft_tokens[row])
            kind = int(self._kinds[slot])
            self._payoff.note_row(slot, num_drafts, int(gained[row]) - 1, kind)
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
            guess, matched = self.guess(ids[slot, :length])
            guess = guess[: ids.shape[1] - length]
            ids[slot, length : length + len(guess)] = guess
            found.append(len(guess))
            self._kinds[slot] = max(0, bisect_right(KIND_FROM, matched) - 1)
        if any(found):
            kinds = self._kinds[slots]
            counts = self._payoff.choose(slots, np.asarray(found), kinds, num_rows)
            state.num_drafts.numpy()[slots] = counts

    def guess(self, tokens: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], int]:
        """[n] tokens that may follow, n <= num_tokens: those behind the newest of the places where
        the longest part of the end stands; and the length of that part."""
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
            return tokens[:0], 0
        behind = int(places[-1]) + 1
        # A guess that reaches the end goes on with itself: the text repeats from `behind` on.
        following = behind + np.arange(self.num_tokens) % (len(tokens) - behind)
        return tokens[following], matched
