"""The bench screen after scripted progress: figures, report, keys, sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from server_harness import serving
from textual.binding import Binding
from textual.pilot import Pilot
from tui_harness import chat_engine, shipped_themes, wait_until

from termgen.config import UIConfig
from termgen.errors import EngineError
from termgen.tui.bench.bench_rows import bench_page, plot_row, report_rows
from termgen.tui.bench.bench_screen import BACK, KEYS, BenchEngineScreen, BenchScreen
from termgen.tui.bench.bench_view import BenchView, Plane, Section, Series, Spread, Target, TimesRow
from termgen.tui.bench_app import BenchApp
from termgen.tui.feeds.attach import RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.spans import row_text, row_width

SPREAD = Spread("time to first token", 21.0, 148.0, (1, 5, 9, 4, 2, 1))
RUNNING = BenchView(
    subject="m at 127.0.0.1:1",
    load="random ×40 · seed 7",
    phase="measuring",
    num_done=10,
    num_requests=40,
    left_s=27.0,
    elapsed_s=9.0,
    targets=(
        Target("rate", "8/s", "7.9/s"),
        Target("at once", "at most 16", "14"),
        Target("TTFT", "≤ 200 ms", "94% of answers", True),
        Target("TPOT", "≤ 10.0 ms", "12% of answers", False),
    ),
    times=(
        TimesRow("TTFT", 44.1, 38.2, 71.5, 148.0),
        TimesRow("ITL", 5.3, 4.9, 6.2, 17.8),
        TimesRow("TPOT", 5.2, 5.0, 6.0, 8.1),
        TimesRow("e2e", 1940.0, None, None, None),
    ),
    rates=(
        ("output tok/s", "411"),
        ("requests/s", "7.20"),
        ("errors", "3"),
        ("goodput", "94% of requests, 7.40/s"),
    ),
    series=(
        Series("in flight", (1.0, 4.0, 14.0), "14", "decode"),
        Series("output tok/s", (10.0, 300.0, 411.0), "411", "prefill"),
        Series("answers/s", (0.0, 4.0, 7.0), "7.0", "latency"),
    ),
    spread=SPREAD,
)
REPORT = (
    Section("files", ("report written to out/run.html",)),
    Section("times", tuple(f"line {i}" for i in range(60))),
    Section("histogram", ("  1.0 ms  ███▌ 4",)),
)
DONE = replace(RUNNING, phase="done", num_done=40, left_s=0.0, report=REPORT)


class Script:
    """The bench's news, chosen by a test, and the screen's commands."""

    def __init__(self, view: BenchView = RUNNING) -> None:
        self.view = view
        self.begun = self.stops = 0
        self.url: str | None = None

    def app(self, **ui: Any) -> BenchApp:
        return BenchApp(
            lambda: self.view,
            begin=self._begin,
            stop=self._stop,
            open_feed=self._open_feed,
            ui=UIConfig(dashboard_hz=10.0, **ui),
            theme_folders=(shipped_themes(),),
        )

    def _begin(self) -> None:
        self.begun += 1

    def _stop(self) -> None:
        self.stops += 1
        self.view = replace(DONE, phase="stopped")

    async def _open_feed(self) -> StreamFeed:
        if self.url is None:
            raise EngineError("http://h has no /v1/events: is it a termgen server?")
        return await RemoteFeed.connect(self.url, hz=10)


def shown(app: BenchApp) -> str:
    return app.bench.query_one("#bench", Canvas).text


async def until_shown(app: BenchApp, pilot: Pilot[Any], words: str) -> None:
    await wait_until(pilot, lambda: isinstance(app.screen, BenchScreen) and words in shown(app))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
async def test_figures_follow_and_the_report_takes_their_place(size: tuple[int, int]) -> None:
    script = Script()
    app = script.app()
    async with app.run_test(size=size) as pilot:
        await until_shown(app, pilot, "10/40")
        assert script.begun == 1
        text = shown(app)
        for words in ("random ×40", "25%", "0:27 left", "8/s  now 7.9/s", "at most 16  now 14"):
            assert words in text, words
        for words in ("94% of answers ✓", "12% of answers ✗", "38.2", "148", "1.94 s", "in flight"):
            assert words in text, words
        assert "goodput        94% of requests" in text and "errors         3" in text
        await pilot.press("r", "pagedown")
        assert "report written" not in shown(app), "there is none yet"
        script.view = replace(RUNNING, num_done=20)
        await until_shown(app, pilot, "20/40")
        script.view = DONE
        await until_shown(app, pilot, "report written to out/run.html")
        assert "100%" in shown(app) and " done" in shown(app) and "left" not in shown(app)
        await pilot.press("end")
        await until_shown(app, pilot, "███▌")
        await pilot.press("up")
        assert "███▌" not in shown(app)
        await pilot.press("home", "r")
        await until_shown(app, pilot, "figures")
        await pilot.press("q")
        await pilot.pause()
    assert script.stops == 0, "there was nothing to stop"


async def test_ctrl_c_stops_the_run_first_and_leaves_then() -> None:
    script = Script()
    app = script.app()
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(app, pilot, "10/40")
        await pilot.press("ctrl+c")
        await until_shown(app, pilot, "report written")
        assert script.stops == 1 and "stopped" in shown(app)
        await pilot.press("s")
        assert script.stops == 1, "it has stopped"
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert not app.is_running


async def test_the_engine_is_one_key_away() -> None:
    script, engine = Script(), chat_engine()
    app = script.app()
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(app, pilot, "10/40")
        await pilot.press("f2")
        await pilot.pause()
        assert isinstance(app.screen, BenchScreen), "no engine to watch"
        assert "has no /v1/events" in " ".join(n.message for n in app._notifications)
        async with serving(engine) as server:
            script.url = server.url
            await pilot.press("2")
            await wait_until(pilot, lambda: isinstance(app.screen, BenchEngineScreen))
            assert {"dashboard.bench"} == {
                a.binding.id for a in app.screen.active_bindings.values() if a.binding.key == "f2"
            }
            script.view = DONE
            await pilot.press("f2")
            await until_shown(app, pilot, "report written")
            await pilot.press("f2")
            await wait_until(pilot, lambda: isinstance(app.screen, BenchEngineScreen))
            await pilot.press("q")  # no keys of the engine
            await pilot.press("ctrl+q")
            await pilot.pause()


async def test_every_key_is_in_the_palette_and_the_help_and_can_be_changed() -> None:
    app = Script().app(keys=("bench.stop=f8",))
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(app, pilot, "10/40")
        words = {command.help for command in app.get_system_commands(app.screen)}
        assert all(any(text.startswith(key.tooltip) for text in words) for key in KEYS)
        assert not any("chat" in text.lower() for text in words), "there is none"
        helped = {b.id for _, part in app.help_sections() for b in part if isinstance(b, Binding)}
        assert helped >= {b.id for b in [*KEYS, *BACK]} and "dashboard.chat" not in helped
        await pilot.press("s", "f8")
        await until_shown(app, pilot, "stopped")


@pytest.mark.parametrize("size", [(20, 4), (40, 12), (80, 24), (99, 60), (100, 20), (200, 60)])
def test_pages_fill_any_size_exactly(size: tuple[int, int]) -> None:
    width, height = size
    plane = Plane("TTFT p99, ms", "clients", ((1, 40, True), (2, 260, False)), 200.0)
    early = BenchView(subject="", load="x", phase="connecting")
    for view in (RUNNING, DONE, early, replace(RUNNING, plane=plane)):
        for boxed in (False, True):
            rows = bench_page(view, width, height, boxed=boxed)
            assert len(rows) <= height and all(row_width(row) == width for row in rows)


def test_a_sweep_shows_its_curve_and_its_limit() -> None:
    plane = Plane("TTFT p99, ms", "clients", ((1, 40, True), (8, 260, False)), 200.0)
    rows = bench_page(replace(RUNNING, plane=plane, step="8 clients"), 120, 40, boxed=True)
    text = "\n".join(row_text(row) for row in rows)
    assert "8 clients · measuring" in text and "┄┄┄" in text and "8 clients │" in text
    marks = [line.index(mark) for mark in "●○" for line in text.splitlines()[3:] if mark in line]
    assert marks[0] < marks[1], "the heavier load is at the right"


def test_long_lines_of_a_report_go_on_and_plots_have_colours() -> None:
    rows = report_rows((Section("warnings", ("a" * 50,)),), 20)
    assert [row_text(row) for row in rows] == ["warnings", "a" * 20, "a" * 20, "a" * 10]
    words = "the load generator woke up late"
    rows = report_rows((Section("warnings", (words,)),), 20)
    assert [row_text(row) for row in rows[1:]] == ["the load generator", "woke up late"]
    assert plot_row("1 ┤█ ●\x1b") == (
        *(("1 ", "text"), ("┤", "border"), ("█", "decode"), (" ", "text"), ("●", "good")),
        ("␛", "text"),
    )
