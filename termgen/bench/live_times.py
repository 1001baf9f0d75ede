"""Times of a run under way in ranges of 1%: as small after a million as after ten.

What the load generator tells while it runs is counted with it, and what the screen shows. Nothing
heavy: the generator imports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

RANGES_PER_E = 100
"""A range ends where it begins times e^(1/100)."""
LEAST_S = 1e-7


def range_of(seconds: float) -> int:
    return math.floor(math.log(max(seconds, LEAST_S)) * RANGES_PER_E)


class LiveTimes:
    """Counts of times, with their exact mean and percentiles to half a percent."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.number = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        key = range_of(seconds)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.number += 1
        self.total_s += seconds

    def add_told(self, told: Sequence[Iterable[Sequence[int]] | float]) -> None:
        """What `take` of another one returned."""
        pairs, total_s = told
        assert not isinstance(pairs, float) and isinstance(total_s, (float, int))
        for key, count in pairs:
            self.counts[key] = self.counts.get(key, 0) + count
            self.number += count
        self.total_s += total_s

    def take(self) -> list[list[list[int]] | float]:
        """Everything so far, for JSON; it is forgotten here."""
        told: list[list[list[int]] | float] = [[[k, n] for k, n in self.counts.items()]]
        told.append(self.total_s)
        self.counts, self.number, self.total_s = {}, 0, 0.0
        return told

    @property
    def mean(self) -> float | None:
        return self.total_s / self.number if self.number else None

    def quantile(self, share: float) -> float | None:
        """The middle of the range that holds it; None without a time."""
        place, seen = share * (self.number - 1), 0
        for key in sorted(self.counts):
            seen += self.counts[key]
            if seen > place:
                return math.exp((key + 0.5) / RANGES_PER_E)
        return None

    def spread(self, columns: int) -> tuple[float, float, list[int]]:
        """(smallest, p99, counts in that many equal parts between them); the last has the rest."""
        low, high = self.quantile(0.0) or 0.0, self.quantile(0.99) or 0.0
        found = [0] * columns
        for key, count in self.counts.items():
            at = math.exp((key + 0.5) / RANGES_PER_E)
            place = int((at - low) / (high - low) * columns) if high > low else 0
            found[min(columns - 1, max(0, place))] += count
        return low, high, found
