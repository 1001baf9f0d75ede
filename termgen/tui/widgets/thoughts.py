"""The thoughts before an answer: open while they are written, then folded to one line."""

from __future__ import annotations

from termgen.tui.formatting import count
from termgen.tui.sanitize import StreamCleaner
from termgen.tui.spans import Row, Span, spread, wrap
from termgen.tui.thoughts import Thought

FOLD_ROLE = "muted@background"
"""Of the line that folds and unfolds them; no text has this role."""
_EDGE: Span = ("│ ", "faint")


class ThoughtRows:
    """Reads a `Thought` that grows. Costs its open line, not its length."""

    def __init__(self, thought: Thought, *, fold_key: str) -> None:
        """`fold_key` opens and folds them."""
        self._thought = thought
        self._fold_key = fold_key
        self._is_open: bool | None = None
        """None until the user has chosen."""
        self._width = 0
        self._reset(0)

    @property
    def is_open(self) -> bool:
        return not self._thought.is_over if self._is_open is None else self._is_open

    def toggle(self) -> None:
        self._is_open = not self.is_open

    def __call__(self, width: int) -> list[Row]:
        thought = self._thought
        if not thought.text:
            return []
        head = self._head(width)
        if not self.is_open:
            return [head]
        if width != self._width:
            self._reset(width)
        self._read()
        return [head, *self._done, *self._wrapped(self._line)]

    def _head(self, width: int) -> Row:
        thought = self._thought
        sign = "▾" if self.is_open else "▸"
        words = "thought for" if thought.is_over else "thinking"
        seconds = f"{thought.seconds:.1f} s"
        left: Span = (f"{sign} {words} {seconds} · {count(thought.num_tokens)} tok", FOLD_ROLE)
        return spread([left], [(self._fold_key, "faint")], width)

    def _reset(self, width: int) -> None:
        self._width = width
        self._cleaner = StreamCleaner()
        self._num_read = 0
        self._line = ""
        self._done: list[Row] = []

    def _read(self) -> None:
        text = self._thought.text
        if self._num_read == len(text):
            return
        *lines, self._line = (self._line + self._cleaner.feed(text[self._num_read :])).split("\n")
        self._num_read = len(text)
        for line in lines:
            self._done += self._wrapped(line)

    def _wrapped(self, line: str) -> list[Row]:
        return [(_EDGE, *row) for row in wrap([(line, "muted")], max(1, self._width - 2))]
