"""`termgen top`: watching a server over its socket, and playing a recording of it."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import make_snapshot
from server_harness import eventually, serving
from textual.widgets._footer import FooterKey
from tui_harness import (
    MODEL,
    NOW_NS,
    SECOND,
    busy_snapshot,
    chat_engine,
    request_events,
    shipped_themes,
    step,
    steps,
    wait_until,
)

from termgen.commands import cli, top_command
from termgen.config import UIConfig
from termgen.errors import ConfigError
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.dashboard_keys import PAGES
from termgen.tui.dashboard.state.event_reader import EventReader
from termgen.tui.dashboard.state.store import STEP_HISTORY
from termgen.tui.feed_app import TopApp
from termgen.tui.feeds.attach import AttachError, RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.feeds.replay import ReplayError, ReplayFeed, read_frames
from termgen.tui.help import HelpText
from termgen.tui.paint.canvas import Canvas
from termgen.vocabulary.telemetry import Cache, Opening, encode, encode_events


@asynccontextmanager
async def attached(url: str, **options: Any) -> AsyncGenerator[RemoteFeed, None]:
    feed = await RemoteFeed.connect(url, hz=20, **options)
    try:
        yield feed
    finally:
        await feed.close()


async def test_what_the_engine_publishes_arrives() -> None:
    engine = chat_engine()
    engine.scripted_snapshot = busy_snapshot()
    async with serving(engine) as server, attached(server.url) as feed:
        ring = feed.events()
        assert feed.model == engine.model and feed.is_healthy
        assert (await feed.snapshot()).num_running == 4
        sent = [*request_events(), *steps(20)]
        for event in sent:
            engine.bus.publish(event)
        got: list[Any] = []
        await eventually(lambda: got.extend(ring.drain()) or len(got) == len(sent))
        assert got == sent
        engine.scripted_snapshot = replace(busy_snapshot(), num_waiting=7, time_ns=NOW_NS + 1)
        engine.bus.publish(step(1, end_ns=NOW_NS))
        async with asyncio.timeout(5):
            while (await feed.snapshot()).num_waiting != 7:
                await asyncio.sleep(0.01)


async def test_a_lost_server_is_said_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termgen.tui.feeds.attach.RETRY_S", 0.02)
    engine = chat_engine()
    async with serving(engine) as server:
        port = server.url.rsplit(":", 1)[1]
        feed = await RemoteFeed.connect(server.url, hz=20)
    try:
        await eventually(lambda: feed.trouble == "connection lost")
        assert not feed.is_healthy and feed.epoch == 0
        async with serving(engine, port=int(port)):
            await eventually(lambda: feed.is_healthy)
            assert feed.epoch == 1  # another process, with another history
            ring = feed.events()
            engine.bus.publish(step(77, end_ns=NOW_NS))
            got: list[Any] = []
            await eventually(lambda: bool(got.extend(ring.drain()) or got))
            assert got[0].step_id == 77
    finally:
        await feed.close()


async def test_top_begins_with_the_minutes_before() -> None:
    engine = chat_engine()
    engine.scripted_snapshot = busy_snapshot(time.perf_counter_ns())
    async with serving(engine) as server:
        now = time.perf_counter_ns()
        sent: list[Any] = [*steps(9000, now_ns=now), *request_events(now)]
        for event in sent:
            engine.bus.publish(event)
        async with attached(server.url, past=True) as feed:
            reader = EventReader(feed, feed.now_ns)
            assert feed.begun is None, "no state stands before these events"
            assert not await reader.ask(), "nor between them"
            await eventually(lambda: feed.history.since_ns == sent[0].applied_ns)
            await eventually(lambda: reader._ring.num_appended == len(sent))
            await eventually(lambda: feed._snapshot is not None)  # a busy server sends it later
            assert await reader.take() and await reader.ask()
            view = reader.store.view(feed.now_ns(), window_s=600)
            assert view.num_running == 4 and reader.store.num_dropped == 0
            assert list(view.steps) == sent[9000 - STEP_HISTORY : 9000]
            assert view.ttft.p50 is not None and view.known_s == pytest.approx(360, abs=5)
            assert view.series.decode.max() == pytest.approx(3.5 * 25, rel=0.1)
            reader.close()


@pytest.mark.parametrize("hz", [0.01, 1000.0])
async def test_any_rate_of_a_screen_is_one_that_servers_take(hz: float) -> None:
    async with serving(chat_engine()) as server:
        feed = await RemoteFeed.connect(server.url, hz=hz)
        await feed.close()


async def test_keys_are_sent_and_refusals_are_explained() -> None:
    async with serving(chat_engine(), api_key=("user",), admin_key=("s3cret",)) as server:
        with pytest.raises(AttachError, match="asks for its admin key"):
            await RemoteFeed.connect(server.url, hz=4)
        async with attached(server.url, key="s3cret") as feed:
            assert feed.model.model_id == MODEL.model_id
        address = server.url
    with pytest.raises(AttachError, match="no server at"):
        await RemoteFeed.connect(address, hz=4)
    with pytest.raises(AttachError, match="no server at"):
        await RemoteFeed.connect("http://[", hz=4)


async def test_a_recording_is_the_stream_itself(tmp_path: Path) -> None:
    engine, file = chat_engine(), io.BytesIO()
    engine.scripted_snapshot = make_snapshot(num_running=1, time_ns=1)
    async with serving(engine) as server, attached(server.url, record=file) as feed:
        ring = feed.events()
        first = feed.now_ns()
        for i in range(5):
            engine.bus.publish(step(i, end_ns=first + i * SECOND))
        await eventually(lambda: ring.num_appended == 5)
    path = tmp_path / "run.events"
    path.write_bytes(file.getvalue() + b"event: step\nid: x-1\ndata: {half a fra")
    replay = ReplayFeed.open(path)
    assert replay.model == engine.model
    ring = replay.events()
    replay.seek(100 * SECOND)
    assert [event.step_id for event in ring.drain()] == list(range(5))


# -- replay --------------------------------------------------------------------------------


def recording(seconds: int = 60) -> bytes:
    """One step each second, a snapshot with it; ids count seconds."""
    start = NOW_NS
    opening = Opening(
        stream="s",
        resumed=False,
        clock_ns=start,
        unix_ns=0,
        dropped=0,
        status="ok",
        model=MODEL,
        snapshot=replace(busy_snapshot(start), num_finished=0),
    )
    out = [bytes(encode(opening, "s-0"))]
    for i in range(1, seconds + 1):
        at = start + i * SECOND
        record = step(i, end_ns=at - 100_000)
        topics = frozenset({"step"})
        out += map(bytes, encode_events([record], stream="s", first=i, dropped=0, topics=topics))
        snapshot = replace(busy_snapshot(at), num_finished=i)
        out.append(bytes(encode(Cache(dropped=0, snapshot=snapshot), f"s-{i}")))
    return b"".join(out)


class Clock:
    def __init__(self) -> None:
        self.ns = 5 * SECOND

    def __call__(self) -> int:
        return self.ns


def replay_of(tmp_path: Path, clock: Clock) -> ReplayFeed:
    path = tmp_path / "run.events"
    path.write_bytes(recording())
    return ReplayFeed(read_frames(path), now_ns=clock)


async def test_a_recording_plays_by_its_own_times(tmp_path: Path) -> None:
    clock = Clock()
    feed = replay_of(tmp_path, clock)
    ring = feed.events()
    assert feed.length_ns == 60 * SECOND and feed.position_ns == 0
    clock.ns += 3 * SECOND
    feed.advance()
    assert [s.step_id for s in ring.drain()] == [1, 2, 3]
    assert (await feed.snapshot()).num_finished == 3
    feed.stop(True)
    clock.ns += 50 * SECOND
    feed.advance()
    assert ring.drain() == [] and feed.position_ns == 3 * SECOND
    feed.stop(False)
    feed.set_speed(2.0)
    clock.ns += 2 * SECOND
    feed.advance()
    assert [s.step_id for s in ring.drain()] == [4, 5, 6, 7]
    feed.seek(10 * SECOND)
    assert [s.step_id for s in ring.drain()] == list(range(8, 18)) and feed.epoch == 0
    feed.seek(-15 * SECOND)
    assert feed.epoch == 1 and feed.position_ns == 2 * SECOND
    assert [s.step_id for s in ring.drain()] == [1, 2]
    assert (await feed.snapshot()).num_finished == 2
    feed.seek(1000 * SECOND)
    clock.ns += 1000 * SECOND
    assert feed.position_ns == feed.length_ns


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no frame of an event stream"),
        (b"hello world\n\nmore\n\n", "no frame of an event stream"),
        (b"event: step\nid: s-1\ndata: {}\n\n", "cannot be read"),
        (b"event: model\nid: s-1\ndata: nonsense\n\n", "cannot be read"),
        (b"event: \xff\nid: s-1\ndata: {}\n\n", "--replay"),
        (b'event: snapshot\nid: s-1\ndata: {"version":1,"model":"x"}\n\n', "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=why):
        ReplayFeed.open(path)
    with pytest.raises(ReplayError, match="No such file"):
        ReplayFeed.open(tmp_path / "missing")


# -- the app -------------------------------------------------------------------------------


class QuietTop(TopApp):
    """Draws on the test's request."""

    def make_feed_dashboard(self, feed: StreamFeed) -> DashboardScreen:
        return DashboardScreen(feed, hz=0.01, now_ns=feed.now_ns, cpu_ns=lambda: 0, is_alone=True)


