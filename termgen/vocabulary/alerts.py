"""Limits that a person sets for an engine's figures: names, ranges, and their form `NAME=VALUE`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from termgen.errors import ConfigError

MOST: dict[str, float] = {
    "ttft_p95_ms": math.inf,
    "itl_p99_ms": math.inf,
    "waiting": math.inf,
    "kv_use": 1.0,
    "preemptions_per_s": math.inf,
}
"""Each limit's highest value."""

AlertLimits = tuple[tuple[str, float], ...]


def parse_alerts(entries: Iterable[str]) -> AlertLimits:
    """The limits by name; the last of several for one name holds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for entry in entries:
        name, is_there, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if name not in MOST or not is_there:
            raise _wrong(entry, f"it must be NAME=VALUE with a name of {', '.join(MOST)}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 <= value <= MOST[name] and math.isfinite(value)):
            most = f"between 0 and {MOST[name]:g}" if math.isfinite(MOST[name]) else "0 or more"
            raise _wrong(entry, f"{name} must be a number, {most}")
        limits[name] = value
    return tuple(limits.items())


def _wrong(entry: str, why: str) -> ConfigError:
    return ConfigError(f"alert {entry!r:.60}: {why}", param="alert")
