"""The prefix cache of recurrent layers: copies of states, found by the tokens they have taken up.

A state cannot be cut at a token, so it is copied while it stands at the end of a block: at the last
block's end within each of a chat's `TurnEnds`, before the last tokens of another prompt, at every
`LONG_STEP` tokens of a long one, and at each block of an answer, of which the last copy is kept.
Where turns part inside a block, up to a block of tokens is read again: copies at any token would
also need the KV of half a block, which the requests that share it write on.

The copies lie in places behind the rows of running requests. They are made and read by steps, in
the order of the plans, so a place may be given away at once.

A row with drafts may pass the end of a block within a step. Its state has then not taken up all
tokens that stayed, and lies with them at any position between: so the copy is made by the next
step, and found by that position. Where that step is planned before the other has landed, the copy
is a try: it counts once it is known that the state was there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.events import StateView
from termgen.vocabulary.request import IntArray, Request, TurnEnds

MARGIN = 8
"""Tokens at the end of a prompt before which its state is copied where no turn's end is known: what
asks for the answer there is often not in the next prompt."""
LEAST_APART = 64
"""Tokens from one copy in a prompt to the next: reading fewer again takes no longer than the step
that a copy adds."""
LONG_STEP = 8192
"""Tokens between the copies of a long prompt's state."""
_AT_ITS_END = np.iinfo(np.int32).max
"""Stands for the position of the state: it has taken up all tokens that were computed."""


class Copy(NamedTuple):
    """A state that has taken up `position` tokens."""

    position: int
    place: int
    is_answer: bool
    """True if it replaces the one before in the same answer."""


class Try(NamedTuple):
    """A copy of the state that a step in flight leaves."""

    step: int
    slot: int
    copy: Copy


