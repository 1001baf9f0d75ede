"""The cost of a screen for the engine: on and off in turns, on a real terminal of 120 x 40.

    python benchmarks/screen_cost.py [--engine simulated|smollm2] [--parts NAME ...]

dashboard-4, dashboard-10   the dashboard in the engine's process, at 4 and at 10 Hz
chat                        an answer at 200 tokens/s in the chat
stalled                     the dashboard at 10 Hz on a terminal that is not read
attached                    `termgen top` at 4 Hz in a process of its own; the server is there
                            without it too
memory                      an hour of steps of 5 ms with 64 requests through the dashboard

The simulated engine is the real one over a device that computes nothing: steps of 1 ms, 64
requests, 100,000 KV blocks; `--run-ahead-ms 0` keeps two steps in flight. smollm2 is the real model
on this machine's cores, with 4 requests, which share them with the screen.

A step is the time between two landings. Every part reports the share of its speed that the engine
keeps with the screen, and mean, 99th percentile and longest step with and without it; the device's
idle time shows whether the device waited too. A dashboard frame is reported in processor time of
the screen's thread, with drawing apart, and in bytes sent to the terminal. beside-N: every page at
N frames a second beside the engine; pages-N: every page for an engine that computes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from async_engine_parts import idle_share
from async_screen_parts import FrontSizes, Terminal, dashboard, reading
from cost_in_turns import HEAD_OF_PARTS, print_part, summary
from frame_cost import HEAD, FrameCosts, figures, line
from machine import machine_facts
from made_up_model import write_tiny, write_tokenizer
from pages_beside import print_pages_beside
from simulated_gpu import Simulation, installed

from termgen.config import EngineConfig, ServerConfig, UIConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.system.cpu_slices import share_lock_quickly
from termgen.vocabulary.events import StepRecord

PARTS = (
    *("dashboard-4", "dashboard-10", "beside-4", "beside-10", "pages-4", "pages-10"),
    *("chat", "stalled", "attached", "memory"),
)
ROWS, COLUMNS = 40, 120
SETTLE_S = 1.0
READ_EVERY_S = 0.25
MOST_WAIT_S = 60.0
"""Limit for all requests to start decoding."""
STALLED_S = 5.0
"""After this time a terminal that is not read blocks the thread that writes to it."""
CHAT_STEP_MS = 5.0  # 200 tokens/s
VOCAB = 2048
PAGE_FRAMES = 60
HOUR_STEPS = 720_000  # of 5 ms


@dataclass(frozen=True, slots=True)
class Settings:
    streams: int
    seconds: float
    rounds: int
    step_ms: float
    run_ahead_ms: float
    is_real: bool
    """True if the model is real: then its context ends."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--engine", choices=("simulated", "smollm2"), default="simulated")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--streams", type=int, help="requests (default: 64; smollm2: 4)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a cell")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of cells")
    parser.add_argument("--run-ahead-ms", type=float, default=20.0)
    parser.add_argument("--output-json", type=Path, help="write machine and results here")
    args = parser.parse_args()
    if args.parts is None:
        args.parts = [part for part in PARTS if args.engine == "simulated" or part != "chat"]
    elif args.engine == "smollm2" and "chat" in args.parts:
        parser.error("--parts chat: an answer of the real model ends before it can be measured")
    return args


Counter = Callable[[], int]
"""Frames drawn so far."""


