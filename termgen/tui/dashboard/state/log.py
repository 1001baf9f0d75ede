"""The log of the dashboard: what the events tell worth a line, and what this process has logged.

`LogBook` keeps the newest lines, `LogTap` brings records of Python's logging from any thread. The
text of requests is in neither. No Textual.
"""

from __future__ import annotations

import enum
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from termgen.tui.paint.formatting import plural, took
from termgen.vocabulary.events import RequestEvent, RequestEventKind, StepRecord

KEPT = 4096
"""Lines kept below WARNING, and as many others: a busy engine logs thousands a minute, and an error
must outlast them."""
TAPPED = 1024
MAX_CHARS = 4096
"""Characters kept of a logged line; the rest cannot be searched."""
SLOW_STEP_NS = 1_000_000_000
LOGGERS = ("termgen", "uvicorn")


class Level(enum.IntEnum):
    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3


class Line(NamedTuple):
    time_ns: int
    level: Level
    text: str
    number: int = 0
    """Position in the book."""


_number = attrgetter("number")


class LogBook:
    """Lines in the order in which they came."""

    def __init__(self) -> None:
        self._num_lines = 0
        self._usual: deque[Line] = deque(maxlen=KEPT)
        self._serious: deque[Line] = deque(maxlen=KEPT)
        self._late_compiles: int | None = None
        self._corrupted: int | None = None
        self._reason = ""
        self._asked: tuple[Level, str, int] | None = None
        """The last search, and the number of lines searched; every frame asks for it."""
        self._found: list[Line] = []

    def add(self, line: Line) -> None:
        lines = self._serious if line.level >= Level.WARNING else self._usual
        self._num_lines += 1
        lines.append(line._replace(number=self._num_lines))

    def add_steps(self, steps: Iterable[StepRecord]) -> None:
        """Most are worth no line."""
        for step in steps:
            if (
                step.ended_ns - step.started_ns >= SLOW_STEP_NS
                or step.num_late_compiles != self._late_compiles
                or step.num_corrupted != self._corrupted
                or (step.graph_reason and step.graph_reason != self._reason)
            ):
                self.add_step(step)

    def add_step(self, step: StepRecord) -> None:
        took_ms = (step.ended_ns - step.started_ns) / 1e6
        if step.ended_ns - step.started_ns >= SLOW_STEP_NS:
            tokens = step.num_decode_rows + step.num_prefill_tokens
            text = f"step {step.step_id} took {took(took_ms)} for {plural(tokens, 'token')}"
            self.add(Line(step.applied_ns, Level.WARNING, text))
        before, self._late_compiles = self._late_compiles, step.num_late_compiles
        if step.num_late_compiles > (before or 0):
            text = f"kernels compiled while serving: {step.num_late_compiles} since the start"
            self.add(Line(step.applied_ns, Level.ERROR, text))
        before, self._corrupted = self._corrupted, step.num_corrupted
        if step.num_corrupted > (before or 0):
            text = f"requests whose logits were NaN: {step.num_corrupted} since the start"
            self.add(Line(step.applied_ns, Level.ERROR, text))
        if step.graph_reason and step.graph_reason != self._reason:
            text = f"step {step.step_id} ran {step.graph_mode}: {step.graph_reason}"
            self.add(Line(step.applied_ns, Level.DEBUG, text))
        self._reason = step.graph_reason or self._reason

    def add_event(self, event: RequestEvent) -> None:
        kinds, name = RequestEventKind, event.request_id
        level, text = Level.DEBUG, f"{name} {event.kind.value.replace('_', ' ')}"
        if event.kind is kinds.QUEUED:
            text += f", {plural(event.num_prompt_tokens, 'prompt token')}"
        elif event.kind is kinds.SCHEDULED and event.num_cached_tokens:
            text += f", {plural(event.num_cached_tokens, 'prompt token')} found in the cache"
        elif event.kind is kinds.PREEMPTED:
            level, text = Level.WARNING, f"{name} preempted: {event.detail}"
        elif event.kind is kinds.FINISHED:
            level = Level.ERROR if event.detail == "error" else Level.INFO
            text = f"{name} finished: {event.detail}, {plural(event.num_output_tokens, 'token')}"
        self.add(Line(event.time_ns, level, text))

    def matching(self, level: Level, words: str, until_ns: int) -> Sequence[Line]:
        """Lines of at least this level, with these words in them, up to a moment."""
        asked = (level, words.casefold(), self._num_lines)
        if asked != self._asked:
            self._asked, self._found = asked, self._search(level, words.casefold())
        if all(line.time_ns <= until_ns for line in self._found):
            return self._found
        return [line for line in self._found if line.time_ns <= until_ns]

    def _search(self, level: Level, wanted: str) -> list[Line]:
        books = (self._usual, self._serious) if level < Level.WARNING else (self._serious,)
        found = [
            line
            for lines in books
            for line in lines
            if line.level >= level and (not wanted or wanted in line.text.casefold())
        ]
        found.sort(key=_number)
        return found


class LogScroll:
    """Scroll position among the lines that pass the filter: at the newest, or at fixed lines, which
    stay in view while others arrive."""

    def __init__(self) -> None:
        self._last: int | None = None
        """Number of the last line in view; None: whichever is the newest."""
        self._by = 0

    def move(self, by: int) -> None:
        """Towards newer lines, or for less than 0 towards older ones."""
        self._by += by

    def follow(self) -> None:
        self._last, self._by = None, 0

    def end(self, lines: Sequence[Line], room: int) -> int:
        """The place in `lines` behind the last one in view."""
        total = len(lines)
        end = total
        if self._last is not None:
            end = bisect_right(lines, self._last, key=_number)
        end = min(total, max(end + self._by, min(room, total)))
        self._last = None if end == total else lines[end - 1].number
        self._by = 0
        return end


class LogTap(logging.Handler):
    """Collects what this process logs, from any thread, until `drain`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._waiting: deque[Line] = deque(maxlen=TAPPED)
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        level = Level.ERROR if record.levelno >= logging.ERROR else Level.INFO
        if logging.WARNING <= record.levelno < logging.ERROR:
            level = Level.WARNING
        try:
            text = " ".join(_shortened(record.getMessage()).split())
        except Exception:  # logging must not stop its caller, which may be the engine
            self.handleError(record)
            return
        self._waiting.append(Line(time.perf_counter_ns(), level, f"{record.name}: {text}"))

    def drain(self) -> list[Line]:
        lines: list[Line] = []
        while self._waiting:
            lines.append(self._waiting.popleft())
        return lines

    def close(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)
        super().close()


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]}… ({len(text):,} characters)"
