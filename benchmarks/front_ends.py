"""Front ends beside an engine, switched on and off in turns. Used by `screen_cost.py` and
`gpu_async.py`.

The whole program runs: the engine's thread, and one asyncio loop that turns tokens into text.
Without a front end a task per request reads them. Only the engine's steps are timed: a step is the
time between two landings.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import random
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import AsyncMock, patch

import numpy as np
from async_engine_parts import idle_share, steps_per_s
from load_client import Clients
from machine import print_rows, timed_callbacks
from servers import port_of
from textual._context import active_app
from textual.screen import Screen

from termgen.config import UIConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.server import Server
from termgen.tui.app import PatientDriver, TermgenApp
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.state.event_reader import EventReader
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.sampling_params import SamplingParams

S = TypeVar("S", bound=Screen[Any])
STALLED_S = 5.0
"""After this time a terminal that is not read blocks the thread that writes to it."""
BEGIN_TIMEOUT_S = 60.0
LEAST_STEPS = 8


@dataclass(slots=True)
class FrameCost:
    """The cost of one frame, in processor time of the drawing thread.

    A frame is everything the app does from one tick to the next: it drains events, asks for a
    snapshot and makes rows, which Textual turns into bytes for the terminal. Only callbacks of the
    app's own tasks count, whatever else the loop runs meanwhile. Draining events is measured apart:
    it grows with the engine's speed, and a frame does not.
    """

    all_ns: int = 0
    intake_ns: int = 0
    num_bytes: int = 0


class FrameCosts:
    """The newest of `frames` is unfinished."""

    def __init__(self) -> None:
        self.frames = [FrameCost()]

    @contextmanager
    def counting(self) -> Iterator[FrameCosts]:
        drain, write = EventReader._drain, PatientDriver.write
        refresh_view = DashboardScreen.refresh_view

        def timed_drain(intake: EventReader) -> bool:
            began_ns = time.thread_time_ns()
            came = drain(intake)
            self.frames[-1].intake_ns += time.thread_time_ns() - began_ns
            return came

        async def marked_refresh(screen: DashboardScreen) -> None:
            self.frames.append(FrameCost())
            await refresh_view(screen)

        def counted_write(driver: PatientDriver, data: str) -> None:
            self.frames[-1].num_bytes += len(data.encode())
            write(driver, data)

        with (
            timed_callbacks(self._add),
            patch.object(EventReader, "_drain", timed_drain),
            patch.object(DashboardScreen, "refresh_view", marked_refresh),
            patch.object(PatientDriver, "write", counted_write),
        ):
            yield self

    def _add(self, handle: Any, spent_ns: int) -> None:
        if handle._context.get(active_app) is not None:
            self.frames[-1].all_ns += spent_ns


def figures(frames: Sequence[FrameCost]) -> dict[str, float]:
    """Statistics of whole frames; empty without any."""
    if not frames:
        return {}
    frame_ms = np.array([f.all_ns for f in frames]) / 1e6
    draw_ms = np.array([f.all_ns - f.intake_ns for f in frames]) / 1e6
    num_bytes = np.array([f.num_bytes for f in frames])
    return {
        "frame_ms": float(frame_ms.mean()),
        "draw_ms": float(draw_ms.mean()),
        "draw_max_ms": float(draw_ms.max()),
        "bytes": float(num_bytes.mean()),
    }


@dataclass(frozen=True)
class FrontSizes:
    """The load of an engine; prompts and answers fit its context."""

    streams: int
    prompt: int
    max_tokens: int
    read_every_s: float = 0.0
    """Interval at which the tasks read that stand in for a front end; 0: each token as it comes."""
    seconds: float = 3.0
    """Length of a cell."""
    rounds: int = 5
    """Pairs of cells."""
    vocab: int = 2048

    def prompt_of(self, index: int) -> list[int]:
        rng = random.Random(f"{index} {self.prompt}")
        return [rng.randrange(10, self.vocab) for _ in range(self.prompt)]


class Watch:
    """Times the steps that decode every stream."""

    def __init__(self, engine: AsyncEngine, sizes: FrontSizes) -> None:
        self._ring = engine.events(200_000)
        self._engine, self._sizes = engine, sizes

    async def begun(self, settle_s: float) -> None:
        """Wait until all streams have begun to decode, and `settle_s` longer: steps take longer
        with every token, so cells that are compared wait equally long."""
        await self._collect(least=1)
        await asyncio.sleep(settle_s)
        self._full()

    async def cell(self, settle_s: float, costs: FrameCosts) -> dict[str, Any]:
        await self.begun(settle_s)
        began, first = time.monotonic(), len(costs.frames)
        await asyncio.sleep(self._sizes.seconds)
        records = await self._collect(least=LEAST_STEPS)
        step_ms = np.diff([r.landed_ns for r in records]) / 1e6
        return {
            "tokens_per_s": self._sizes.streams * steps_per_s(records),
            "mean_ms": float(step_ms.mean()),
            "p99_ms": float(np.percentile(step_ms, 99)),
            "max_ms": float(step_ms.max()),
            "idle_share": idle_share(records),
            "host_us": statistics.median(r.host_us for r in records),
            "frames_per_s": (len(costs.frames) - first) / (time.monotonic() - began),
            "frame": figures(costs.frames[first:-1]),
        }

    async def _collect(self, *, least: int) -> list[StepRecord]:
        """Steps since the last call, after waiting for at least `least`."""
        records = self._full()
        async with asyncio.timeout(BEGIN_TIMEOUT_S):  # else the requests never ran together
            while len(records) < least:
                await asyncio.sleep(0.02)
                records += self._full()
        return records

    def _full(self) -> list[StepRecord]:
        records = [e for e in self._ring.drain() if isinstance(e, StepRecord)]
        return [r for r in records if r.num_decode_rows == self._sizes.streams]

    async def at_rest(self) -> None:
        while (snapshot := await self._engine.snapshot()).num_running or snapshot.num_waiting:
            await asyncio.sleep(0.02)
        self._ring.drain()

    def close(self) -> None:
        self._engine.close_events(self._ring)


async def in_turns(
    engine: AsyncEngine,
    sizes: FrontSizes,
    front: Callable[[], AbstractAsyncContextManager[object]],
    *,
    settle_s: float,
    sends: bool,
) -> list[dict[str, Any]]:
    """Cells without and with a front end. sends: it has requests of its own, and reads them."""
    watch, cells = Watch(engine, sizes), []
    with FrameCosts().counting() as costs:
        try:
            for _ in range(sizes.rounds):
                async with reading(engine, sizes):
                    cells.append({"on": False, **await watch.cell(settle_s, costs)})
                await watch.at_rest()
                async with front(), reading(engine, sizes, count=0 if sends else None):
                    cells.append({"on": True, **await watch.cell(settle_s, costs)})
                await watch.at_rest()
        finally:
            watch.close()
    return cells


def print_turns(name: str, cells: list[dict[str, Any]]) -> None:
    pairs = list(zip(cells[::2], cells[1::2], strict=True))
    kept = statistics.median(on["tokens_per_s"] / off["tokens_per_s"] for off, on in pairs)
    print(f"{name}: medians without and with; speed kept: {kept:.1%}")
    print_rows(_medians(side) for side in zip(*pairs, strict=True))
    if frames := [on["frame"] for _, on in pairs if on["frame"]]:
        print_rows([_medians(frames)])


def _medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = [name for name, value in found[0].items() if isinstance(value, float)]
    return {name: statistics.median(one[name] for one in found) for name in names}


@asynccontextmanager
async def reading(
    engine: AsyncEngine, sizes: FrontSizes, *, count: int | None = None
) -> AsyncIterator[None]:
    """One task per request that reads its tokens and drops them."""

    async def read(index: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=sizes.max_tokens, ignore_eos=True)
        async for _ in engine.generate(tuple(sizes.prompt_of(index)), params):
            await asyncio.sleep(sizes.read_every_s)

    count = sizes.streams if count is None else count
    tasks = [asyncio.create_task(read(index)) for index in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ending in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ending, Exception):
                raise ending


@asynccontextmanager
async def clients(server: Server, sizes: FrontSizes) -> AsyncIterator[None]:
    """Streams that another process reads."""
    fixed = {"max_tokens": sizes.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [{"prompt": sizes.prompt_of(index), **fixed} for index in range(sizes.streams)]
    process = await Clients.start(port_of(server), bodies, "/v1/completions")
    yield
    if errors := [answer.error for answer in await process.stop() if answer.error]:
        raise RuntimeError(f"a stream failed: {errors[0]}")


class Terminal:
    """A terminal that replaces this process's own, and a program that reads what is drawn on it."""

    def __init__(self, rows: int = 40, columns: int = 120) -> None:
        self._sizes = {"COLUMNS": str(columns), "LINES": str(rows)}
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._reader = subprocess.Popen(["cat"], stdin=self._master, stdout=subprocess.DEVNULL)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Textual reads descriptor 0 and writes to descriptor 2. It takes the size from descriptor
        1, which is another terminal or none, unless the environment gives it."""
        saved = os.dup(0), os.dup(2)
        sys.stderr.flush()
        os.dup2(self._slave, 0)
        os.dup2(self._slave, 2)
        try:
            with patch.dict(os.environ, self._sizes):
                yield
        finally:
            os.dup2(saved[0], 0)
            os.dup2(saved[1], 2)
            for descriptor in saved:
                os.close(descriptor)

    @contextmanager
    def unread(self) -> Iterator[None]:
        self._reader.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._reader.send_signal(signal.SIGCONT)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.kill()
        self._reader.wait()
        os.close(self._slave)
        os.close(self._master)


def app_of(engine: Any, **options: Any) -> TermgenApp:
    """The app on an engine that is there already, and stays."""
    start = AsyncMock(return_value=engine)
    return TermgenApp(start, stop_engine=AsyncMock(), **options)


def dashboard_app(engine: Any, hz: float, **options: Any) -> TermgenApp:
    """options: of the screen."""
    app = app_of(engine, ui=UIConfig(), start_screen="dashboard")
    app.make_dashboard = lambda client: DashboardScreen(client, hz=hz, **options)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def shown(app: TermgenApp, terminal: Terminal, kind: type[S]) -> AsyncIterator[S]:
    """The app on a terminal, once it shows a screen of this kind."""
    with terminal.installed():
        running = asyncio.create_task(app.run_async())
        try:
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                while not (app.screen_stack and isinstance(app.screen, kind)):
                    assert not running.done(), "the app ended before it drew"
                    await asyncio.sleep(0.02)
            yield app.screen
        finally:
            app.exit()
            await running


@asynccontextmanager
async def dashboard(
    engine: Any, terminal: Terminal, hz: float = 10.0, *, page: str = "overview", **options: Any
) -> AsyncIterator[DashboardScreen]:
    """The app with a page of its dashboard, on the engine's loop."""
    app = dashboard_app(engine, hz, **options)
    async with shown(app, terminal, DashboardScreen) as screen:
        screen.call_later(screen.action_page, page)
        yield screen


@asynccontextmanager
async def stalled(engine: AsyncEngine, terminal: Terminal) -> AsyncIterator[DashboardScreen]:
    """The dashboard at 10 Hz on a terminal that is not read."""
    async with dashboard(engine, terminal) as screen:
        with terminal.unread():
            yield screen
