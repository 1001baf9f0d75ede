"""An hour of engine events through the dashboard, as fast as it takes them: does its memory grow?

Used by `screen_cost.py --parts memory`. The app runs without a terminal; every second of the hour
is drawn once, on each page in turn.
"""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
from scripted_engine import ScriptedEngine

from termgen.config import UIConfig
from termgen.engine.events import (
    BlockState,
    EngineSnapshot,
    EventBus,
    EventRing,
    RequestEvent,
    RequestEventKind,
    RequestView,
    StepRecord,
)
from termgen.tui.app import TermgenApp
from termgen.tui.screens.dashboard import DashboardScreen
from termgen.tui.screens.dashboard_keys import PAGES

STEP_NS = 5_000_000
STEPS_PER_FRAME = 200
LIFE_STEPS = 500
NUM_BLOCKS = 100_000


class EventfulEngine(ScriptedEngine):
    """Tells of steps that nobody computes."""

    def __init__(self, rows: int) -> None:
        super().__init__(0.2)
        self._rows_running = rows
        self.bus = EventBus()
        self.time_ns = time.perf_counter_ns()
        self.num_steps = 0

    def events(self, capacity: int = 4096) -> EventRing:
        return self.bus.subscribe(capacity)

    def close_events(self, ring: EventRing) -> None:
        self.bus.unsubscribe(ring)

    def request_ids(self) -> list[str]:
        """Each row's request is replaced every LIFE_STEPS steps, not all at once."""
        rows, step = self._rows_running, self.num_steps
        return [f"r{row}-{(step + row * LIFE_STEPS // rows) // LIFE_STEPS}" for row in range(rows)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            before = self.request_ids() if self.num_steps % 8 == 0 else None
            self._step()
            if before is not None:
                for old, new in zip(before, self.request_ids(), strict=True):
                    if old != new:
                        self._replace(old, new)

    def _step(self) -> None:
        rows, now = self._rows_running, self.time_ns
        self.num_steps += 1
        self.time_ns = end = now + STEP_NS
        self.bus.publish(
            StepRecord(
                step_id=self.num_steps,
                planned_ns=now,
                submitted_ns=now + 30_000,
                started_ns=now + 60_000,
                ended_ns=end,
                applied_ns=end + 40_000,
                schedule_us=30.0,
                apply_us=40.0,
                num_decode_rows=rows,
                num_prefill_rows=0,
                num_prefill_tokens=0,
                num_sampled_tokens=rows,
                num_padded_tokens=0,
                graph_mode="FULL",
                num_running=rows,
                num_waiting=0,
                num_used_blocks=NUM_BLOCKS // 2,
                num_cached_blocks=NUM_BLOCKS // 4,
                num_free_blocks=NUM_BLOCKS // 4,
                prefix_query_tokens=0,
                prefix_hit_tokens=0,
                num_preemptions=0,
                landed_ns=end,
            )
        )

    def _replace(self, old: str, new: str) -> None:
        now = self.time_ns
        ended = (old, RequestEventKind.FINISHED, LIFE_STEPS, "length")
        begun = [
            (new, kind, 0, "") for kind in (RequestEventKind.QUEUED, RequestEventKind.SCHEDULED)
        ]
        first = (new, RequestEventKind.FIRST_TOKEN, 1, "")
        for request_id, kind, output, detail in (ended, *begun, first):
            self.bus.publish(RequestEvent(now, request_id, kind, 100, output, 0, detail))

    async def snapshot(self) -> EngineSnapshot:
        rows = self._rows_running
        states = np.full(NUM_BLOCKS, BlockState.ACTIVE, np.uint8)
        states[NUM_BLOCKS // 2 :] = BlockState.CACHED
        counts: dict[str, Any] = {
            **{"num_waiting": 0, "num_used_blocks": NUM_BLOCKS // 2, "num_preemptions": 0},
            **{"num_cached_blocks": NUM_BLOCKS // 4, "num_free_blocks": NUM_BLOCKS // 4},
            **{"prefix_query_tokens": 0, "prefix_hit_tokens": 0, "num_finished": 0},
            **{"prompt_tokens": 0, "generation_tokens": 0, "max_num_batched_tokens": 2048},
        }
        return EngineSnapshot(
            time_ns=self.time_ns,
            step=None,
            requests=tuple(
                RequestView(request_id, "decode", 100, 0, 110, 10, 7, 1, 0.5, 0, 0)
                for request_id in self.request_ids()
            ),
            num_running=rows,
            block_states=states,
            block_owners=np.arange(NUM_BLOCKS, dtype=np.int32) % rows,
            max_num_seqs=rows,
            last_progress_ns=self.time_ns,
            **counts,
        )


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status does not tell the resident memory")


async def _hour(num_steps: int, rows: int) -> dict[str, Any]:
    engine = EventfulEngine(rows)

    async def start(progress: object) -> Any:
        return engine

    async def stop() -> None:
        engine.close()

    class QuietApp(TermgenApp):
        def make_dashboard(self, client: Any) -> DashboardScreen:
            return DashboardScreen(client, hz=0.001, now_ns=lambda: engine.time_ns)

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
