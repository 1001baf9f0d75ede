"""Events of an engine that does not compute, fed to the dashboard as fast as it takes them.

Used by the parts `memory` and `pages` of `screen_cost.py`.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from front_ends import FrameCosts, Terminal, dashboard, dashboard_app, figures
from machine import resident_mib

from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.dashboard_keys import PAGES
from termgen.vocabulary.events import (
    BlockState,
    EngineSnapshot,
    RequestEvent,
    RequestEventKind,
    RequestView,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))

from fake_engine import FakeEngine, make_model_info, make_snapshot, make_step_record

SECOND_NS = 1_000_000_000
STEP_NS = 5_000_000
HOUR_S = 3600
LIFE_STEPS = 500
SETTLE_S = 0.5
PAGE_FRAMES = 60
FRAME_S = 0.06
"""Time enough to draw a frame."""
ROWS = 64
NUM_BLOCKS = 100_000
STEP = make_step_record(
    graph_mode="FULL", num_cached_blocks=NUM_BLOCKS // 4, num_free_blocks=0, queue_depth=1
)


class EventfulEngine(FakeEngine):
    """Publishes steps that are never computed."""

    def __init__(self, step_ns: int, life_steps: int) -> None:
        """Each row's request is replaced every `life_steps` steps, not all at once."""
        super().__init__(model=make_model_info(max_num_seqs=ROWS))
        self._life_steps = life_steps
        self._step_ns = step_ns
        self._rng = random.Random(7)
        self.time_ns = time.perf_counter_ns()
        self.num_steps = 0
        self._snapshot = self._state()

    def request_ids(self) -> list[str]:
        step, life = self.num_steps, self._life_steps
        return [f"r{row}-{(step + row * life // ROWS) // life}" for row in range(ROWS)]

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
        now = self.time_ns
        self.num_steps += 1
        self.time_ns = end = now + round(self._step_ns * self._rng.uniform(0.9, 1.1))
        host_us = self._rng.uniform(100.0, 200.0)
        self.bus.publish(
            STEP._replace(
                step_id=self.num_steps,
                planned_ns=now,
                submitted_ns=now + round(200 * host_us),
                started_ns=now + round(400 * host_us),
                ended_ns=end,
                applied_ns=end + round(300 * host_us),
                schedule_us=0.2 * host_us,
                apply_us=0.3 * host_us,
                num_decode_rows=ROWS,
                num_sampled_tokens=ROWS,
                num_running=ROWS,
                num_used_blocks=self._num_used_blocks(),
                num_free_blocks=NUM_BLOCKS * 3 // 4 - self._num_used_blocks(),
                landed_ns=end,
                launch_us=0.2 * host_us,
                host_us=host_us,
                wait_us=(end - now) / 1e3 - host_us,
                publish_us=0.01 * host_us,
            )
        )

    def _num_used_blocks(self) -> int:
        """Grows with the requests' tokens, and wraps around."""
        return NUM_BLOCKS // 4 + self.num_steps * ROWS // 16 % (NUM_BLOCKS // 4)

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
        used = self._num_used_blocks()
        states = np.full(NUM_BLOCKS, BlockState.FREE, np.uint8)
        states[:used] = BlockState.ACTIVE
        states[used : used + NUM_BLOCKS // 4] = BlockState.CACHED
        owners = np.where(states == BlockState.ACTIVE, np.arange(NUM_BLOCKS) % ROWS, -1)
        return make_snapshot(
            time_ns=self.time_ns,
            requests=tuple(self._view(row, name) for row, name in enumerate(self.request_ids())),
            num_running=ROWS,
            num_used_blocks=used,
            num_cached_blocks=NUM_BLOCKS // 4,
            num_free_blocks=NUM_BLOCKS * 3 // 4 - used,
            block_states=states,
            block_owners=owners.astype(np.int32),
            max_num_seqs=ROWS,
            max_num_batched_tokens=2048,
            last_progress_ns=self.time_ns,
        )

    def _view(self, row: int, request_id: str) -> RequestView:
        life = self._life_steps
        done = (self.num_steps + row * life // ROWS) % life
        age_s = done * self._step_ns / 1e9
        blocks = (100 + done) // 16 + 1
        return RequestView(
            request_id, "decode", 100, 0, 100 + done, 1 + done, blocks, 1, age_s, 0, 0
        )


async def hour_of_events() -> dict[str, Any]:
    """Resident memory while an hour goes through the store, as fast as it takes it. The app runs
    without a terminal; every second is drawn once, on each page in turn."""
    engine = EventfulEngine(STEP_NS, LIFE_STEPS)
    app = dashboard_app(engine, 0.001, now_ns=lambda: engine.time_ns)
    marks: list[tuple[int, float]] = []
    async with app.run_test(size=(120, 40)) as pilot:
        while not isinstance(app.screen, DashboardScreen):
            await pilot.pause(0.05)
        screen = app.screen
        began = time.perf_counter()
        for second in range(HOUR_S + 1):
            if second % (HOUR_S // 12) == 0:
                gc.collect()
                marks.append((second, resident_mib()))
                print(f"second {second}: {resident_mib():.1f} MiB", flush=True)
            engine.run(SECOND_NS // STEP_NS)
            screen.action_page(PAGES[second % len(PAGES)].name)
            await screen.refresh_view()
            await pilot.pause()
        took_s = time.perf_counter() - began
    print(f"{took_s:.0f} s for an hour of events")
    return {"seconds": took_s, "resident_mib_by_second": marks}


async def pages_cost(hz: float) -> dict[str, dict[str, float]]:
    """A frame of each page, for steps of 1 ms by a clock that no other program slows down, and `hz`
    frames a second."""
    engine = EventfulEngine(SECOND_NS // 1000, 24_000)
    found: dict[str, dict[str, float]] = {}
    with Terminal() as terminal:
        clock = {"now_ns": lambda: engine.time_ns}
        async with dashboard(engine, terminal, 0.001, **clock) as screen:
            engine.run(20_000)
            for page in PAGES:
                screen.call_later(screen.action_page, page.name)
                await asyncio.sleep(SETTLE_S)
                with FrameCosts().counting() as costs:
                    for _ in range(PAGE_FRAMES + 1):
                        engine.run(round(1000 / hz))
                        screen.call_later(screen.refresh_view)
                        await asyncio.sleep(FRAME_S)
                found[page.name] = figures(costs.frames[2:])
    return found
