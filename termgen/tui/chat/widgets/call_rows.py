"""Rows of tool calls in the transcript: a line for each, folded over its arguments and result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from termgen.tools.calls import CallState, ToolCall, arguments_of
from termgen.tools.text import amount
from termgen.tui.paint.formatting import duration
from termgen.tui.paint.parts import (
    PART_CHARS,
    Job,
    Part,
    job_for,
    lay_out,
    num_chars_to_do,
    rows_of,
)
from termgen.tui.paint.sanitize import clean, clean_line
from termgen.tui.paint.spans import Row, Span, cut, row_width, spread, wrap

CALL_ROLE = "muted call:"
"""Beginning of the role of a call's line, which can be clicked; its number follows."""
MAX_SHOWN_CHARS = 20_000
"""Characters of a result, and of arguments, that are shown; the store has all."""
MAX_HEAD_CHARS = 400
_EDGE: Span = ("│ ", "faint")
_SIGNS = {
    CallState.WRITTEN: ("…", "muted", "written"),
    CallState.ASKED: ("?", "warn", "waits for your word"),
    CallState.RUNNING: ("…", "accent", "running"),
    CallState.DONE: ("✓", "good", ""),
    CallState.FAILED: ("✗", "bad", "failed"),
    CallState.DENIED: ("■", "warn", "denied"),
    CallState.CANCELLED: ("■", "warn", "stopped"),
}


class CallRows:
    """A list of calls that may grow. Work is proportional to what is open."""

    def __init__(self, calls: Sequence[ToolCall], *, fold_key: str, first: int = 0) -> None:
        """fold_key: folds and unfolds. first: number of the first call in its answer."""
        self._calls = calls
        self._fold_key = fold_key
        self._first = first
        self._open: set[int] = set()
        self._bodies: dict[int, tuple[tuple[CallState, int], list[Part]]] = {}
        """Place of an open call -> what it was laid out from, and its parts."""

    def __len__(self) -> int:
        return len(self._calls)

    def has(self, number: int) -> bool:
        return self._first <= number < self._first + len(self._calls)

    def toggle(self, number: int) -> None:
        self._open ^= {number - self._first}

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def fold_all(self, is_open: bool) -> None:
        self._open = set(range(len(self._calls))) if is_open else set()

    def num_chars_to_do(self, width: int) -> int:
        return sum(num_chars_to_do(parts, width) for parts in self._parts())

    def job(self, width: int) -> Job | None:
        return next((job for parts in self._parts() if (job := job_for(parts, width))), None)

    def _parts(self) -> list[list[Part]]:
        return [self._body(place) for place in sorted(self._open) if place < len(self._calls)]

    def __call__(self, width: int, *, at_once: int | None = None) -> list[Row]:
        rows: list[Row] = []
        for place, call in enumerate(self._calls):
            rows.append(self._head(place, call, width))
            if place in self._open:
                parts = self._body(place)
                at_once = lay_out(parts, width, at_once)
                rows += rows_of(parts)
        return rows

    def _head(self, place: int, call: ToolCall, width: int) -> Row:
        sign, role, word = _SIGNS[call.state]
        link = f"{CALL_ROLE}{place + self._first}"
        fold: Span = (f"{'▾' if place in self._open else '▸'} ", link)
        words = [word] if word else []
        if call.state in (CallState.DONE, CallState.FAILED):
            words.append(duration(call.seconds))
        if call.state is CallState.DONE:
            words.append(f"{amount(len(call.result))} chars")
        end: list[Span] = [(f"{sign} ", role), (" · ".join(words), "muted")]
        if place == 0:
            end.append((f"  {self._fold_key}", "faint"))
        name = clean_line(call.name[:MAX_HEAD_CHARS])
        arguments = clean_line(call.arguments[:MAX_HEAD_CHARS])
        room = max(8, width - row_width((fold,)) - row_width(tuple(end)) - 2)
        shown = cut(f"{name} {arguments}", room)
        left: list[Span] = [fold, (shown[: len(name)], link.replace("muted", "text", 1))]
        left.append((shown[len(name) :], link))
        return spread(left, end, width)

    def _body(self, place: int) -> list[Part]:
        call = self._calls[place]
        made_of = (call.state, len(call.arguments))
        known = self._bodies.get(place)
        if known is None or known[0] != made_of:
            known = self._bodies[place] = (made_of, _parts_of(call))
        return known[1]


def _parts_of(call: ToolCall) -> list[Part]:
    arguments = call.arguments
    if len(arguments) < MAX_SHOWN_CHARS and (parsed := arguments_of(arguments)):
        arguments = json.dumps(parsed, indent=2, ensure_ascii=False)
    parts = _chunks(arguments, "text")
    if call.result:
        parts += [Part(partial(_wrapped, "", "muted"), 1), *_chunks(call.result, "muted")]
    return parts


def _chunks(text: str, role: str) -> list[Part]:
    """Parts of whole lines where lines are short, of the text that is shown."""
    more = len(text) - MAX_SHOWN_CHARS
    shown = clean(text[:MAX_SHOWN_CHARS])
    parts = []
    while shown:
        end = shown.rfind("\n", 0, PART_CHARS) + 1 or PART_CHARS
        piece, shown = shown[:end], shown[end:]
        parts.append(Part(partial(_wrapped, piece.removesuffix("\n"), role), len(piece)))
    if more > 0:
        parts.append(Part(partial(_wrapped, f"... {amount(more)} more", "faint"), 1))
    return parts


def _wrapped(lines: str, role: str, width: int) -> list[Row]:
    room = max(1, width - 4)
    edge: Row = (("  ", "text"), _EDGE)
    return [(*edge, *row) for line in lines.split("\n") for row in wrap([(line, role)], room)]
