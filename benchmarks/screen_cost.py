"""The cost of a screen for the engine: on and off in turns, on a real terminal of 120 x 40.

    python benchmarks/screen_cost.py [--engine simulated|smollm2|gpu|tiny] [--parts NAME ...]

dashboard-4, dashboard-10   the dashboard in the engine's process, at 4 and at 10 Hz
chat                        an answer at 200 tokens/s in the chat
stalled                     the dashboard at 10 Hz on a terminal that is not read
attached                    `termgen top` at 4 Hz in a process of its own; the server is there
                            without it too
sse                         as many streams through the server, read by another process, against
                            tasks that read in this one
beside-4, beside-10         a frame of each page, beside the engine
pages-4, pages-10           a frame of each page, beside an engine that computes nothing
memory                      an hour of steps of 5 ms with 64 requests through the dashboard
events                      processor time of each thread that feeds a screen in another process,
                            for one second sent at 4 Hz: nearly the same on a busy machine, where
                            wall times mostly show other processes

The simulated engine is the real one over a device that computes nothing: steps of 1 ms, 64
requests, 100,000 KV blocks; `--run-ahead-ms 0` keeps two steps in flight. smollm2 is the real model
on this machine's cores, with 4 requests, which share them with the screen. gpu is qwen3-0.6b's
shapes with random weights and 64 requests of 512 tokens, tiny a tiny model instead, on a CPU.

The first six parts report the share of its speed that the engine keeps with the screen, mean, 99th
percentile and longest step with and without it, and the device's idle time. A dashboard frame is
reported in processor time of the screen's thread, with drawing apart, and in bytes sent to the
terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_async
import screen_events
from front_ends import (
    STALLED_S,
    FrameCosts,
    FrontSizes,
    Terminal,
    Watch,
    app_of,
    clients,
    dashboard,
    figures,
    in_turns,
    print_turns,
    reading,
    shown,
    stalled,
)
from machine import parser_of, print_rows, write_report
from made_up_models import write_config
from servers import serving
from simulated_gpu import Simulation, installed

from termgen.config import EngineConfig, UIConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.serving.metrics import ServerMetrics
from termgen.system.cpu_slices import share_lock_quickly
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.dashboard.dashboard_keys import PAGES
from termgen.vocabulary.telemetry import (
    TOPICS,
    decode,
    encode_cache,
    encode_events,
    encode_snapshot,
)

TURNS = ("dashboard-4", "dashboard-10", "chat", "stalled", "attached", "sse")
PARTS = (*TURNS, "beside-4", "beside-10", "pages-4", "pages-10", "memory", "events")
READ_EVERY_S = 0.25
"""64 tasks that wake up in every step of 1 ms would take the whole loop, with a screen and
without."""
SETTLE_S = 1.0
SETTLES_S = {"stalled": STALLED_S, "attached": 4.0}
CHAT_STEP_MS = 5.0  # 200 tokens/s
EVENTS_HZ = 4
LEAST_FRAMES = 4
"""Few frames are drawn when other processes keep the cores busy."""


ON_GPU = ("dashboard-10", "stalled", "sse")
ENGINES: dict[str, tuple[FrontSizes, Sequence[str]]] = {  # the load, and the parts by default
    "simulated": (FrontSizes(64, 32, 24_000, READ_EVERY_S), [p for p in PARTS if p != "sse"]),
    "smollm2": (FrontSizes(4, 32, 3000, READ_EVERY_S), [*TURNS[:2], *TURNS[3:5]]),
    "gpu": (FrontSizes(64, 512, 15_000), ON_GPU),
    "tiny": (FrontSizes(4, 16, 15_000), ON_GPU),
}


@dataclass(frozen=True)
class Bench:
    """An engine that is started for each part, and the size of its load."""

    config: EngineConfig
    sizes: FrontSizes

    async def run(self, part: str) -> Any:
        name, _, hz = part.partition("-")
        engine = await AsyncEngine.start(self.config)
        try:
            if part in TURNS:
                return await self.turns(engine, part)
            if name == "beside":
                return await self._pages_beside(engine, float(hz))
            return await self._events(engine)
        finally:
            await engine.shutdown()

    async def turns(self, engine: AsyncEngine, part: str) -> list[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            terminal = stack.enter_context(Terminal())
            front: Callable[[], Any] = partial(FRONTS.get(part, dashboard), engine, terminal)
            if part in ("attached", "sse"):
                server = await stack.enter_async_context(serving(engine))
                front = partial(attached, server.url, terminal)
            if part == "sse":
                front = partial(clients, server, self.sizes)
            cells = await in_turns(
                engine,
                replace(self.sizes, streams=1) if part == "chat" else self.sizes,
                front,
                settle_s=SETTLES_S.get(part, SETTLE_S),
                sends=part in ("chat", "sse"),
            )
        print_turns(part, cells)
        return cells

    async def _pages_beside(self, engine: AsyncEngine, hz: float) -> dict[str, Any]:
        """Each page with the figures of its frames while every request decodes."""
        found, watch = {}, Watch(engine, self.sizes)
        with Terminal() as terminal, FrameCosts().counting() as costs:
            for page in PAGES:
                async with (
                    dashboard(engine, terminal, hz, page=page.name),
                    reading(engine, self.sizes),
                ):
                    await watch.begun(SETTLE_S)
                    first = len(costs.frames)
                    while len(costs.frames) - 1 <= first + LEAST_FRAMES:
                        await asyncio.sleep(self.sizes.seconds)
                    found[page.name] = figures(costs.frames[first:-1])
                await watch.at_rest()
        return found

    async def _events(self, engine: AsyncEngine) -> dict[str, float]:
        """Milliseconds of processor time for one second of events."""
        core, ring = engine.parts.core, engine.events(200_000)
        async with reading(engine, self.sizes):
            await asyncio.sleep(2.0)
            ring.drain()
            await asyncio.sleep(1.0)
            events = ring.drain()
            copying = await asyncio.wrap_future(core.call(lambda: cpu_ms(core.copy_state)))
            state = await asyncio.wrap_future(core.call(core.copy_state))
        part = events[: len(events) // EVENTS_HZ]
        fixed: dict[str, Any] = {"stream": "s", "first": 1, "dropped": 0}
        encode = partial(encode_events, part, **fixed, topics=frozenset(TOPICS))
        snapshot, metrics = state.snapshot(), ServerMetrics("m")
        cache = encode_cache(encode_snapshot(snapshot), dropped=0, frame_id="s-1")
        steps = [*encode()]
        found = {
            "engine: copying its state": EVENTS_HZ * copying,
            "loop: steps as bytes": EVENTS_HZ * cpu_ms(lambda: [*encode()]),
            "loop: the map of the blocks": EVENTS_HZ * cpu_ms(state.snapshot),
            "loop: state as bytes": EVENTS_HZ * cpu_ms(lambda: encode_snapshot(snapshot)),
            "loop: metrics of the steps": cpu_ms(lambda: metrics.on_events(events)),
            "top: steps of bytes": EVENTS_HZ * cpu_ms(lambda: [decode(f) for f in steps]),
            "top: state of bytes": EVENTS_HZ * cpu_ms(lambda: decode(cache)),
        }
        print(f"{len(events)} events in a second; ms of processor time for them at {EVENTS_HZ} Hz")
        print_rows({"what": name, "ms": took} for name, took in found.items())
        return {"events": len(events), **found}


def cpu_ms(work: Callable[[], object]) -> float:
    """Processor time of this thread for one call, the median of 25."""
    took_s = timeit.repeat(work, timer=time.thread_time, repeat=25, number=1)
    return 1e3 * statistics.median(took_s)


@asynccontextmanager
async def chat(engine: AsyncEngine, terminal: Terminal) -> AsyncIterator[None]:
    """The chat, with an answer that outlasts the cell. Its frames are not counted."""
    app = app_of(engine, ui=UIConfig(max_tokens=30_000, temperature=1.0))
    async with shown(app, terminal, ChatScreen) as screen:
        await asyncio.sleep(0.5)  # wait for the layout
        screen.dialogue.ask("Tell me of steps.")
        yield
        assert screen.is_streaming, "the answer ended before the cell"


@asynccontextmanager
async def attached(url: str, terminal: Terminal) -> AsyncIterator[None]:
    """`termgen top` in another process, on the terminal."""
    command = [sys.executable, "-m", "termgen", "top", url, "--dashboard-hz", "4"]
    with terminal.installed():
        top = await asyncio.create_subprocess_exec(*command, stdin=0, stdout=2, stderr=2)
    try:
        yield
        assert top.returncode is None, "termgen top ended before the cell"
    finally:
        top.terminate()
        await top.wait()


FRONTS: dict[str, Callable[..., Any]] = {
    "dashboard-4": partial(dashboard, hz=4.0),
    "dashboard-10": dashboard,
    "chat": chat,
    "stalled": stalled,
}


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="simulated")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a cell")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of cells")
    parser.add_argument("--run-ahead-ms", type=float, default=20.0)
    args = parser.parse_args()
    args.parts = args.parts or list(ENGINES[args.engine][1])
    if args.engine == "smollm2" and "chat" in args.parts:
        parser.error("--parts chat: an answer of the real model ends before it can be measured")
    return args


def config_of(args: argparse.Namespace, folder: Path) -> EngineConfig:
    if args.engine == "smollm2":
        return EngineConfig(model="smollm2-135m", device="cpu", max_model_len=4096, max_num_seqs=8)
    if args.engine in ("gpu", "tiny"):
        device = "cuda" if args.engine == "gpu" else "cpu"
        options = {"run_ahead_ms": args.run_ahead_ms, "max_model_len": 16_384}
        return gpu_async.engine_config(folder, device, options)
    target = write_config(folder, vocab=FrontSizes.vocab)
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


def run_part(name: str, config: EngineConfig, args: argparse.Namespace) -> Any:
    if name == "memory":
        return asyncio.run(screen_events.hour_of_events())
    if name.startswith("pages-"):
        return asyncio.run(screen_events.pages_cost(float(name.removeprefix("pages-"))))
    sizes = replace(ENGINES[args.engine][0], seconds=args.seconds, rounds=args.rounds)
    if name == "chat":
        config = replace(config, skip_tokenizer_init=False)
    simulation = Simulation(CHAT_STEP_MS if name == "chat" else 1.0, 100_001, 64, sizes.vocab)
    with installed(simulation) if args.engine == "simulated" else nullcontext():
        return asyncio.run(Bench(config, sizes).run(name))


def main() -> None:
    args = parse_args()
    share_lock_quickly()  # as the command line does
    os.environ.setdefault("COLORTERM", "truecolor")
    os.environ["TERM"] = "xterm-256color"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, Path(folder))
        for name in args.parts:
            print(f"-- {name}", flush=True)
            results[name] = run_part(name, config, args)
            if name.startswith(("beside-", "pages-")):
                print_rows({"page": page, **frame} for page, frame in results[name].items())
    write_report(args, results)


if __name__ == "__main__":
    main()
