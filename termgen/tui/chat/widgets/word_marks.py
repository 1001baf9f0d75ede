"""The words of a search, marked where they stand in the transcript.

They are marked in rows that are laid out already, as these become strips: laying out text, and a
stream, have nothing to do with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from termgen.tui.paint.spans import Row, Span, row_text

MARK = "warn/r"
"""Reversed, so that it shows without colours too."""
FOLD_GROUND = "@background"
"""In the role of lines that fold and unfold: they are termgen's words."""


class WordMarks:
    def __init__(self, words: Sequence[str], entries: Collection[object]) -> None:
        """words: in whatever case, parts of words too. entries: where they are marked."""
        longest_first = sorted(words, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)
        self.entries = entries
        self.is_shown = False
        """The first marked word has been brought into view."""

    def is_in(self, row: Row) -> bool:
        return not _folds(row) and self._pattern.search(row_text(row)) is not None

    def on(self, row: Row) -> Row:
        """The row with its words marked, those too that are in several styles."""
        if not self.is_in(row):
            return row
        found = [match.span() for match in self._pattern.finditer(row_text(row))]
        marked: list[Span] = []
        start = 0
        for text, role in row:
            at, end = start, start + len(text)
            for first, last in found:
                a, b = max(at, first), min(end, last)
                if a < b:
                    marked += [(text[at - start : a - start], role)]
                    marked += [(text[a - start : b - start], _marked(role))]
                    at = b
            marked.append((text[at - start :], role))
            start = end
        return tuple(span for span in marked if span[0])


def _marked(role: str) -> str:
    """An address of a link stays."""
    _, blank, address = role.partition(" ")
    return MARK + blank + address


def _folds(row: Row) -> bool:
    return any(role.endswith(FOLD_GROUND) for _, role in row)
