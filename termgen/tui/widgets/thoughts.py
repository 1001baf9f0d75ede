"""The thoughts before an answer: open while they stream, then folded to one line."""

from __future__ import annotations

from functools import partial

from termgen.tui.formatting import count
from termgen.tui.parts import (
    PART_CHARS,
    Job,
    Part,
    indented,
    job_for,
    lay_out,
    num_chars_to_do,
    rows_of,
)
from termgen.tui.sanitize import StreamCleaner
from termgen.tui.spans import Row, Span, spread, wrap
from termgen.tui.thoughts import Thought

FOLD_ROLE = "muted@background"
"""Role of the line that folds and unfolds the thoughts; no text uses it."""
_EDGE: Span = ("│ ", "faint")


class ThoughtRows:
    """Reads a growing `Thought`. Work is proportional to what is open, not to the length."""

    def __init__(self, thought: Thought, *, fold_key: str, before: Row = ()) -> None:
        """`fold_key` folds and unfolds; `before` precedes every row."""
        self._thought = thought
        self._fold_key = fold_key
        self._before = before
        self._is_open: bool | None = None
        """None until the user has chosen."""
        self._cleaner = StreamCleaner()
        self._num_read = 0
        self._line = ""
        """The last, unfinished line."""
        self._parts: list[Part] = []
        self._lines = ""
        """Finished lines of the last part."""

    @property
    def is_open(self) -> bool:
        return not self._thought.is_over if self._is_open is None else self._is_open

    def toggle(self) -> None:
        self._is_open = not self.is_open

    def num_chars_to_do(self, width: int) -> int:
        if not self.is_open:
            return 0
        self._read()
        return num_chars_to_do(self._parts, width)

    def job(self, width: int) -> Job | None:
        return job_for(self._parts, width) if self.is_open else None

    def __call__(self, width: int, *, at_once: int | None = None) -> list[Row]:
        """Lay out up to `at_once` characters now; the rest keeps its old rows until a `job` has
        run."""
        thought = self._thought
        if not thought.text:
            return []
        head = (*self._before, *self._head(width))
        if not self.is_open:
            return [head]
        self._read()
        lay_out(self._parts, width, at_once)
        return [head, *rows_of(self._parts), *indented(_wrapped(self._line, width), self._before)]

    def _head(self, width: int) -> Row:
        thought = self._thought
        sign = "▾" if self.is_open else "▸"
        words = "thought for" if thought.is_over else "thinking"
        seconds = f"{thought.seconds:.1f} s"
        left: Span = (f"{sign} {words} {seconds} · {count(thought.num_tokens)} tok", FOLD_ROLE)
        return spread([left], [(self._fold_key, "faint")], width)

    def _read(self) -> None:
        text = self._thought.text
        if self._num_read == len(text):
            return
        *lines, self._line = (self._line + self._cleaner.feed(text[self._num_read :])).split("\n")
        self._num_read = len(text)
        for line in lines:
            if not self._parts or self._parts[-1].num_chars >= PART_CHARS:
                self._lines = ""
                self._parts.append(Part(partial(_wrapped, ""), 0, before=self._before))
            self._lines += f"{line}\n"
            self._parts[-1].change(partial(_wrapped, self._lines[:-1]), len(self._lines))


def _wrapped(lines: str, width: int) -> list[Row]:
    room = max(1, width - 2)
    return [(_EDGE, *row) for line in lines.split("\n") for row in wrap([(line, "muted")], room)]
