"""An answer in the scrollback: markdown on a terminal, plain text elsewhere. No Textual.

What is finished is printed once and stays; only the block that still grows is drawn again, in its
place. Colours are the terminal's own sixteen, since its background is not ours to choose.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from termgen.tui.paint.markdown_stream import StreamingMarkdown
from termgen.tui.paint.sanitize import StreamCleaner
from termgen.tui.paint.spans import Row, row_text, row_width

MAX_WIDTH = 100
REDRAW_S = 1 / 15
MARGIN_ROWS = 2
"""Rows of the screen that the growing block leaves free: what has scrolled away cannot be redrawn.
"""

_COLOURS = {
    "muted": "2",
    "faint": "2",
    "border": "2",
    "accent": "36",
    "heading": "36",
    "link": "34",
    "warn": "33",
    "bad": "31",
    "syn-keyword": "35",
    "syn-string": "32",
    "syn-number": "33",
    "syn-comment": "2",
    "syn-function": "34",
    "syn-type": "36",
}
_FLAGS = {"b": "1", "i": "3", "u": "4", "r": "7", "s": "9"}
_DIM = "2"


class AnswerWriter(Protocol):
    """Takes the pieces of one answer."""

    def feed(self, text: str) -> None: ...

    def close(self, footer: str = "") -> None:
        """The end; `footer` is for people."""
        ...


class PlainWriter:
    """Writer for pipes and files (the text as it is), and for terminals that take only lines
    (without control characters)."""

    def __init__(self, stream: TextIO, *, is_cleaned: bool = False) -> None:
        self._stream = stream
        self._cleaner = StreamCleaner() if is_cleaned else None
        self._ends_line = True

    def feed(self, text: str) -> None:
        if self._cleaner is not None:
            text = self._cleaner.feed(text)
        self._write(text)

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
            self._ends_line = text.endswith("\n")

    def close(self, footer: str = "") -> None:
        if self._cleaner is not None:
            self._write(self._cleaner.finish())
        if not self._ends_line:
            self._stream.write("\n")
        self._stream.flush()


class MarkdownWriter:
    """Writer for a terminal. `close` leaves the whole answer above the cursor."""

    def __init__(
        self,
        stream: TextIO,
        *,
        colour: bool = True,
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._colour = colour
        self._size = size
        self._clock = clock
        self._width = max(1, min(MAX_WIDTH, size()[0] - 1))  # the last column would wrap
        self._markdown = StreamingMarkdown()
        self._cleaner = StreamCleaner()
        self._num_printed = 0
        self._shown: Sequence[Row] = ()
        """Rows below what is printed, to be drawn over."""
        self._drawn_s = float("-inf")

    def feed(self, text: str) -> None:
        self._markdown.append(self._cleaner.feed(text))
        if self._clock() - self._drawn_s >= REDRAW_S:
            self._draw()

    def close(self, footer: str = "") -> None:
        self._markdown.append(self._cleaner.finish())
        self._markdown.finish()
        self._draw()
        if footer:
            self._stream.write(self._painted(((footer, "muted"),)) + "\n")
        self._stream.flush()

    def _draw(self) -> None:
        rows = self._markdown.rows(self._width)
        num_frozen = self._markdown.num_frozen_rows
        columns, lines = self._size()
        tail = rows[num_frozen:][-max(1, lines - MARGIN_ROWS) :]
        fresh = [*rows[self._num_printed : num_frozen], *tail]
        self._stream.write(self._erase(columns) + "".join(self._painted(r) + "\n" for r in fresh))
        self._stream.flush()
        self._num_printed, self._shown = num_frozen, tail
        self._drawn_s = self._clock()

    def _erase(self, columns: int) -> str:
        """Back to where the growing block begins. A narrower window has broken its rows."""
        height = sum(max(1, -(-_used(row) // max(1, columns))) for row in self._shown)
        return f"\x1b[{height}A\x1b[J" if height else ""

    def _painted(self, row: Row) -> str:
        """The row with colours, without blanks at its end: a copy would include them."""
        spans = [*row]
        while spans and not spans[-1][0].strip(" "):
            spans.pop()
        if spans:
            spans[-1] = (spans[-1][0].rstrip(" "), spans[-1][1])
        return "".join(self._span(text, role) for text, role in spans)

    def _span(self, text: str, role: str) -> str:
        name, _, flags = role.partition(" ")[0].partition("/")
        codes = [_FLAGS[flag] for flag in flags]
        colour = _COLOURS.get(name.partition("@")[0])
        if colour is not None and (self._colour or colour == _DIM):
            codes.append(colour)
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes else text


def _used(row: Row) -> int:
    """Cells, without blanks at the end."""
    text = row_text(row)
    return row_width(row) - (len(text) - len(text.rstrip(" ")))


def writer_for(stream: TextIO, *, no_color: bool, is_dumb: bool = False) -> AnswerWriter:
    if is_dumb and stream.isatty():
        return PlainWriter(stream, is_cleaned=True)
    if stream.isatty():
        return MarkdownWriter(stream, colour=not no_color)
    return PlainWriter(stream)
