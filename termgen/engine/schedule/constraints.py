"""The scheduler's view of constrained requests: when they may join a step, and their masks.

A row's next mask needs its newest token, but only sampling needs the mask. So a constrained row
joins a step while its previous token is still in flight; during the model's run that token lands,
threads fill the mask and post it to the device, which waits for it before it samples, for a while.
A row whose mask is late does not sample and computes its token again, in the step behind if it is
in that. A row with slow masks joins only when all its tokens have landed and its mask is filled, so
that no other row waits for it. Only tokens that have landed reach a matcher, or that must come, so
preemption and dropped steps need no rollback. A grammar that fails, in a mask or on a token, ends
its own request only. Owned by the scheduler, on the engine thread.

Forced tokens are drafts that the host knows. The invariant: while a row's newest mask has forced
tokens before it, the row's tokens in flight are the first of these, whatever steps they are in. So
the drafts of a step that is planned ahead are those behind them, and both its masks and those of
the steps before it are in the one thing posted, which stays until the token behind all forced ones
has landed. In a step behind that token's, the host knows nothing yet, and the row has no drafts.
"""

from __future__ import annotations

import time
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from termgen.engine.grammar.grammar import named
from termgen.engine.grammar.mask_filler import MaskFiller
from termgen.engine.schedule.slot_table import SlotTable
from termgen.errors import EngineError, RequestError, TermgenError
from termgen.vocabulary.request import FinishReason, IntArray, Request
from termgen.vocabulary.token_mask import (
    IDLE_PATIENCE_S,
    PATIENCE_S,
    GrammarState,
    MaskReceiver,
)

Endings = dict[int, tuple[FinishReason, TermgenError | None]]
"""Index among the landed rows -> how the row ends."""


