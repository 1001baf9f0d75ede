"""An engine's last hour in stretches of ten seconds: tokens, gauges, preemptions, and histograms of
times, in arrays of fixed size (1.3 MB).

A server keeps one from its start, a chat's dashboard another. `state` is what a dashboard begins
with that is opened later; it continues with the events it gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.events import EngineEvent, StepRecord
from termgen.vocabulary.request_tracks import RequestTracks
from termgen.vocabulary.step_figures import (
    COLUMNS,
    NUM_ROWS,
    QUEUE_MS,
    RUNNING,
    TTFT_MS,
    StepFigures,
)
from termgen.vocabulary.time_spread import COARSE, TimeSpread, num_bins

WIDTH_NS = 10_000_000_000
KEPT = 361
"""An hour, and the stretch that is not over yet."""
TIMES = ("step", "itl", "ttft", "queue")
WAITING_STEPS = 1024
WAITING_NS = 1_000_000_000
"""Steps are counted many at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryState:
    """`history`: figures of all events before this frame."""

    since_ns: int
    """Time of the first event; 0: there was none."""
    end_ns: int
    """End of the newest stretch."""
    width_ns: int
    columns: tuple[str, ...]
    series: npt.NDArray[np.float64]
    """[columns, stretches] oldest first; gauges are NaN where nothing ran."""
    times: tuple[str, ...]
    growth: float
    """Ratio of neighbouring bins; the first begins at a microsecond."""
    counts: npt.NDArray[np.int32]
    """[times, stretches, bins]: how often a time was in a bin."""

    @property
    def is_known(self) -> bool:
        """False for the arrays of another version."""
        return (
            (self.width_ns, self.columns, self.times, self.growth)
            == (WIDTH_NS, COLUMNS, TIMES, COARSE)
            and self.series.shape == (NUM_ROWS, KEPT)
            and self.counts.shape == (len(TIMES), KEPT, num_bins(COARSE))
        )


class EngineHistory:
    """The history of one engine. Belongs to one thread."""

    def __init__(self) -> None:
        self.since_ns = 0
        self._steps: list[StepRecord] = []
        """Not yet counted."""
        self._tracks = RequestTracks()
        self._figures = StepFigures(
            kept_buckets=KEPT,
            kept_times=KEPT,
            width_ns=WIDTH_NS,
            times_ns=WIDTH_NS,
            growth=COARSE,
        )

    @property
    def figures(self) -> StepFigures:
        """Figures of all events so far."""
        self._count()
        return self._figures

    def add(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            if not self.since_ns:
                self.since_ns = _time_of(event)
            if isinstance(event, StepRecord):
                self._steps.append(event)
                if len(self._steps) >= WAITING_STEPS:
                    self._count()
            else:
                self._tracks.apply(event)
        self._tracks.pass_waits(self._figures)
        if self._steps and self._steps[-1].ended_ns - self._steps[0].ended_ns >= WAITING_NS:
            self._count()

    def state(self) -> HistoryState:
        figures, last = self.figures, self._figures.newest
        return HistoryState(
            since_ns=self.since_ns,
            end_ns=(last + 1) * WIDTH_NS,
            width_ns=WIDTH_NS,
            columns=COLUMNS,
            series=figures.kept(last, KEPT),
            times=TIMES,
            growth=COARSE,
            counts=np.stack([spread.counts(last, KEPT) for spread in _spreads(figures)]),
        )

    def restore(self, state: HistoryState) -> None:
        """Go on from a known state; what was counted here so far is forgotten. Values that no
        engine has are taken for 0."""
        assert state.is_known
        self._count()  # the gap to the next step is measured from the last one
        last, figures = state.end_ns // WIDTH_NS - 1, self._figures
        series = np.nan_to_num(state.series, nan=np.nan, posinf=0.0, neginf=0.0).clip(min=0.0)
        series[:RUNNING] = np.nan_to_num(series[:RUNNING])
        figures.restore(last, series)
        for spread, counts in zip(_spreads(figures), state.counts, strict=True):
            spread.restore(last, counts.clip(min=0))
        self.since_ns = state.since_ns

    def _count(self) -> None:
        steps, self._steps = self._steps, []
        self._figures.add(steps)


def _spreads(figures: StepFigures) -> tuple[TimeSpread, ...]:
    """In the order of `TIMES`."""
    waits = figures.waits
    return figures.step_times, figures.gaps, waits[TTFT_MS], waits[QUEUE_MS]


def _time_of(event: EngineEvent) -> int:
    return event.applied_ns if isinstance(event, StepRecord) else event.time_ns
