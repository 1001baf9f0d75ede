"""Rows of the list of chats, grouped by last use; `●` marks the open one, `▸` the selected one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from termgen.tui.chat_db import SessionSummary
from termgen.tui.formatting import count
from termgen.tui.sanitize import clean_line
from termgen.tui.spans import Row, Span, cut, fit, spread

DAY_S = 86_400.0
ROOMY_WIDTH = 60
"""Width at which a row also shows the model."""


@dataclass(frozen=True, slots=True)
class ListedRow:
    row: Row
    index: int | None = None
    """Index of the row's chat in the list; None for a heading."""


def session_rows(
    sessions: Sequence[SessionSummary],
    width: int,
    *,
    selected: int,
    open_id: str,
    now_s: float,
    has_focus: bool,
) -> list[ListedRow]:
    rows: list[ListedRow] = []
    group = ""
    for index, (session, number) in enumerate(zip(sessions, _numbers(sessions), strict=True)):
        name = age_group(session.updated_s, now_s)
        if name != group:
            rows += [ListedRow(())] if rows else []
            rows.append(ListedRow(((name, "muted"),)))
            group = name
        is_marked = index == selected and has_focus
        background = "@select" if is_marked else ""
        sign = f"{'▸' if is_marked else ' '}{'●' if session.session_id == open_id else ' '} "
        rows.append(ListedRow(_row(session, number, width, sign, now_s, background), index))
        if session.excerpt:
            said: Span = (cut(f"     {clean_line(session.excerpt)}", width), f"muted{background}")
            rows.append(ListedRow(fit([said], width, f"text{background}"), index))
    return rows


def _row(
    session: SessionSummary, number: int, width: int, sign: str, now_s: float, background: str
) -> Row:
    left: list[Span] = [
        (sign, f"accent{background}"),
        (clean_line(session.title) or "untitled", f"text{background}"),
    ]
    if number:
        left.append((f" ({number})", f"muted{background}"))
        left[1] = (cut(left[1][0], max(4, width - 24)), left[1][1])
    used = used_words(session.updated_s, now_s)
    model = f"{cut(clean_line(session.model_id), 24)}  " if width >= ROOMY_WIDTH else ""
    right: list[Span] = [(f"{model}{used}  ", f"muted{background}")]
    right.append((f"{count(session.num_turns)} ", f"faint{background}"))
    return spread(left, right, width, f"text{background}")


def used_words(then_s: float, now_s: float) -> str:
    """A time for today, weekday and time for this week, otherwise the date."""
    forms = {"today": "%H:%M", "yesterday": "%H:%M", "this week": "%a %H:%M"}
    then, now = time.localtime(then_s), time.localtime(now_s)
    other_days = "%-d %b" if then.tm_year == now.tm_year else "%-d %b %Y"
    return time.strftime(forms.get(age_group(then_s, now_s), other_days), then)


def _numbers(sessions: Sequence[SessionSummary]) -> list[int]:
    """Numbers for chats that share a title, counted from the oldest; 0 for unique titles."""
    titles = [session.title.casefold() for session in sessions]
    counts = Counter(titles)
    left = Counter(titles)
    numbers = []
    for title in titles:
        numbers.append(left[title] if counts[title] > 1 else 0)
        left[title] -= 1
    return numbers


def age_group(then_s: float, now_s: float) -> str:
    """The heading for a time, by calendar days."""
    now = time.localtime(now_s)
    midnight_s = time.mktime((now.tm_year, now.tm_mon, now.tm_mday, 0, 0, 0, 0, 0, -1))
    for name, days in (("today", 0), ("yesterday", 1), ("this week", 6), ("this month", 29)):
        if then_s >= midnight_s - days * DAY_S:
            return name
    return "earlier"


def empty_list_rows(words: str, width: int) -> list[Row]:
    said = f"No chat has {words!r}." if words else "No chats yet: ask something."
    return [(), ((cut(clean_line(said), width), "muted"),)]
