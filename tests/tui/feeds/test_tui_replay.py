"""Moving within a recording: the display matches that time, and keys work meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import make_snapshot
from tui_harness import (
    MODEL,
    MS,
    NOW_NS,
    SECOND,
    busy_snapshot,
    request_view,
    shipped_themes,
    step,
    wait_until,
)

from termgen.config import UIConfig
from termgen.errors import EngineError
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.state import event_reader as intake
from termgen.tui.dashboard.state.event_reader import EventReader
from termgen.tui.dashboard.state.past import as_of
from termgen.tui.dashboard.state.request_history import Doing
from termgen.tui.dashboard.state.store import STEP_HISTORY
from termgen.tui.feed_app import TopApp
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.feeds.replay import PART_EVENTS, ReplayFeed
from termgen.tui.paint.canvas import Canvas
from termgen.vocabulary.engine_history import EngineHistory
from termgen.vocabulary.events import EngineSnapshot, RequestEvent, RequestEventKind, StepRecord
from termgen.vocabulary.step_figures import COLUMNS, Values
from termgen.vocabulary.telemetry import Cache, Frame, Model, Opening, encode, encode_events

Frames = list[tuple[int, Frame]]


class Clock:
    def __init__(self) -> None:
        self.ns = 5 * SECOND

    def __call__(self) -> int:
        return self.ns


def at(second: float) -> int:
    return NOW_NS + round(second * SECOND)


def opened(second: float, snapshot: EngineSnapshot | None, stream: str = "s") -> tuple[int, Frame]:
    message = Opening(
        stream=stream,
        resumed=False,
        clock_ns=at(second),
        unix_ns=0,
        dropped=0,
        status="ok",
        model=MODEL,
        snapshot=snapshot,
    )
    return at(second), encode(message, f"{stream}-0")


def state(second: float, finished: int) -> tuple[int, Frame]:
    snapshot = replace(busy_snapshot(at(second)), num_finished=finished)
    return at(second), encode(Cache(dropped=0, snapshot=snapshot), "s-1")


def stepped(second: float, *step_ids: int) -> tuple[int, Frame]:
    records = [step(i, end_ns=at(second) - MS) for i in step_ids]
    topics = frozenset({"step"})
    (frame,) = encode_events(records, stream="s", first=1, dropped=0, topics=topics)
    return at(second), frame


def played(frames: Frames, seconds: float) -> tuple[ReplayFeed, Clock]:
    clock = Clock()
    feed = ReplayFeed(frames, now_ns=clock)
    clock.ns += round(seconds * SECOND)
    while feed.advance():
        pass
    return feed, clock


# -- what was ------------------------------------------------------------------------------


async def test_after_a_quiet_stretch_the_state_is_that_of_then() -> None:
    frames = [opened(0, busy_snapshot(at(0)))]
    frames += [f for i in range(1, 6) for f in (stepped(i, i), state(i, finished=i))]
    frames += [stepped(400, 6), state(400, finished=99)]
    feed, _ = played(frames, 400)
    assert (await feed.snapshot()).num_finished == 99
    feed.seek(-100 * SECOND)
    assert (await feed.snapshot()).num_finished == 5
    feed.seek(-297 * SECOND)
    assert (await feed.snapshot()).num_finished == 3


async def test_each_step_of_a_recording_has_its_own_snapshot() -> None:
    """Many are passed in one frame of the screen, and again after the recording is turned."""
    frames = [opened(0, busy_snapshot(at(0)))]
    for i in range(1, 200):
        frames += [stepped(i / 4, i), state(i / 4, finished=i)]
    clock = Clock()
    feed = ReplayFeed(frames, now_ns=clock)
    reader = EventReader(feed, feed.now_ns)
    for seconds, turned, newest in ((45, 0, 180), (0, -5, 160)):
        clock.ns += seconds * SECOND
        if turned:
            reader.turn(turned * SECOND)
        await reader.take()
        await reader.ask()
        view, kept = reader.store.view(feed.now_ns()), reader.store.kept()
        assert view.steps[-1].step_id == newest
        for back in (1, 7, 50, 100):
            then = as_of(view, back, kept, reader.store.history)
            assert then.snapshot is not None and then.num_finished == newest - back
    reader.close()


async def test_the_last_hour_is_that_of_then(tmp_path: Path) -> None:
    """After a turn back the coarse figures are the ones that were shown at that time, those from
    before the recording with them."""
    before = EngineHistory()
    before.add(step(i, end_ns=at(i - 1800)) for i in range(1800))
    frames = [opened(0, busy_snapshot(at(0)))]
    frames.append((at(0), encode(before.state(), "s-0")))
    frames += [f for i in range(1, 1000) for f in (stepped(i, i), state(i, finished=i))]
    path, clock = tmp_path / "run.events", Clock()
    path.write_bytes(b"".join(bytes(frame) for _, frame in frames))
    for moments in ((600, 330, 300, 5), (100, 90, 0)):
        straight, turned = ReplayFeed.open(path), ReplayFeed.open(path)
        for feed in (straight, turned):
            feed._wall_ns = clock
            feed.stop(True)
        turn(turned, 990)
        for moment in reversed(moments):
            turn(straight, moment)
            turn(turned, 990)
            turn(turned, moment)
            assert turned.position_ns == straight.position_ns == moment * SECOND
            assert np.array_equal(known(turned), known(straight)), f"{moment} s"
            assert known(turned).sum() == 1800 + moment, "a step each second"
            reader = EventReader(turned, turned.now_ns)
            assert sum(reader.store.view(at(moment), window_s=3600).series.decode) > 0
            reader.close()


def turn(feed: ReplayFeed, second: float) -> None:
    feed.seek(round(second * SECOND) - feed.position_ns)
    while feed.advance():
        pass


def known(feed: ReplayFeed) -> Values:
    """Steps in each ten seconds of the hour."""
    return feed.history.state().series[COLUMNS.index("steps")]


async def test_a_state_that_was_not_told_yet_is_not_known() -> None:
    feed, _ = played([opened(0, None), stepped(20, 1), state(30, finished=9)], 30)
    assert (await feed.snapshot()).num_finished == 9
    feed.seek(-5 * SECOND)
    with pytest.raises(EngineError, match="not reported"):
        await feed.snapshot()


async def test_what_is_served_and_how_it_stands_are_those_of_then() -> None:
    other = replace(MODEL, model_id="another")
    frames = [opened(0, busy_snapshot(at(0))), stepped(1, 1)]
    frames += [(at(200), encode(Model(status="draining", model=MODEL), "s-2"))]
    frames += [stepped(201, 2), opened(400, None, stream="t")]
    frames += [(at(401), encode(Model(status="engine_dead", model=other), "t-1")), stepped(600, 3)]
    feed, _ = played(frames, 600)
    assert (feed.stream, feed.status, feed.model) == ("t", "engine_dead", other)
    assert feed.trouble == "engine stopped"
    feed.seek(-201 * SECOND)
    assert (feed.stream, feed.status, feed.model) == ("s", "draining", MODEL)
    feed.seek(-200 * SECOND)
    assert feed.status == "ok" and feed.is_healthy
    epoch = feed.epoch
    feed.seek(250 * SECOND)
    while feed.advance():
        pass
    assert feed.stream == "t" and feed.epoch == epoch + 1


# -- keys answered meanwhile ---------------------------------------------------------------


async def test_minutes_are_played_again_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "REPLAY_CAPACITY", 1000)
    frames = [opened(0, busy_snapshot(at(0)))]
    frames += [stepped(i, *range(i * 100, i * 100 + 100)) for i in range(1, 51)]
    clock = Clock()
    feed = ReplayFeed(frames, now_ns=clock)
    listener, turns = EventReader(feed, feed.now_ns), 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    clock.ns += 60 * SECOND
    await listener.take()
    other = asyncio.create_task(other_work())
    listener.turn(-1 * SECOND)
    assert await listener.take()
    other.cancel()
    assert turns >= 4900 // (PART_EVENTS + 100) - 1
    view = listener.store.view(feed.now_ns())
    assert view.graphs.num_steps == 4900 and len(view.steps) == STEP_HISTORY
    assert view.num_dropped == 0
    listener.close()


async def test_events_of_two_engines_are_never_mixed() -> None:
    frames = [opened(0, None), stepped(1, 1, 2, 3), opened(2, None, stream="t"), stepped(3, 4)]
    clock = Clock()
    feed = ReplayFeed(frames, now_ns=clock)
    listener = EventReader(feed, feed.now_ns)
    clock.ns += 10 * SECOND
    await listener.take()
    assert [s.step_id for s in listener.store.view(feed.now_ns()).steps] == [4]
    listener.close()


# -- on the screen -------------------------------------------------------------------------


class QuietTop(TopApp):
    """Draws on the test's request."""

    def make_feed_dashboard(self, feed: StreamFeed) -> DashboardScreen:
        return DashboardScreen(feed, hz=0.01, now_ns=feed.now_ns, cpu_ns=lambda: 0)


