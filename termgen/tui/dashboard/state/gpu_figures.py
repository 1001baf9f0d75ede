"""Figures made of a GPU's readings: energy for each token, and what holds its clocks back.

The utilisation that the driver reports is left out: it is no evidence of a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from termgen.tui.dashboard.state.store import DashboardView
from termgen.vocabulary.device.gpu_reading import (
    CLOCKS_SET,
    HEAT,
    IDLE,
    POWER_BRAKE,
    POWER_CAP,
    SLOWDOWN,
    GpuHistory,
    GpuReading,
)
from termgen.vocabulary.step_figures import BUCKET_NS, Values

WINDOW_NS = 5_000_000_000
"""Energy and tokens of this long are compared at most, and a second of them at least: the counter
of a GPU moves ten times a second."""
SHORTEST_NS = 950_000_000
LONGEST_GAP_NS = 2_500_000_000
LATE_NS = 500_000_000
"""Steps that ended this lately may still be on their way."""
MOST_J = 1e6
"""More for one token is no figure of a GPU."""
HELD_SHARE = 0.5
"""Readings with a reason, of those of the window, before it is said."""
HELD_BY = {
    POWER_CAP: "the power cap",
    POWER_BRAKE: "the power brake",
    HEAT: "heat",
    SLOWDOWN: "a slowdown of the hardware",
    CLOCKS_SET: "a setting",
}


def joules_per_token(view: DashboardView, gpu: GpuHistory) -> float | None:
    """Energy of the whole GPU for each token that was generated, prompts and idle moments included;
    None where too little is known, or no token came."""
    end_ns = view.now_ns // BUCKET_NS * BUCKET_NS
    found = _connected([r for r in gpu if r.time_ns <= end_ns - LATE_NS])
    if not found or found[-1].time_ns - found[0].time_ns < SHORTEST_NS:
        return None
    first, last = found[0], found[-1]
    if end_ns - last.time_ns > WINDOW_NS:
        return None
    tokens = _tokens(view.decode_series, end_ns, first.time_ns, last.time_ns)
    joules = (last.energy_j or 0.0) - (first.energy_j or 0.0)
    if tokens < 1 or not 0 < joules < tokens * MOST_J:
        return None
    return joules / tokens


def _connected(readings: Sequence[GpuReading]) -> list[GpuReading]:
    """The newest readings of a window that have an energy and follow one another."""
    found: list[GpuReading] = []
    for reading in reversed(readings):
        if reading.energy_j is None:
            break
        if found:
            gap_ns = found[-1].time_ns - reading.time_ns
            is_far = found[0].time_ns - reading.time_ns > WINDOW_NS + BUCKET_NS
            if is_far or gap_ns > LONGEST_GAP_NS or reading.energy_j > (found[-1].energy_j or 0.0):
                break
        found.append(reading)
    return found[::-1]


def _tokens(rates: Values, end_ns: int, first_ns: int, last_ns: int) -> float:
    """Tokens between two moments, of a series of rates that ends at `end_ns`."""
    sums = np.concatenate(([0.0], np.cumsum(rates) * (BUCKET_NS / 1e9)))
    at = (np.array([first_ns, last_ns]) - end_ns) / BUCKET_NS + len(rates)
    begin, end = np.interp(at, np.arange(len(sums)), sums)
    return float(end - begin)


class HeldClocks(NamedTuple):
    """What holds the clocks of a GPU back while it works."""

    words: str
    """A sentence."""
    brief: str


def held_clocks(view: DashboardView, gpu: GpuHistory) -> HeldClocks | None:
    """None where nothing does, or nothing is known."""
    known = [
        reading
        for reading in gpu
        if view.now_ns - reading.time_ns <= WINDOW_NS and reading.clock_reasons is not None
    ]
    times = Counter(name for reading in known for name in reading.clock_reasons or ())
    for reason, words in HELD_BY.items():
        if times[reason] and times[reason] >= HELD_SHARE * len(known):
            figure = _figure(reason, known[-1])
            return HeldClocks(f"{words}{figure} holds the GPU's clocks back", reason)
    return None


def _figure(reason: str, reading: GpuReading) -> str:
    if reason == POWER_CAP and reading.power_limit_w:
        return f" ({reading.power_limit_w:.0f} W)"
    if reason == HEAT and reading.temperature_c is not None:
        return f" ({reading.temperature_c} °C)"
    return ""


def idle_power_w(gpu: GpuHistory) -> float | None:
    """The least that the GPU drew while its clocks were idle; None where it never was."""
    drawn = (r.power_w for r in gpu if r.power_w is not None and IDLE in (r.clock_reasons or ()))
    return min(drawn, default=None)


def joules_words(joules: float) -> str:
    """`0.41 J`, `12 J`, `35 mJ`: two digits or three."""
    if joules < 0.0995:
        return f"{joules * 1e3:.2g} mJ"
    return f"{joules:.2f} J" if joules < 9.95 else f"{joules:,.0f} J"


def power_words(reading: GpuReading, *, brief: bool) -> str:
    """`412/685 W`, or `412 W` where the limit is not known."""
    limit = f"/{reading.power_limit_w:.0f}" if reading.power_limit_w else ""
    return f"{reading.power_w or 0.0:.0f}{limit}{'W' if brief else ' W'}"
