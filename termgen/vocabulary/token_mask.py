"""Which tokens a constrained row may sample next: the masks of a step, and what makes them.

Vocabulary. Matchers and grammars are seen here only by what others ask of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from termgen.errors import EngineError, RequestError

IntArray = npt.NDArray[np.int32]


class TokenMatcher(Protocol):
    """One answer's way through a grammar."""

    @property
    def num_words(self) -> int:
        """Words of 32 tokens that a mask has."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token. False if the grammar does not allow it, then and for ever after."""
        ...

    @property
    def is_ended(self) -> bool:
        """The answer is complete, and nothing could follow."""
        ...

    def fill(self, bits: IntArray) -> None:
        """Write the mask of the next token over all of `bits`: bit i % 32 of word i // 32 stands
        for token i. Raises RequestError where the grammar turns out to be too complex."""
        ...

    @staticmethod
    def fill_all(matchers: Sequence[Any], bits: IntArray) -> list[BaseException | None]:
        """The same for several of one kind, bits[i] for each; what `fill` would have raised."""
        ...


class TokenGrammar(Protocol):
    """A compiled grammar; any thread may begin answers."""

    @property
    def is_slow(self) -> bool:
        """The mask of the first token takes long."""
        ...

    def start(self, *, ends_at_eos: bool) -> TokenMatcher:
        """A matcher at the beginning. Without `ends_at_eos` an end token is only allowed where
        nothing else is."""
        ...


class GrammarState:
    """How far one answer is in its grammar, and the mask of its next token.

    It takes turns: the thread that fills masks has it until `is_ready`, and the engine's thread
    from then on, until it asks for the mask behind the next token.
    """

    __slots__ = (
        "_ends_at_eos",
        "_grammar",
        "_is_dropped",
        "_mask",
        "_matcher",
        "_num_quick",
        "_num_slow",
        "error",
        "is_ready",
        "is_slow",
    )

    def __init__(self, grammar: TokenGrammar, *, ends_at_eos: bool) -> None:
        self._grammar = grammar
        self._ends_at_eos = ends_at_eos
        self._matcher: TokenMatcher | None = None
        self._mask: IntArray | None = None
        self._num_quick = self._num_slow = 0
        self._is_dropped = False
        self.error: BaseException | None = None
        """Why there is no mask, and never will be one."""
        self.is_ready = False
        """The mask is filled, or there is an error."""
        self.is_slow = grammar.is_slow
        """The newest mask took long: the engine does not wait for the next one, which is filled
        elsewhere."""

    @property
    def mask(self) -> IntArray:
        """[num_words] of the next token. Once that has landed, and no step reads this mask any
        more, the next one may be written over it."""
        assert self.is_ready and self._mask is not None
        return self._mask

    def fill(self) -> None:
        """Make the next mask, at the beginning the matcher too. Either may take long."""
        if self._is_dropped:
            return
        try:
            if self._matcher is None:
                self._matcher = self._grammar.start(ends_at_eos=self._ends_at_eos)
                self._mask = np.zeros(self._matcher.num_words, np.int32)
            assert self._mask is not None
            self._matcher.fill(self._mask)
        except BaseException as cause:  # a panic in llguidance is no Exception; it ends the request
            self.error = cause

    def drop(self) -> None:
        """The answer is over: a mask that is still to be made would keep others waiting. The
        engine's thread may say so at any time."""
        self._is_dropped = True

    @staticmethod
    def fill_together(rows: Sequence[GrammarState]) -> None:
        """The next mask of each; none of them is the first. Filled one by one, each would wait for
        Python's lock."""
        matchers = [row._matcher for row in rows]
        first = matchers[0]
        assert first is not None, "the first mask makes the matcher"
        bits = np.empty((len(rows), first.num_words), np.int32)
        try:
            faults = first.fill_all(matchers, bits)
        except BaseException:  # whose it was turns out when each is alone
            for row in rows:
                row.fill()
            return
        for row, mask, fault in zip(rows, bits, faults, strict=True):
            row._mask, row.error = mask, fault

    @property
    def may_share(self) -> bool:
        """Whether others may have to wait for its next mask: not for the first, and after one that
        took long only once many have been quick, more every time."""
        return self._num_quick >> 3 * self._num_slow > 0  # eight times as many every time

    def note_slow_company(self) -> None:
        """It was filled with others, and that took long: who is to blame turns out when each is
        alone."""
        self._num_quick = 0

    def note_time(self, *, is_slow: bool) -> None:
        """How long the newest mask took."""
        self.is_slow = is_slow
        self._num_slow += is_slow
        self._num_quick = 0 if is_slow else self._num_quick + 1

    def accept(self, token_id: int) -> bool:
        """Take in a landed token. Whether the answer is complete and nothing could follow.

        Raises EngineError where the token does not fit, RequestError where by its mask it does.
        """
        matcher = self._matcher
        assert matcher is not None, "no token lands before the first mask is there"
        if not matcher.accept(token_id):
            if int(self.mask[token_id // 32]) >> token_id % 32 & 1:
                raise RequestError(
                    "the grammar is too complex to be followed further", code="invalid_schema"
                )
            raise EngineError(f"token {token_id} does not fit the grammar")
        return matcher.is_ended


def faults_of(
    fill: Callable[[Any, IntArray], None], matchers: Sequence[Any], bits: IntArray
) -> list[BaseException | None]:
    """What filling the mask of each raises: a fault is its own and no other's."""
    faults: list[BaseException | None] = []
    for matcher, mask in zip(matchers, bits, strict=True):
        try:
            fill(matcher, mask)
            faults.append(None)
        except BaseException as cause:  # a panic in llguidance is no Exception
            faults.append(cause)
    return faults


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """The masks of the rows of a plan that sample under a grammar. Made once the model runs."""

    rows: IntArray
    """[num_masks] index of each in the plan."""
    bits: Sequence[IntArray]
    """num_masks of [num_words]"""
    late: IntArray
    """[num_late] index of the rows whose mask is not there: they sample nothing, and compute their
    newest token once more in a later step."""

    @classmethod
    def none(cls, rows: IntArray) -> RowMasks:
        """All of these rows are late."""
        return cls(rows[:0], (), rows)
