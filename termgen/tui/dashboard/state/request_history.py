"""Activity of each request, step by step, collected from the events.

The batch page and the inspector read it. A lane is kept as runs: a step id, and what the request
does from that step on. A step record lists the requests that have part of a prompt in it; a request
past its prompt decodes in every step until it ends or is preempted. Fed by the store. No Textual.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from termgen.vocabulary.events import (
    EngineSnapshot,
    RequestEvent,
    RequestEventKind,
    RequestView,
    StepRecord,
)

MAX_REQUESTS = 2048
MAX_RUNS = 4096
"""Runs kept of one request; the oldest are dropped."""
_step_id = attrgetter("step_id")


class Doing(enum.IntEnum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3
    BETWEEN = 4
    """Has a slot, but no token in the step."""
    OVER = 5


@dataclass(slots=True)
class Chunk:
    """A part of a prompt that one step computed."""

    step_id: int
    num_tokens: int
    started_ns: int
    ended_ns: int


@dataclass(slots=True)
class History:
    """The events of one request."""

    request_id: str
    queued_ns: int = 0
    """0: it was there before anybody listened."""
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    """Guessed tokens that steps computed for it."""
    num_accepted_tokens: int = 0
    params: str = ""
    reason: str = ""
    """Why it finished."""
    found: str = ""
    """What it found in the prefix cache when it first ran, and why no more."""
    chunks: list[Chunk] = field(default_factory=list)
    preemptions: list[tuple[int, str]] = field(default_factory=list)
    run_starts: list[int] = field(default_factory=list)
    run_kinds: list[Doing] = field(default_factory=list)

    def doing(self, step_id: int) -> Doing:
        """The request's activity in a step."""
        index = bisect_right(self.run_starts, step_id) - 1
        return self.run_kinds[index] if index >= 0 else Doing.OVER

    def lane(self, step_ids: Sequence[int]) -> Iterator[tuple[Doing, int]]:
        """The request's activity in these steps, which are in order, as runs with their lengths."""
        starts, at = self.run_starts, 0
        run = bisect_right(starts, step_ids[0]) - 1 if step_ids else 0
        while at < len(step_ids):
            is_last = run + 1 == len(starts)
            end = len(step_ids) if is_last else bisect_left(step_ids, starts[run + 1], at)
            if end > at:
                yield (self.run_kinds[run] if run >= 0 else Doing.OVER), end - at
            at, run = end, run + 1

    def spans(self, doing: Doing, first_id: int) -> Iterator[tuple[int, int | None]]:
        """The steps from `first_id` on in which it does this: from one up to another, or None."""
        begin = max(0, bisect_right(self.run_starts, first_id) - 1)
        for i in range(begin, len(self.run_starts)):
            if self.run_kinds[i] is doing:
                is_last = i + 1 == len(self.run_starts)
                yield self.run_starts[i], None if is_last else self.run_starts[i + 1]

    @property
    def state(self) -> Doing:
        return self.run_kinds[-1] if self.run_kinds else Doing.WAITING

    def note_drafts(self, counts: RequestEvent | RequestView) -> None:
        """Take the newest counts: those of an event may be older than a snapshot's."""
        if counts.num_draft_tokens >= self.num_draft_tokens:
            self.num_draft_tokens = counts.num_draft_tokens
            self.num_accepted_tokens = counts.num_accepted_tokens
            self.num_output_tokens = max(self.num_output_tokens, counts.num_output_tokens)

    def turn(self, step_id: int, doing: Doing) -> None:
        """Change the activity from this step on."""
        if self.run_kinds and self.run_kinds[-1] is doing:
            return
        if self.run_starts and self.run_starts[-1] >= step_id:
            self.run_kinds[-1] = doing
            return
        self.run_starts.append(step_id)
        self.run_kinds.append(doing)
        if len(self.run_starts) > MAX_RUNS:
            del self.run_starts[: MAX_RUNS // 2], self.run_kinds[: MAX_RUNS // 2]


class RequestHistory:
    """The histories of the newest requests, by id."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._in_prefill: set[str] = set()
        self._step_id = -1

    def __iter__(self) -> Iterator[History]:
        return iter(self._histories.values())

    def copy(self) -> RequestHistory:
        """A read-only copy of the present state, for a paused dashboard."""
        book = RequestHistory()
        for request_id, history in self._histories.items():
            book._histories[request_id] = replace(
                history,
                chunks=history.chunks.copy(),
                preemptions=history.preemptions.copy(),
                run_starts=history.run_starts.copy(),
                run_kinds=history.run_kinds.copy(),
            )
        return book

    def get(self, request_id: str | None) -> History | None:
        return self._histories.get(request_id) if request_id is not None else None

    def add_steps(self, steps: Sequence[StepRecord]) -> None:
        """A step without prompts changes no lane, unless the step before had some."""
        for step in steps:
            if step.prefill_ids or self._in_prefill:
                self.add_step(step)
        self._step_id = steps[-1].step_id

    def add_step(self, step: StepRecord) -> None:
        self._step_id = step.step_id
        names = set(step.prefill_ids)
        for request_id in self._in_prefill - names:
            self._leave_prefill(self._histories[request_id], step.step_id)
        for request_id, num_tokens in zip(step.prefill_ids, step.prefill_tokens, strict=True):
            history = self._history(request_id)
            if history.state is not Doing.OVER:
                history.turn(step.step_id, Doing.PREFILL)
            history.chunks.append(Chunk(step.step_id, num_tokens, step.started_ns, step.ended_ns))
        self._in_prefill = names & self._histories.keys()

    def _leave_prefill(self, history: History, step_id: int) -> None:
        if history.state is Doing.PREFILL:
            history.turn(step_id, Doing.DECODE if history.first_token_ns else Doing.BETWEEN)

    def add_event(self, event: RequestEvent) -> None:
        history = self._history(event.request_id)
        kinds = RequestEventKind
        following = self._step_id + 1
        history.num_prompt_tokens = event.num_prompt_tokens
        history.num_cached_tokens = max(history.num_cached_tokens, event.num_cached_tokens)
        history.num_output_tokens = max(history.num_output_tokens, event.num_output_tokens)
        history.note_drafts(event)
        if event.kind is kinds.QUEUED:
            history.queued_ns, history.params = event.time_ns, event.detail
            history.turn(following, Doing.WAITING)
        elif event.kind is kinds.SCHEDULED:
            history.scheduled_ns = history.scheduled_ns or event.time_ns
            history.found = history.found or event.detail
            # Back after a preemption, with all it had still in the cache, it decodes at once.
            back = bool(history.first_token_ns)
            history.turn(following, Doing.DECODE if back else Doing.BETWEEN)
        elif event.kind is kinds.FIRST_TOKEN:
            history.first_token_ns = history.first_token_ns or event.time_ns
            history.turn(following, Doing.DECODE)
        elif event.kind is kinds.PREEMPTED:
            history.preemptions.append((event.time_ns, event.detail))
            history.turn(following, Doing.PREEMPTED)
        else:
            history.finished_ns, history.reason = event.time_ns, event.detail
            history.turn(following, Doing.OVER)

    def add_snapshot(self, snapshot: EngineSnapshot) -> None:
        """Counts of drafts, and requests that were there before anybody listened."""
        for view in snapshot.requests:
            known = self._histories.get(view.request_id)
            history = known or self._history(view.request_id)
            if view.num_draft_tokens:
                history.note_drafts(view)
            if known is not None:
                continue
            history.num_prompt_tokens = view.num_prompt_tokens
            history.num_cached_tokens = view.num_cached_tokens
            states = {"decode": Doing.DECODE, "prefill": Doing.BETWEEN}
            if view.status == "decode":
                history.first_token_ns = 1  # long ago, at an unknown time
            history.turn(self._step_id + 1, states.get(view.status, Doing.WAITING))

    def _history(self, request_id: str) -> History:
        found = self._histories.get(request_id)
        if found is None:
            found = self._histories[request_id] = History(request_id)
            if len(self._histories) > MAX_REQUESTS:
                self._forget_one()
        return found

    def _forget_one(self) -> None:
        """The oldest that is over; without one, the oldest."""
        over = (h.request_id for h in self._histories.values() if h.state is Doing.OVER)
        request_id = next(over, None) or next(iter(self._histories))
        del self._histories[request_id]
        self._in_prefill.discard(request_id)


def token_times(history: History, steps: Sequence[StepRecord]) -> list[int]:
    """Times of the tokens: the first, then one for each decode in the kept steps."""
    times = [history.first_token_ns] if history.first_token_ns > 1 else []
    for first, end in history.spans(Doing.DECODE, steps[0].step_id if steps else 0):
        begin = bisect_left(steps, first, key=_step_id)
        stop = len(steps) if end is None else bisect_left(steps, end, key=_step_id)
        times += [step.landed_ns or step.applied_ns for step in steps[begin:stop]]
    return times
