"""Percentiles of times: of a few values exactly, of any number of them from histograms."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SECOND_NS = 1_000_000_000
LEAST_MS, MOST_MS = 1e-3, 1e6
"""Range of the bins: a microsecond to a quarter of an hour."""
FINE, COARSE = 1.02, 1.1
"""Ratio of neighbouring bins: percentiles are right to half of what lies between, 1% and 5%."""
LONG_MS = 200.0
"""A wait from here on is felt."""


class Spread(NamedTuple):
    """Percentiles of times in ms; Nones where there was nothing."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class LongTimes(NamedTuple):
    num_long: int = 0
    """Times of `LONG_MS` or more."""
    num: int = 0
    """All times."""


class TimeSpread:
    """Histogram of times for each second, or another width: percentiles of any number of times, in
    an array of fixed size."""

    QS = 50, 95, 99

    def __init__(self, kept: int, *, width_ns: int = SECOND_NS, growth: float = FINE) -> None:
        """kept: number of histograms; older ones are overwritten."""
        self._size = kept
        self._width_ns = width_ns
        self._growth = growth
        self._counts = np.zeros((kept, num_bins(growth)), np.int32)
        self._newest = -1

    def add(
        self,
        at_ns: npt.NDArray[np.int64],
        took_ms: npt.NDArray[np.float64],
        times: npt.NDArray[np.int64] | int = 1,
    ) -> None:
        """times: how often each occurred."""
        at = at_ns // self._width_ns
        self._reach(int(at.max()))
        known = at > self._newest - self._size
        bins = np.minimum(bins_of(took_ms, self._growth), self._counts.shape[1] - 1)
        more = np.broadcast_to(np.asarray(times, np.int32), bins.shape)
        places = at[known] % self._size * self._counts.shape[1] + bins[known]
        np.add.at(self._counts.reshape(-1), places, more[known])

    def _reach(self, newest: int) -> None:
        """Make room for a newer histogram than there was."""
        ahead = min(newest - self._newest, self._size) if self._newest >= 0 else self._size
        if ahead > 0:
            self._counts[np.arange(newest - ahead + 1, newest + 1) % self._size] = 0
            self._newest = newest

    def spread(self, now_ns: int, last_s: int) -> Spread:
        """The distribution over the last seconds."""
        upto = self._upto(now_ns, last_s)
        if not upto[-1]:
            return Spread()
        ranks = np.ceil(np.array(self.QS) / 100 * upto[-1])
        bins = np.searchsorted(upto, ranks)
        return Spread(*(LEAST_MS * self._growth ** (bins + 0.5)).tolist())

    def num_long(self, now_ns: int, last_s: int) -> LongTimes:
        """How many times of the last seconds were `LONG_MS` or more, to within a bin."""
        upto = self._upto(now_ns, last_s)
        first = int(bins_of(np.array(LONG_MS), self._growth))
        return LongTimes(int(upto[-1] - upto[first - 1]), int(upto[-1]))

    def _upto(self, now_ns: int, last_s: int) -> npt.NDArray[np.int64]:
        """How many times of the last seconds were in each bin or one before."""
        last, number = now_ns // self._width_ns, last_s * SECOND_NS // self._width_ns
        upto: npt.NDArray[np.int64] = np.cumsum(self.counts(last, number).sum(axis=0))
        return upto

    def counts(self, last: int, number: int) -> npt.NDArray[np.int32]:
        """[number, bins]: histograms up to number `last`, oldest first; 0 where none is kept."""
        wanted = np.arange(last - min(number, self._size) + 1, last + 1)
        known = (wanted <= self._newest) & (wanted > self._newest - self._size)
        found = self._counts[wanted % self._size]
        found[~known] = 0
        return found

    def restore(self, last: int, counts: npt.NDArray[np.int32]) -> None:
        """Take the place of all that was counted: the result of `counts` elsewhere."""
        self._newest = last
        self._counts[np.arange(last - len(counts) + 1, last + 1) % self._size] = counts


def bins_of(took_ms: npt.NDArray[np.float64], growth: float) -> npt.NDArray[np.int64]:
    """The bin of each time; the longest are beyond the last one."""
    scale = np.log(np.maximum(took_ms, LEAST_MS) / LEAST_MS) / math.log(growth)
    return scale.astype(np.int64)


def num_bins(growth: float) -> int:
    return math.ceil(math.log(MOST_MS / LEAST_MS) / math.log(growth))


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
