"""The token lens: tokens tinted by surprise, and the alternatives to each.

Pure functions of scores and a cursor. The text is wrapped once for a width; after that a frame
costs only its visible rows. The degree of surprise is a colour and, for terminals without colours,
an attribute.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from termgen.tui.chat.state.token_scores import LIKELY, Alternative, TokenScores
from termgen.tui.paint.series import bar
from termgen.tui.paint.spans import Row, Span, cut, fit, merge, split_cells, spread
from termgen.vocabulary.sampling_params import SamplingParams

ROLES = ("text", "accent/i", "warn/u", "bad/bu")
"""Roles in ascending degree of surprise."""
NAME_WIDTH = 22
SHARE_WIDTH = 7
FEWEST_CHOICES = 3
LINE_END = "↵"
UNSEEN = "▯"
"""Stands for a token without visible text while the cursor is on it."""
SIGNS = 2
"""Columns reserved in each row for the signs of a line's end and of a token without text."""


class TokenText:
    """Tokens wrapped to a width, with their signs. A token that fits on one line is not broken."""

    def __init__(self, pieces: Sequence[str], width: int) -> None:
        self.width = max(1, width - SIGNS)
        self._rows: list[list[tuple[int, str]]] = [[]]
        self._firsts_of = array("l")
        """First row of each token."""
        self._used = 0
        for index, piece in enumerate(pieces):
            self._add(index, piece)

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, token: int) -> int:
        """The row in which the token begins."""
        return self._firsts_of[token]

    def row(self, index: int) -> list[tuple[int, str]]:
        """Tokens of the row, each with the text it has there."""
        return self._rows[index]

    def first_of(self, row: int) -> int:
        """The first token that begins or continues in this row."""
        return self._rows[row][0][0] if self._rows[row] else bisect_left(self._firsts_of, row)

    def token_at(self, row: int, column: int) -> int | None:
        if row >= len(self._rows):
            return None
        for token, shown in self._rows[row]:
            column -= cell_len(shown)
            if column < 0:
                return token
        return None

    def _add(self, index: int, piece: str) -> None:
        self._firsts_of.append(len(self._rows) - 1)
        line, *others = piece.split("\n")
        if self._used and self._used + cell_len(line) > self.width >= cell_len(line):
            self._break()
            self._firsts_of[-1] += 1
        if line or not others:
            self._put(index, line)
        for line in others:
            self._rows[-1].append((index, LINE_END))
            self._break()
            if line:
                self._put(index, line)

    def _put(self, index: int, line: str) -> None:
        """Place a line at the current row, over as many rows as it takes."""
        while True:
            head, line = split_cells(line, self.width - self._used)
            if not head and line and not self._used:  # a glyph wider than the row
                head, line = line[0], line[1:]
            self._rows[-1].append((index, head))
            self._used += cell_len(head)
            if not line:
                return
            self._break()

    def _break(self) -> None:
        self._rows.append([])
        self._used = 0


@dataclass(slots=True)
class LensView:
    """Scores, cursor and scroll position of the lens."""

    scores: TokenScores
    params: SamplingParams
    vocab_size: int
    keys: str = ""
    """The keys to show in the last row."""
    cursor: int = 0
    chosen: int = 0
    """Index among the alternatives at the cursor."""
    top: int = 0
    """The first visible row of the text."""

    def move(self, cursor: int) -> None:
        """Go to a token and select the alternative that was sampled."""
        self.cursor = max(0, min(len(self.scores) - 1, cursor))
        taken = [choice.is_taken for choice in self.choices]
        self.chosen = taken.index(True)

    @property
    def choices(self) -> list[Alternative]:
        return self.scores.alternatives(self.cursor)


def text_height(height: int) -> int:
    """Rows for the text out of `height`."""
    return height - 3 - max(FEWEST_CHOICES, (height - 3) // 2)


def lens_rows(view: LensView, text: TokenText, width: int, height: int) -> list[Row]:
    rows = [_header(view, width)]
    num_text = max(1, text_height(height))
    _keep_in_view(view, text, num_text)
    for index in range(view.top, view.top + num_text):
        rows.append(_text_row(view, text.row(index)) if index < len(text) else ())
    rows.append(_legend(width))
    rows += _choice_rows(view, width, height - num_text - 3)
    rows.append(((cut(view.keys, width), "muted"),))
    return rows


def _keep_in_view(view: LensView, text: TokenText, height: int) -> None:
    at = text.row_of(view.cursor)
    lowest = max(0, len(text) - height)
    view.top = min(lowest, at, max(view.top, at - height + 1))


def _header(view: LensView, width: int) -> Row:
    scores, at = view.scores, view.cursor
    bits, is_least = scores.entropy_bits(at)
    taken = next(choice for choice in view.choices if choice.is_taken)
    name = f" {cut(taken.text, NAME_WIDTH)}" if width >= 60 else ""
    left: list[Span] = [(f"token {at + 1} of {len(scores)}", "accent/b"), (name, "text")]
    right = [
        (f"p {_share(taken.probability)}", ROLES[scores.surprise(at)]),
        (f"  rank {taken.rank}  entropy {'≥ ' if is_least else ''}{bits:.2f} bits", "muted"),
    ]
    return spread(left, right, width)


def _text_row(view: LensView, tokens: Sequence[tuple[int, str]]) -> Row:
    spans: list[Span] = []
    for index, shown in tokens:
        role = ROLES[view.scores.surprise(index)]
        if index == view.cursor:
            shown, role = shown or UNSEEN, role + ("r" if "/" in role else "/r")
        spans.append((shown, role))
    return merge(spans)


def _legend(width: int) -> Row:
    words = [f"≥ {bound:.0%}" for bound in LIKELY] + ["less"]
    spans: list[Span] = [("── likely ", "faint")]
    for word, role in zip(words, ROLES, strict=True):
        spans += [(word, role), (" ", "faint")]
    used = sum(cell_len(word) for word, _ in spans)
    return fit([*spans, ("─" * max(0, width - used), "faint")], width)


def _choice_rows(view: LensView, width: int, height: int) -> list[Row]:
    """The alternatives around the selected one, and where top-k, top-p and min-p cut them off."""
    choices = view.choices
    rows = [_choice_row(choice, i == view.chosen, width) for i, choice in enumerate(choices)]
    at = view.chosen
    drawn = view.scores.cut(view.cursor, view.params, view.vocab_size)
    if drawn is not None:
        words = f"┄┄ {drawn[1]} cuts here "
        rows.insert(drawn[0], (((words + "┄" * max(0, width - cell_len(words)))[:width], "warn"),))
        at += at >= drawn[0]
    first = max(0, min(at - height + 1, len(rows) - height))
    shown = rows[first : first + height]
    return shown + [()] * (height - len(shown))


def _choice_row(choice: Alternative, is_chosen: bool, width: int) -> Row:
    name = cut(choice.text, NAME_WIDTH)
    sign = "▸" if is_chosen else " "
    mark = "●" if choice.is_taken else " "
    left = f"{sign}{mark} {choice.rank:>4} {name}"
    left += " " * (8 + NAME_WIDTH - cell_len(left) + 1)
    room = max(1, width - cell_len(left) - SHARE_WIDTH - 1)
    role = "accent/b" if is_chosen else "text" if choice.is_taken else "muted"
    share = _share(choice.probability).rjust(SHARE_WIDTH)
    return fit(
        [(left, role), *bar(choice.probability, min(room, 50), role=role), (share, role)], width
    )


def _share(probability: float) -> str:
    if probability < 0.0005:
        return "< 0.1%"
    return f"{probability:.1%}"
