"""Admission: a limit on the requests that wait, checked before any work is spent on a request.

A completion waits from its admission until the engine starts to compute it: the engine's events
report that, and the completion's first token at the latest. `Generation` takes a `Ticket` for each
HTTP request and gives it back. Work that only turns text into tokens, or back, waits until it is
over: `place`. Refusals say when to try again, from the recent rate of starts. A second limit is the
memory that large bodies hold. Owned by the event loop; knows nothing of HTTP or tokenizers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from termgen.api.job import Job
from termgen.client import ChatPrompt, FillPrompt, Prompt, prompt_chars
from termgen.config import ServerConfig
from termgen.errors import OverloadedError
from termgen.vocabulary.events import EngineEvent, RequestEvent, RequestEventKind, StepRecord

RATE_WINDOW_S = 30.0
"""Starts within this time count for the rate."""
MAX_RETRY_AFTER_S = 60.0
MIN_RETRY_AFTER_S = 0.1
UNKNOWN_RETRY_AFTER_S = 5.0
"""Used when nothing was started within the window."""

FIRST_CHARS_PER_TOKEN = 4.0
RATIO_WEIGHT = 0.05
"""Weight of the newest request in the running mean of characters per token."""

_QUEUED, _SCHEDULED = RequestEventKind.QUEUED, RequestEventKind.SCHEDULED

_RENAMED = re.compile(r"~\d+$")
"""Suffix that the engine appends to an id that is still in use."""

SMALL_BODY_BYTES = 2**15
"""A body of this size is parsed within a millisecond whatever it holds."""
BODY_RETRY_AFTER_S = 1.0
"""Most large bodies are parsed within this time."""


class Ticket:
    """The place of one HTTP request. It must be closed in any case."""

    __slots__ = ("_admission", "_begun", "_num_ended", "_sizes", "_timer", "_tokens")

    def __init__(self, admission: AdmissionControl, jobs: Sequence[Job]) -> None:
        self._admission = admission
        self._sizes = {job.request_id: job.params.n if job.generates else 1 for job in jobs}
        self._begun: set[tuple[str, int]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._num_ended = 0
        self._tokens = {job.request_id: admission.estimate(job.prompt) for job in jobs}

    @property
    def job_ids(self) -> Iterable[str]:
        return self._sizes

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompts: estimates, until they have been tokenised."""
        return sum(self._tokens.values())

    @property
    def num_waiting(self) -> int:
        return sum(self._sizes.values()) - len(self._begun)

    @property
    def num_seated(self) -> int:
        return len(self._begun) - self._num_ended

    @property
    def has_begun(self) -> bool:
        """True once the engine computes, or has computed, a part of the request."""
        return bool(self._begun)

    def begin(self, job_id: str, index: int) -> None:
        """Note that a completion has left the queue. May be called more than once."""
        key = (job_id, index)
        if key not in self._begun and index < self._sizes.get(job_id, 0):
            self._begun.add(key)
            self._admission.on_begin(self)

    def end(self, job_id: str, index: int) -> None:
        """Note the end of a completion that had begun: its seat is free again."""
        if index < self._sizes.get(job_id, 0):
            self._num_ended += 1

    def measured(self, job_id: str, num_tokens: int) -> None:
        """Note a prompt's length, now that it has been tokenised. May be called more than once."""
        before, self._tokens[job_id] = self._tokens[job_id], num_tokens
        if self.num_waiting:
            self._admission.on_measured(num_tokens - before)

    def limit_wait(self, fail: Callable[[OverloadedError], None]) -> None:
        """Call `fail` if the request still waits as a whole when its time is over."""
        limit_s = self._admission.max_time_s
        if limit_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limit_s, self._on_time, fail)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._admission.on_close(self)

    def _on_time(self, fail: Callable[[OverloadedError], None]) -> None:
        self._admission.look()
        if not self.has_begun:
            fail(self._admission.waited_too_long())