def top_of(frames: Frames) -> tuple[QuietTop, Clock]:
    clock = Clock()
    feed = ReplayFeed(frames, now_ns=clock)

    async def give() -> StreamFeed:
        return feed

    return QuietTop(give, ui=UIConfig(), theme_folders=(shipped_themes(),)), clock


async def dashboard_of(app: QuietTop, pilot: Any) -> DashboardScreen:
    await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
    await pilot.pause()
    assert isinstance(app.screen, DashboardScreen)
    return app.screen


async def test_turning_where_no_state_is_known_draws_what_there_is() -> None:
    frames = [opened(0, None), stepped(5, 1), stepped(15, 2), state(30, finished=9)]
    app, clock = top_of(frames)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await dashboard_of(app, pilot)
        await pilot.press("right_square_bracket")
        await pilot.pause()
        assert "0:10/0:30" in screen.query_one("#header", Canvas).text
        assert screen.view.snapshot is None and len(screen.view.steps) == 1
        clock.ns += 20 * SECOND
        await screen.refresh_view()
        assert screen.view.num_finished == 9
        await pilot.press("left_square_bracket")
        await pilot.pause()
        assert screen.view.snapshot is None and len(screen.view.steps) == 2


async def test_who_was_there_before_the_first_event_has_a_lane() -> None:
    """This also holds after going back, when the request has ended since."""
    ended = RequestEvent(at(8), "chat-1", RequestEventKind.FINISHED, 9, 4, 0, "stop")
    topics = frozenset({"request"})
    frames = [opened(0, busy_snapshot(at(0)))]
    frames += [stepped(i, i) for i in range(1, 8)]
    frames += [
        (at(8), f) for f in encode_events([ended], stream="s", first=9, dropped=0, topics=topics)
    ]
    frames += [state(9, finished=1), stepped(10, 10)]
    clock = Clock()
    feed = ReplayFeed(frames, now_ns=clock)
    listener = EventReader(feed, feed.now_ns)
    clock.ns += 10 * SECOND
    for _ in range(2):
        await listener.take()
        history = listener.store.history.get("chat-1")
        assert history is not None and history.doing(5) is Doing.DECODE
        assert history.state is Doing.OVER
        listener.turn(-1 * SECOND)


