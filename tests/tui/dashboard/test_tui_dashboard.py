"""The dashboard after scripted events."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from fake_engine import make_snapshot
from textual.geometry import Region
from textual.widgets import Input
from textual.widgets._footer import FooterKey
from tui_harness import (
    NOW_NS,
    SECOND,
    FrozenApp,
    ask,
    busy_snapshot,
    chat_engine,
    feed_dashboard,
    ready,
    step,
    steps,
    wait_until,
)

from termgen.errors import EngineError
from termgen.tui.paint.canvas import Canvas
from termgen.vocabulary.events import EngineEvent, RequestEvent, RequestEventKind


def dashboard_app() -> FrozenApp:
    return FrozenApp(chat_engine(), start_screen="dashboard")


def panel(app: FrozenApp, name: str) -> str:
    return app.screen.query_one(f"#{name}", Canvas).text


async def test_idle_panels_teach() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await app.dashboard.refresh_view()
        assert "no step yet" in panel(app, "batch")
        assert "no requests yet" in panel(app, "requests")
        assert "63 free" in panel(app, "blocks")
        assert "● live 4 Hz" in panel(app, "header")


async def test_every_panel_shows_the_engines_numbers() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        view = app.dashboard.view
        assert f"{view.decode_rate:.1f} tok/s" in panel(app, "decode")
        assert view.decode_rate == pytest.approx(86, abs=8)  # 25 steps of 2 to 5 tokens a second
        assert "tok/s" in panel(app, "prefill")
        times = {
            row.split()[1]: re.findall(r"([\d.]+) ms", row)
            for row in panel(app, "latency").splitlines()[2:6]
        }
        assert [*times] == ["TTFT", "ITL", "step", "queue"]
        assert [float(value) for value in times["step"]] == pytest.approx([34, 21, 34], rel=0.05)
        assert [float(value) for value in times["ITL"]] == pytest.approx([40, 40, 40], rel=0.02)
        gauges = panel(app, "gauges")
        for expected in ("4/8", "36%", "63%", "97%"):
            assert expected in gauges
        assert "step 182 299" in panel(app, "batch")
        assert "151 active" in panel(app, "blocks")
        assert "chat-1" in panel(app, "requests") and "+256" in panel(app, "requests")
        assert "smollm2-135m float32" in panel(app, "header")


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (100, 30), (120, 40), (200, 60), (30, 8)])
async def test_it_fits_every_terminal(size: tuple[int, int]) -> None:
    app = dashboard_app()
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        for canvas in app.screen.query(Canvas):
            if canvas.display and canvas.region:
                assert canvas.region.right <= size[0] and canvas.region.bottom <= size[1]
                for strip in canvas.render_lines(Region(0, 0, *canvas.size)):
                    assert strip.cell_length == canvas.size.width
        if size[0] >= 60:
            assert "chat-1" in panel(app, "requests")


async def test_small_terminals_swap_the_tiles_for_a_line() -> None:
    app = dashboard_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        assert not app.screen.query_one("#tiles").display
        numbers = panel(app, "numbers")
        for expected in ("out ", "in ", "4/8", "wait", "KV ", "36%", "63%", "TTFT", "p50/95/99"):
            assert expected in numbers
        await pilot.resize_terminal(140, 40)
        await pilot.pause()
        assert app.screen.query_one("#tiles").display
        assert not app.screen.query_one("#numbers").display


async def test_a_page_that_is_left_at_once_may_be_told_its_size_late() -> None:
    app = dashboard_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("t")
        await pilot.pause()
        app.screen.action_page("overview")
        app.screen.query_one("#page", Canvas).on_resize()  # which was in flight
        await pilot.pause()
        assert app.is_running and "chat-1" in panel(app, "requests")


async def test_pause_freezes_the_picture_and_goes_on() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("space")
        assert "❚❚ paused" in panel(app, "header")
        frozen = panel(app, "batch")
        app.engine.bus.publish(step(999_123, end_ns=NOW_NS))
        await app.dashboard.refresh_view()
        assert panel(app, "batch") == frozen
        await pilot.press("space")
        await app.dashboard.refresh_view()
        assert "step 999 123" in panel(app, "batch")
        assert "live" in panel(app, "header")


async def test_pause_freezes_the_pages_of_requests_too() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("down", "i", "space")
        kinds, pages = RequestEventKind, {}
        for key in "bi":
            await pilot.press(key)
            await pilot.pause()
            pages[key] = panel(app, "page")
        assert "request chat-1" in pages["i"] and "never" in pages["i"]
        app.now_ns += SECOND
        lost = RequestEvent(NOW_NS, "chat-1", kinds.PREEMPTED, 1800, 9, 0, "out of KV blocks")
        for event in (lost, lost._replace(kind=kinds.FINISHED, detail="length")):
            app.engine.bus.publish(event)
        await app.dashboard.refresh_view()
        for key in "bi":
            await pilot.press(key)
            await pilot.pause()
            assert panel(app, "page") == pages[key]
        await pilot.press("space")
        await app.dashboard.refresh_view()
        assert "out of KV blocks" in panel(app, "page") and "finished: length" in panel(app, "page")


async def test_a_search_ends_without_ending_the_pause() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("down", "space", "left", "left", "slash", *"done1")
        search = app.screen.query_one("#search", Input)
        assert search.display and search.has_focus and "“done1”" in panel(app, "page")
        await pilot.press("escape")
        assert not search.display and app.focused is None and search.value == ""
        await pilot.press("o")
        assert "paused −2" in panel(app, "header") and "▸ chat-1" in panel(app, "requests")
        await pilot.press("escape")
        assert "live" in panel(app, "header") and "▸" not in panel(app, "requests")


async def test_another_page_ends_the_search_and_keeps_its_words() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("slash", *"done1")
        await pilot.click("#tabs", offset=(2, 0))
        search = app.screen.query_one("#search", Input)
        assert app.screen.query_one("#overview").display
        assert not search.display and app.focused is None
        await pilot.press("l")
        await pilot.pause()
        assert "“done1”" in panel(app, "page")


async def test_stepping_back_tells_of_each_step() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("left", "left")
        assert "step 182 297" in panel(app, "batch") and "paused −2" in panel(app, "header")
        await pilot.press("shift+left", "right")
        assert "step 182 288" in panel(app, "batch")
        await pilot.press("escape")
        await app.dashboard.refresh_view()
        assert "step 182 299" in panel(app, "batch") and "live" in panel(app, "header")


async def test_a_marked_request_lights_its_blocks() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        assert "█" not in panel(app, "blocks")
        await pilot.press("down", "down")
        assert "▸ chatcmpl-3f9a01" in panel(app, "requests")
        assert panel(app, "blocks").count("█") == 60
        for _ in range(20):
            await pilot.press("down")
        last = app.dashboard.view.requests[-1].request_id
        assert f"▸ {last}" in panel(app, "requests")


async def test_nothing_changed_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await app.dashboard.refresh_view()
        drawn: list[Any] = []
        for canvas in app.screen.query(Canvas):
            monkeypatch.setattr(canvas, "refresh", lambda *a, **k: pytest.fail("one for all"))
        monkeypatch.setattr(app.dashboard, "refresh", lambda *a, **k: drawn.append(a))
        await app.dashboard.refresh_view()
        assert drawn == []
        app.now_ns += SECOND
        await app.dashboard.refresh_view()
        assert len(drawn) == 1
        changed = sum(region.height for regions in drawn for region in regions)
        assert 0 < changed < 30  # the clock, the series, the ages; not the maps


async def test_a_picture_that_would_not_differ_is_not_painted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        dashboard = app.dashboard
        for worker in dashboard.workers:  # its own frames would be counted too
            worker.cancel()
        await pilot.pause()
        painted: list[Any] = []
        monkeypatch.setattr(dashboard, "paint", lambda: painted.append(dashboard.view))
        for _ in range(5):
            app.now_ns += SECOND // 4
            await dashboard.refresh_view()
        assert len(painted) == 5, "ages of running requests have tenths of a second"
        dashboard._freeze(True)
        app.engine.bus.publish(step(1, end_ns=app.now_ns))
        app.now_ns += 9 * SECOND
        await dashboard.refresh_view()
        assert len(painted) == 5, "paused"
        app.engine.healthy = False  # type: ignore[attr-defined]
        await dashboard.refresh_view()
        assert len(painted) == 6, "but trouble is told"
        app.engine.healthy = True  # type: ignore[attr-defined]
        dashboard._freeze(False)
        app.engine.scripted_snapshot = make_snapshot(time_ns=app.now_ns)
        app.engine.bus.publish(step(2, end_ns=app.now_ns, num_running=0, num_waiting=0))
        await dashboard.refresh_view()
        assert dashboard.view.is_idle
        painted.clear()
        for _ in range(7):
            app.now_ns += SECOND // 4
            await dashboard.refresh_view()
        assert len(painted) == 1, "an idle engine: once a second"
        app.engine.bus.publish(step(3, end_ns=app.now_ns))
        await dashboard.refresh_view()
        assert len(painted) == 2 and dashboard.view.steps[-1].step_id == 3


async def test_an_idle_engine_is_left_alone() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        asked = 0

        async def snapshot() -> Any:
            nonlocal asked
            asked += 1
            return make_snapshot(time_ns=app.now_ns)

        app.engine.snapshot = snapshot  # type: ignore[method-assign]
        await app.dashboard.refresh_view()
        before = asked
        for _ in range(5):
            await app.dashboard.refresh_view()
        assert asked == before
        app.now_ns += 3 * SECOND
        await app.dashboard.refresh_view()
        assert asked == before + 1
        app.engine.bus.publish(step(1, end_ns=app.now_ns))
        await app.dashboard.refresh_view()
        assert asked == before + 2


async def test_a_stopped_engine_is_shown_not_fatal() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)

        async def dying() -> Any:
            app.engine.healthy = False  # type: ignore[attr-defined]
            raise EngineError("gone")

        app.engine.snapshot = dying  # type: ignore[method-assign]
        await app.dashboard.refresh_view()
        await app.dashboard.refresh_view()
        assert "✗ engine stopped" in panel(app, "header")
        assert "chat-1" in panel(app, "requests")


async def test_lost_events_are_counted() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        for i in range(5000):
            app.engine.bus.publish(step(i, end_ns=NOW_NS))
        await app.dashboard.refresh_view()
        assert f"{5000 - 4096} lost" in panel(app, "header")


async def test_it_knows_what_happened_before_it_was_first_shown() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        app.engine.bus.publish(step(4_711, end_ns=NOW_NS))
        await pilot.press("f2")
        await wait_until(pilot, lambda: "step 4 711" in panel(app, "batch"))
        assert len(app.engine.bus._rings) == 2, "its own, and that of the last hour"
    assert app.engine.bus._rings == ()


async def test_it_rests_while_hidden() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        dashboard = app.dashboard
        running = [w for w in dashboard.workers if w.group == "pump" and w.is_running]
        assert len(running) == 1
        await pilot.press("f2")
        await pilot.pause()
        assert not [w for w in dashboard.workers if w.group == "pump" and w.is_running]
        await ask(app, pilot, "hello")
        await pilot.press("f2")
        await pilot.pause()
        assert app.dashboard is dashboard
        assert [w for w in dashboard.workers if w.group == "pump" and w.is_running]
        await wait_until(pilot, lambda: "chat-1" in panel(app, "requests"))


async def test_new_colours_reach_every_panel() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        app.engine.scripted_snapshot = busy_snapshot()
        await feed_dashboard(app, pilot)
        canvas = app.screen.query_one("#blocks", Canvas)
        before = canvas.render_lines(Region(0, 0, *canvas.size))
        app.theme = "termgen-light"
        await pilot.pause()
        after = canvas.render_lines(Region(0, 0, *canvas.size))
        assert [s.text for s in after] == [s.text for s in before]
        assert after != before


async def test_the_footer_of_each_page_has_the_keys_that_act_there() -> None:
    app = dashboard_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        steps, requests = ("←→", "Step"), ("↑↓", "Request")
        for key, some in (
            ("o", {steps, ("↑↓", "Mark"), ("w", "Span")}),
            ("t", {steps, ("+-", "Zoom")}),
            ("b", {steps, requests}),
            ("k", {("←→↑↓", "Move"), ("+-", "Zoom")}),
            ("i", {requests}),
            ("g", set()),
            ("l", {("↑↓", "Scroll"), ("v", "Level"), ("/", "Find")}),
        ):
            await pilot.press(key)
            await pilot.pause(0.1)
            shown = {(k.key_display, k.description) for k in app.screen.query(FooterKey)}
            assert sum(len(k) + len(d) + 3 for k, d in shown) <= 80, "cut off"
            own = {pair for pair in shown if pair[1] not in ("Chat", "Help", "Actions", "Quit")}
            assert own == {("space", "Pause"), *some}, key


async def test_q_ends_no_engine() -> None:
    """In a chat, and over a server, it says how to leave instead."""
    app = dashboard_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("q")
        await pilot.pause()
        assert app.is_running
        assert ["ctrl+q quits, and ends the engine with all that runs"] == [
            notice.message for notice in app._notifications
        ]


async def test_the_window_of_the_series_is_chosen_by_a_key() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        before = panel(app, "decode")
        await pilot.press("w")
        await pilot.pause()
        assert "−30 s" in panel(app, "decode") and "−30 s" in panel(app, "latency")
        await pilot.press("w", "w")
        await app.dashboard.refresh_view()
        assert "−120 s" in panel(app, "decode")
        await pilot.press("w", "w", "w")
        await pilot.pause()
        assert panel(app, "decode") == before


def long_ago() -> list[EngineEvent]:
    """Twenty minutes, 10 s of work in each; the figures of the last ten are known."""
    kinds, events = RequestEventKind, list[EngineEvent]()
    for minute in range(20, 0, -1):
        at = NOW_NS - minute * 60 * SECOND
        events.append(RequestEvent(at, f"r{minute}", kinds.QUEUED, 5, 0, 0))
        events.append(RequestEvent(at + SECOND, f"r{minute}", kinds.FIRST_TOKEN, 5, 1, 0))
        run = steps(250, now_ns=at + 10 * SECOND, first_id=minute * 1000)
        events += [record._replace(num_preemptions=(20 - minute) // 5) for record in run]
    return events


async def test_ten_minutes_and_an_hour_are_coarse_and_say_so() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 40)) as pilot:
        await ready(app, pilot)
        for event in long_ago():
            app.engine.bus.publish(event)
        assert app.dashboard._event_reader._watch is not None
        app.dashboard._event_reader._watch.read()
        await app.dashboard.refresh_view()
        await pilot.press("w", "w", "w", "w")
        await pilot.pause()
        assert "−10 min · 10 s each" in panel(app, "decode")
        assert "±5%" in panel(app, "latency") and "last 10 min" in panel(app, "gauges")
        ten = app.dashboard.view
        assert ten.is_coarse and len(ten.series.decode) == 60
        assert np.count_nonzero(ten.series.prefill) == 10, "ten seconds of work in a minute"
        assert ten.ttft.p50 == pytest.approx(1000, rel=0.05)
        await pilot.press("w")
        await pilot.pause()
        assert "−1 h" in panel(app, "decode")
        assert "last 1 h · 20 min known" in panel(app, "gauges")
        assert re.search(r"preempted .* 3 ", panel(app, "gauges"))
        hour = app.dashboard.view
        assert np.count_nonzero(hour.series.prefill) == 20
        assert hour.decode_rate == ten.decode_rate, "rates are those of the last second"
        await pilot.press("space", "w", "w")  # frozen: from what was known then
        for record in steps(1000, now_ns=NOW_NS + 40 * SECOND):
            app.engine.bus.publish(record)
        app.dashboard._event_reader._watch.read()
        await pilot.press("w", "w", "w", "w")
        await pilot.pause()
        frozen = app.dashboard.view
        assert np.array_equal(frozen.series.decode, hour.series.decode)
        assert frozen.ttft == hour.ttft
