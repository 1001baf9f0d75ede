"""The cost of a dashboard frame, in processor time of the drawing thread.

Used by `screen_cost.py`. A frame is everything the app does from one tick to the next: it drains
events, asks for a snapshot and makes rows, which Textual turns into bytes for the terminal. Only
callbacks of the app's own tasks count, whatever else the loop runs meanwhile. Draining events is
measured apart: it grows with the engine's speed, and a frame does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from machine import timed_callbacks
from textual._context import active_app

from termgen.tui.app import PatientDriver
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.state.event_reader import EventReader


@dataclass(slots=True)
class FrameCost:
    """The cost of one frame."""

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

        with ExitStack() as stack:
            stack.enter_context(timed_callbacks(self._add))
            for owner, name, new in (
                (EventReader, "_drain", timed_drain),
                (DashboardScreen, "refresh_view", marked_refresh),
                (PatientDriver, "write", counted_write),
            ):
                stack.enter_context(patch.object(owner, name, new))
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