async def test_the_mark_does_not_outlive_its_engine() -> None:
    before = make_snapshot(
        time_ns=at(0), num_running=1, requests=(request_view("old-1", "decode"),)
    )
    after = make_snapshot(
        time_ns=at(60), num_running=1, requests=(request_view("new-1", "decode"),)
    )
    app, clock = top_of([opened(0, before), opened(60, after, stream="t"), state(90, finished=1)])
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await dashboard_of(app, pilot)
        await screen.refresh_view()
        await pilot.press("down", "i")
        await pilot.pause()
        page = screen.query_one("#page", Canvas)
        assert "request old-1" in page.text
        clock.ns += 70 * SECOND
        await screen.refresh_view()
        assert "request new-1" in page.text and "no request yet" not in page.text


def test_frames_of_the_tests_are_frames_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    frames = [opened(0, None), stepped(5, 1), state(6, finished=1)]
    path.write_bytes(b"".join(bytes(frame) for _, frame in frames))
    feed = ReplayFeed.open(path)
    ring = feed.events()
    feed.seek(100 * SECOND)
    (event,) = ring.drain()
    assert isinstance(event, StepRecord) and feed.length_ns == 6 * SECOND


def test_a_recorded_load_can_be_played(tmp_path: Path) -> None:
    """The output of `benchmarks/record_events.py`: requests of every kind, none of them lost."""
    program = Path(__file__).parents[3] / "benchmarks" / "record_events.py"
    target = tmp_path / "run.events"
    command = [sys.executable, str(program), str(target), "--tiny", "--seconds", "1.5"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert " 0 events lost" in told.stdout
    feed = ReplayFeed.open(target)
    assert feed.model.model_id == "tiny" and feed.length_ns > SECOND