class AdmissionControl:
    """The tickets of one server."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        drain_events: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """`drain_events` makes the caller pass the engine's published events to `on_events`."""
        self._max_queue = config.max_queue
        self._max_tokens = config.max_queue_tokens
        self.max_time_s = config.max_queue_time
        self.look = drain_events
        self._on_refused = on_refused
        self.num_seats = 0
        """Completions the engine can run at once, 0 while that is not known."""
        self._open: set[Ticket] = set()
        self._by_job: dict[str, Ticket] = {}
        self._num_waiting = 0
        self._tokens_waiting = 0
        self._newest: StepRecord | None = None
        self._begun_at: deque[float] = deque(maxlen=256)
        self._chars_per_token = FIRST_CHARS_PER_TOKEN

    @property
    def is_full(self) -> bool:
        return self._is_full(1)

    def check_room(self) -> None:
        """Refuse before a body is read what `admit` would refuse."""
        if self._is_full(1):
            raise self._queue_full(1)

    @contextmanager
    def place(self, num_tokens: int) -> Iterator[None]:
        """A place in the queue for work with these tokens that takes no step of the engine."""
        self._check(1, num_tokens)
        self._num_waiting += 1
        self._tokens_waiting += num_tokens
        try:
            yield
        finally:
            self._num_waiting -= 1
            self._tokens_waiting -= num_tokens
            self._begun_at.append(time.monotonic())

    def admit(self, jobs: Sequence[Job]) -> Ticket:
        """A place for all of these jobs. Tokenises nothing. Raises `OverloadedError`."""
        ticket = Ticket(self, jobs)
        self._check(ticket.num_waiting, ticket.num_tokens)
        self._open.add(ticket)
        self._by_job.update(dict.fromkeys(ticket.job_ids, ticket))
        self._num_waiting += ticket.num_waiting
        self._tokens_waiting += ticket.num_tokens
        return ticket

    def on_begin(self, ticket: Ticket) -> None:
        self._num_waiting -= 1
        self._begun_at.append(time.monotonic())
        if not ticket.num_waiting:
            self._tokens_waiting -= ticket.num_tokens

    def on_measured(self, num_more: int) -> None:
        self._tokens_waiting += num_more

    def on_close(self, ticket: Ticket) -> None:
        if ticket not in self._open:
            return
        self._open.remove(ticket)
        for job_id in ticket.job_ids:
            self._by_job.pop(job_id, None)
        if ticket.num_waiting:
            self._num_waiting -= ticket.num_waiting
            self._tokens_waiting -= ticket.num_tokens

    def on_events(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, StepRecord):
                self._newest = event
            elif self._by_job and event.kind in (_QUEUED, _SCHEDULED):
                self._on_news(event)

    def on_prompt(self, prompt: Prompt, num_tokens: int) -> None:
        """Note the length of a tokenised prompt."""
        if num_tokens and isinstance(prompt, (str, ChatPrompt, FillPrompt)):
            ratio = min(16.0, max(0.5, prompt_chars(prompt) / num_tokens))
            self._chars_per_token += RATIO_WEIGHT * (ratio - self._chars_per_token)

    def estimate(self, prompt: Prompt) -> int:
        """Estimated tokens of a prompt, without tokenising."""
        if isinstance(prompt, (str, ChatPrompt, FillPrompt)):
            return int(prompt_chars(prompt) / self._chars_per_token) + 1
        return len(prompt)

    def waited_too_long(self) -> OverloadedError:
        return self._refusal(
            "queue_timeout",
            f"The request waited {self.max_time_s:g} s without being started",
            num_over=max(1, self._num_waiting),
        )

    def _on_news(self, event: RequestEvent) -> None:
        """Note news of a completion. The engine calls a single one `ID`, one of several
        `ID-INDEX`."""
        job_id, index = _RENAMED.sub("", event.request_id), "0"
        ticket = self._by_job.get(job_id)
        if ticket is None:
            job_id, _, index = job_id.rpartition("-")
            ticket = self._by_job.get(job_id)
        if ticket is None or not index.isdigit():
            return
        if event.kind is _QUEUED:
            ticket.measured(job_id, event.num_prompt_tokens)
        else:
            ticket.begin(job_id, int(index))

    def _check(self, num_new: int, num_tokens: int) -> None:
        """Raises `OverloadedError` where there is no room for these."""
        if self._is_full(num_new):
            raise self._queue_full(num_new)
        limit = self._max_tokens
        if limit and self._tokens_waiting and self._tokens_waiting + num_tokens > limit:
            self.look()
            if self._tokens_waiting and self._tokens_waiting + num_tokens > limit:
                raise self._refusal(
                    "queue_tokens_full",
                    f"{self._tokens_waiting} prompt tokens wait already, and at most {limit} may",
                    num_over=1,
                )

    def _is_full(self, num_new: int) -> bool:
        # a server without a queue admits any size: the engine checks it
        limit = self._max_queue
        if not limit or not self._num_waiting or self._num_waiting + num_new <= limit:
            return False
        self.look()
        return bool(self._num_waiting) and self._num_waiting + num_new > limit + self._num_free()

    def _num_free(self) -> int:
        """Seats that waiting completions can take at once."""
        if self._newest is not None and self._newest.num_waiting:
            return 0  # if seats are free, memory is not
        return max(0, self.num_seats - sum(ticket.num_seated for ticket in self._open))

    def _queue_full(self, num_new: int) -> OverloadedError:
        num_over = self._num_waiting + num_new - self._max_queue - self._num_free()
        return self._refusal(
            "queue_full",
            f"{self._num_waiting} completions wait already, and at most {self._max_queue} may",
            num_over=num_over,
        )

    def _refusal(self, code: str, message: str, *, num_over: int) -> OverloadedError:
        self._on_refused(code)
        after_s = self._seconds_for(num_over)
        return OverloadedError(
            f"{message}; try again in {after_s:.1f} s", code=code, retry_after_s=after_s
        )

    def _seconds_for(self, num_starts: int) -> float:
        """Seconds that so many starts take, at the recent rate."""
        now = time.monotonic()
        while self._begun_at and now - self._begun_at[0] > RATE_WINDOW_S:
            self._begun_at.popleft()
        if len(self._begun_at) < 2:
            return UNKNOWN_RETRY_AFTER_S
        rate = len(self._begun_at) / max(1e-3, now - self._begun_at[0])
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, num_starts / rate))


# -- memory for bodies ---------------------------------------------------------------------


class BodyMemory:
    """Memory for the large bodies of all requests, from their first byte until they are parsed.
    Small bodies always fit: a client that sends large ones cannot keep others out."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: 0 for no limit."""
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes that large bodies hold now."""

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """The memory of one body."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_held

    def take(self, num_bytes: int) -> None:
        """Raises `OverloadedError` where there is no room for these."""
        if self._max_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"Large request bodies hold {self.num_bytes} bytes already, and at most "
                f"{self._max_bytes} may be held; try again in {BODY_RETRY_AFTER_S:g} s",
                code="bodies_full",
                retry_after_s=BODY_RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes


class BodyShare:
    """The memory that one body holds."""

    def __init__(self, room: BodyMemory) -> None:
        self._room = room
        self.num_bytes = self.num_held = 0
        """Bytes that arrived, and those of them that count."""

    @property
    def is_small(self) -> bool:
        return self.num_bytes <= SMALL_BODY_BYTES

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if not self.is_small:
            self._room.take(self.num_bytes - self.num_held)
            self.num_held = self.num_bytes