def top_of(feed: StreamFeed) -> QuietTop:
    async def give() -> StreamFeed:
        return feed

    return QuietTop(give, ui=UIConfig(), theme_folders=(shipped_themes(),))


def panel(app: TopApp, name: str) -> str:
    return app.screen.query_one(f"#{name}", Canvas).text


async def test_a_recording_in_the_dashboard(tmp_path: Path) -> None:
    clock = Clock()
    app = top_of(replay_of(tmp_path, clock))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
        screen = app.screen
        assert isinstance(screen, DashboardScreen)
        await pilot.pause()
        clock.ns += 30 * SECOND
        await screen.refresh_view()
        assert "▶ replay  " in panel(app, "header") and "0:30/1:00" in panel(app, "header")
        assert "step 30 " in panel(app, "batch") and "chat-1" in panel(app, "requests")
        await pilot.press("left_square_bracket")
        await pilot.pause()
        assert "0:20/1:00" in panel(app, "header") and "step 20 " in panel(app, "batch")
        assert screen.view.num_finished == 20
        await pilot.press("space")
        clock.ns += 60 * SECOND
        await screen.refresh_view()
        assert "❚❚ paused" in panel(app, "header") and "0:20/1:00" in panel(app, "header")
        await pilot.press("right_square_bracket")
        await pilot.pause()
        assert "0:30/1:00" in panel(app, "header") and "step 30 " in panel(app, "batch")
        await pilot.press("space", "greater_than_sign")
        clock.ns += 5 * SECOND
        await screen.refresh_view()
        assert "0:40/1:00 ×2" in panel(app, "header")
        await pilot.press("f2")
        await pilot.pause()
        assert app.screen is screen
        footer = " ".join(str(key.description) for key in screen.query(FooterKey))
        assert "Pause" in footer and "Chat" not in footer
        titles = {command.title for command in app.get_system_commands(screen)}
        assert "Chat" not in titles and {"10 s back", "Faster", "Timeline"} <= titles
        await pilot.press("f1")
        await wait_until(pilot, lambda: bool(app.screen.query(HelpText)))
        help_text = app.screen.query_one(HelpText).text
        assert "Freeze or go on live" in help_text and "Go to the chat" not in help_text


