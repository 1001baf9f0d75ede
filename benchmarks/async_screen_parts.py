"""The parts of `gpu_async.py` with a front end in the engine's process, switched on and off.

The whole program runs: the engine's thread, and one asyncio loop that turns tokens into text.
Without a front end a task per request reads them. Only the engine's steps are timed.
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
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_engine_parts import idle_share, steps_per_s

from termgen.config import EngineConfig, ServerConfig, UIConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.sampling_params import SamplingParams

HZ = 10.0
ROWS, COLUMNS = 48, 160
SETTLE_S = 0.5
STALLED_S = 5.0
"""After this time a terminal that is not read blocks the thread that writes to it."""
BEGIN_TIMEOUT_S = 60.0
LEAST_STEPS = 8


@dataclass(frozen=True, slots=True)
class FrontSizes:
    streams: int
    prompt: int
    seconds: float
    rounds: int
    max_tokens: int
    vocab: int


class Watch:
    """Times steps in a thread of its own: the loop may be blocked meanwhile."""

    def __init__(self, engine: AsyncEngine, sizes: FrontSizes) -> None:
        self._ring = engine.events(200_000)
        self._engine = engine
        self._sizes = sizes
        self._loop = asyncio.get_running_loop()

    async def cell(self, settle_s: float, stalled: Terminal | None = None) -> dict[str, Any]:
        """The steps of a cell, `settle_s` after all streams have begun to decode: steps take longer
        with every token, so cells that are compared wait equally long.

        stalled: a terminal that is not read meanwhile.
        """
        return await asyncio.to_thread(self._time, settle_s, stalled)

    def _time(self, settle_s: float, stalled: Terminal | None) -> dict[str, Any]:
        self._collect(least=1)
        stands_still = False
        if stalled is not None:
            stalled.stall()
        try:
            time.sleep(settle_s)
            self._full()
            time.sleep(self._sizes.seconds)
            records = self._collect(least=LEAST_STEPS)
            if stalled is not None:
                stands_still = self._stands_still()
        finally:
            if stalled is not None:
                stalled.resume()
        return {
            "loop_stood_still": stands_still,
            "tokens_per_s": self._sizes.streams * steps_per_s(records),
            "idle_share": idle_share(records),
            "host_us": statistics.median(r.host_us for r in records),
            "queue_depth": statistics.median(r.queue_depth for r in records),
        }

    def _stands_still(self) -> bool:
        """True if the loop is blocked."""
        answer = threading.Event()
        self._loop.call_soon_threadsafe(answer.set)
        return not answer.wait(0.5)

    def _collect(self, *, least: int) -> list[StepRecord]:
        """Steps since the last call, after waiting for at least `least`."""
        deadline, records = time.monotonic() + BEGIN_TIMEOUT_S, self._full()
        while len(records) < least:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._sizes.streams} requests never ran together")
            time.sleep(0.02)
            records += self._full()
        return records

    def _full(self) -> list[StepRecord]:
        """Steps since the last call in which every stream decodes."""
        records = [e for e in self._ring.drain() if isinstance(e, StepRecord)]
        return [r for r in records if r.num_decode_rows == self._sizes.streams]

    async def at_rest(self) -> None:
        while (snapshot := await self._engine.snapshot()).num_running or snapshot.num_waiting:
            await asyncio.sleep(0.02)
        self._ring.drain()

    def close(self) -> None:
        self._engine.close_events(self._ring)


@asynccontextmanager
async def reading(
    engine: AsyncEngine, sizes: FrontSizes, *, every_s: float = 0.0
) -> AsyncIterator[None]:
    """One task per request that reads its tokens and drops them: as they arrive, or in batches
    every `every_s` seconds."""

    async def read(index: int) -> None:
        rng = random.Random(f"{index} {sizes.prompt}")
        prompt = tuple(rng.randrange(10, sizes.vocab) for _ in range(sizes.prompt))
        params = SamplingParams(temperature=0.0, max_tokens=sizes.max_tokens, ignore_eos=True)
        async for _ in engine.generate(prompt, params):
            await asyncio.sleep(every_s)

    tasks = [asyncio.create_task(read(index)) for index in range(sizes.streams)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ending in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ending, Exception):
                raise ending


class Terminal:
    """A terminal that replaces this process's own, and a program that reads what is drawn on it."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS) -> None:
        self._rows, self._columns = rows, columns
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._reader = subprocess.Popen(["cat"], stdin=self._master, stdout=subprocess.DEVNULL)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Textual reads descriptor 0 and writes to descriptor 2. It takes the size from descriptor
        1, which is another terminal or none, unless the environment gives it."""
        saved = os.dup(0), os.dup(2)
        sizes = {"COLUMNS": str(self._columns), "LINES": str(self._rows)}
        before = {name: os.environ.get(name) for name in sizes}
        os.environ |= sizes
        sys.stderr.flush()
        os.dup2(self._slave, 0)
        os.dup2(self._slave, 2)
        try:
            yield
        finally:
            os.dup2(saved[0], 0)
            os.dup2(saved[1], 2)
            for descriptor in saved:
                os.close(descriptor)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def stall(self) -> None:
        self._reader.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._reader.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._reader.kill()
        self._reader.wait()
        os.close(self._slave)
        os.close(self._master)


@asynccontextmanager
async def dashboard(
    engine: AsyncEngine, terminal: Terminal, hz: float = HZ, *, page: str = "overview"
) -> AsyncIterator[Callable[[], int]]:
    """The app with a page of its dashboard, on the engine's loop. Yields the number of frames
    drawn."""
    from termgen.tui.app import TermgenApp
    from termgen.tui.dashboard.dashboard import DashboardScreen

    frames = 0

    class Counted(DashboardScreen):
        async def refresh_view(self) -> None:
            nonlocal frames
            frames += 1
            await super().refresh_view()

    class CountingApp(TermgenApp):
        def make_dashboard(self, client: Any) -> DashboardScreen:
            return Counted(client, hz=hz)

    async def start(progress: object) -> AsyncEngine:
        return engine

    async def stop() -> None:
        return None

    with terminal.installed():
        app = CountingApp(
            start, stop_engine=stop, ui=UIConfig(dashboard_hz=hz), start_screen="dashboard"
        )
        running = asyncio.create_task(app.run_async())
        try:
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                while not frames and not running.done():
                    await asyncio.sleep(0.02)
            assert not running.done(), "the app ended before it drew"
            screen = app.screen
            assert isinstance(screen, DashboardScreen)
            screen.call_later(screen.action_page, page)
            yield lambda: frames
        finally:
            app.exit()
            await running


async def screen_part(
    engine: AsyncEngine, sizes: FrontSizes, *, stalls: bool
) -> list[dict[str, Any]]:
    """Cells without and with the dashboard, alternating; with `stalls`, on a terminal that is not
    read."""
    watch, terminal, cells = Watch(engine, sizes), Terminal(), []
    settle_s = STALLED_S if stalls else SETTLE_S
    try:
        for _ in range(sizes.rounds):
            async with reading(engine, sizes):
                cells.append({"on": False, **await watch.cell(settle_s)})
            await watch.at_rest()
            async with dashboard(engine, terminal) as frames, reading(engine, sizes):
                drawn, began = frames(), time.monotonic()
                cell = await watch.cell(settle_s, terminal if stalls else None)
                cell["frames_per_s"] = (frames() - drawn) / (time.monotonic() - began)
            cells.append({"on": True, **cell})
            await watch.at_rest()
    finally:
        terminal.close()
        watch.close()
    return cells


async def sse_part(engine: AsyncEngine, sizes: FrontSizes) -> list[dict[str, Any]]:
    """Cells with readers in this process, and with a server whose clients run in another."""
    from termgen.server import Server

    server = Server(engine, ServerConfig(port=0))
    serving = asyncio.create_task(server.serve())
    await server.started()
    watch, cells = Watch(engine, sizes), []
    try:
        for _ in range(sizes.rounds):
            for is_on in (False, True):
                async with clients(server.url, sizes) if is_on else reading(engine, sizes):
                    cells.append({"on": is_on, **await watch.cell(SETTLE_S)})
                await watch.at_rest()
    finally:
        watch.close()
        await server.stop(drain_timeout=0)
        await serving
    return cells


@asynccontextmanager
async def clients(url: str, sizes: FrontSizes) -> AsyncIterator[None]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    numbers = (port, sizes.streams, sizes.max_tokens, sizes.prompt, sizes.vocab)
    program = str(Path(__file__).with_name("sse_client.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        program,
        host,
        *map(str, numbers),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield
    finally:
        told, _ = await process.communicate(b"")  # it exits when its standard input closes
    if told.strip() != b"left":
        raise RuntimeError(f"the clients ended before they were told to: {told!r}")


async def _run(parts: list[str], config: EngineConfig, sizes: FrontSizes) -> dict[str, Any]:
    engine = await AsyncEngine.start(config)
    found: dict[str, Any] = {}
    try:
        for part in parts:
            try:
                if part == "sse":
                    found[part] = await sse_part(engine, sizes)
                else:
                    found[part] = await screen_part(engine, sizes, stalls=part == "terminal")
            except Exception as error:  # reported with the others' figures, which took minutes
                found[part] = {"failed": repr(error)}
    finally:
        await engine.shutdown()
    return found


def run_screen_parts(parts: list[str], config: EngineConfig, sizes: FrontSizes) -> dict[str, Any]:
    return asyncio.run(_run(parts, config, sizes))