class Bench:
    """One engine, and cells without and with one kind of screen."""

    def __init__(self, engine: AsyncEngine, settings: Settings, sizes: FrontSizes) -> None:
        self._engine = engine
        self._settings = settings
        self._sizes = sizes
        self._ring = engine.events(200_000)
        self._costs = FrameCosts()

    async def pairs(
        self, screen: Callable[[], Any], settle_s: float, *, is_chat: bool
    ) -> list[dict[str, Any]]:
        cells = []
        with self._costs:
            for _ in range(self._settings.rounds):
                async with self._requests():
                    cells.append({"on": False, **await self._cell(settle_s, None)})
                await self._at_rest()
                async with screen() as frames, self._requests_beside(is_chat):
                    cells.append({"on": True, **await self._cell(settle_s, frames)})
                await self._at_rest()
        return cells

    def _requests_beside(self, is_chat: bool) -> AbstractAsyncContextManager[None]:
        """A chat sends its own request."""
        return nullcontext() if is_chat else self._requests()

    def _requests(self) -> AbstractAsyncContextManager[None]:
        """Cheap readers: 64 tasks that wake up in every step of 1 ms would take the whole loop,
        with a screen and without."""
        return reading(self._engine, self._sizes, every_s=READ_EVERY_S)

    async def _cell(self, settle_s: float, frames: Counter | None) -> dict[str, Any]:
        """The steps of a period in which every request decodes."""
        await asyncio.sleep(settle_s)
        async with asyncio.timeout(MOST_WAIT_S):  # `reading` reports why they do not decode
            while not self._steps():
                await asyncio.sleep(0.02)
        cpu_s, began_s = time.thread_time(), time.perf_counter()
        num_frames, first = frames() if frames else 0, len(self._costs.frames)
        await asyncio.sleep(self._settings.seconds)
        cpu_s, span_s = time.thread_time() - cpu_s, time.perf_counter() - began_s
        records = self._steps()
        step_ms = np.diff([r.landed_ns for r in records]) / 1e6
        drawn = (frames() - num_frames) if frames else 0
        return {
            "steps_per_s": (len(records) - 1)
            / ((records[-1].landed_ns - records[0].landed_ns) / 1e9),
            "mean_ms": float(step_ms.mean()),
            "p99_ms": float(np.percentile(step_ms, 99)),
            "max_ms": float(step_ms.max()),
            "idle_share": idle_share(records),
            "loop_share": cpu_s / span_s,
            "frames_per_s": drawn / span_s,
            "frames": figures(self._costs.frames[first:-1]) if drawn else {},
        }

    def _steps(self) -> list[StepRecord]:
        """Steps since the last call in which every request decodes."""
        records = [e for e in self._ring.drain() if isinstance(e, StepRecord)]
        return [r for r in records if r.num_decode_rows == self._sizes.streams]

    async def _at_rest(self) -> None:
        while (snapshot := await self._engine.snapshot()).num_running or snapshot.num_waiting:
            await asyncio.sleep(0.02)
        self._ring.drain()


@asynccontextmanager
async def stalled(engine: AsyncEngine, terminal: Terminal) -> AsyncIterator[Counter]:
    async with dashboard(engine, terminal, 10.0) as frames:
        terminal.stall()
        try:
            yield frames
        finally:
            terminal.resume()


@asynccontextmanager
async def chat(engine: AsyncEngine, terminal: Terminal) -> AsyncIterator[Counter]:
    """The chat, with an answer that outlasts the cell. Its frames are not counted."""
    from termgen.tui.app import TermgenApp
    from termgen.tui.chat.chat_screen import ChatScreen

    async def start(progress: object) -> AsyncEngine:
        return engine

    async def stop() -> None:
        return None

    with terminal.installed():
        ui = UIConfig(max_tokens=30_000, temperature=1.0)
        app = TermgenApp(start, stop_engine=stop, ui=ui)
        running = asyncio.create_task(app.run_async())
        try:
            while not (app.screen_stack and isinstance(app.screen, ChatScreen)):
                await asyncio.sleep(0.05)
            screen = app.screen
            assert isinstance(screen, ChatScreen)
            await asyncio.sleep(0.5)  # wait for the layout
            screen.dialogue.ask("Tell me of steps.")
            yield lambda: 0
            assert screen.is_streaming, "the answer ended before the cell"
        finally:
            app.exit()
            await running


@asynccontextmanager
async def served(engine: AsyncEngine) -> AsyncIterator[str]:
    """The URL of a server in this process."""
    from termgen.server import Server

    server = Server(engine, ServerConfig(port=0))
    serving = asyncio.create_task(server.serve())
    await server.started()
    try:
        yield server.url
    finally:
        await server.stop(drain_timeout=0)
        await serving


@asynccontextmanager
async def attached(url: str, terminal: Terminal) -> AsyncIterator[Counter]:
    """`termgen top` in another process, on the terminal."""
    command = [sys.executable, "-m", "termgen", "top", url, "--dashboard-hz", "4"]
    with terminal.installed():
        top = await asyncio.create_subprocess_exec(*command, stdin=0, stdout=2, stderr=2)
    try:
        yield lambda: 0
        assert top.returncode is None, "termgen top ended before the cell"
    finally:
        top.terminate()
        await top.wait()