async def test_q_quits_a_recording_and_its_footer_shows_its_keys(tmp_path: Path) -> None:
    app = top_of(replay_of(tmp_path, Clock()))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
        for page in PAGES:
            await pilot.press(page.key)
            await pilot.pause(0.1)
            footer = [(key.key_display, key.description) for key in app.screen.query(FooterKey)]
            assert {("[]", "10 s"), ("<>", "Speed"), ("q", "Quit")} <= set(footer), page.name
            assert ("^q", "Quit") not in footer
            assert sum(len(k) + len(d) + 3 for k, d in footer) <= 80, footer
        await pilot.press("q")
        await wait_until(pilot, lambda: not app.is_running)
    assert app.return_code == 0


async def test_a_server_in_the_dashboard() -> None:
    engine = chat_engine()
    engine.scripted_snapshot = busy_snapshot()
    async with serving(engine) as server:
        feed = await RemoteFeed.connect(server.url, hz=20)
        app = top_of(feed)
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
            screen = app.screen
            assert isinstance(screen, DashboardScreen)
            await pilot.pause()
            engine.bus.publish(step(4711, end_ns=feed.now_ns()))
            await wait_until(pilot, lambda: screen._event_reader._ring.num_appended > 0)
            await screen.refresh_view()
            assert "step 4 711" in panel(app, "batch") and "chat-1" in panel(app, "requests")
            await pilot.press("left_square_bracket")
            await pilot.pause()
            assert any("recording" in note.message for note in app._notifications)
            await server.stop(drain_timeout=0)
            await wait_until(pilot, lambda: not feed.is_healthy)
            await screen.refresh_view()
            assert "✗ connection lost" in panel(app, "header")
            assert "chat-1" in panel(app, "requests")


