"""Figures of many steps at once: tokens, times and the engine's counters per stretch of time.

Fed by the store with the steps of a whole frame, so that an engine of a thousand steps a second
costs some array operations a frame and not a thousand updates. No Textual.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from termgen.vocabulary.events import StepRecord

BUCKET_NS = 250_000_000
"""Width of one point of the series."""
MAX_STEP_BUCKETS = 40
"""A step longer than this many buckets is charged to the last of them only."""
NUM_SUMS, NUM_PEAKS, NUM_STANDS = 6, 4, 3
DECODE, PREFILL, STEPS, FROM_GRAPH, ASKED, FOUND = range(NUM_SUMS)
"""Rows that are summed: tokens sampled and of prompts, steps and those run from a recording, prompt
tokens looked up in the prefix cache and found there."""
STEP_MS, GAP_MS, TTFT_MS, QUEUE_MS = range(NUM_SUMS, NUM_SUMS + NUM_PEAKS)
"""Rows of the longest in each stretch."""
RUNNING, WAITING, KV_SHARE = range(NUM_SUMS + NUM_PEAKS, NUM_SUMS + NUM_PEAKS + NUM_STANDS)
"""Rows of gauges, at their last known values."""
NUM_ROWS = NUM_SUMS + NUM_PEAKS + NUM_STANDS


Values = npt.NDArray[np.float64]


class Spread(NamedTuple):
    """Percentiles of times in ms; Nones where there was nothing."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


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
)
_MODE = _fields("graph_mode")


