"""How many drafts pay in the next step: none, where checking them takes longer than they save.

Two things are learned while the engine runs: the time of a step by the tokens that it computes,
and for each row and kind of draft how often one behind right ones is right. A step of B rows with n
drafts is expected to give B tokens and, for each draft, the chance that it and all before it are
right. The likely ones come first, and n is what gives the most tokens for its time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.events import DraftChoice, DraftReason
from termgen.vocabulary.request import IntArray

PRIOR = 0.6
"""How often a draft is right, before anything is known."""
PRIOR_WEIGHT = 1.0
"""Number of checked drafts that this counts for."""
KEPT_WITH_DRAFTS, KEPT_WITHOUT = 0.95, 0.99
"""Weight of what a row showed, a step later: without drafts it learns nothing new, and after a
hundred steps it is given another try."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest step in the mean time of steps of its size."""
TOKEN_SHARE = 0.1
"""Time of one token more, in times of a step of one, where no step of that size was seen: little
enough for a try."""
MOST_TOKENS = 512
"""Sizes of steps that are kept apart."""
NEAR = 1.25
"""Ratio of sizes whose times tell of each other."""
KNOWN_FROM = 2
"""Steps of a size after which its time is known: the first one may have compiled something."""
REMEMBERED = 500
"""Steps after which a time is forgotten: what was slow on a busy machine is tried again."""


class _Offers(NamedTuple):
    """Steps to choose from, each with one draft more than the one before."""

    owners: npt.NDArray[np.int64]
    """[n] index of the row of each draft, the likeliest draft first."""
    tokens: npt.NDArray[np.float64]
    """[1 + n] tokens that a step with none, one, ... of them is expected to give."""
    sizes: npt.NDArray[np.int64]
    """[1 + n] tokens that it computes."""
    rates: npt.NDArray[np.float64]
    """[1 + n] tokens for its time, in the unit of `DraftPayoff.times`."""


