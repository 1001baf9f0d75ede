"""Token masks of constrained rows, and the protocols of the grammars and matchers that fill them.

Vocabulary: knows no grammar engine.

A mask reaches the device by itself, not with a plan: steps are queued before their masks are known,
and sampling waits on the device. What it waits for is a position: the mask posted for a slot names
the index, in the row's tokens, of the token that may be sampled under it. The device knows that
index exactly, so a step never samples under the mask of another token.

Where a grammar allows a single continuation, its tokens are posted with the mask behind them. Each
of them is the only one that may be sampled at its place, so a step may compute them all at once, as
drafts: what the step behind it samples is known before any of them has landed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from termgen.errors import EngineError, RequestError

IntArray = npt.NDArray[np.int32]

MOST_FORCED = 16
"""Tokens that a grammar forces, and that one step computes for a row, at most."""
PATIENCE_S = 0.001
"""Wait for masks while there is other work; a row whose mask takes longer misses the step."""
IDLE_PATIENCE_S = 0.01
"""Wait for masks in a step of constrained rows only; waiting keeps rows in the same steps."""
PROVEN_AFTER = 8
"""Quick masks after which the next one is expected to be quick, too."""
NO_MASK = -1
"""Position of a slot for which no mask was posted yet."""
WITHHELD = -2
"""Position of a slot whose mask does not come: steps in flight do not wait for it, and the row
samples nothing."""


class MaskReceiver(Protocol):
    """The device, as those see it that fill masks. Any thread may call it."""

    @property
    def waits_for_masks(self) -> bool:
        """Its steps wait for masks; False: a step is submitted when its masks are posted."""
        ...

    def post_masks(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Let the token at `positions` [N] of these slots [N] be sampled under the masks `bits`
        [N, num_words]; where `forced` has tokens, these from that position on, one at each place,
        and the token behind them under the mask. No step in flight still reads an older mask of
        these slots."""
        ...

    def withhold_masks(self, slots: IntArray) -> None:
        """Have no step in flight wait for the masks of these slots [N]."""
        ...


class TokenMatcher(Protocol):
    """Position of one answer in a grammar."""

    @property
    def num_words(self) -> int:
        """Length of a mask, in words of 32 tokens."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by a token. False if the grammar does not allow it; all later calls fail too."""
        ...

    @property
    def is_ended(self) -> bool:
        """The answer is complete, and nothing can follow."""
        ...

    def take_forced(self, most: int) -> Sequence[int]:
        """Advance by the tokens whose masks allow nothing else, `most` of them at most, and return
        them."""
        ...

    def fill(self, bits: IntArray) -> None:
        """Overwrite `bits` with the mask of the next token: bit i % 32 of word i // 32 is token i.
        Raises RequestError if the grammar is too complex."""
        ...

    @staticmethod
    def fill_all(
        matchers: Sequence[Any], bits: IntArray, *, in_this_thread: bool
    ) -> list[BaseException | None]:
        """Fill bits[i] for each matcher, all of one class and none for the first time, perhaps in
        threads of its own; returns what each `fill` raised."""
        ...


class AnswerCheck(Protocol):
    """Finds out what of a finished answer is not as asked for."""

    def errors(self, answer: str) -> tuple[str, ...]:
        """One line for each; empty if all is. May wait for another process."""
        ...

    def submit(self, answer: str) -> Future[tuple[str, ...]]:
        """The same in a thread."""
        ...


class TokenGrammar(Protocol):
    """A compiled grammar. Thread-safe."""

    @property
    def check(self) -> AnswerCheck | None:
        """Set if the grammar does not enforce everything that was asked for."""
        ...

    @property
    def is_slow(self) -> bool:
        """Filling the mask of the first token takes long."""
        ...

    def start(self, *, ends_at_eos: bool) -> TokenMatcher:
        """A new matcher. Without `ends_at_eos` an end token is allowed only if nothing else is."""
        ...


