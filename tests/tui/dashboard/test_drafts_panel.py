"""Guessed tokens on the batch page: the large number, the counts a second, and the reason."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from test_tui_renderers import empty_view
from tui_harness import drafted_steps, steps

from termgen.tui.dashboard.pages.lanes import batch_page
from termgen.tui.dashboard.state.draft_figures import draft_figures, latest
from termgen.tui.dashboard.state.request_history import RequestHistory
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.large_digits import large_number
from termgen.tui.paint.palette import COLOUR_GLYPHS
from termgen.tui.paint.spans import row_text, row_width
from termgen.vocabulary.events import DraftChoice, DraftReason, StepRecord

CHOICE = DraftChoice(4, 7, DraftReason.BEST, 4, 162.0, 100.0, 0.61)
WORDS = "drafts 4 of 7: 1.62x of none expected, at 61% kept"


def view_of(records: list[StepRecord]) -> DashboardView:
    return replace(empty_view(), steps=tuple(records), max_num_batched_tokens=256)


def page(records: list[StepRecord], width: int, height: int, **options: Any) -> list[str]:
    lanes = RequestHistory()
    options = {"boxed": height > 24, **options}
    rows = batch_page(view_of(records), lanes, width, height, COLOUR_GLYPHS, **options)
    assert len(rows) == height and {row_width(row) for row in rows} == {width}
    return [row_text(row) for row in rows]


def panel(rows: list[str]) -> list[str]:
    first = next((i for i, row in enumerate(rows) if row.strip("─╭ ").startswith("drafts")), None)
    if first is None:
        return []
    ends = (i for i, row in enumerate(rows) if i > first and row[0] in "─╰")
    return rows[first : next(ends)]


def test_counts_of_a_second_and_what_a_step_gave() -> None:
    records = drafted_steps(30, choice=CHOICE)
    figures = draft_figures(records)
    assert figures is not None and figures.choice == CHOICE
    seconds = (records[-1].ended_ns - records[1].started_ns) / 1e9
    drafted = sum(4 * record.num_decode_rows for record in records[1:])
    kept = sum(2 * record.num_decode_rows for record in records[1:])
    assert figures.tokens_per_step == pytest.approx(3.0)
    assert figures.drafted_per_s == pytest.approx(drafted / seconds)
    assert figures.kept_per_s == pytest.approx(kept / seconds)
    assert figures.given_up_per_s == pytest.approx((drafted - kept) / seconds)
    assert figures.kept_share == pytest.approx(0.5)


def test_only_the_latest_two_seconds_count() -> None:
    """Also after a long pause, whose time is no step's."""
    seed = random.randrange(10**6)
    print("seed", seed)
    at = random.Random(seed).randrange(5, 25)
    records = drafted_steps(30, choice=CHOICE)
    records = [
        r._replace(started_ns=r.started_ns - 10**11, ended_ns=r.ended_ns - 10**11) if i < at else r
        for i, r in enumerate(records)
    ]
    figures, alone = draft_figures(records), draft_figures(drafted_steps(30, choice=CHOICE))
    assert latest(records)[0] is records[at - 1] and len(latest(records)) == 30 - at + 1
    assert figures is not None and alone is not None
    assert figures.drafted_per_s == pytest.approx(alone.drafted_per_s, rel=0.5)
    assert figures.tokens_per_step == pytest.approx(3.0)


def test_nothing_is_said_of_drafts_that_were_not_there() -> None:
    assert draft_figures([]) is None and draft_figures(steps(30)) is None
    for height in (8, 20, 40):
        assert not panel(page(steps(30), 120, height))
    before = drafted_steps(30, choice=CHOICE)[-1]
    later = [
        record._replace(
            num_draft_tokens=before.num_draft_tokens,
            num_accepted_tokens=before.num_accepted_tokens,
        )
        for record in steps(30)
    ]
    assert draft_figures(later) is None, "counts since the start, and none in these steps"


def test_a_choice_of_none_is_shown_without_counts() -> None:
    why = DraftChoice(0, 7, DraftReason.NO_GAIN, 3, 97.0, 100.0, 0.12)
    records = [record._replace(draft_choice=why) for record in steps(30)]
    rows = "\n".join(panel(page(records, 120, 40)))
    assert "drafts 0 of 7: 3 would be 3% slower at 12% kept" in rows
    assert "tokens a step" in rows and all(part in rows for part in large_number("1.00"))
    assert "drafted" not in rows and " kept 0" not in rows and "position" not in rows
    one = draft_figures(records[-1:])
    assert one is not None and one.tokens_per_step is None and one.kept_share is None
    alone = "\n".join(panel(page(records[-1:], 120, 40)))
    assert "drafts 0 of 7" in alone and "tokens a step" not in alone


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("height", [20, 36, 56])
def test_the_number_is_large_where_there_is_room(width: int, height: int) -> None:
    rows = panel(page(drafted_steps(30, choice=CHOICE), width, height))
    assert len(rows) == 4
    for digits, row in zip(large_number("3.00"), rows[1:], strict=True):
        assert row.strip("│ ").startswith(digits.strip())
    assert "tokens a step" in rows[1] and " given up a second" in rows[1]
    assert WORDS in rows[2]
    assert "kept 50%" in rows[3] and "by position ██··" in rows[3]


def test_small_pages_have_one_row_of_it() -> None:
    rows = panel(page(drafted_steps(30, choice=CHOICE), 80, 12))
    assert len(rows) == 2 and rows[1].strip() == f"3.00 tokens a step   {WORDS}"
    wide = panel(page(drafted_steps(30, choice=CHOICE), 140, 12))
    assert wide[1].strip().endswith(" given up a second")
    assert not panel(page(drafted_steps(30, choice=CHOICE), 80, 9))


def test_the_marked_step_is_what_is_explained() -> None:
    records = drafted_steps(30, choice=CHOICE)
    records[-1] = records[-1]._replace(draft_choice=CHOICE.as_ran(0))
    assert "no guess was found" in panel(page(records, 120, 40))[2]
    assert WORDS in panel(page(records, 120, 40, cursor=1))[2]


def test_the_page_says_it_once() -> None:
    rows = "\n".join(page(drafted_steps(30, choice=CHOICE), 200, 40))
    assert rows.count("by position") == 1 and rows.count("kept 50%") == 1


def test_digits_stand_on_one_line() -> None:
    for text in ("0.00", "12.34", "9876543210"):
        rows = large_number(text)
        width = sum(1 if sign == "." else 3 for sign in text)
        assert [len(row) for row in rows] == [width] * 3
    assert len({large_number(digit) for digit in "0123456789"}) == 10
    assert [row[3] for row in large_number("1.2")] == [" ", " ", "•"]
