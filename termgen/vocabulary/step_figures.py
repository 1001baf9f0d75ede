"""Figures of many steps at once: tokens, times and the engine's counters per stretch of time.

Fed with many steps at once, so that an engine of a thousand steps a second costs some array
operations a frame and not a thousand updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.time_spread import FINE, SECOND_NS, TimeSpread

BUCKET_NS = 250_000_000
"""Width of one point of the live series."""
MAX_STEP_BUCKETS = 40
"""A step longer than this many buckets is charged to the last of them only."""
NUM_SUMS, NUM_PEAKS, NUM_STANDS = 7, 4, 3
DECODE, PREFILL, STEPS, FROM_GRAPH, ASKED, FOUND, PREEMPTED = range(NUM_SUMS)
"""Rows that are summed: tokens sampled and of prompts, steps and those run from a recording, prompt
tokens looked up in the prefix cache and found there, preemptions."""
STEP_MS, GAP_MS, TTFT_MS, QUEUE_MS = range(NUM_SUMS, NUM_SUMS + NUM_PEAKS)
"""Rows of the longest in each stretch."""
RUNNING, WAITING, KV_SHARE = range(NUM_SUMS + NUM_PEAKS, NUM_SUMS + NUM_PEAKS + NUM_STANDS)
"""Rows of gauges, at their last known values."""
TOP_RUNNING = NUM_SUMS + NUM_PEAKS + NUM_STANDS
"""The first of as many rows with the highest value of each gauge."""
NUM_ROWS = TOP_RUNNING + NUM_STANDS
COLUMNS = (
    *("decode_tokens", "prefill_tokens", "steps", "steps_from_graphs"),
    *("prefix_query_tokens", "prefix_hit_tokens", "preemptions"),
    *("step_ms_max", "itl_ms_max", "ttft_ms_max", "queue_ms_max"),
    *("running", "waiting", "kv_share", "running_max", "waiting_max", "kv_share_max"),
)
"""Names of the rows on the wire."""


Values = npt.NDArray[np.float64]


class Series(NamedTuple):
    """Live series, a point per bucket, oldest first."""

    decode: Values
    """Tokens per second."""
    prefill: Values
    step_ms: Values
    """The longest step of each bucket."""
    gap_ms: Values
    ttft_ms: Values
    queue_ms: Values
    running: Values
    waiting: Values
    kv_share: Values
    hit_share: Values
    """Share of the looked-up prompt tokens that were cache hits."""
    graph_share: Values
    """Share of the steps that ran from a recording."""
    preempted: Values
    """Preemptions in each bucket."""


def _fields(*names: str) -> itemgetter[Any]:
    """A getter of record fields by position: twice as fast as by name."""
    return itemgetter(*map(StepRecord._fields.index, names))


_FACTS = _fields(
    "started_ns",
    "ended_ns",
    "num_sampled_tokens",
    "num_prefill_tokens",
    "step_id",
    "landed_ns",
    "applied_ns",
    "num_decode_rows",
    "num_running",
    "num_waiting",
    "num_used_blocks",
    "num_cached_blocks",
    "num_free_blocks",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "num_preemptions",
)
_MODE = _fields("graph_mode")


class StepFigures:
    """Series of the last `kept_buckets` buckets of `width_ns`, and spreads of times over
    `kept_times` stretches of `times_ns`."""

    def __init__(
        self,
        *,
        kept_buckets: int,
        kept_times: int,
        width_ns: int = BUCKET_NS,
        times_ns: int = SECOND_NS,
        growth: float = FINE,
    ) -> None:
        """growth: ratio of neighbouring bins of the spreads."""
        self._size = kept_buckets
        self._width_ns = width_ns
        self.newest = -1
        """The newest bucket anything was in."""
        self._series = np.zeros((NUM_ROWS, kept_buckets))
        """[kind, bucket % kept_buckets]; a gauge is NaN in a bucket without a value."""
        self._series[RUNNING:] = np.nan
        self._last: npt.NDArray[np.int64] | None = None
        """Facts of the newest step."""

        def times() -> TimeSpread:
            return TimeSpread(kept_times, width_ns=times_ns, growth=growth)

        self.step_times = times()
        self.gaps = times()
        """Times between two tokens of a request, once for each of them."""
        self.waits = {TTFT_MS: times(), QUEUE_MS: times()}

    def add(self, steps: Sequence[StepRecord]) -> None:
        if not steps:
            return
        facts = np.array(list(map(_FACTS, steps)), np.int64)  # [steps, 16]
        started, ended = facts.T[:2]
        sampled, prefill = facts.T[2:4].astype(np.float64)  # adding at places is slow with a cast
        took_ms = np.maximum(0, ended - started) / 1e6
        last = ended // self._width_ns
        first = np.maximum(started // self._width_ns, last - MAX_STEP_BUCKETS)
        self._reach(int(last.max()))
        self.step_times.add(ended, took_ms)
        known = last > self.newest - self._size
        np.maximum.at(self._series[STEP_MS], last[known] % self._size, took_ms[known])
        within = known & (first >= last)
        slots = last[within] % self._size
        np.add.at(self._series[DECODE], slots, sampled[within])
        np.add.at(self._series[PREFILL], slots, prefill[within])
        for i in np.flatnonzero(known & (first < last)).tolist():
            buckets = np.arange(first[i], last[i] + 1)
            share = 1 / len(buckets)
            buckets = buckets[buckets > self.newest - self._size] % self._size
            self._series[DECODE, buckets] += sampled[i] * share
            self._series[PREFILL, buckets] += prefill[i] * share
        self._add_modes(steps, last, known)
        self._add_changes(facts, last, known)
        self._add_stands(facts, last, known)
        self._last = facts[-1]

    def _add_modes(
        self, steps: Sequence[StepRecord], last: npt.NDArray[np.int64], known: npt.NDArray[np.bool_]
    ) -> None:
        slots = last[known] % self._size
        from_graph = np.array([float(mode != "NONE") for mode in map(_MODE, steps)])
        np.add.at(self._series[STEPS], slots, np.ones(len(slots)))
        np.add.at(self._series[FROM_GRAPH], slots, from_graph[known])

    def _add_changes(
        self,
        facts: npt.NDArray[np.int64],
        last: npt.NDArray[np.int64],
        known: npt.NDArray[np.bool_],
    ) -> None:
        """Add figures that are differences to the step before: decode rows had their last token
        from it, and the prefix cache counts since the start."""
        before = facts[:1] if self._last is None else self._last[None]
        change = np.diff(facts, axis=0, prepend=before)
        landed = np.where(facts[:, 5] > 0, facts[:, 5], facts[:, 6])
        earlier = np.where(before[:, 5] > 0, before[:, 5], before[:, 6])
        gap_ms = np.diff(landed, prepend=earlier) / 1e6
        num_rows = np.where((change[:, 4] == 1) & (gap_ms >= 0), facts[:, 7], 0)
        self.gaps.add(landed, gap_ms, num_rows)
        some = known & (num_rows > 0)
        np.maximum.at(self._series[GAP_MS], last[some] % self._size, gap_ms[some])
        for row, column in ((ASKED, 13), (FOUND, 14), (PREEMPTED, 15)):
            more = np.maximum(0.0, change[:, column])
            np.add.at(self._series[row], last[known] % self._size, more[known])

    def _add_stands(
        self,
        facts: npt.NDArray[np.int64],
        last: npt.NDArray[np.int64],
        known: npt.NDArray[np.bool_],
    ) -> None:
        """When one bucket holds several steps, the last one wins, and the highest is kept too."""
        slots = last[known] % self._size
        used = facts[known, 10]
        total = np.maximum(1, facts[known, 10:13].sum(axis=1))
        for i, values in enumerate((facts[known, 8], facts[known, 9], used / total)):
            self._series[RUNNING + i, slots] = values
            np.fmax.at(self._series[TOP_RUNNING + i], slots, values.astype(np.float64))

    def add_waits(self, row: int, waits: Sequence[tuple[int, float]]) -> None:
        """Add waits that ended: the times of first tokens or of admissions, and the milliseconds
        waited."""
        at_ns = np.array([time_ns for time_ns, _ in waits], np.int64)
        took_ms = np.array([ms for _, ms in waits])
        self.waits[row].add(at_ns, took_ms)
        buckets = at_ns // self._width_ns
        self._reach(int(buckets.max()))
        known = buckets > self.newest - self._size
        np.maximum.at(self._series[row], buckets[known] % self._size, took_ms[known])

    def reaches(self, time_ns: int) -> bool:
        """True if this far back is still kept, or nothing was older."""
        return time_ns // self._width_ns > self.newest - self._size

    def _reach(self, bucket: int) -> None:
        """Make room for a newer bucket than there was."""
        ahead = min(bucket - self.newest, self._size) if self.newest >= 0 else self._size
        if ahead > 0:
            slots = np.arange(bucket - ahead + 1, bucket + 1) % self._size
            self._series[:RUNNING, slots] = 0.0
            self._series[RUNNING:, slots] = np.nan
            self.newest = bucket

    def series(self, now_ns: int, count: int) -> Series:
        """The last `count` points that are full by now."""
        found = self._window(now_ns // self._width_ns - 1, count)
        found[[DECODE, PREFILL]] *= 1e9 / self._width_ns
        return Series(
            decode=found[DECODE],
            prefill=found[PREFILL],
            step_ms=found[STEP_MS],
            gap_ms=found[GAP_MS],
            ttft_ms=found[TTFT_MS],
            queue_ms=found[QUEUE_MS],
            running=found[RUNNING],
            waiting=found[WAITING],
            kv_share=found[KV_SHARE],
            hit_share=_shares(found[FOUND], found[ASKED]),
            graph_share=_shares(found[FROM_GRAPH], found[STEPS]),
            preempted=found[PREEMPTED],
        )

    def _window(self, last: int, count: int) -> npt.NDArray[np.float64]:
        """[NUM_ROWS, count]: the series up to a bucket. A gauge is the highest of its bucket;
        without one it keeps its last value until the next, and is 0 before the first."""
        found = self.kept(last, count)
        stands, tops = found[RUNNING:TOP_RUNNING], found[TOP_RUNNING:]
        places = np.maximum.accumulate(np.where(np.isnan(stands), -1, np.arange(count)), axis=1)
        values = np.take_along_axis(stands, np.maximum(places, 0), axis=1)
        carried = np.where(places >= 0, values, 0.0)
        found[RUNNING:TOP_RUNNING] = np.where(np.isnan(tops), carried, tops)
        return found

    def kept(self, last: int, count: int) -> npt.NDArray[np.float64]:
        """[NUM_ROWS, count]: what is kept of the buckets up to number `last`, oldest first."""
        buckets = np.arange(last - count + 1, last + 1)
        known = (buckets <= self.newest) & (buckets > self.newest - self._size)
        found = self._series[:, buckets % self._size]
        found[:RUNNING, ~known] = 0.0
        found[RUNNING:, ~known] = np.nan
        return found

    def restore(self, last: int, series: npt.NDArray[np.float64]) -> None:
        """Take the place of all series: the result of `kept` elsewhere, for all buckets."""
        self.newest = last
        self._series[:, np.arange(last - self._size + 1, last + 1) % self._size] = series


def _shares(parts: Values, wholes: Values) -> Values:
    """Part of each whole; where there is no whole, as it was before."""
    known = wholes > 0
    places = np.maximum.accumulate(np.where(known, np.arange(len(wholes)), -1))
    values = parts / np.where(known, wholes, 1.0)
    return np.where(places >= 0, values[np.maximum(places, 0)], 0.0)
