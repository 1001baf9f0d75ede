"""Events of an engine that does not compute, fed to the dashboard as fast as it takes them.

Used by `screen_cost.py`. `memory`: does memory grow over an hour? The app runs without a terminal;
every second is drawn once, on each page in turn. `pages`: the cost of a frame of each page, on a
terminal, with no engine in the process.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from async_screen_parts import Terminal
from frame_cost import FrameCosts, figures
from scripted_engine import ScriptedEngine

from termgen.config import UIConfig
from termgen.tui.app import TermgenApp
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.dashboard_keys import PAGES
from termgen.vocabulary.events import (
    BlockState,
    EngineSnapshot,
    EventBus,
    EventRing,
    RequestEvent,
    RequestEventKind,
    RequestView,
    StepRecord,
)

STEP_NS = 5_000_000
STEPS_PER_FRAME = 200
LIFE_STEPS = 500
SETTLE_S = 0.5
FRAME_S = 0.06
"""Time enough to draw a frame."""
NUM_BLOCKS = 100_000


class EventfulEngine(ScriptedEngine):
    """Publishes steps that are never computed."""

    def __init__(self, rows: int, step_ns: int, life_steps: int) -> None:
        """Each row's request is replaced every `life_steps` steps, not all at once."""
        super().__init__(0.2)
        self._rows_running = rows
        self._life_steps = life_steps
        self._step_ns = step_ns
        self._rng = random.Random(7)
        self.bus = EventBus()
        self.time_ns = time.perf_counter_ns()
        self.num_steps = 0
        self._snapshot = self._state()

    def events(self, capacity: int = 4096) -> EventRing:
        return self.bus.subscribe(capacity)

    def close_events(self, ring: EventRing) -> None:
        self.bus.unsubscribe(ring)

    def request_ids(self) -> list[str]:
        rows, step, life = self._rows_running, self.num_steps, self._life_steps
        return [f"r{row}-{(step + row * life // rows) // life}" for row in range(rows)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            before = self.request_ids() if self.num_steps % 8 == 0 else None
            self._step()
            if before is not None:
                for old, new in zip(before, self.request_ids(), strict=True):
                    if old != new:
                        self._replace(old, new)
        self._snapshot = self._state()

    def _step(self) -> None:
        rows, now = self._rows_running, self.time_ns
        self.num_steps += 1
        self.time_ns = end = now + round(self._step_ns * self._rng.uniform(0.9, 1.1))
        host_us = self._rng.uniform(100.0, 200.0)
        self.bus.publish(
            StepRecord(
                step_id=self.num_steps,
                planned_ns=now,
                submitted_ns=now + round(200 * host_us),
                started_ns=now + round(400 * host_us),
                ended_ns=end,
                applied_ns=end + round(300 * host_us),
                schedule_us=0.2 * host_us,
                apply_us=0.3 * host_us,
                num_decode_rows=rows,
                num_prefill_rows=0,
                num_prefill_tokens=0,
                num_sampled_tokens=rows,
                num_padded_tokens=0,
                graph_mode="FULL",
                num_running=rows,
                num_waiting=0,
                num_used_blocks=self._num_used_blocks(),
                num_cached_blocks=NUM_BLOCKS // 4,
                num_free_blocks=NUM_BLOCKS * 3 // 4 - self._num_used_blocks(),
                prefix_query_tokens=0,
                prefix_hit_tokens=0,
                num_preemptions=0,
                landed_ns=end,
                launch_us=0.2 * host_us,
                queue_depth=1,
                host_us=host_us,
                wait_us=(end - now) / 1e3 - host_us,
                publish_us=0.01 * host_us,
            )
        )

    def _num_used_blocks(self) -> int:
        """Grows with the requests' tokens, and wraps around."""
        return NUM_BLOCKS // 4 + self.num_steps * self._rows_running // 16 % (NUM_BLOCKS // 4)

    def _replace(self, old: str, new: str) -> None:
        now = self.time_ns
        ended = (old, RequestEventKind.FINISHED, self._life_steps, "length")
        begun = [
            (new, kind, 0, "") for kind in (RequestEventKind.QUEUED, RequestEventKind.SCHEDULED)
        ]
        first = (new, RequestEventKind.FIRST_TOKEN, 1, "")
        for request_id, kind, output, detail in (ended, *begun, first):
            self.bus.publish(RequestEvent(now, request_id, kind, 100, output, 0, detail))

    async def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    def _state(self) -> EngineSnapshot:
        rows, used = self._rows_running, self._num_used_blocks()
        states = np.full(NUM_BLOCKS, BlockState.FREE, np.uint8)
        states[:used] = BlockState.ACTIVE
        states[used : used + NUM_BLOCKS // 4] = BlockState.CACHED
        counts: dict[str, Any] = {
            **{"num_waiting": 0, "num_used_blocks": used, "num_preemptions": 0},
            "num_cached_blocks": NUM_BLOCKS // 4,
            "num_free_blocks": NUM_BLOCKS * 3 // 4 - used,
            **{"prefix_query_tokens": 0, "prefix_hit_tokens": 0, "num_finished": 0},
            **{"prompt_tokens": 0, "generation_tokens": 0, "max_num_batched_tokens": 2048},
        }
        return EngineSnapshot(
            time_ns=self.time_ns,
            step=None,
            requests=tuple(self._view(row, name) for row, name in enumerate(self.request_ids())),
            num_running=rows,
            block_states=states,
            block_owners=np.where(
                states == BlockState.ACTIVE, np.arange(NUM_BLOCKS) % rows, -1
            ).astype(np.int32),
            max_num_seqs=rows,
            last_progress_ns=self.time_ns,
            **counts,
        )

    def _view(self, row: int, request_id: str) -> RequestView:
        life = self._life_steps
        done = (self.num_steps + row * life // self._rows_running) % life
        age_s = done * self._step_ns / 1e9
        blocks = (100 + done) // 16 + 1
        return RequestView(
            request_id, "decode", 100, 0, 100 + done, 1 + done, blocks, 1, age_s, 0, 0
        )


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status does not tell the resident memory")


class QuietApp(TermgenApp):
    """Draws the dashboard on request, by the clock of the events."""

    def make_dashboard(self, client: Any) -> DashboardScreen:
        return DashboardScreen(client, hz=0.001, now_ns=lambda: client.time_ns)


async def _hour(num_steps: int, rows: int) -> dict[str, Any]:
    engine = EventfulEngine(rows, STEP_NS, LIFE_STEPS)

    async def start(progress: object) -> Any:
        return engine

    async def stop() -> None:
        engine.close()

    app = QuietApp(start, stop_engine=stop, ui=UIConfig(), start_screen="dashboard")
    frames = num_steps // STEPS_PER_FRAME
    marks: list[tuple[int, float]] = []
    async with app.run_test(size=(120, 40)) as pilot:
        while not isinstance(app.screen, DashboardScreen):
            await pilot.pause(0.05)
        screen = app.screen
        began = time.perf_counter()
        for frame in range(frames):
            engine.run(STEPS_PER_FRAME)
            screen.action_page(PAGES[frame % len(PAGES)].name)
            await screen.refresh_view()
            await pilot.pause()
            if frame % max(1, frames // 12) == 0:
                gc.collect()
                marks.append((frame, resident_mib()))
        gc.collect()
        marks.append((frames, resident_mib()))
        took_s = time.perf_counter() - began
    return {"steps": num_steps, "seconds": took_s, "resident_mib_by_second": marks}


def hour_of_events(num_steps: int, *, rows: int) -> dict[str, Any]:
    return asyncio.run(_hour(num_steps, rows))


async def _pages(hz: float, num_frames: int, rows: int) -> dict[str, Any]:
    """Steps of 1 ms by a clock that no other program slows down, and `hz` frames a second."""
    engine, terminal = EventfulEngine(rows, 1_000_000, 24_000), Terminal(40, 120)

    async def start(progress: object) -> Any:
        return engine

    async def stop() -> None:
        engine.close()

    found: dict[str, Any] = {}
    steps_per_frame = round(1000 / hz)
    with terminal.installed():
        app = QuietApp(start, stop_engine=stop, ui=UIConfig(), start_screen="dashboard")
        running = asyncio.create_task(app.run_async())
        while not (app.screen_stack and isinstance(app.screen, DashboardScreen)):
            await asyncio.sleep(0.05)
        screen = app.screen
        engine.run(20_000)
        for page in PAGES:
            screen.call_later(screen.action_page, page.name)
            await asyncio.sleep(SETTLE_S)
            with FrameCosts() as costs:
                for _ in range(num_frames + 1):
                    engine.run(steps_per_frame)
                    screen.call_later(screen.refresh_view)
                    await asyncio.sleep(FRAME_S)
            found[page.name] = figures(costs.frames[2:])
        app.exit()
        await running
    terminal.close()
    return found


def pages_cost(hz: float, num_frames: int, *, rows: int) -> dict[str, Any]:
    return asyncio.run(_pages(hz, num_frames, rows))
