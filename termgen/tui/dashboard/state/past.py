"""The dashboard's figures as they were at an earlier step: for a display that is frozen.

Counters are those of the step, and rates, latencies and series end at it. The block map and the
requests come from the nearest snapshot; where none was kept, they are missing. No Textual.
"""

from __future__ import annotations

from dataclasses import replace

from termgen.tui.dashboard.state.request_history import RequestHistory
from termgen.tui.dashboard.state.store import (
    HISTORY_BUCKETS,
    KEPT_S,
    DashboardView,
    Kept,
    figures_of,
    graphs_before,
    request_rows,
    with_counters,
)
from termgen.vocabulary.events import EngineSnapshot, StepRecord
from termgen.vocabulary.step_figures import StepFigures

REACH_NS = 500_000_000
"""Longest time between a step and a snapshot that stands for it."""


def as_of(view: DashboardView, back: int, kept: Kept, lanes: RequestHistory) -> DashboardView:
    """The view at the end of an earlier step, `back` steps from the newest. kept, lanes: copies of
    what the store had when the display was frozen."""
    later = min(back, len(view.steps) - 1)
    step = view.steps[-1 - later]
    at_ns = step.applied_ns
    figures, coarse = kept.figures, kept.coarse
    if not figures.reaches(at_ns - KEPT_S * 1_000_000_000):  # long ago: from the kept steps alone
        figures = StepFigures(kept_buckets=2 * HISTORY_BUCKETS, kept_times=2 * KEPT_S)
        figures.add(view.steps[: len(view.steps) - later])
    snapshot = nearest(kept.snapshots, step)
    off = None if snapshot is None or snapshot.step is None else snapshot.step.step_id
    ended = [(ended_ns, row) for ended_ns, row in kept.finished if ended_ns <= at_ns]
    num_later = len(kept.finished) - len(ended)
    past = replace(
        view,
        now_ns=at_ns,
        uptime_s=max(0.0, view.uptime_s - (view.now_ns - at_ns) / 1e9),
        **figures_of(figures, coarse, at_ns, view.window_s),
        num_finished=snapshot.num_finished if snapshot else view.num_finished - num_later,
        generation_tokens=snapshot.generation_tokens if snapshot else 0,
        prompt_tokens=snapshot.prompt_tokens if snapshot else 0,
        requests=request_rows(snapshot, ended, lanes.get, at_ns) if snapshot else (),
        snapshot=snapshot,
        graphs=graphs_before(view.graphs, view.steps[len(view.steps) - later :]),
        host=tuple(reading for reading in view.host if reading.time_ns <= at_ns),
        is_past=True,
        snapshot_off=0 if off is None else off - step.step_id,
    )
    return with_counters(past, step)


def nearest(snapshots: tuple[EngineSnapshot, ...], step: StepRecord) -> EngineSnapshot | None:
    """The snapshot that was taken closest to a step; None if that is too far off."""

    def distance(snapshot: EngineSnapshot) -> tuple[int, int]:
        newest = snapshot.step.step_id if snapshot.step is not None else step.step_id
        return abs(newest - step.step_id), abs(snapshot.time_ns - step.applied_ns)

    there = [s for s in snapshots if abs(s.time_ns - step.applied_ns) <= REACH_NS]
    return min(there, key=distance, default=None)
