"""Figures of many steps at once: tokens and step times per stretch of time, and step times.

Fed by the store with the steps of a whole frame, so that an engine of a thousand steps a second
costs some array operations a frame and not a thousand updates. No Textual.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from termgen.engine.events import StepRecord

BUCKET_NS = 250_000_000
"""Width of one point of the series."""
MAX_STEP_BUCKETS = 40
"""A step longer than this many buckets is charged to the last of them only."""
DECODE, PREFILL, LONGEST_MS = range(3)

_FACTS = attrgetter("started_ns", "ended_ns", "num_sampled_tokens", "num_prefill_tokens")


class StepFigures:
    """Of the last `kept_buckets` buckets, and of the last `kept_steps` steps."""

    def __init__(self, *, kept_buckets: int, kept_steps: int) -> None:
        self._size = kept_buckets
        self._kept_steps = kept_steps
        self._newest = -1
        """The newest bucket anything was in."""
        self._series = np.zeros((3, kept_buckets))
        """[kind, bucket % kept_buckets]"""
        self._ended_ns = np.empty(0, np.int64)
        self._took_ms = np.empty(0)

    def add(self, steps: Sequence[StepRecord]) -> None:
        if not steps:
            return
        facts = np.array(list(map(_FACTS, steps)), np.int64)  # [steps, 4]
        started, ended, sampled, prefill = facts.T
        took_ms = np.maximum(0, ended - started) / 1e6
        self._ended_ns = np.concatenate((self._ended_ns, ended))[-self._kept_steps :]
        self._took_ms = np.concatenate((self._took_ms, took_ms))[-self._kept_steps :]
        last = ended // BUCKET_NS
        first = np.maximum(started // BUCKET_NS, last - MAX_STEP_BUCKETS)
        self._reach(int(last.max()))
        known = last > self._newest - self._size
        slots = last[known] % self._size
        np.maximum.at(self._series[LONGEST_MS], slots, took_ms[known])
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

    def _reach(self, bucket: int) -> None:
        """Make room for a newer bucket than there was."""
        ahead = min(bucket - self._newest, self._size) if self._newest >= 0 else self._size
        if ahead > 0:
            self._series[:, np.arange(bucket - ahead + 1, bucket + 1) % self._size] = 0.0
            self._newest = bucket

    def window(self, last: int, count: int) -> npt.NDArray[np.float64]:
        """[3, count]: sampled and prefill tokens, and the longest step in ms, up to a bucket."""
        buckets = np.arange(last - count + 1, last + 1)
        known = (buckets <= self._newest) & (buckets > self._newest - self._size)
        return np.where(known, self._series[:, buckets % self._size], 0.0)

    def step_ms(self, since_ns: int) -> npt.NDArray[np.float64]:
        """How long the steps took that have ended after a moment."""
        return self._took_ms[self._ended_ns > since_ns]


def quantiles(values: npt.NDArray[np.float64], *qs: float) -> npt.NDArray[np.float64]:
    """[..., values] -> [..., qs]: percentiles along the last axis, between two neighbours on the
    line that joins them. As `np.percentile`, which takes ten times as long for what a frame has."""
    ordered = np.sort(values, axis=-1)
    places = np.array(qs) / 100 * (values.shape[-1] - 1)
    below = places.astype(np.intp)
    low, high = ordered[..., below], ordered[..., np.ceil(places).astype(np.intp)]
    found: npt.NDArray[np.float64] = low + (places - below) * (high - low)
    return found
