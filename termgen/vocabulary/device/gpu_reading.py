"""What a GPU's driver reports, as one reading a second; each figure may be missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

IDLE = "idle"
POWER_CAP = "power cap"
POWER_BRAKE = "power brake"
HEAT = "heat"
SLOWDOWN = "hardware slowdown"
CLOCKS_SET = "clocks set by hand"
READINGS_KEPT = 120
"""Readings: as far back as the live series of the engine go."""


class GpuReading(NamedTuple):
    """One reading. Figures are of the whole card, with all its processes; None: not supported."""

    time_ns: int = 0
    """When it was read, by the clock of the engine's events."""
    busy: float | None = None
    """Share of the last sample period during which a kernel ran."""
    used_bytes: int | None = None
    total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Joules since an arbitrary moment: differences count."""
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    """Why clocks are no higher: some of the names at the top of this file."""

    @property
    def memory_share(self) -> float | None:
        if self.used_bytes is None or not self.total_bytes or self.total_bytes < 0:
            return None
        return self.used_bytes / self.total_bytes

    @property
    def is_known(self) -> bool:
        """True if there is any figure in it."""
        return any(value is not None for value in self[1:])


GpuHistory = Sequence[GpuReading]
"""The newest last; empty where there is nothing to read."""