class GrammarState:
    """One answer's matcher and the mask of its next token, or of the one behind forced tokens.

    Ownership alternates: the mask thread until `is_ready`, then the engine thread until it requests
    the next mask. The matcher has advanced over the forced tokens: they land as they are, in any
    number of steps, or not at all, so nothing is rolled back.
    """

    __slots__ = (
        "_ends_at_eos",
        "_grammar",
        "_is_dropped",
        "_last",
        "_mask",
        "_matcher",
        "_num_quick",
        "_num_slow",
        "error",
        "forced",
        "is_ready",
        "is_slow",
        "is_spent",
        "position",
        "slot",
    )

    def __init__(self, grammar: TokenGrammar, *, ends_at_eos: bool) -> None:
        self._grammar = grammar
        self._ends_at_eos = ends_at_eos
        self._matcher: TokenMatcher | None = None
        self._mask: IntArray | None = None
        self._num_quick = self._num_slow = 0
        self._is_dropped = False
        self._last = -1
        """A forced token with which the answer ends: the mask allows it alone, and the matcher has
        it already."""
        self.forced: tuple[int, ...] = ()
        """Tokens that must come before the one that the mask is for."""
        self.is_spent = True
        """The token that the mask was for has landed, or there was no mask yet."""
        self.error: BaseException | None = None
        """Why no mask can be filled any more."""
        self.is_ready = False
        """The mask is filled, or there is an error."""
        self.is_slow = grammar.is_slow
        """The newest mask took long: the next one is filled in another thread, and the engine does
        not wait for it."""
        self.slot = -1
        """Where the mask is posted; -1: the answer has no row on the device."""
        self.position = NO_MASK
        """Index, in the row's tokens, of the next token: the first forced one, if any."""

    @property
    def mask(self) -> IntArray:
        """[num_words] the mask of the token behind the forced ones. Valid until that token has
        landed; then the next mask may overwrite it."""
        assert self.is_ready and self._mask is not None
        return self._mask

    @property
    def filled(self) -> IntArray:
        """The same, for the thread that has filled it."""
        assert self._mask is not None
        return self._mask

    def allows(self, token_id: int) -> bool:
        """True if this may be the next token to land."""
        if self.forced:
            return token_id == self.forced[0]
        return bool(int(self.mask[token_id // 32]) >> token_id % 32 & 1)

    def fill(self, most_forced: int = 0) -> None:
        """Fill the next mask; the first call also creates the matcher. Both may take long.
        most_forced: forced tokens to go over before, at most."""
        if self._is_dropped:
            return
        try:
            if self._matcher is None:
                self._matcher = self._grammar.start(ends_at_eos=self._ends_at_eos)
                self._mask = np.zeros(self._matcher.num_words, np.int32)
            assert self._mask is not None
            self._go_over(self._matcher, most_forced)
            if self._last < 0:
                self._matcher.fill(self._mask)
                return
            self._mask[:] = 0
            self._mask.view(np.uint32)[self._last // 32] = np.uint32(1 << self._last % 32)
        except BaseException as cause:  # llguidance's panic is no Exception; it ends the request
            self.error = cause

    def _go_over(self, matcher: TokenMatcher, most: int) -> None:
        """Advance over the forced tokens before the next mask, once."""
        if not self.is_spent:
            return
        self.is_spent, self._last = False, -1
        forced = tuple(matcher.take_forced(most)) if most else ()
        if forced and matcher.is_ended:
            self._last, forced = forced[-1], forced[:-1]
        self.forced = forced

    def drop(self) -> None:
        """Skip the next `fill`, which would delay others: the answer has ended. The engine thread
        may call this at any time."""
        self._is_dropped = True

    @staticmethod
    def fill_together(
        rows: Sequence[GrammarState], *, in_this_thread: bool = False, most_forced: int = 0
    ) -> IntArray | None:
        """Fill the next masks of several rows, none of which is a first mask. Threads that take
        over the work avoid a wait for the GIL per row, and take longer to wake up than a few masks
        take. Returns the masks [N, num_words], if they lie side by side."""
        matchers = [row._matcher for row in rows]
        first = matchers[0]
        assert first is not None, "the first mask makes the matcher"
        bits = np.empty((len(rows), first.num_words), np.int32)
        faults: list[BaseException | None] | None = None
        # An exception: fill one by one to find the row at fault.
        with contextlib.suppress(BaseException):
            for row, matcher in zip(rows, matchers, strict=True):
                assert matcher is not None, "the first mask makes the matcher"
                row._go_over(matcher, most_forced)
            if all(row._last < 0 for row in rows):  # a matcher at its end has no mask
                faults = first.fill_all(matchers, bits, in_this_thread=in_this_thread)
        if faults is None:
            for row in rows:
                row.fill(most_forced)
            return None
        for row, mask, fault in zip(rows, bits, faults, strict=True):
            row._mask, row.error = mask, fault
        return bits

    @property
    def may_share(self) -> bool:
        """True if its next mask may be filled together with others. False for the first mask, and
        after each slow one until 8 times as many quick ones as before have followed."""
        return self._num_quick >> 3 * self._num_slow > 0

    @property
    def is_proven(self) -> bool:
        """True if its newest masks were all quick."""
        return self._num_quick >= PROVEN_AFTER

    def note_slow_company(self) -> None:
        """Fill the next mask alone, as a joint fill was slow: this shows which row is at fault."""
        self._num_quick = 0

    def note_time(self, *, is_slow: bool) -> None:
        """Record whether the newest mask was slow."""
        self.is_slow = is_slow
        self._num_slow += is_slow
        self._num_quick = 0 if is_slow else self._num_quick + 1

    def accept(self, token_id: int) -> bool:
        """Advance by a landed token; returns True if the answer is complete and nothing can follow.

        If the matcher refuses it, raises RequestError if its mask allowed the token, else
        EngineError.
        """
        matcher = self._matcher
        assert matcher is not None, "no token lands before the first mask is there"
        if self.forced and self.allows(token_id):
            self.forced = self.forced[1:]
            return False
        if not self.forced and token_id == self._last:
            return True
        self.is_spent = True
        if self.forced or self._last >= 0 or not matcher.accept(token_id):
            if self.allows(token_id):
                raise RequestError(
                    "the grammar is too complex to be followed further", code="invalid_schema"
                )
            raise EngineError(f"token {token_id} does not fit the grammar")
        return matcher.is_ended


def faults_of(
    fill: Callable[[Any, IntArray], None], matchers: Sequence[Any], bits: IntArray
) -> list[BaseException | None]:
    """Fill the masks one by one; returns the exception of each, or None."""
    faults: list[BaseException | None] = []
    for matcher, mask in zip(matchers, bits, strict=True):
        try:
            fill(matcher, mask)
            faults.append(None)
        except BaseException as cause:  # a panic in llguidance is no Exception
            faults.append(cause)
    return faults