class Constraints:
    """The constrained rows."""

    def __init__(self, most_forced: int = 0) -> None:
        """most_forced: drafts of a row in a step that a grammar forces; 0 where the device takes
        none."""
        self.most_forced = most_forced
        self.patience_s = PATIENCE_S
        self.idle_patience_s = IDLE_PATIENCE_S
        self.is_late = False
        """A row or a waiting request missed the newest step because of a late mask."""
        self.waited_ns = 0
        """Time that the engine thread has waited for masks, since start."""
        self._filler = MaskFiller()
        self._filler.most_forced = most_forced
        self._is_busy = False
        self._may_run_ahead = True
        self._deadline = 0.0
        """Time until which this step waits for masks."""
        self._failed: list[Request] = []
        self._seated: dict[int, GrammarState] = {}
        """Slot -> grammar of its row."""
        self._aside: dict[GrammarState, Request] = {}
        """Waiting requests that are skipped until their mask is filled."""

    def connect(self, receiver: MaskReceiver) -> None:
        """Post masks to this device."""
        self._filler.receiver = receiver
        self._may_run_ahead = receiver.waits_for_masks

    def begin(self, request: Request) -> None:
        """Create a new request's matcher and fill the mask of its first token."""
        if request.grammar is not None:
            self._filler.begin([request.grammar])

    def hold_back(
        self, table: SlotTable, running: IntArray, want: IntArray, *, is_busy: bool
    ) -> None:
        """Set `want` to 0 for rows that cannot join now. is_busy: a step is in flight."""
        self.is_late, self._is_busy = False, is_busy
        rows = table.has_grammar[running].nonzero()[0]
        rows = rows[want[rows] > 0]
        is_alone = not is_busy and np.count_nonzero(want) == len(rows)
        self._begin_waiting(is_alone=is_alone)
        requests = [table.request_at(slot) for slot in running[rows].tolist()]
        is_ahead = table.num_pending[running[rows]] > 0
        landed = [request for request, ahead in zip(requests, is_ahead, strict=True) if not ahead]
        self._wait_for([grammar_of(request) for request in landed])
        for i, request, ahead in zip(rows.tolist(), requests, is_ahead, strict=True):
            if ahead and self._may_run_ahead and not grammar_of(request).is_slow:
                continue
            # A row with slow masks would have the step wait on the device for nothing.
            if ahead or not self._has_mask(request):
                want[i] = 0
                self.is_late = True

    def may_all_run_ahead(self, table: SlotTable) -> bool:
        """True if every constrained row may join a step before its mask is filled."""
        if not table.num_constrained:
            return True
        slots = table.running[table.has_grammar[table.running]]
        return (
            self._may_run_ahead
            and bool((table.num_pending[slots] > 0).all())
            and not any([grammar.is_slow for grammar in self._seated.values()])
        )

    def forced_drafts(self, table: SlotTable, slots: IntArray) -> IntArray:
        """[num_rows] tokens that are forced behind those of each row, tokens in flight included."""
        counts = np.zeros_like(slots)
        if not (self.most_forced and table.num_constrained):
            return counts
        rows = table.has_grammar[slots].nonzero()[0]
        for row, slot in zip(rows.tolist(), slots[rows].tolist(), strict=True):
            grammar = self._seated[slot]
            if grammar.is_ready and grammar.forced:
                counts[row] = len(grammar.forced)
        counts -= table.num_pending[slots]
        return np.maximum(counts, 0, out=counts)

    def is_ready(self, request: Request) -> bool:
        """True if a waiting request may join the step being planned."""
        grammar = request.grammar
        if grammar is None:
            return True
        if not (grammar.is_ready or grammar.is_slow):  # a cheap check: many may wait in the queue
            self._wait_for([grammar])
        return self._has_mask(request)

    def set_aside(self, request: Request) -> None:
        """Skip a waiting request until its mask is filled; `take_ready` then returns it."""
        self.is_late = True
        grammar = grammar_of(request)
        self._aside[grammar] = request
        self._filler.watch(grammar)

    def take_ready(self) -> list[Request]:
        """Requests set aside whose masks are filled now; some may have ended."""
        if not self._aside:
            return []
        return [self._aside.pop(grammar) for grammar in self._filler.take_watched()]

    def rest(self) -> None:
        """Called when nothing can be planned: wait briefly for masks, if they are the reason and no
        step in flight is to be landed."""
        if self.is_late and not (self._is_busy or self._failed):
            began_ns = time.perf_counter_ns()
            self._filler.wait_for_any(PATIENCE_S)
            self.waited_ns += time.perf_counter_ns() - began_ns

    def seat(self, request: Request, slot: int) -> None:
        """The request gets a slot: post its mask there."""
        if request.grammar is not None:
            self._seated[slot] = request.grammar
            self._filler.seat(request.grammar, slot, len(request.token_ids))

    def unseat(self, request: Request) -> None:
        """The request loses its slot."""
        if request.grammar is not None:
            del self._seated[request.grammar.slot]
            self._filler.unseat(request.grammar)

    def note_late(self, table: SlotTable, slots: IntArray) -> None:
        """Slow down rows that sampled nothing in a step which has just landed, as their masks were
        late or do not come: they compute their newest token again."""
        for slot in slots.tolist():
            request = table.request_at(slot)
            if not self._has_mask(request):
                self._filler.note_late(grammar_of(request))

    def withhold_all(self, table: SlotTable) -> None:
        """Have the steps in flight not wait: their results are not read."""
        slots = table.running[table.has_grammar[table.running]]
        if len(slots) and self._filler.receiver is not None:
            self._filler.receiver.withhold_masks(slots)

    def take_failed(self) -> list[tuple[Request, TermgenError]]:
        """Requests whose next mask could not be filled, with the errors."""
        failed, self._failed = self._failed, []
        return [(request, _error(request, grammar_of(request).error)) for request in failed]

    def endings(
        self,
        table: SlotTable,
        slots: IntArray,
        tokens: IntArray,
        counts: IntArray | None,
        stopped: npt.NDArray[np.bool_],
        ended: npt.NDArray[np.intp],
    ) -> Endings:
        """Pass landed tokens to the grammars: `counts` of each row, row after row; None: one each.
        Returns all rows that end: those that have `ended` already, some `stopped` by a token, and
        those whose grammar ends."""
        endings: Endings = {
            i: (FinishReason.STOP if stopped[i] else FinishReason.LENGTH, None)
            for i in ended.tolist()
        }
        if not table.num_constrained:
            return endings
        going_on: list[GrammarState] = []
        rows = table.has_grammar[slots].nonzero()[0]
        num_landed = np.ones_like(slots) if counts is None else counts
        lasts = np.cumsum(num_landed)[rows]
        slots, num_landed = slots[rows], num_landed[rows]
        facts = (rows, slots, lasts, num_landed, table.num_tokens[slots])
        for i, slot, last, count, length in zip(*(a.tolist() for a in facts), strict=True):
            grammar = self._seated[slot]
            try:
                is_complete = self._land(table, slot, tokens[last - count : last], length)
            except BaseException as cause:  # a panic in llguidance is no Exception
                endings[i] = FinishReason.ERROR, _error(table.request_at(slot), cause)
                continue
            if is_complete:
                endings[i] = FinishReason.STOP, None
            elif i not in endings and grammar.is_spent:
                grammar.position = length
                going_on.append(grammar)
        self._filler.begin(going_on)
        return endings

    def _land(self, table: SlotTable, slot: int, tokens: IntArray, length: int) -> bool:
        """Pass a row's newest tokens, all before `length`, to its grammar. True if the answer is
        complete."""
        grammar, is_complete = self._seated[slot], False
        may_conflict = table.has_edits[slot] or table.has_minimum[slot]
        for end, token in enumerate(tokens.tolist(), length + 1 - len(tokens)):
            if may_conflict:
                request = table.request_at(slot)
                answer = table.token_ids[slot, table.num_prompt[slot] : end]
                if fault := fault_of(request, answer, is_allowed=grammar.allows(token)):
                    raise fault
            is_complete = grammar.accept(token)
        return is_complete

    def _begin_waiting(self, *, is_alone: bool) -> None:
        patience_s = self.idle_patience_s if is_alone else self.patience_s
        self._deadline = time.perf_counter() + patience_s

    def _wait_for(self, grammars: list[GrammarState]) -> None:
        """Wait until the deadline for the masks that are usually quick."""
        quick = [grammar for grammar in grammars if not (grammar.is_ready or grammar.is_slow)]
        if quick:
            began_ns = time.perf_counter_ns()
            self._filler.wait(quick, max(0.0, self._deadline - began_ns / 1e9))
            self.waited_ns += time.perf_counter_ns() - began_ns

    def _has_mask(self, request: Request) -> bool:
        grammar = grammar_of(request)
        if not grammar.is_ready:
            self.is_late = True
        elif grammar.error is not None:
            self.is_late = True
            self._failed.append(request)
        return grammar.is_ready and grammar.error is None


