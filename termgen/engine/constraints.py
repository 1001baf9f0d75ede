"""Requests under a grammar, seen from the scheduler: when they may join a step, and their masks.

A row's next mask needs its newest token. So a constrained row joins a step only when all its tokens
have landed: every second step where two are in flight, while the rows without a grammar run ahead.
Its mask is filled by a thread from the moment the token lands, usually while the step behind runs.
Only landed tokens ever reach a matcher, so preemption and dropped steps need no way back. Owned by
the scheduler, on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from termgen.engine.at_odds import fault_of
from termgen.engine.request import FinishReason, IntArray, Request
from termgen.engine.slot_table import SlotTable
from termgen.engine.token_mask import RowMasks, TokenMask, TokenMatcher
from termgen.errors import EngineError, TermgenError

PATIENCE_S = 0.001
"""While another step runs, masks are waited for this long; a row whose mask takes longer misses
the step, so that it holds nobody up."""

FillMasks = Callable[[Sequence[TokenMatcher], IntArray], None]


def fill_one_by_one(matchers: Sequence[TokenMatcher], bits: IntArray) -> None:
    for matcher, row in zip(matchers, bits, strict=True):
        matcher.fill(row)


class Constraints:
    """Matchers and masks of the requests that have a grammar."""

    def __init__(self, fill: FillMasks = fill_one_by_one) -> None:
        self.fill = fill
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, request: Request) -> None:
        """Fill the mask of a new request's first token."""
        if request.matcher is not None:
            self._refill([request])

    def hold_back(
        self, table: SlotTable, running: IntArray, want: IntArray, *, is_busy: bool
    ) -> None:
        """Set `want` to 0 for rows that cannot join now. is_busy: a step is in flight."""
        deadline = time.monotonic() + PATIENCE_S
        for i, slot in _constrained(table, running):
            if table.num_pending[slot]:
                want[i] = 0
            elif is_busy and want[i]:
                mask = table.request_at(slot).mask
                assert mask is not None
                if not mask.wait(max(0.0, deadline - time.monotonic())):
                    want[i] = 0

    def endings(
        self,
        table: SlotTable,
        slots: IntArray,
        tokens: IntArray,
        stopped: npt.NDArray[np.bool_],
        ended: npt.NDArray[np.intp],
    ) -> dict[int, tuple[FinishReason, TermgenError | None]]:
        """Take in landed tokens. All rows that end, and how: those `ended` already, some of them
        `stopped` by a token, and those whose grammar ends."""
        endings: dict[int, tuple[FinishReason, TermgenError | None]] = {
            i: (FinishReason.STOP if stopped[i] else FinishReason.LENGTH, None)
            for i in ended.tolist()
        }
        going_on: list[Request] = []
        for i, slot in _constrained(table, slots):
            request = table.request_at(slot)
            matcher = request.matcher
            assert matcher is not None
            answer = table.token_ids[slot, table.num_prompt[slot] : table.num_tokens[slot]]
            assert request.mask is not None
            if fault := fault_of(request, answer, request.mask.bits()):
                endings[i] = FinishReason.ERROR, fault
            elif not matcher.accept(int(tokens[i])):
                error = EngineError(
                    f"token {int(tokens[i])} does not fit the grammar, which may be too complex"
                )
                endings[i] = FinishReason.ERROR, error
            elif matcher.is_ended:
                endings[i] = FinishReason.STOP, None
            elif i not in endings:
                going_on.append(request)
        if going_on:
            self._refill(going_on)
        return endings

    def _refill(self, requests: Sequence[Request]) -> None:
        matchers = [r.matcher for r in requests if r.matcher is not None]
        bits = np.zeros((len(matchers), matchers[0].num_words), np.int32)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "termgen-token-masks")
        job = self._thread.submit(self.fill, matchers, bits)
        for request, row in zip(requests, bits, strict=True):
            request.mask = TokenMask(row, job)


def masks_of(table: SlotTable, slots: IntArray) -> RowMasks | None:
    """Masks of the rows of a step that sample under a grammar; the step is already counted."""
    rows: list[int] = []
    masks: list[TokenMask] = []
    for i, slot in _constrained(table, slots):
        mask = table.request_at(slot).mask
        if table.num_pending[slot]:
            assert mask is not None
            rows.append(i)
            masks.append(mask)
    return RowMasks(np.asarray(rows, np.int32), tuple(masks)) if rows else None


def _constrained(table: SlotTable, slots: IntArray) -> Iterator[tuple[int, int]]:
    """Index and slot of those of these rows that have a grammar."""
    if table.constrained:
        for i, slot in enumerate(slots.tolist()):
            if slot in table.constrained:
                yield i, slot
