"""How long grammars take to compile, and why some do not: counted by the threads that compile.

`GrammarCompiler` measures with `GrammarTimes`; front ends see its `GrammarTotals` through
`EngineClient`. Vocabulary: knows no grammars.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from termgen.errors import RequestError

T = TypeVar("T")
Wanted = TypeVar("Wanted")

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class GrammarTotals:
    """Since the engine's start. What came from the cache is in none of these."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    """Compilations of up to so many seconds as `BOUNDS_S` says; the last: of more."""
    seconds: float = 0.0
    failures: Mapping[str, int] = field(default_factory=dict)
    """Those of them that failed, by the code of the error."""


class GrammarTimes:
    """Adds up. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0
        self._failures: Counter[str] = Counter()

    def measure(self, compile: Callable[[Wanted], T], wanted: Wanted) -> T:
        """The result of compiling, or what that raises."""
        begun = time.perf_counter()
        failure = "internal_error"
        try:
            grammar = compile(wanted)
            failure = ""
            return grammar
        except RequestError as error:
            failure = error.code
            raise
        finally:
            self._add(time.perf_counter() - begun, failure)

    def _add(self, seconds: float, failure: str) -> None:
        with self._lock:
            self._counts[bisect_left(BOUNDS_S, seconds)] += 1
            self._seconds += seconds
            if failure:
                self._failures[failure] += 1

    def totals(self) -> GrammarTotals:
        with self._lock:
            return GrammarTotals(tuple(self._counts), self._seconds, dict(self._failures))