class StepFigures:
    """Series of the last `kept_buckets` buckets, and spreads of times over the last `kept_s`."""

    def __init__(self, *, kept_buckets: int, kept_s: int) -> None:
        self._size = kept_buckets
        self._newest = -1
        """The newest bucket anything was in."""
        self._series = np.zeros((NUM_ROWS, kept_buckets))
        """[kind, bucket % kept_buckets]; a gauge is NaN in a bucket without a value."""
        self._series[RUNNING:] = np.nan
        self._last: npt.NDArray[np.int64] | None = None
        """Facts of the newest step."""
        self.step_times = TimeSpread(kept_s)
        self.gaps = TimeSpread(kept_s)
        """Times between two tokens of a request, once for each of them."""
        self.waits = {TTFT_MS: TimeSpread(kept_s), QUEUE_MS: TimeSpread(kept_s)}

    def add(self, steps: Sequence[StepRecord]) -> None:
        if not steps:
            return
        facts = np.array(list(map(_FACTS, steps)), np.int64)  # [steps, 15]
        started, ended = facts.T[:2]
        sampled, prefill = facts.T[2:4].astype(np.float64)  # adding at places is slow with a cast
        took_ms = np.maximum(0, ended - started) / 1e6
        last = ended // BUCKET_NS
        first = np.maximum(started // BUCKET_NS, last - MAX_STEP_BUCKETS)
        self._reach(int(last.max()))
        self.step_times.add(ended, took_ms)
        known = last > self._newest - self._size
        np.maximum.at(self._series[STEP_MS], last[known] % self._size, took_ms[known])
        within = known & (first >= last)
        slots = last[within] % self._size
        np.add.at(self._series[DECODE], slots, sampled[within])
        np.add.at(self._series[PREFILL], slots, prefill[within])
        for i in np.flatnonzero(known & (first < last)).tolist():
            buckets = np.arange(first[i], last[i] + 1)
            share = 1 / len(buckets)
            buckets = buckets[buckets > self._newest - self._size] % self._size
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
        for row, column in ((ASKED, 13), (FOUND, 14)):
            more = np.maximum(0.0, change[:, column])
            np.add.at(self._series[row], last[known] % self._size, more[known])

    def _add_stands(
        self,
        facts: npt.NDArray[np.int64],
        last: npt.NDArray[np.int64],
        known: npt.NDArray[np.bool_],
    ) -> None:
        """When one bucket holds several steps, the last one wins."""
        slots = last[known] % self._size
        used = facts[known, 10]
        total = np.maximum(1, facts[known, 10:13].sum(axis=1))
        self._series[RUNNING, slots] = facts[known, 8]
        self._series[WAITING, slots] = facts[known, 9]
        self._series[KV_SHARE, slots] = used / total

    def add_waits(self, row: int, waits: Sequence[tuple[int, float]]) -> None:
        """Add waits that ended: the times of first tokens or of admissions, and the milliseconds
        waited."""
        at_ns = np.array([time_ns for time_ns, _ in waits], np.int64)
        took_ms = np.array([ms for _, ms in waits])
        self.waits[row].add(at_ns, took_ms)
        buckets = at_ns // BUCKET_NS
        self._reach(int(buckets.max()))
        known = buckets > self._newest - self._size
        np.maximum.at(self._series[row], buckets[known] % self._size, took_ms[known])

    def reaches(self, time_ns: int) -> bool:
        """True if this far back is still kept, or nothing was older."""
        return time_ns // BUCKET_NS > self._newest - self._size

    def _reach(self, bucket: int) -> None:
        """Make room for a newer bucket than there was."""
        ahead = min(bucket - self._newest, self._size) if self._newest >= 0 else self._size
        if ahead > 0:
            slots = np.arange(bucket - ahead + 1, bucket + 1) % self._size
            self._series[:RUNNING, slots] = 0.0
            self._series[RUNNING:, slots] = np.nan
            self._newest = bucket

    def series(self, now_ns: int, count: int) -> Series:
        """The last `count` points that are full by now."""
        found = self._window(now_ns // BUCKET_NS - 1, count)
        found[[DECODE, PREFILL]] *= 1e9 / BUCKET_NS
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
        )

    def _window(self, last: int, count: int) -> npt.NDArray[np.float64]:
        """[NUM_ROWS, count]: the series up to a bucket. A gauge keeps its last value until the next
        one, and is 0 before the first."""
        buckets = np.arange(last - count + 1, last + 1)
        known = (buckets <= self._newest) & (buckets > self._newest - self._size)
        found = np.where(known, self._series[:, buckets % self._size], 0.0)
        stands = self._series[RUNNING:, buckets % self._size]
        has_value = known & ~np.isnan(stands)
        places = np.maximum.accumulate(np.where(has_value, np.arange(count), -1), axis=1)
        values = np.take_along_axis(stands, np.maximum(places, 0), axis=1)
        found[RUNNING:] = np.where(places >= 0, values, 0.0)
        return found


def _shares(parts: Values, wholes: Values) -> Values:
    """Part of each whole; where there is no whole, as it was before."""
    known = wholes > 0
    places = np.maximum.accumulate(np.where(known, np.arange(len(wholes)), -1))
    values = parts / np.where(known, wholes, 1.0)
    return np.where(places >= 0, values[np.maximum(places, 0)], 0.0)


class TimeSpread:
    """Histogram of times for each second: percentiles to within 1% of any number of times, in an
    array of fixed size."""

    LEAST_MS, GROWTH, NUM_BINS = 1e-3, 1.02, 1050
    """Bins from a microsecond to a quarter of an hour."""
    QS = 50, 95, 99

    def __init__(self, kept_s: int) -> None:
        self._size = kept_s
        self._counts = np.zeros((kept_s, self.NUM_BINS), np.int32)
        self._newest = -1

    def add(
        self,
        at_ns: npt.NDArray[np.int64],
        took_ms: npt.NDArray[np.float64],
        times: npt.NDArray[np.int64] | int = 1,
    ) -> None:
        """times: how often each occurred."""
        seconds = at_ns // 1_000_000_000
        newest = int(seconds.max())
        ahead = min(newest - self._newest, self._size) if self._newest >= 0 else self._size
        if ahead > 0:
            self._counts[np.arange(newest - ahead + 1, newest + 1) % self._size] = 0
            self._newest = newest
        known = seconds > self._newest - self._size
        scale = np.log(np.maximum(took_ms, self.LEAST_MS) / self.LEAST_MS) / math.log(self.GROWTH)
        bins = np.minimum(scale.astype(np.int64), self.NUM_BINS - 1)
        more = np.broadcast_to(np.asarray(times, np.int32), bins.shape)
        places = seconds[known] % self._size * self.NUM_BINS + bins[known]
        np.add.at(self._counts.reshape(-1), places, more[known])

    def spread(self, now_ns: int, last_s: int) -> Spread:
        """The distribution over the last seconds."""
        now = now_ns // 1_000_000_000
        seconds = np.arange(now - min(last_s, self._size) + 1, now + 1)
        known = (seconds <= self._newest) & (seconds > self._newest - self._size)
        upto = np.cumsum(self._counts[seconds[known] % self._size].sum(axis=0))
        if not upto[-1]:
            return Spread()
        ranks = np.ceil(np.array(self.QS) / 100 * upto[-1])
        bins = np.searchsorted(upto, ranks)
        return Spread(*(self.LEAST_MS * self.GROWTH ** (bins + 0.5)).tolist())


def quantiles(values: npt.NDArray[np.float64], *qs: float) -> npt.NDArray[np.float64]:
    """[..., values] -> [..., qs]: percentiles along the last axis, between two neighbours on the
    line that joins them. As `np.percentile`, which takes ten times as long for what a frame has."""
    ordered = np.sort(values, axis=-1)
    places = np.array(qs) / 100 * (values.shape[-1] - 1)
    below = places.astype(np.intp)
    low, high = ordered[..., below], ordered[..., np.ceil(places).astype(np.intp)]
    found: npt.NDArray[np.float64] = low + (places - below) * (high - low)
    return found


def percentile(values: Iterable[float], q: float) -> float | None:
    return percentiles(np.fromiter(values, dtype=np.float64), q)[0]


def percentiles(
    values: Collection[float] | npt.NDArray[np.float64], *qs: float
) -> Sequence[float | None]:
    """Nones where there are no values."""
    if not len(values):
        return [None] * len(qs)
    known = values if isinstance(values, np.ndarray) else np.fromiter(values, np.float64)
    found: list[float | None] = quantiles(known, *qs).tolist()
    return found
