"""The cost of a dashboard frame, in processor time of the drawing thread.

Used by `screen_cost.py`. A frame is everything the app does from one tick to the next: it drains
events, asks for a snapshot and makes rows, which Textual turns into bytes for the terminal. Only
callbacks of the app's own tasks count, whatever else the loop runs meanwhile. Draining events is
measured apart: it grows with the engine's speed, and a frame does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from textual._context import active_app

from termgen.tui.app import PatientDriver
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.state.event_reader import EventReader
from termgen.tui.dashboard.state.store import DashboardStore
from termgen.vocabulary.events import EngineEvent


@dataclass(slots=True)
class FrameCost:
    """The cost of one frame."""

    all_ns: int = 0
    intake_ns: int = 0
    num_events: int = 0
    num_bytes: int = 0


class FrameCosts:
    """Counts while it is entered. The newest of `frames` is unfinished."""

    def __init__(self) -> None:
        self.frames = [FrameCost()]

    def __enter__(self) -> FrameCosts:
        run = asyncio.Handle._run
        drain, apply, write = EventReader._drain, DashboardStore.apply, PatientDriver.write
        refresh_view = DashboardScreen.refresh_view
        self._real = run, drain, apply, refresh_view, write

        def timed_run(handle: Any) -> None:
            if handle._context.get(active_app) is None:
                run(handle)
                return
            began_ns = time.thread_time_ns()
            run(handle)
            self.frames[-1].all_ns += time.thread_time_ns() - began_ns

        def timed_drain(intake: EventReader) -> bool:
            began_ns = time.thread_time_ns()
            came = drain(intake)
            self.frames[-1].intake_ns += time.thread_time_ns() - began_ns
            return came

        def counted_apply(store: DashboardStore, events: list[EngineEvent]) -> None:
            self.frames[-1].num_events += len(events)
            apply(store, events)

        async def marked_refresh(screen: DashboardScreen) -> None:
            self.frames.append(FrameCost())
            await refresh_view(screen)

        def counted_write(driver: PatientDriver, data: str) -> None:
            self.frames[-1].num_bytes += len(data.encode())
            write(driver, data)

        self._put(timed_run, timed_drain, counted_apply, marked_refresh, counted_write)
        return self

    def __exit__(self, *exc: object) -> None:
        self._put(*self._real)

    def _put(self, run: Any, drain: Any, apply: Any, refresh_view: Any, write: Any) -> None:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        EventReader._drain = drain  # type: ignore[method-assign]
        DashboardStore.apply = apply  # type: ignore[method-assign]
        DashboardScreen.refresh_view = refresh_view  # type: ignore[method-assign]
        PatientDriver.write = write  # type: ignore[method-assign]


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
        "draw_p99_ms": float(np.percentile(draw_ms, 99)),
        "draw_max_ms": float(draw_ms.max()),
        "intake_us_per_event": sum(f.intake_ns for f in frames)
        / 1e3
        / max(1, sum(f.num_events for f in frames)),
        "bytes": float(num_bytes.mean()),
        "max_bytes": float(num_bytes.max()),
    }


HEAD = (
    f"{'a frame: ms':>23}{'drawing':>9}{'p99':>7}{'max':>7}"
    f"{'bytes':>8}{'max':>8}{'us an event':>13}"
)


def line(name: str, f: dict[str, float]) -> str:
    return (
        f"{name:>13}{f['frame_ms']:10.1f}{f['draw_ms']:9.1f}{f['draw_p99_ms']:7.1f}"
        f"{f['draw_max_ms']:7.1f}{f['bytes']:8.0f}{f['max_bytes']:8.0f}"
        f"{f['intake_us_per_event']:13.1f}"
    )
