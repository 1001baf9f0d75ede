"""Rows of styled text: what every renderer returns and every canvas draws.

A row is a tuple of spans, a span is `(text, role)`. A role is a name from the palette, optionally
with a background and attributes: `role[@background][/flags]`, flags being any of `b` bold,
`i` italic, `u` underline, `s` strike, `r` reverse. Text that a click opens in a browser has the
address behind a blank at the end of its role. Rows are plain tuples, so they compare fast and
tests can read them. No Textual here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
Row = tuple[Span, ...]

_MANY = map(chr, chain(range(0x20, 0x7F), range(0xA1, 0x180), range(0x2010, 0x2C00)))
_ONE_CELL = re.compile(f"[{re.escape(''.join(char for char in _MANY if cell_len(char) == 1))}]*")
_WORDS = re.compile(r"\n|[^\S\n]+|[^\s]+")


def row_text(row: Sequence[Span]) -> str:
    return "".join([text for text, _ in row])


def is_simple(text: str) -> bool:
    """True if every character surely has one cell; a quick test that may err on the safe side."""
    return text.isascii() or _ONE_CELL.fullmatch(text) is not None


def row_width(row: Sequence[Span]) -> int:
    text = row_text(row)
    return len(text) if is_simple(text) else sum([cell_len(text) for text, _ in row])


def fit(row: Sequence[Span], width: int, fill: str = "text") -> Row:
    """Exactly `width` cells: padded with blanks, or cut with an ellipsis."""
    texts = [text for text, _ in row]
    whole = "".join(texts)
    if len(whole) == width and all(texts) and is_simple(whole):
        return tuple(row)
    lengths = [cell_len(text) for text in texts]
    used = 0
    out: list[Span] = []
    for (text, role), cells in zip(row, lengths, strict=True):
        if used + cells > width:
            room = width - used
            head = cut(text, room) if text.strip() else ""
            out.append((head, role))
            out.append((" " * (room - cell_len(head)), fill))
            return tuple(span for span in out if span[0])
        if text:
            out.append((text, role))
        used += cells
    if used < width:
        out.append((" " * (width - used), fill))
    return tuple(out)


def cut(text: str, width: int) -> str:
    """The text in at most `width` cells, with an ellipsis in the last one if something was cut
    off."""
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1).rstrip() + "…"


def spread(left: Sequence[Span], right: Sequence[Span], width: int, fill: str = "text") -> Row:
    """`left` and `right` at the two ends of a row; `left` gives way when both do not fit."""
    right_width = sum(cell_len(text) for text, _ in right)
    if right_width >= width:
        return fit(right, width, fill)
    room = width - right_width - 1
    return (*fit(left, room, fill), (" ", fill), *(s for s in right if s[0]))


def merge(spans: Iterable[Span]) -> Row:
    """Join neighbours of one role, so that a row has as few spans as it can."""
    out: list[Span] = []
    for text, role in spans:
        if not text:
            continue
        if out and out[-1][1] == role:
            out[-1] = (out[-1][0] + text, role)
        else:
            out.append((text, role))
    return tuple(out)


def _words(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Kinds 'word', 'space', 'break'; a word may be made of several spans."""
    word: list[Span] = []
    for text, role in spans:
        for match in _WORDS.finditer(text):
            piece = match.group()
            if piece == "\n" or piece.isspace():
                if word:
                    yield "word", word
                    word = []
                yield ("break" if piece == "\n" else "space"), [(piece, role)]
            else:
                word.append((piece, role))
    if word:
        yield "word", word


def wrap(spans: Iterable[Span], width: int) -> list[Row]:
    """Word-wrap to `width` cells; words longer than a line are broken; `\\n` breaks the line."""
    width, spans = max(1, width), list(spans)
    return [merge(spans)] if _is_a_line(spans, width) else _wrap(spans, width)


def _wrap(spans: Sequence[Span], width: int) -> list[Row]:
    rows: list[Row] = []
    line: list[Span] = []
    space: list[Span] = []
    used = 0

    def flush() -> None:
        nonlocal line, used, space
        rows.append(merge(line))
        line, space, used = [], [], 0

    for kind, piece in _words(spans):
        if kind == "break":
            flush()
            continue
        if kind == "space":
            space = piece
            continue
        cells = sum(cell_len(text) for text, _ in piece)
        gap = sum(cell_len(text) for text, _ in space)
        if used and used + gap + cells > width:
            flush()
            gap = 0
        if space and gap and used + gap + cells <= width:
            line.extend(space)
            used += gap
        space = []
        if cells <= width:
            line.extend(piece)
            used += cells
            continue
        for text, role in piece:
            while text:
                head, text = split_cells(text, width - used)
                if not head and used == 0:  # one glyph wider than the line
                    head, text = text[0], text[1:]
                if head:
                    line.append((head, role))
                    used += cell_len(head)
                if text:
                    flush()
    if line or not rows:
        flush()
    return rows


def _is_a_line(spans: Sequence[Span], width: int) -> bool:
    """True if the text needs no wrapping."""
    text = "".join(text for text, _ in spans)
    return "\n" not in text and text == text.rstrip() and row_width(spans) <= width


def wrap_hard(spans: Iterable[Span], width: int) -> list[Row]:
    """Break at the cell where the line is full, as for code: blanks are kept."""
    width, spans = max(1, width), list(spans)
    if row_width(spans) <= width:
        return [merge(spans)]
    rows: list[Row] = []
    line: list[Span] = []
    used = 0
    for text, role in spans:
        while text:
            head, text = split_cells(text, width - used)
            if not head and used == 0:
                head, text = text[0], text[1:]
            if head:
                line.append((head, role))
                used += cell_len(head)
            if text:
                rows.append(merge(line))
                line, used = [], 0
    rows.append(merge(line))
    return rows


def split_cells(text: str, width: int) -> tuple[str, str]:
    """The longest head of `text` within `width` cells, and the rest."""
    if width <= 0:
        return "", text
    if cell_len(text) <= width:
        return text, ""
    if text.isascii():
        return text[:width], text[width:]
    used = 0
    for index, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return text[:index], text[index:]
    return text, ""
