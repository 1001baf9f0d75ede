"""Times and failures of grammar compilations.

`GrammarCompiler` adds to `GrammarTimes`; front ends get `GrammarTotals` through `EngineClient`.
Vocabulary: knows no grammars.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from termgen.errors import RequestError

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class GrammarTotals:
    """Totals since the engine's start, without cache hits."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    """Histogram of compile times over `BOUNDS_S` (upper bounds in seconds); the last: longer."""
    seconds: float = 0.0
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed compilations, by error code."""


class GrammarTimes:
    """Adds up compilations. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0
        self._failures: Counter[str] = Counter()

    def add(self, seconds: float, error: BaseException | None = None) -> None:
        """Count one compilation, which failed if `error` is given."""
        with self._lock:
            self._counts[bisect_left(BOUNDS_S, seconds)] += 1
            self._seconds += seconds
            if error is not None:
                code = error.code if isinstance(error, RequestError) else "internal_error"
                self._failures[code] += 1

    def totals(self) -> GrammarTotals:
        with self._lock:
            return GrammarTotals(tuple(self._counts), self._seconds, dict(self._failures))
