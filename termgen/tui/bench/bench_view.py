"""State of a bench for the screen, as plain values. `commands.bench_watch` makes them; the screens
know no bench and no server.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A target that was set for the load, beside the measured value."""

    name: str
    asked: str
    now: str
    is_kept: bool | None = None
    """None: there is nothing to keep."""


@dataclass(frozen=True, slots=True)
class TimesRow:
    """Milliseconds; None before the first one."""

    name: str
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    values: tuple[float, ...]
    now: str
    role: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Counts in equal parts from `low` to `high`, in milliseconds."""

    title: str
    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plane:
    """The steps of a sweep so far: load and a percentile in milliseconds of each, and whether it
    was kept."""

    title: str
    x_title: str
    points: tuple[tuple[float, float, bool], ...]
    limit: float | None


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BenchView:
    subject: str
    """Server and model."""
    load: str
    """The load, in words."""
    phase: str
    """`measuring`, `done`, ..."""
    step: str = ""
    """The load of this step of a sweep."""
    num_done: int = 0
    num_requests: int = 0
    left_s: float | None = None
    elapsed_s: float = 0.0
    targets: tuple[Target, ...] = ()
    times: tuple[TimesRow, ...] = ()
    rates: tuple[tuple[str, str], ...] = ()
    """Figures without percentiles: tokens per second, errors, goodput."""
    series: tuple[Series, ...] = ()
    spread: Spread | None = None
    plane: Plane | None = None
    report: tuple[Section, ...] = ()
    """Empty until the end."""

    @property
    def is_over(self) -> bool:
        return bool(self.report)