async def test_no_server_is_one_line() -> None:
    async def fail() -> StreamFeed:
        raise AttachError("no server at http://127.0.0.1:1: refused")

    app = QuietTop(fail, ui=UIConfig(), theme_folders=(shipped_themes(),))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.return_code is not None)
    assert app.return_code == 2


# -- the command ---------------------------------------------------------------------------


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("  first\nsecond\n")
    assert top_command.read_key(str(path)) == "first"
    monkeypatch.setenv("TERMGEN_ADMIN_KEY", "one,two")
    assert top_command.read_key(None) == "one"
    monkeypatch.delenv("TERMGEN_ADMIN_KEY")
    assert top_command.read_key(None) is None
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        top_command.read_key(str(path))
    with pytest.raises(ConfigError, match="missing"):
        top_command.read_key(str(tmp_path / "missing"))


def test_a_failed_start_leaves_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command can be given again."""
    path = tmp_path / "run.events"

    def fails(app: TopApp) -> None:
        with pytest.raises(AttachError, match="no server at"):
            asyncio.run(app._open_feed())

    monkeypatch.setattr(TopApp, "run", fails)
    monkeypatch.setattr(top_command, "let_others_first", lambda: None)
    for _ in range(2):
        top_command.run_top(
            "http://127.0.0.1:9", UIConfig(), record=str(path), key_file=None, wait_s=0.0
        )
        assert not path.exists()
    with pytest.raises(ConfigError, match="theme"):
        top_command.run_top(None, UIConfig(theme="none"), record=str(path), key_file=None)
    assert not path.exists()


async def test_a_loading_server_is_waited_for_on_the_loading_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(None) as server:
        server.on_loading("loading weights", 0.25)
        apps: list[QuietTop] = []

        async def connect() -> StreamFeed:
            return await RemoteFeed.connect(server.url, hz=20, report=apps[0].report)

        app = QuietTop(connect, ui=UIConfig(), theme_folders=(shipped_themes(),))
        apps.append(app)
        async with app.run_test(size=(80, 24)) as pilot:
            canvas = app.screen.query_one(Canvas)
            await wait_until(pilot, lambda: "loading weights" in canvas.text)
            await wait_until(pilot, lambda: "25%" in canvas.text)
            server.attach(chat_engine())
            await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))


def test_a_recording_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="exists already"):
        top_command.run_top(None, UIConfig(), record=str(path), key_file=None)
    assert path.read_bytes() == b"precious"


def test_bad_command_lines_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--replay", "a", "--record", "b"]) == 2
    assert "--replay FILE needs no --record" in capsys.readouterr().err
    assert cli.main(["top"]) == 2
    assert "needs a terminal" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "here"),
    [
        (None, True),
        ("localhost:8000", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://[::1]:8000", True),
        ("http://gpu.example.org:8000", False),
        ("gpu:8000", False),
        ("http://[::1", False),
    ],
)
def test_a_screen_beside_its_engine_gives_way(
    url: str | None, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(top_command, "let_others_first", lambda: shown.append("gives way"))
    monkeypatch.setattr(TopApp, "run", lambda self: shown.append("shown"))
    assert top_command.run_top(url, UIConfig(), record=None, key_file=None) == 0
    assert shown == (["gives way", "shown"] if here else ["shown"])


@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's scheduling")
def test_giving_way_is_the_process_own() -> None:
    program = (
        "import os; from termgen.commands.top_command import *;"
        "before = os.nice(0); let_others_first();"
        "print(os.nice(0) == min(19, before + 10), os.sched_getscheduler(0) == os.SCHED_BATCH)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "True"], ran.stderr