SCREENS: dict[str, Callable[[AsyncEngine, Terminal], Any]] = {
    "dashboard-4": lambda engine, terminal: dashboard(engine, terminal, 4.0),
    "dashboard-10": lambda engine, terminal: dashboard(engine, terminal, 10.0),
    "chat": chat,
    "stalled": stalled,
}
SETTLES_S = {"stalled": STALLED_S, "attached": 4.0}


def sizes_of(settings: Settings, streams: int) -> FrontSizes:
    return FrontSizes(
        streams=streams,
        prompt=32,
        seconds=settings.seconds,
        rounds=settings.rounds,
        max_tokens=3000 if settings.is_real else 24_000,
        vocab=VOCAB,
    )


async def part(name: str, config: EngineConfig, settings: Settings) -> list[dict[str, Any]]:
    sizes = sizes_of(settings, 1 if name == "chat" else settings.streams)
    async with AsyncExitStack() as stack:
        engine = await AsyncEngine.start(config)
        stack.push_async_callback(engine.shutdown)
        terminal = Terminal(ROWS, COLUMNS)
        stack.callback(terminal.close)
        bench = Bench(engine, settings, sizes)
        if name == "attached":
            url = await stack.enter_async_context(served(engine))
            screen: Callable[[], Any] = partial(attached, url, terminal)
        else:
            screen = partial(SCREENS[name], engine, terminal)
        return await bench.pairs(
            screen,
            SETTLES_S.get(name, SETTLE_S),
            is_chat=name == "chat",
        )


def config_of(args: argparse.Namespace, folder: Path) -> EngineConfig:
    if args.engine == "smollm2":
        return EngineConfig(model="smollm2-135m", device="cpu", max_model_len=4096, max_num_seqs=8)
    target = write_tiny(folder)
    write_tokenizer(target, VOCAB)
    chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings_file = target / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) | {"chat_template": chat_template}
    settings_file.write_text(json.dumps(settings))
    return EngineConfig(
        model=str(target),
        device="cpu",
        load_format="dummy",
        max_model_len=32_768,
        skip_tokenizer_init=True,
        run_ahead_ms=args.run_ahead_ms,
        async_scheduling=True,
        enable_prefix_caching=False,
    )


def memory_part() -> dict[str, Any]:
    """Resident memory while an hour of events goes through the store, as fast as it takes them."""
    from screen_events import hour_of_events

    return hour_of_events(HOUR_STEPS, rows=64)


def print_pages(hz: float) -> dict[str, Any]:
    from screen_events import pages_cost

    print(f"{hz:g} Hz\n{HEAD}")
    found = pages_cost(hz, PAGE_FRAMES, rows=64)
    for page, costs in found.items():
        print(line(page, costs), flush=True)
    return found


def main() -> None:
    args = parse_args()
    share_lock_quickly()  # as the command line does
    os.environ.setdefault("COLORTERM", "truecolor")
    os.environ["TERM"] = "xterm-256color"
    is_simulated = args.engine == "simulated"
    streams = args.streams or (64 if is_simulated else 4)
    results: dict[str, Any] = {}
    print(HEAD_OF_PARTS)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, Path(folder))
        for name in args.parts:
            if name.startswith("pages-"):
                results[name] = print_pages(float(name.removeprefix("pages-")))
                continue
            if name == "memory":
                results[name] = memory_part()
                print(f"memory: {results[name]}")
                continue
            step_ms = CHAT_STEP_MS if name == "chat" else 1.0
            is_real = args.engine == "smollm2"
            settings = Settings(
                streams, args.seconds, args.rounds, step_ms, args.run_ahead_ms, is_real
            )
            simulation = Simulation(step_ms, 100_001, 64, VOCAB)
            if is_simulated and name == "chat":
                config = replace(config, skip_tokenizer_init=False)
            with installed(simulation) if is_simulated else nullcontext():
                if name.startswith("beside-"):
                    hz = float(name.removeprefix("beside-"))
                    sizes = sizes_of(settings, streams)
                    results[name] = asyncio.run(print_pages_beside(config, sizes, hz))
                    continue
                cells = asyncio.run(part(name, config, settings))
            results[name] = {**summary(cells), "cells": cells}
            print_part(name, results[name])
    if args.output_json:
        settings_of = {"engine": args.engine, "streams": streams, "run_ahead_ms": args.run_ahead_ms}
        report = {"machine": machine_facts(), "settings": settings_of, "results": results}
        args.output_json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
