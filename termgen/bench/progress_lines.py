"""The load generator's progress reports on running answers, for a screen that shows the run.

Times go into a logarithmic histogram with bins of 1%, so a report stays small however many there
are. The watch reads the answers only when it reports, a few times a second, and yields to the event
loop in between, so as not to disturb the times measured. The load generator imports this module:
nothing heavy.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from termgen.bench.stream_client import Answer

RANGES_PER_E = 100
"""Bins per factor e: each is e^(1/100) wide."""
LEAST_S = 1e-7

GAPS_AT_ONCE = 256
"""Gaps counted before yielding to the event loop: a fraction of a millisecond."""


def range_of(seconds: float) -> int:
    return math.floor(math.log(max(seconds, LEAST_S)) * RANGES_PER_E)


class LiveTimes:
    """A histogram of times with their exact mean, and percentiles accurate to half a percent."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.number = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        key = range_of(seconds)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.number += 1
        self.total_s += seconds

    def merge(self, counts: Sequence[Iterable[Sequence[int]] | float]) -> None:
        """Add what `take` of another instance returned."""
        pairs, total_s = counts
        assert not isinstance(pairs, float) and isinstance(total_s, (float, int))
        for key, count in pairs:
            self.counts[key] = self.counts.get(key, 0) + count
            self.number += count
        self.total_s += total_s

    def take(self) -> list[list[list[int]] | float]:
        """Return all counts for JSON, and start again from zero."""
        counts: list[list[list[int]] | float] = [[[k, n] for k, n in self.counts.items()]]
        counts.append(self.total_s)
        self.counts, self.number, self.total_s = {}, 0, 0.0
        return counts

    @property
    def mean(self) -> float | None:
        return self.total_s / self.number if self.number else None

    def quantile(self, share: float) -> float | None:
        """The middle of the bin that holds it; None without any time."""
        place, seen = share * (self.number - 1), 0
        for key in sorted(self.counts):
            seen += self.counts[key]
            if seen > place:
                return math.exp((key + 0.5) / RANGES_PER_E)
        return None

    def spread(self, columns: int) -> tuple[float, float, list[int]]:
        """(minimum, p99, counts in `columns` equal ranges between them); the last has the rest."""
        low, high = self.quantile(0.0) or 0.0, self.quantile(0.99) or 0.0
        found = [0] * columns
        for key, count in self.counts.items():
            at = math.exp((key + 0.5) / RANGES_PER_E)
            place = int((at - low) / (high - low) * columns) if high > low else 0
            found[min(columns - 1, max(0, place))] += count
        return low, high, found


@dataclass(slots=True)
class _Open:
    answer: Answer
    has_first: bool = False
    num_gaps: int = 0


class AnswerWatch:
    """Tracks each request from `begin` to `end`; `take` reports what is new since its last call."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._ended: list[_Open] = []
        self._first = LiveTimes()
        self._gaps = LiveTimes()

    def begin(self, index: int, answer: Answer) -> None:
        self._open[index] = _Open(answer)

    def end(self, index: int) -> None:
        self._ended.append(self._open.pop(index))

    async def take(self) -> dict[str, Any]:
        """`first` and `gaps` as returned by `LiveTimes.take`; `finished` has one row per successful
        request: seconds to its first and to its last chunk, chunks, tokens."""
        ended, self._ended = self._ended, []
        finished = []
        for seen in [*ended, *self._open.values()]:
            await self._look(seen)
        for seen in ended:
            answer = seen.answer
            if answer.error is None:
                first = (answer.first or answer.last) - answer.began
                tokens = answer.num_output_tokens
                finished.append(
                    [
                        first,
                        answer.last - answer.began,
                        answer.num_chunks,
                        answer.num_chunks if tokens is None else tokens,
                    ]
                )
        return {
            "first": self._first.take(),
            "gaps": self._gaps.take(),
            "finished": finished,
        }

    async def _look(self, seen: _Open) -> None:
        answer = seen.answer
        if answer.first and not seen.has_first:
            seen.has_first = True
            self._first.add(answer.first - answer.began)
        while seen.num_gaps < len(answer.gaps):
            end = min(len(answer.gaps), seen.num_gaps + GAPS_AT_ONCE)
            for i in range(seen.num_gaps, end):
                self._gaps.add(answer.gaps[i])
            seen.num_gaps = end
            if end < len(answer.gaps):
                await asyncio.sleep(0)
