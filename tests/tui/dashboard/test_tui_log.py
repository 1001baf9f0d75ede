"""The log page: levels, search, the watchdog's verdict and the cost of observing."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from textual.events import MouseScrollUp
from tui_harness import (
    MS,
    NOW_NS,
    SECOND,
    FrozenApp,
    busy_snapshot,
    chat_engine,
    feed_dashboard,
    ready,
    request_events,
    step,
    steps,
)

from termgen.tui.dashboard.pages import log_page as page_module
from termgen.tui.dashboard.pages.log_page import lines_panel, log_page, stalled_for_s
from termgen.tui.dashboard.state import event_reader as intake
from termgen.tui.dashboard.state.log import KEPT, MAX_CHARS, Level, Line, LogBook, LogScroll, LogTap
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView
from termgen.tui.paint import sanitize
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.spans import Row, row_text, row_width
from termgen.vocabulary.events import RequestEvent, RequestEventKind


def text(rows: list[Row]) -> str:
    return "\n".join(row_text(row) for row in rows)


def lines(book: LogBook, level: Level = Level.DEBUG, words: str = "") -> list[str]:
    return [line.text for line in book.matching(level, words, NOW_NS)]


def test_what_is_worth_a_line() -> None:
    book = LogBook()
    for event in request_events():
        book.add_event(event)
    lost = RequestEvent(NOW_NS, "r1", RequestEventKind.PREEMPTED, 9, 3, 0, "out of KV blocks")
    book.add_event(lost)
    book.add_event(lost._replace(kind=RequestEventKind.FINISHED, detail="error"))
    book.add_step(step(1, end_ns=NOW_NS - MS))
    book.add_step(step(2, end_ns=NOW_NS - MS, ms=1500.0, num_late_compiles=2))
    book.add_step(step(3, end_ns=NOW_NS - MS, num_late_compiles=2, graph_reason="too long"))
    book.add_step(step(4, end_ns=NOW_NS - MS, num_late_compiles=2, graph_reason="too long"))
    everything = lines(book)
    assert "chatcmpl-done0 queued, 400 prompt tokens" in everything
    assert sum("too long" in line for line in everything) == 1
    info = lines(book, Level.INFO)
    assert "chatcmpl-done1 finished: length, 81 tokens" in info
    assert not any("queued" in line for line in info)
    assert lines(book, Level.WARNING)[0] == "r1 preempted: out of KV blocks"
    assert any("step 2 took 1.50 s" in line for line in lines(book, Level.WARNING))
    assert lines(book, Level.ERROR) == [
        "r1 finished: error, 3 tokens",
        "kernels compiled while serving: 2 since the start",
    ]
    assert lines(book, words="DONE1 Fin") == ["chatcmpl-done1 finished: length, 81 tokens"]
    assert book.matching(Level.DEBUG, "r1", NOW_NS - SECOND) == []  # not yet, after going back


def test_it_stays_bounded() -> None:
    book = LogBook()
    for i in range(2 * KEPT):
        book.add_event(RequestEvent(i, f"r{i}", RequestEventKind.QUEUED, 1, 0, 0))
    assert len(lines(book)) == KEPT


def test_an_error_outlasts_what_nobody_needs_to_hear() -> None:
    book = LogBook()
    book.add(Line(1, Level.ERROR, "it broke"))
    for i in range(2 * KEPT):
        level = Level.INFO if i % 2 else Level.DEBUG
        book.add(Line(2, level, f"usual {i}"))
    book.add(Line(3, Level.WARNING, "odd"))
    book.add(Line(3, Level.DEBUG, "usual again"))
    assert lines(book, Level.WARNING) == ["it broke", "odd"]
    everything = lines(book)
    assert everything[0] == "it broke" and everything[-2:] == ["odd", "usual again"]
    assert lines(book, Level.INFO, "usual") == [f"usual {i}" for i in range(KEPT + 1, 2 * KEPT, 2)]


def test_a_line_that_is_scrolled_to_stays_while_others_come() -> None:
    book, scroll = LogBook(), LogScroll()
    for i in range(30):
        book.add(Line(i, Level.INFO, f"{i}"))

    def shown(level: Level = Level.DEBUG) -> list[str]:
        found = book.matching(level, "", NOW_NS)
        end = scroll.end(found, 4)
        return [line.text for line in found[max(0, end - 4) : end]]

    assert shown() == ["26", "27", "28", "29"]
    scroll.move(-3)
    assert shown() == ["23", "24", "25", "26"]
    book.add(Line(30, Level.ERROR, "30"))
    assert shown() == ["23", "24", "25", "26"]
    scroll.move(-1000)
    assert shown() == ["0", "1", "2", "3"]
    assert shown(Level.ERROR) == ["30"], "fewer lines pass than there is room for"
    scroll.move(1000)
    assert shown()[-1] == "30"
    book.add(Line(31, Level.INFO, "31"))
    assert shown()[-1] == "31", "the newest are followed again"
    scroll.move(-2)
    shown()
    scroll.follow()
    assert shown()[-1] == "31"


def test_only_the_beginning_of_a_long_line_is_kept_and_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tap = LogTap()
    try:
        logging.getLogger("termgen").warning("begin %s end", "word " * 200_000)
        (line,) = tap.drain()
    finally:
        tap.close()
    assert line.text.startswith("termgen: begin word word")
    assert line.text.endswith("word … (1,000,010 characters)") and len(line.text) < MAX_CHARS + 50
    store, cleaned = DashboardStore(started_ns=0), list[int]()
    line = line._replace(time_ns=NOW_NS)
    store.log.add(line)
    store.log.add(line._replace(text="漢" * MAX_CHARS))
    store.log.add(line._replace(text="e\u0301" * MAX_CHARS))

    def clean_line(text: str) -> str:
        cleaned.append(len(text))
        return sanitize.clean_line(text)

    monkeypatch.setattr(page_module, "clean_line", clean_line)
    view = store.view(NOW_NS)
    rows = lines_panel(
        view, store.log, Frame(60, 8, True), level=Level.INFO, words="", scroll=LogScroll()
    )
    assert max(cleaned) < 5 * 60
    shown = [row_text(row) for row in rows]
    room = 60 - 4 - 11
    assert any("termgen: begin word word" in row and row.endswith("… │") for row in shown)
    assert any("漢" * ((room - 1) // 2) + "…" in row for row in shown)
    assert any("e\u0301" * (room - 1) + "…" in row for row in shown)
    assert {row_width(row) for row in rows} == {60}


def test_lines_are_searched_when_others_came_or_something_else_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book, real, times = LogBook(), LogBook._search, list[str]()

    def search(self: LogBook, level: Level, wanted: str) -> list[Line]:
        times.append(wanted)
        return real(self, level, wanted)

    monkeypatch.setattr(LogBook, "_search", search)
    book.add(Line(5, Level.INFO, "one"))
    assert lines(book) == lines(book) == ["one"] and len(times) == 1
    assert book.matching(Level.DEBUG, "", 4) == [] and len(times) == 1
    assert lines(book, words="x") == [] and times[-1] == "x"
    book.add(Line(5, Level.INFO, "x"))
    assert lines(book, words="x") == ["x"] and len(times) == 3


def test_a_record_that_cannot_be_written_does_not_stop_who_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tap, told = LogTap(), list[logging.LogRecord]()
    monkeypatch.setattr(tap, "handleError", told.append)
    try:
        record = logging.LogRecord("termgen", logging.WARNING, "f", 1, "%d", ("text",), None)
        tap.handle(record)
        assert told == [record] and tap.drain() == []
    finally:
        tap.close()


def test_what_the_program_logs_arrives_from_any_logger() -> None:
    tap = LogTap()
    try:
        logging.getLogger("termgen.engine.device.runner").warning("slow\nstart of %s", "kernels")
        logging.getLogger("uvicorn.error").error("socket gone")
        got = tap.drain()
        assert [(line.level, line.text) for line in got] == [
            (Level.WARNING, "termgen.engine.device.runner: slow start of kernels"),
            (Level.ERROR, "uvicorn.error: socket gone"),
        ]
        assert tap.drain() == []
    finally:
        tap.close()
    logging.getLogger("termgen").warning("after")
    assert tap.drain() == []


def busy_view(*, progress_s_ago: float, **changes: object) -> DashboardView:
    store = DashboardStore(started_ns=NOW_NS - 60 * SECOND)
    ended = NOW_NS - round(progress_s_ago * SECOND)
    store.apply([s._replace(publish_us=9.0) for s in steps(30, now_ns=ended)])
    store.set_snapshot(replace(busy_snapshot(), last_progress_ns=ended, **changes))
    return store.view(NOW_NS)


def page_of(view: DashboardView, trouble: str = "", height: int = 37) -> str:
    return text(
        log_page(
            view,
            LogBook(),
            120,
            height,
            boxed=True,
            trouble=trouble,
            observer_share=0.012,
            level=Level.INFO,
            words="",
            scroll=LogScroll(),
        )
    )


def test_a_stall_is_told_with_the_last_steps() -> None:
    page = page_of(busy_view(progress_s_ago=0.1))
    assert "● at work" in page and "steps · the newest first" not in page
    view = busy_view(progress_s_ago=12.0)
    assert stalled_for_s(view) == pytest.approx(12.0, abs=0.2)
    page = page_of(view)
    assert "no step for 12.0 s with 4 running and 2 waiting" in page
    assert "steps · the newest first" in page and "182029" in page and "182022" in page
    assert stalled_for_s(busy_view(progress_s_ago=12.0, paused=True)) == 0
    idle = busy_view(progress_s_ago=12.0)
    assert "● idle" in page_of(replace(idle, num_running=0, num_waiting=0))


def test_a_dead_engine_is_told_with_the_last_steps() -> None:
    page = page_of(busy_view(progress_s_ago=0.1), trouble="engine stopped")
    assert "✗ engine stopped" in page and "182029" in page


def test_the_observers_tax_is_on_the_page() -> None:
    # 9 us of steps of 20 ms in the median
    page = page_of(busy_view(progress_s_ago=0.1))
    assert "observer  1.2% of a core to draw, 9 µs of the engine's time a step (0%)" in page


@pytest.mark.parametrize("size", [(30, 6), (80, 21), (120, 37), (200, 57)])
@pytest.mark.parametrize("trouble", ["", "engine stopped"])
def test_it_fills_its_size(size: tuple[int, int], trouble: str) -> None:
    store = DashboardStore(started_ns=NOW_NS)
    store.apply([*request_events(), *steps(50)])
    for view in (store.view(NOW_NS), DashboardStore(started_ns=NOW_NS).view(NOW_NS)):
        rows = log_page(
            view,
            store.log,
            *size,
            boxed=size[0] >= 100,
            trouble=trouble,
            observer_share=None,
            level=Level.DEBUG,
            words="",
            scroll=LogScroll(),
        )
        assert {row_width(row) for row in rows} == {size[0]} and len(rows) == size[1]


async def test_levels_and_search_on_the_screen() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        logging.getLogger("termgen").warning("a word from the program")
        app.now_ns = NOW_NS
        await feed_dashboard(app, pilot)
        page = app.screen.query_one("#page", Canvas)
        await pilot.press("l")
        await pilot.pause()
        assert "info and above" in page.text and "done0 finished: stop" in page.text
        assert "queued" not in page.text
        await pilot.press("v", "v", "v")
        await pilot.pause()
        assert "debug and above" in page.text and "queued" in page.text
        await pilot.press("slash", *"done1")
        await pilot.pause()
        assert "“done1”" in page.text and "done0" not in page.text and "3 lines" in page.text
        await pilot.press("enter", "o")
        await pilot.pause()
        assert app.screen.query_one("#overview").display
        await pilot.press("l", "escape")
        await pilot.pause()
        assert "done0" in page.text


async def test_the_log_is_scrolled_by_keys_and_wheel() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        queued = RequestEventKind.QUEUED
        for i in range(100):
            app.engine.bus.publish(RequestEvent(NOW_NS, f"r{i:02}", queued, 7, 0, 0))
        await app.dashboard.refresh_view()
        await pilot.press("l", "v", "v", "v")
        page = app.screen.query_one("#page", Canvas)
        await pilot.pause()
        assert "r99 queued" in page.text and "newer" not in page.text
        await pilot.press("up", "up")
        assert "r97 queued" in page.text and "r98" not in page.text
        assert "↓ 2 newer of 100 lines" in page.text
        x, y = page.region.offset
        app.screen._forward_event(MouseScrollUp(None, x + 5, y + 5, 0, -1, 0, False, False, False))
        await pilot.pause()
        assert "r96 queued" in page.text and "r97" not in page.text
        await pilot.press("home")
        assert "r00 queued" in page.text and "live" in app.screen.query_one("#header", Canvas).text
        await pilot.press("end")
        assert "r99 queued" in page.text
        await pilot.press("up", "escape")
        assert "r99 queued" in page.text


async def test_an_engine_that_does_not_answer_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "SNAPSHOT_S", 0.02)
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)

        async def silence() -> None:
            await asyncio.sleep(3600)

        app.engine.snapshot = silence  # type: ignore[assignment, method-assign]
        app.now_ns += 30 * SECOND
        await app.dashboard.refresh_view()
        await pilot.press("l")
        await pilot.pause()
        assert "no step for 30.0 s" in app.screen.query_one("#page", Canvas).text
