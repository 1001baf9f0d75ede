"""The GPU's figures on the dashboard: in this process, of a server, and of a recording."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_engine import FakeEngine
from fake_nvml import FakeNvml
from server_harness import serving
from tui_harness import MODEL, MS, NOW_NS, SECOND, FrozenApp, TimedEngine, ready, step, wait_until

from termgen.config import UIConfig
from termgen.system import gpu_meter
from termgen.tui.dashboard.pages.graphs import gpu_lines, graphs_page
from termgen.tui.dashboard.pages.overview import gauges_tile, limit_spans, numbers_lines
from termgen.tui.dashboard.state.gpu_figures import (
    WINDOW_NS,
    HeldClocks,
    held_clocks,
    idle_power_w,
    joules_per_token,
    joules_words,
)
from termgen.tui.dashboard.state.limits import Limit
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView
from termgen.tui.feed_app import TopApp
from termgen.tui.feeds.attach import RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.feeds.replay import ReplayFeed
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.spans import Row
from termgen.vocabulary.device.gpu_reading import GpuReading
from termgen.vocabulary.telemetry import Frame as WireFrame
from termgen.vocabulary.telemetry import Gpu, Opening, decode, encode

FULL = GpuReading(
    time_ns=NOW_NS,
    busy=0.93,
    used_bytes=71 * 2**30,
    total_bytes=79 * 2**30,
    power_w=684.5,
    power_limit_w=685.0,
    energy_j=1000.0,
    sm_mhz=1605,
    max_sm_mhz=1980,
    memory_mhz=3201,
    temperature_c=71,
    clock_reasons=("power cap",),
)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu_meter, "READ_S", 0.01)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def engine(device: str) -> FakeEngine:
    return TimedEngine(model=replace(MODEL, device=device))


def view_of(tokens_per_s: int, seconds: int = 8) -> DashboardView:
    """Steps of ten milliseconds that end at `NOW_NS`, each with the same number of tokens."""
    store = DashboardStore(started_ns=0)
    rows = tokens_per_s // 100
    store.apply(
        step(i, end_ns=NOW_NS - (100 * seconds - i) * 10 * MS, ms=9.0, num_sampled_tokens=rows)
        for i in range(100 * seconds)
    )
    return store.view(NOW_NS)


def readings(watts: float, count: int = 20, **figures: Any) -> list[GpuReading]:
    return [
        GpuReading(NOW_NS - i * SECOND, energy_j=7e6 - i * watts, power_w=watts, **figures)
        for i in range(count)
    ][::-1]


def test_joules_of_a_token_are_energy_by_tokens() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    watts, rate = rng.uniform(50, 1000), 100 * rng.randrange(1, 200)
    found = joules_per_token(view_of(rate), readings(watts))
    assert found == pytest.approx(watts / rate, rel=0.02)


def test_a_window_of_hours_has_the_energy_of_now() -> None:
    """The series of a long window have points of ten seconds: the figure needs finer ones."""
    store = DashboardStore(started_ns=0)
    records = [step(i, end_ns=NOW_NS - (999 - i) * 10 * MS, ms=9.0) for i in range(1000)]
    store.apply(records)
    rate = 100 * records[0].num_sampled_tokens
    for window_s in (None, 30, 3600):
        found = joules_per_token(store.view(NOW_NS, window_s=window_s), readings(400.0))
        assert found == pytest.approx(400 / rate, rel=0.05)


@pytest.mark.parametrize(
    "history",
    [
        [],
        readings(400.0)[-2:],  # the newest is too new for its steps to be known, and one is no span
        [r._replace(energy_j=None) for r in readings(400.0)],
        [r._replace(time_ns=r.time_ns - 2 * WINDOW_NS) for r in readings(400.0)],
        [r._replace(energy_j=7.0) for r in readings(400.0)],
        [r._replace(energy_j=-(r.energy_j or 0.0)) for r in readings(400.0)],
        readings(400.0)[::4],  # it was not watched between
    ],
    ids=("none", "one", "no energy", "old", "no change", "falling", "gaps"),
)
def test_too_little_is_no_figure(history: list[GpuReading]) -> None:
    assert joules_per_token(view_of(1000), history) is None


def test_an_idle_engine_has_no_energy_of_a_token() -> None:
    assert joules_per_token(DashboardStore(started_ns=0).view(NOW_NS), readings(78.0)) is None


def test_a_counter_that_began_anew_counts_from_there() -> None:
    history = readings(400.0)
    history[:-4] = [r._replace(energy_j=(r.energy_j or 0) + 1e6) for r in history[:-4]]
    assert joules_per_token(view_of(1000), history) == pytest.approx(0.4, rel=0.02)


@pytest.mark.parametrize(
    ("joules", "words"),
    [(0.0123, "12 mJ"), (0.412, "0.41 J"), (9.94, "9.94 J"), (12.3, "12 J"), (4321.0, "4,321 J")],
)
def test_words_of_energies(joules: float, words: str) -> None:
    assert joules_words(joules) == words


def held(reasons: list[tuple[str, ...] | None], **figures: Any) -> HeldClocks | None:
    history = [
        FULL._replace(time_ns=NOW_NS - i * SECOND, clock_reasons=one, **figures)
        for i, one in enumerate(reasons)
    ][::-1]
    return held_clocks(view_of(1000), history)


def test_what_holds_the_clocks_back_is_said_with_its_figure() -> None:
    found = held([("power cap",)] * 4)
    assert found == HeldClocks("the power cap (685 W) holds the GPU's clocks back", "power cap")
    found = held([("heat",)] * 4)
    assert found is not None and found.words == "heat (71 °C) holds the GPU's clocks back"
    found = held([("power cap",)] * 4, power_limit_w=None)
    assert found is not None and found.words == "the power cap holds the GPU's clocks back"


@pytest.mark.parametrize(
    "reasons",
    [
        [()] * 4,
        [None] * 4,
        [("idle",)] * 4,
        [("power cap",), (), (), ()],
        [()] * 6 + [("power cap",)] * 10,
        [("sunspots",)] * 4,
    ],
    ids=("nothing", "unknown", "idle", "seldom", "long ago", "of a later version"),
)
def test_nothing_else_holds_them_back(reasons: list[tuple[str, ...] | None]) -> None:
    assert held(reasons) is None


LIMIT = Limit("memory", "memory 71%", "a step takes 9 ms, for 3 GiB of weights", "9 ms a step")
HELD = HeldClocks("the power cap (685 W) holds the GPU's clocks back", "power cap")


def shown(limit: Limit | None, slow: str, room: int, held: HeldClocks | None = HELD) -> str:
    return "".join(text for text, _ in limit_spans(limit, slow, room, held))


def test_held_clocks_are_beside_what_limits_where_there_is_room() -> None:
    slow = "first tokens take up to 2 s"
    forms = [
        f"limited by memory: {LIMIT.words}; {slow}; {HELD.words}",
        f"limited by memory: {LIMIT.words}; {HELD.words}",
        "limited by memory: 9 ms a step; power cap",
        "limited by memory 71%; power cap",
        "limit memory 71%; power cap",
        "limited by memory 71%",
        "limit memory 71%",
        "limit memory",
    ]
    for longer, form in pairwise(["x" * 201, *forms]):
        assert shown(LIMIT, slow, len(form)) == form
        assert shown(LIMIT, slow, min(len(longer) - 1, len(form) + 3)) == form
    assert shown(None, slow, 200) == ""
    for room in range(200):
        assert len(shown(LIMIT, slow, room)) <= room
        assert shown(LIMIT, "", room, None) == "".join(
            text for text, _ in limit_spans(LIMIT, "", room)
        )


def test_idle_power_is_the_least_of_idle_clocks() -> None:
    history = [
        GpuReading(1, power_w=80.0, clock_reasons=("idle",)),
        GpuReading(2, power_w=78.0, clock_reasons=("idle",)),
        GpuReading(3, power_w=60.0, clock_reasons=()),
        GpuReading(4, clock_reasons=("idle",)),
    ]
    assert idle_power_w(history) == 78.0 and idle_power_w(history[2:]) is None


def test_the_page_of_graphs_has_what_is_known() -> None:
    view = view_of(1000)
    assert gpu_lines(view, ()) == [] and gpu_lines(view, [GpuReading(NOW_NS, busy=0.9)]) == []
    lines = gpu_lines(view, readings(400.0, sm_mhz=1605, temperature_c=70))
    assert [name for name, _, _ in lines] == ["power", "energy", "clock", "heat"]
    for width, height, boxed in ((160, 50, True), (120, 37, True), (80, 20, False), (60, 8, False)):
        rows = graphs_page(view, MODEL, width, height, boxed=boxed, gpu=[FULL])
        without = graphs_page(view, MODEL, width, height, boxed=boxed)
        assert len(rows) == len(without)
        text = text_of(rows)
        assert ("684/685 W" in text) == (height > 8), (width, height)


@pytest.mark.parametrize("missing", [name for name in GpuReading._fields if name != "time_ns"])
def test_a_figure_that_is_missing_is_not_drawn(missing: str) -> None:
    view = view_of(1000, seconds=2)
    gpu = (FULL._replace(**{missing: None}),)
    for width, height in ((60, 12), (30, 12), (30, 10), (24, 7), (24, 4), (24, 2)):
        text = text_of(gauges_tile(view, Frame(width, height, True), gpu))
        assert "None" not in text and ("93%" in text) == (missing != "busy")
        if height >= 10:
            assert ("684" in text) == (missing != "power_w")
            assert ("71/79" in text) == (missing not in ("used_bytes", "total_bytes"))
    text = text_of(numbers_lines(view, 140, 3, gpu))
    assert "None" not in text and ("684" in text) == (missing != "power_w")
    text = text_of(graphs_page(view, MODEL, 120, 37, boxed=True, gpu=gpu))
    assert "None" not in text and ("1,605" in text) == (missing != "sm_mhz")
    assert ("power cap" in text) == (missing != "clock_reasons")
    assert ("71 °C" in text) == (missing != "temperature_c")


def text_of(rows: Sequence[Row]) -> str:
    return "\n".join("".join(part for part, _ in row) for row in rows)


@pytest.mark.parametrize(
    ("size", "name", "words"),
    [
        (
            (200, 52),
            "#gauges",
            ("GPU busy", "93%", "GPU memory", "71/79 GiB", "GPU power", "684/685 W", "▇"),
        ),
        ((120, 40), "#gauges", ("GPU", "93%", "GPU mem", "71/79G", "GPU pow", "684/685W", "▇")),
        ((100, 24), "#numbers", ("GPU 93% 684W",)),
    ],
)
async def test_the_overview_shows_it_while_it_is_looked_at(
    nvml: FakeNvml, size: tuple[int, int], name: str, words: tuple[str, ...]
) -> None:
    app = FrozenApp(engine("cuda:1"), start_screen="dashboard")
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: nvml.reads > 2)
        app.now_ns += 2 * SECOND
        await app.dashboard.refresh_view()
        await pilot.pause()  # the tiles are higher where there is a GPU
        text = app.screen.query_one(name, Canvas).text
        assert all(word in text for word in words), text
        await pilot.press("f2")
        await pilot.pause()
        before = nvml.reads
        await pilot.pause(0.1)
        assert nvml.reads <= before + 1, "nobody looks"


async def test_nothing_is_shown_of_a_cpu(nvml: FakeNvml) -> None:
    app = FrozenApp(engine("cpu"), start_screen="dashboard")
    async with app.run_test(size=(140, 52)) as pilot:
        await ready(app, pilot)
        await app.dashboard.refresh_view()
        assert "GPU" not in app.screen.query_one("#gauges", Canvas).text and not nvml.reads


def test_energy_of_a_token_has_a_line() -> None:
    view, gpu = view_of(1000), readings(400.0)
    for width, name in ((60, "energy/token"), (30, "J/token")):
        text = text_of(gauges_tile(view, Frame(width, 11, True), gpu))
        assert re.search(rf"{name} .*0.40 J", text), text
        assert name not in text_of(gauges_tile(view, Frame(width, 11, True), gpu[:1]))
    assert "token 0.40 J" in text_of(numbers_lines(view, 140, 3, gpu))


# -- from elsewhere ------------------------------------------------------------------------


async def test_a_dashboard_elsewhere_shows_the_gpu_of_the_server(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads its second GPU; the dashboard's own meter is never opened."""
    async with serving(engine("cuda:1")) as server:
        app = TopApp(
            lambda: RemoteFeed.connect(server.url, hz=20.0), ui=UIConfig(dashboard_hz=10.0)
        )
        async with app.run_test(size=(140, 44)) as pilot:
            await wait_until(
                pilot,
                lambda: (
                    bool(app.screen.query("#gauges"))
                    and "684/685" in app.screen.query_one("#gauges", Canvas).text
                ),
            )
            assert app.screen._gpu is None  # type: ignore[attr-defined]
        await wait_until_not_watched(nvml)