class DraftPayoff:
    """What drafts cost and give. R slots."""

    def __init__(
        self,
        num_slots: int,
        num_kinds: int = 1,
        *,
        token_share: float = TOKEN_SHARE,
        remembered: int = REMEMBERED,
        kept_without: float = KEPT_WITHOUT,
    ) -> None:
        """num_kinds: kinds of drafts whose chances differ, as a drafter sees them. token_share,
        remembered, kept_without: see `TOKEN_SHARE`, `REMEMBERED` and `KEPT_WITHOUT`."""
        self._token_share, self._remembered = token_share, remembered
        self._kept_without = kept_without
        self._right = np.zeros((num_slots, num_kinds))
        self._checked = np.zeros((num_slots, num_kinds))
        self._step_ns = np.zeros(MOST_TOKENS + 1)
        """Mean time by tokens."""
        self._num_seen = np.zeros(MOST_TOKENS + 1, np.int64)
        self._last_seen = np.zeros(MOST_TOKENS + 1, np.int64)
        """The newest step of each size, by its number."""
        self._num_steps = 0

    def begin(self, slot: int) -> None:
        """Forget what the slot's last request showed."""
        self._right[slot] = self._checked[slot] = 0.0

    def note_row(self, slot: int, num_drafts: int, num_right: int, kind: int = 0) -> None:
        """Learn from a row of a step; its drafts up to the first wrong one were checked."""
        if not num_drafts:
            self._right[slot] *= self._kept_without
            self._checked[slot] *= self._kept_without
            return
        at = slot, kind
        self._right[at] = KEPT_WITH_DRAFTS * self._right[at] + num_right
        checked = min(num_right + 1, num_drafts)
        self._checked[at] = KEPT_WITH_DRAFTS * self._checked[at] + checked

    def note_rows(self, slots: IntArray, num_drafts: IntArray, num_right: IntArray) -> None:
        """The same of all rows of a step, with drafts of one kind."""
        none = slots[num_drafts == 0]
        self._right[none] *= self._kept_without
        self._checked[none] *= self._kept_without
        had = num_drafts > 0
        rows, right = slots[had], num_right[had]
        self._right[rows, 0] = KEPT_WITH_DRAFTS * self._right[rows, 0] + right
        checked = np.minimum(right + 1, num_drafts[had])
        self._checked[rows, 0] = KEPT_WITH_DRAFTS * self._checked[rows, 0] + checked

    def note_step(self, num_tokens: int, took_ns: int) -> None:
        """Learn from the time of a step without prompts."""
        self._num_steps += 1
        if num_tokens > MOST_TOKENS:
            return
        if self._num_steps - self._last_seen[num_tokens] > self._remembered:
            self._num_seen[num_tokens] = 0
        self._num_seen[num_tokens] += 1
        self._last_seen[num_tokens] = self._num_steps
        is_known = self._num_seen[num_tokens] > KNOWN_FROM
        weight = NEWEST_WEIGHT if is_known else 1.0
        self._step_ns[num_tokens] += weight * (took_ns - self._step_ns[num_tokens])

    def share_right(
        self, slots: npt.NDArray[np.int32], kinds: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """[n] how often a draft of these rows is right."""
        right = self._right[slots, kinds] + PRIOR * PRIOR_WEIGHT
        shares: npt.NDArray[np.float64] = right / (self._checked[slots, kinds] + PRIOR_WEIGHT)
        return shares

    def choose(
        self,
        slots: npt.NDArray[np.int32],
        num_found: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.int64],
        num_rows: int,
    ) -> npt.NDArray[np.int64]:
        """[n] drafts that each of these rows gets.

        num_found, kinds: [n] drafts that there are for each. num_rows: rows of the step, these
        among them.
        """
        offers = self._offers(slots, num_found, kinds, num_rows)
        best = int(np.argmax(offers.rates))
        return np.bincount(offers.owners[:best], minlength=len(slots)).astype(np.int64)

    def explain(
        self,
        slots: npt.NDArray[np.int32],
        num_found: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.int64],
        num_rows: int,
        counts: npt.NDArray[np.int64],
        most: int,
    ) -> DraftChoice:
        """Why these counts were chosen from the same. most: drafts that a row may have."""
        chosen, deepest = int(counts.sum()), int(counts.max(initial=0))
        if not num_found.any():
            return DraftChoice(0, most, DraftReason.NONE_FOUND)
        offers = self._offers(slots, num_found, kinds, num_rows)
        shown = chosen or 1 + int(np.argmax(offers.rates[1:]))
        if not all(self.has_seen_like(int(offers.sizes[number])) for number in (0, shown)):
            return DraftChoice(deepest, most, DraftReason.UNTRIED)
        why = DraftReason.BEST if chosen else DraftReason.NO_GAIN
        compared = deepest or int(np.bincount(offers.owners[:shown]).max())
        kept_share = (float(offers.tokens[shown]) - num_rows) / shown
        rate, without = 1e9 * float(offers.rates[shown]), 1e9 * float(offers.rates[0])
        return DraftChoice(deepest, most, why, compared, rate, without, kept_share)

    def _offers(
        self,
        slots: npt.NDArray[np.int32],
        num_found: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.int64],
        num_rows: int,
    ) -> _Offers:
        owners = np.repeat(np.arange(len(slots)), num_found)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(num_found) - num_found, num_found)
        chances = self.share_right(slots, kinds)[owners] ** (1 + places)
        order = np.argsort(-chances, kind="stable")  # a row's own are in order already
        tokens = num_rows + np.concatenate(([0.0], np.cumsum(chances[order])))
        sizes = num_rows + np.arange(1 + len(order))
        return _Offers(owners[order], tokens, sizes, tokens / self.times(sizes))

    def has_seen_like(self, size: int) -> bool:
        """True if a step of so many tokens lies between those seen, or near them."""
        known = np.flatnonzero(self._num_seen >= KNOWN_FROM)
        if not len(known):
            return False
        return bool(known[0] / NEAR <= size <= known[-1] * NEAR)

    def times(self, sizes: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """Time of steps of so many tokens, in one unit for all."""
        is_fresh = self._num_steps - self._last_seen <= self._remembered
        known = np.flatnonzero((self._num_seen >= KNOWN_FROM) & is_fresh)
        if not len(known):
            return self._guessed(sizes)
        seen = np.interp(sizes, known, self._step_ns[known])
        within = np.clip(sizes, known[0], known[-1])
        times: npt.NDArray[np.float64] = seen * (self._guessed(sizes) / self._guessed(within))
        return times

    def _guessed(self, sizes: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """Time of steps of these sizes, in times of a step of one token."""
        return np.asarray(1.0 + self._token_share * (sizes - 1), np.float64)
