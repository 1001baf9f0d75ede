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
from termgen.engine.device.drafting.paying import PayingDrafter
from termgen.vocabulary.step import StepPlan

KIND_FROM = (1, 3, 6)
"""Tokens that stood before, from which on a guess is of the first, second and third kind: the more
of them, the more often it is right."""


class NgramDrafter(PayingDrafter):
    """Searches in memory that the host reads: for a CPU."""

    def __init__(self, num_tokens: int, *, num_slots: int, shortest: int, longest: int) -> None:
        """shortest, longest: tokens that must have been there before."""
        super().__init__(num_tokens, num_slots=num_slots, num_kinds=len(KIND_FROM))
        self._shortest, self._longest = shortest, longest

    def step_ended(self, plan: StepPlan, took_ns: int, state: DraftedRows) -> None:
        """See `Drafter`."""
        slots, num_rows = self._learn(plan, took_ns, state)
        state.num_drafts.numpy()[plan.slots] = 0
        self._write(slots, num_rows, state)

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
        if found:
            counts = self._choose(slots, np.asarray(found), num_rows)
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