class StateCache:
    """Places from `first_place` on; the least recently used is given away first."""

    def __init__(
        self, *, block_size: int, max_num_seqs: int, first_place: int, num_places: int
    ) -> None:
        self._block_size = block_size
        self.num_places = num_places
        self.num_made = self.num_used = self.num_evicted = 0
        """Since start: copies made, requests that started from one, and copies given away."""
        self._free = list(range(first_place + num_places - 1, first_place - 1, -1))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()
        self._unnamed: list[list[Copy]] = [[] for _ in range(max_num_seqs)]
        """Per slot, copies of which not all tokens are known to the host."""
        self._tries: list[Try] = []
        """In the order of their steps."""
        self._passed: IntArray = np.full(max_num_seqs, _AT_ITS_END, np.int32)
        """Per slot, tokens that were known before its newest step landed: the state that this step
        left can be copied from there on."""
        self._of_answer: list[bytes | None] = [None] * max_num_seqs
        """Per slot, the hash of the newest copy in the answer."""
        self._of_prompt: list[bytes | None] = [None] * max_num_seqs
        """Per slot, the hash of the newest copy in the prompt."""
        self.cuts = np.zeros((len(TurnEnds._fields), max_num_seqs), np.int32)
        """[4, max_num_seqs] positions at which each slot's prompt is cut for a copy; 0: nowhere."""

    def __len__(self) -> int:
        """Copies that can be found."""
        return len(self._by_hash)

    def view(self) -> StateView:
        """Its counts, for screens."""
        made, used, evicted = self.num_made, self.num_used, self.num_evicted
        return StateView(self.num_places, len(self._free), len(self), made, used, evicted)

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """The copy that has taken up the most of these blocks: their number, and its place; (0, -1)
        if there is none."""
        for num_blocks in range(len(hashes), 0, -1):
            place = self._by_hash.get(hashes[num_blocks - 1])
            if place is not None:
                self._by_hash.move_to_end(hashes[num_blocks - 1])
                return num_blocks, place
        return 0, -1

    def occupy(self, slot: int, request: Request, found: int = -1) -> None:
        """Note a slot's new request. found: the place of the copy that it starts from, if any.

        The copies at its turns' ends count as used: those of the system prompt and of the last
        question stay while their conversation goes on.
        """
        self.num_used += found >= 0
        size, (last, *others) = self._block_size, request.turn_ends
        last = last or max(0, request.num_prompt_tokens - 1 - MARGIN)
        cuts = [last // size * size]
        for end in sorted((end // size * size for end in others), reverse=True):
            if 0 < end <= cuts[-1] - LEAST_APART:
                cuts.append(end)
        self.cuts[: len(cuts), slot] = cuts
        known = [end // size - 1 for end in cuts if 0 < end <= len(request.block_hashes) * size]
        for name in (request.block_hashes[block] for block in reversed(known)):
            if name in self._by_hash:
                self._by_hash.move_to_end(name)
                self._of_prompt[slot] = name

    def cut(self, slots: IntArray, computed: IntArray, num_new: IntArray) -> IntArray:
        """[rows] tokens to compute now: no row passes a position at which its state is copied."""
        ends = computed + num_new
        for step in (*self.cuts[:, slots], computed // LONG_STEP * LONG_STEP + LONG_STEP):
            ends = np.where((computed < step) & (step < ends), step, ends)
        cut: IntArray = (ends - computed).astype(num_new.dtype)
        return cut

    def due(
        self, slots: IntArray, computed: IntArray, num_prompt: IntArray, least: IntArray
    ) -> tuple[npt.NDArray[np.intp], IntArray]:
        """Indices of the rows whose states are to be copied before they go on, and [rows] at which
        position each. least: the least positions that states may be at."""
        ends: IntArray = computed // self._block_size * self._block_size
        is_cut = (ends == self.cuts[:, slots]).any(axis=0) | (ends % LONG_STEP == 0)
        is_due = (ends > 0) & (ends >= least)
        return np.flatnonzero(is_due & (is_cut | (ends > num_prompt))), ends

    def least(
        self, slots: IntArray, computed: IntArray, known: IntArray, pending: IntArray
    ) -> IntArray:
        """[rows] the least position at which the state of each row with drafts can be copied.
        known: tokens that the host knows; pending: those that steps in flight draw."""
        found: IntArray = np.where(pending > 0, known, self._passed[slots])
        return np.minimum(found, computed)

    def landed(self, step: int, slots: IntArray, num_new: IntArray | None, known: IntArray) -> None:
        """Note the tokens that a step gave these slots (None: one each), and those that they have
        now; see which of the states that it left were where their copies were to be."""
        before = known - (1 if num_new is None else num_new)
        self._passed[slots] = before
        while self._tries and self._tries[0].step <= step:
            tried = self._tries.pop(0)
            at = np.flatnonzero(slots == tried.slot)
            if (
                tried.step == step
                and len(at)
                and before[at[0]] <= tried.copy.position < known[at[0]]
            ):
                self._unnamed[tried.slot].append(tried.copy)
            else:
                self.num_made -= 1
                self._free.append(tried.copy.place)

    def copy(
        self, slot: int, position: int, *, is_answer: bool, try_after: int | None = None
    ) -> int | None:
        """The place for a copy of a slot's state; None if there is none to give away. try_after:
        the step in flight that may leave the state there or not.

        No place is given away whose copy is not known yet, and for a copy in an answer none of the
        newest copy in a running request's prompt: the next one may have the answer in other words.
        """
        if not self._free and is_answer:  # the one before gives way early
            self._drop(self._of_answer[slot])
        if self._free:
            place = self._free.pop()
        elif self._by_hash and not (is_answer and next(iter(self._by_hash)) in self._of_prompt):
            _, place = self._by_hash.popitem(last=False)
            self.num_evicted += 1
        else:
            return None
        self.num_made += 1
        copy = Copy(position, place, is_answer)
        if try_after is None:
            self._unnamed[slot].append(copy)
        else:
            self._tries.append(Try(try_after, slot, copy))
        return place

    def publish(self, slot: int, num_blocks: int, hashes: Sequence[bytes]) -> None:
        """Make the slot's copies findable that have taken up no more than these blocks."""
        unnamed = self._unnamed[slot]
        while unnamed and unnamed[0].position <= num_blocks * self._block_size:
            copy = unnamed.pop(0)
            name = hashes[copy.position // self._block_size - 1]
            if not copy.is_answer:
                self._of_prompt[slot] = name
            if name in self._by_hash:
                self._free.append(copy.place)
                continue
            self._by_hash[name] = copy.place
            if copy.is_answer:
                self._drop(self._of_answer[slot])
                self._of_answer[slot] = name

    def vacate(self, slot: int) -> None:
        """Forget the copies of a slot that nothing can find."""
        tried = [one.copy for one in self._tries if one.slot == slot]
        self._tries = [one for one in self._tries if one.slot != slot]
        self._free += [copy.place for copy in self._unnamed[slot] + tried]
        self._unnamed[slot].clear()
        self._passed[slot] = _AT_ITS_END
        self._of_answer[slot] = self._of_prompt[slot] = None
        self.cuts[:, slot] = 0

    def clear(self) -> None:
        """Drop all copies that can be found."""
        self._free += self._by_hash.values()
        self._by_hash.clear()

    def _drop(self, name: bytes | None) -> None:
        place = None if name is None else self._by_hash.pop(name, None)
        if place is not None:
            self._free.append(place)