def rows_with_grammar(table: SlotTable, slots: IntArray) -> IntArray | None:
    """Rows of a step, already counted, that have a grammar and sample."""
    if not table.num_constrained:
        return None
    rows = (table.has_grammar[slots] & (table.num_pending[slots] > 0)).nonzero()[0]
    return rows.astype(np.int32) if len(rows) else None


def grammar_of(request: Request) -> GrammarState:
    assert request.grammar is not None, "the request has no grammar"
    return request.grammar


def _error(request: Request, cause: BaseException | None) -> TermgenError:
    if isinstance(cause, RequestError):  # the request is at fault
        wanted = request.params.structured_outputs
        return cause if wanted is None else named(cause, wanted)
    if isinstance(cause, EngineError):
        return cause
    error = EngineError(f"the grammar failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


# Conflicts between a request's parameters and its grammar, which leave no token to sample.
#
# The device then samples a token that the mask or the parameters forbid. `Constraints` checks each
# landed token of the requests that have such parameters.


def fault_of(request: Request, answer: IntArray, *, is_allowed: bool) -> RequestError | None:
    """The error of the answer's [N] newest token, if any. is_allowed: by the grammar."""
    params, token = request.params, int(answer[-1])
    names = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
    if len(answer) <= params.min_tokens:
        names.append("min_tokens")
    if not names:
        return None
    fits = is_allowed
    if params.allowed_token_ids is not None:
        place = bisect_left(params.allowed_token_ids, token)
        fits &= params.allowed_token_ids[place : place + 1] == (token,)
    is_bad = any(tuple(answer[-len(ids) :].tolist()) == ids for ids in request.bad_token_ids)
    if fits and not is_bad:
        return None
    return RequestError(
        f"{' and '.join(names)}: token {len(answer)} of the answer cannot be both what this allows"
        " and what the grammar does",
        param=names[0],
    )