async def wait_until_not_watched(nvml: FakeNvml) -> None:
    async with asyncio.timeout(10):
        while True:
            before = nvml.reads
            await asyncio.sleep(0.2)
            if nvml.reads == before:
                return


def opening(stream: str = "s") -> Opening:
    return Opening(
        stream=stream,
        resumed=False,
        clock_ns=NOW_NS,
        unix_ns=0,
        dropped=0,
        status="ok",
        model=MODEL,
        snapshot=None,
    )


def sent(*seconds: float) -> Gpu:
    """Through the wire."""
    made = Gpu(readings=tuple(FULL._replace(time_ns=NOW_NS + round(s * SECOND)) for s in seconds))
    message = decode(encode(made, "s-1"))
    assert message == made
    assert isinstance(message, Gpu)
    return message


def test_readings_that_come_twice_are_kept_once_and_another_engine_has_none() -> None:
    feed = StreamFeed(opening())
    feed.take(opening())
    feed.take(sent(1, 2))
    feed.take(sent(1, 2, 3))
    assert [(r.time_ns - NOW_NS) // SECOND for r in feed.gpu_history] == [1, 2, 3]
    feed.take(opening())
    assert len(feed.gpu_history) == 3
    feed.take(opening("other"))
    assert not feed.gpu_history


def test_a_recording_has_the_gpu_of_its_time() -> None:
    frames: list[tuple[int, WireFrame]] = [(NOW_NS, encode(opening(), "s-0"))]
    frames += [(NOW_NS + s * SECOND, encode(sent(s), "s-0")) for s in range(1, 10)]
    now = 0
    feed = ReplayFeed(frames, lambda: now)
    now = 9 * SECOND
    feed.advance()
    assert len(feed.gpu_history) == 9
    feed.stop(True)
    feed.seek(-5 * SECOND)
    assert feed.gpu_history[-1].time_ns == NOW_NS + 4 * SECOND


def test_a_reading_of_a_later_version_is_read_without_what_is_new() -> None:
    data = b'{"readings":[{"time_ns":5,"fan":0.3,"power_w":71,"clock_reasons":["heat","x"]}]}'
    message = decode(WireFrame("gpu", "s-1", data))
    assert isinstance(message, Gpu)
    assert message.readings == (GpuReading(5, power_w=71.0, clock_reasons=("heat", "x")),)
