"""`termgen top` with several servers: the list, their dashboards, and one that is not there."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from server_harness import serving
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey
from tui_harness import (
    MODEL,
    NOW_NS,
    busy_snapshot,
    chat_engine,
    request_events,
    shipped_themes,
    steps,
    wait_until,
)

from termgen.client import ModelInfo
from termgen.commands import cli
from termgen.commands.top_once import run_once
from termgen.config import UIConfig
from termgen.errors import EngineError
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.fleet import FleetScreen, OpenFeed, Report
from termgen.tui.dashboard.pages.fleet_rows import ServerLine, fleet_rows
from termgen.tui.dashboard.state.store import DashboardStore
from termgen.tui.feed_app import FleetApp
from termgen.tui.feeds.attach import AttachError, RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.spans import row_text, row_width
from termgen.vocabulary.telemetry import Cache, Events, Opening

Compare = Callable[..., bool]
DEAD = "http://127.0.0.1:9"


def opener(url: str) -> OpenFeed:
    async def connect(report: Report) -> StreamFeed:
        return await RemoteFeed.connect(url, hz=20, report=report, past=True)

    return connect


def fleet_of(*servers: tuple[str, OpenFeed]) -> FleetApp:
    return FleetApp(servers, ui=UIConfig(), theme_folders=(shipped_themes(),))


def listed(app: FleetApp) -> list[str]:
    return app.fleet.query_one("#servers", Canvas).text.splitlines()


async def test_a_line_for_each_and_a_dead_one_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("termgen.tui.dashboard.fleet.LOOK_S", 0.1)
    monkeypatch.setattr("termgen.tui.dashboard.fleet.RETRY_S", 0.1)
    busy, idle = chat_engine(), chat_engine()
    now = time.perf_counter_ns()
    busy.scripted_snapshot = busy_snapshot(now)
    async with serving(busy) as one, serving(idle) as other:
        for event in [*steps(100, now_ns=now), *request_events(now)]:
            busy.bus.publish(event)
        urls = (one.url, DEAD, other.url)
        app = fleet_of(*((url, opener(url)) for url in urls))
        async with app.run_test(size=(120, 20)) as pilot:
            await wait_until(pilot, lambda: isinstance(app.screen, FleetScreen))
            await wait_until(pilot, lambda: sum("●" in row for row in listed(app)) == 2)
            first, dead, last = listed(app)[1:4]
            assert first.startswith("▸ ●") and re.search(r" 4/8 +2 .* 36%  ", first), first
            assert dead.startswith("  ✗ 127.0.0.1:9") and "no server at" in dead
            assert last.startswith("  ● ") and " 0/" in last
            assert "2 of 3 servers reachable" in app.screen.query_one("#header", Canvas).text
            await pilot.press("down", "enter")
            await pilot.pause()
            assert isinstance(app.screen, FleetScreen), "there is nothing to open"
            await pilot.press("up", "enter")
            await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
            dashboard = app.screen
            await wait_until(pilot, lambda: "step 182 099" in page(app, "batch"))
            await pilot.press("space", "escape")
            await pilot.pause()
            assert app.screen is dashboard, "esc first goes on live"
            footer = [(key.key_display, key.description) for key in app.screen.query(FooterKey)]
            assert ("esc", "List") in footer
            await pilot.press("escape")
            await wait_until(pilot, lambda: isinstance(app.screen, FleetScreen))
            await pilot.press("enter")
            await wait_until(pilot, lambda: app.screen is dashboard)
            await pilot.press("escape", "q")
            await wait_until(pilot, lambda: not app.is_running)
        assert app.return_code == 0


def page(app: FleetApp, name: str) -> str:
    return app.screen.query_one(f"#{name}", Canvas).text


async def test_one_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termgen.tui.dashboard.fleet.LOOK_S", 0.1)
    monkeypatch.setattr("termgen.tui.dashboard.fleet.RETRY_S", 0.1)
    engine, there = chat_engine(), asyncio.Event()
    engine.scripted_snapshot = busy_snapshot()
    async with serving(engine) as server:

        async def later(report: Report) -> StreamFeed:
            report("loading weights", 0.5)
            if not there.is_set():
                await asyncio.sleep(0.05)
                raise AttachError("not yet there")
            return await opener(server.url)(report)

        async def broken(_report: Report) -> StreamFeed:
            raise ValueError("of a fault")

        app = fleet_of(("later", later), ("broken", broken))
        async with app.run_test(size=(100, 20)) as pilot:
            await wait_until(pilot, lambda: isinstance(app.screen, FleetScreen))
            await wait_until(pilot, lambda: "loading weights" in "".join(listed(app)))
            await wait_until(pilot, lambda: "not yet there" in "".join(listed(app)))
            assert "watching ended: ValueError: of a fault" in listed(app)[2]
            there.set()
            await wait_until(pilot, lambda: "▸ ● later" in "".join(listed(app)))


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_lines_fit_and_lose_no_number(width: int) -> None:
    store = DashboardStore(started_ns=NOW_NS)
    store.set_snapshot(busy_snapshot())
    store.apply([*request_events(), *steps(300)])
    view = store.view(NOW_NS)
    name = "http://" + "a" * 60
    lines = [ServerLine(name, MODEL, view), ServerLine("http://b\x1b[2J", trouble="lost \x1b[3J")]
    rows = fleet_rows([*lines, *lines, *lines], width, 4, chosen=3, first=2)
    assert len(rows) == 4
    texts = [row_text(row) for row in rows]
    assert all("\x1b" not in text for text in texts)
    assert all(row_width(row) <= width for row in rows[1:])
    assert texts[2].startswith("▸ ✗ b") and texts[1].startswith("  ● aaaa")
    if width >= 80:
        for number in ("4/8", " 86.5", "512", "200 ms", "36%", "decodes"):
            assert number in texts[1], (number, texts[1])
    paused = replace(busy_snapshot(), paused=True)
    store.set_snapshot(paused)
    asleep = [ServerLine("u", MODEL, store.view(NOW_NS))]
    line = fleet_rows(asleep, 100, 2, chosen=1, first=0)[1]
    assert row_text(line).rstrip().endswith("paused")


def test_several_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    engine = chat_engine()
    engine.scripted_snapshot = busy_snapshot()

    async def run() -> tuple[str, list[dict[str, Any]], str]:
        async with serving(engine) as server:
            urls = [server.url, DEAD]
            await asyncio.to_thread(run_once, urls, key=None, as_json=True)
            as_json = capsys.readouterr().out
            await asyncio.to_thread(run_once, urls, key=None, as_json=False)
            return server.url, json.load(io.StringIO(as_json)), capsys.readouterr().out

    url, (one, dead), lines = asyncio.run(run())
    assert (one["url"], one["error"], one["running"]) == (url, None, 4)
    assert dead["url"] == DEAD and "no server at" in dead["error"] and "running" not in dead
    assert lines.startswith(f"{url}\n  smollm2") and f"\n\n{DEAD}\n  ✗ no server at" in lines
    with pytest.raises(AttachError, match="no server at"):
        run_once([DEAD, DEAD], key=None, as_json=True)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--record", "x"], "--record is for one server"),
        (["--wait", "3"], "--wait is for one server"),
        (["--replay", "x"], "needs no URL"),
    ],
)
def test_flags_of_one_server_are_refused(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", "http://a", "http://b", *flags]) == 2
    assert why in capsys.readouterr().err


# -- pictures ------------------------------------------------------------------------------


class StillFeed(StreamFeed):
    def now_ns(self) -> int:
        return NOW_NS


def still(model: ModelInfo, *, waiting: int) -> OpenFeed:
    """A server whose time stands still."""

    async def connect(_report: Report) -> StreamFeed:
        snapshot = replace(busy_snapshot(), num_waiting=waiting)
        opening = Opening(
            stream="s",
            resumed=False,
            clock_ns=NOW_NS,
            unix_ns=0,
            dropped=0,
            status="ok",
            model=model,
            snapshot=replace(snapshot, time_ns=NOW_NS - 10**10),
        )
        feed = StillFeed(opening)
        feed.take(opening)
        events = (*request_events(), *(s._replace(num_waiting=waiting) for s in steps(300)))
        asyncio.get_running_loop().call_later(
            0.05, lambda: feed.take(Events(dropped=0, events=events))
        )
        asyncio.get_running_loop().call_later(
            0.06, lambda: feed.take(Cache(dropped=0, snapshot=snapshot))
        )
        return feed

    return connect


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_fleet(
    snap_compare: Compare, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termgen.tui.dashboard.fleet.LOOK_S", 0.1)

    async def gone(_report: Report) -> StreamFeed:
        raise EngineError("no server at http://gpu-3:8000: connection refused")

    other = replace(MODEL, model_id="qwen3-0.6b", dtype="bfloat16")
    app = fleet_of(
        ("http://gpu-1:8000", still(MODEL, waiting=2)),
        ("http://gpu-2:8000", still(other, waiting=0)),
        ("http://gpu-3:8000", gone),
    )

    async def shown(pilot: Pilot[Any]) -> None:
        await wait_until(pilot, lambda: isinstance(app.screen, FleetScreen))
        await pilot.press("down")
        await wait_until(pilot, lambda: sum(" 36% " in row for row in listed(app)) == 2)
        await wait_until(pilot, lambda: sum("200 ms" in row for row in listed(app)) == 2)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=shown)
