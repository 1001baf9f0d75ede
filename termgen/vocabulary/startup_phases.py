"""Times of the start-up phases, measured from the progress reports that name them.

Vocabulary: no torch. `startup` wraps its progress callback in a `PhaseClock`; `ModelInfo` passes
the phases to the log, the metrics and screens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

READING_CONFIG = "reading the model's configuration"
LOADING_TOKENIZER = "loading tokenizer"
LOADING_LIBRARIES = "loading libraries"
LOADING_WEIGHTS = "loading weights"
COMPILING_KERNELS = "compiling kernels"
SIZING_CACHE = "sizing the KV cache"
RECORDING_GRAPHS = "recording graphs"
READING_VOCABULARY = "reading the vocabulary"
READY = "ready"

_SHORT_NAMES = {
    READING_CONFIG: "config",
    LOADING_TOKENIZER: "tokenizer",
    LOADING_LIBRARIES: "libraries",
    LOADING_WEIGHTS: "weights",
    COMPILING_KERNELS: "kernels",
    SIZING_CACHE: "KV cache",
    RECORDING_GRAPHS: "graphs",
    READING_VOCABULARY: "vocabulary",
}
_SMALL_SHARE = 0.05
"""Phases shorter than this share of the total are summed up as `other` in the one-line form."""


class StartupPhase(NamedTuple):
    """One phase; phases are ordered by their first start."""

    name: str
    """A short word: `weights`, `kernels`, `graphs`."""
    seconds: float


class PhaseClock:
    """A progress callback that times the phases and passes every report on."""

    def __init__(
        self,
        on_progress: Callable[[str, float], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_progress = on_progress
        self._now = now
        self._seconds: dict[str, float] = {}
        self._phase = ""
        self._began = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        if phase != self._phase:
            self._end_phase()
            self._phase, self._began = phase, self._now()
        self._on_progress(phase, fraction)

    def stop(self) -> tuple[StartupPhase, ...]:
        """End the last phase and return all; a resumed phase is counted as one."""
        self._end_phase()
        self._phase = ""
        return tuple(StartupPhase(name, seconds) for name, seconds in self._seconds.items())

    def _end_phase(self) -> None:
        if self._phase and self._phase != READY:
            name = _SHORT_NAMES.get(self._phase, self._phase)
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - self._began


def describe_startup(phases: Iterable[StartupPhase]) -> str:
    """One line: `ready in 6.1 s: weights 1.2, kernels 3.0, graphs 1.4, other 0.5`."""
    phases = tuple(phases)
    total = sum(p.seconds for p in phases)
    large = [p for p in phases if p.seconds >= _SMALL_SHARE * total]
    parts = [f"{p.name} {p.seconds:.1f}" for p in large]
    rest = total - sum(p.seconds for p in large)
    if rest >= 0.05:  # not printed as 0.0
        parts.append(f"other {rest:.1f}")
    return f"ready in {total:.1f} s" + (": " + ", ".join(parts) if parts else "")
