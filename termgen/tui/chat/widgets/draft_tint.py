"""The guessed parts of an answer, tinted where they stand in its rows.

Markdown is laid out as ever, and the words of the rows are looked for in its source, in order: what
lies in a guessed part gets another background. Rows that stay cost nothing again. A word that is
not found is not tinted (an escape, an entity); bullets, frames and headers of code have no place in
the source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from termgen.client import TokenDelta
from termgen.tui.paint.palette import DRAFTED
from termgen.tui.paint.spans import Row, Span, merge

Ranges = Sequence[tuple[int, int]]
_WORD = re.compile(r"\S+")
NEAR, FAR = 48, 400
"""Characters of markup that may lie before a word, and before a long one, which is found again by
accident less often."""
LONG_WORD = 6
NO_TEXT = frozenset(("accent", "border", "faint"))
"""Roles of what markdown puts around a text."""
HEADER = "muted@code"


def drafted_in(piece: str, delta: TokenDelta) -> Ranges:
    """Places of the guessed parts of a delta's text in a piece of it; none in one that was held
    back, whose place is not known."""
    if not delta.drafted or not piece:
        return ()
    at = delta.text.rfind(piece)
    if at < 0:
        return ()
    cut = ((max(0, first - at), min(len(piece), end - at)) for first, end in delta.drafted)
    return [(first, end) for first, end in cut if first < end]


class DraftTint:
    """Tints the rows of one text that grows."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        """Places in the source, in order."""
        self._known: list[tuple[Row, Row, int, int]] = []
        """Each row as it is and tinted, and behind it the place in the source and the number of
        ranges that end before that."""

    def add(self, start: int, ranges: Ranges) -> None:
        """Take guessed parts of what comes at `start` in the source."""
        for first, end in ranges:
            if self.ranges and self.ranges[-1][1] == start + first:
                first = self.ranges.pop()[0] - start
            self.ranges.append((start + first, start + end))

    def on(self, rows: Sequence[Row], source: str) -> list[Row]:
        """The rows of this source with the guessed parts tinted."""
        if not self.ranges:
            return list(rows)
        pairs = zip(rows, self._known, strict=False)
        same = next((i for i, (row, known) in enumerate(pairs) if row is not known[0]), None)
        del self._known[min(len(rows), len(self._known)) if same is None else same :]
        at, number = self._known[-1][2:] if self._known else (0, 0)
        for row in rows[len(self._known) :]:
            tinted, at, number = self._row(row, source, at, number)
            self._known.append((row, tinted, at, number))
        return [tinted for _, tinted, _, _ in self._known]

    def _row(self, row: Row, source: str, at: int, number: int) -> tuple[Row, int, int]:
        spans: list[Span] = []
        for text, role in row:
            if role.partition("/")[0] in NO_TEXT or role == HEADER:
                spans.append((text, role))
                continue
            done = 0
            for word in _WORD.finditer(text):
                reach = FAR if len(word[0]) >= LONG_WORD else NEAR
                found = source.find(word[0], at, at + reach + len(word[0]))
                if found < 0:
                    continue
                before, at = at, found + len(word[0])
                while number < len(self.ranges) and self.ranges[number][1] <= before:
                    number += 1
                for first, end in self._parts(number, before, at):
                    if end <= found:
                        continue
                    # With the blanks before the word, if they were guessed with it.
                    is_whole = first < found and not text[done : word.start()].strip()
                    begin = done if is_whole else word.start() + max(0, first - found)
                    end = word.start() + end - found
                    spans += [(text[done:begin], role), (text[begin:end], tinted_role(role))]
                    done = end
                if done < word.end():
                    spans.append((text[done : word.end()], role))
                    done = word.end()
            spans.append((text[done:], role))
        return merge(spans), at, number

    def _parts(self, number: int, start: int, end: int) -> list[tuple[int, int]]:
        """What lies between two places of the ranges from this one on."""
        parts = []
        while number < len(self.ranges) and self.ranges[number][0] < end:
            first, last = self.ranges[number]
            if max(first, start) < min(last, end):
                parts.append((max(first, start), min(last, end)))
            number += 1
        return parts


def tinted_role(role: str) -> str:
    """The same colour, attributes and address on the background of what was guessed."""
    name, blank, address = role.partition(" ")
    name, slash, flags = name.partition("/")
    return f"{name.partition('@')[0]}@{DRAFTED}{slash}{flags}{blank}{address}"
