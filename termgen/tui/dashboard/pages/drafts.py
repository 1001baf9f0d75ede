"""Guessed tokens: what a step gives with them, how many there are, and why as many."""

from __future__ import annotations

from collections.abc import Sequence

from termgen.tui.dashboard.pages.batch import position_bars
from termgen.tui.dashboard.state.draft_figures import DraftFigures, latest
from termgen.tui.paint.formatting import percent, rate
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.large_digits import DIGIT_HEIGHT, large_number
from termgen.tui.paint.spans import Row, Span, row_width
from termgen.vocabulary.events import StepRecord

LARGE_FROM = 16
"""Height of the page from which on the number is a large one."""
GAP: Span = ("   ", "text")


def drafts_rows(page_height: int) -> int:
    """Rows of the panel without its frame, on a page of this height."""
    return DIGIT_HEIGHT if page_height >= LARGE_FROM else 1


def drafts_panel(figures: DraftFigures, steps: Sequence[StepRecord], frame: Frame) -> list[Row]:
    """steps: those that `figures` were made of. What does not fit a row is left out from the right,
    whole phrases at a time."""
    width = frame.inner_width
    number = "" if figures.tokens_per_step is None else f"{figures.tokens_per_step:.2f}"
    lines = [_per_second(figures), _choice(figures), _kept(figures, steps)]
    if frame.inner_height < DIGIT_HEIGHT:
        pieces = _tokens_a_step(number) + [piece for line in (lines[1], lines[0]) for piece in line]
        return frame.draw([("drafts", "text/b")], (), [_fitting(pieces, width)])
    lines[0] = [*([[("tokens a step", "text")]] if number else []), *lines[0]]
    rows: list[Row] = []
    for digits, line in zip(large_number(number), lines, strict=True):
        left: Row = ((digits, "decode/b"), GAP) if number else ()
        rows.append((*left, *_fitting(line, width - row_width(left))))
    return frame.draw([("drafts", "text/b")], (), rows)


def _tokens_a_step(number: str) -> list[list[Span]]:
    return [[(number, "decode/b"), (" tokens a step", "text")]] if number else []


def _per_second(figures: DraftFigures) -> list[list[Span]]:
    if not figures.drafted_per_s:
        return []
    parts = (
        (figures.drafted_per_s, " drafted, "),
        (figures.kept_per_s, " kept, "),
        (figures.given_up_per_s, " given up a second"),
    )
    return [[span for value, name in parts for span in ((rate(value), "text"), (name, "muted"))]]


def _choice(figures: DraftFigures) -> list[list[Span]]:
    if figures.choice is None:
        return []
    head, _, why = str(figures.choice).partition(": ")
    return [[(f"{head}: ", "text"), (why, "muted")]]


def _kept(figures: DraftFigures, steps: Sequence[StepRecord]) -> list[list[Span]]:
    if figures.kept_share is None:
        return []
    pieces: list[list[Span]] = [[("kept ", "muted"), (percent(figures.kept_share), "text")]]
    if bars := position_bars(latest(steps)[0], steps[-1]):
        pieces.append([("by position ", "muted"), (bars, "decode")])
    return pieces


def _fitting(pieces: Sequence[Sequence[Span]], width: int) -> Row:
    """The first of these phrases, as many as there is room for."""
    spans: list[Span] = []
    for piece in pieces:
        more = [GAP, *piece] if spans else [*piece]
        if row_width((*spans, *more)) > width:
            break
        spans += more
    return tuple(spans)
