"""Numbers as the screens show them: short, fixed in width, never scientific."""

from __future__ import annotations


def count(value: float) -> str:
    """1234 -> 1.2k; at most five characters below a trillion."""
    if value < 0:
        return "-" + count(-value)
    if value < 999.5:
        return f"{value:.0f}"
    for limit, divisor, unit in ((999.5e3, 1e3, "k"), (999.5e6, 1e6, "M"), (999.5e9, 1e9, "G")):
        if value < limit:
            scaled = value / divisor
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value / 1e12:.1f}T"


def rate(value: float) -> str:
    """Tokens per second: one decimal while it means something."""
    return f"{value:.1f}" if 0 < value < 99.95 else count(value)


def milliseconds(value: float | None) -> str:
    """A duration given in ms, as `4.9`, `142` or `1.3k`; a dash for none."""
    if value is None:
        return "–"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else count(value)


def duration(seconds: float) -> str:
    """142 ms, 1.24 s, 3:05."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    return clock(seconds)


def age(seconds: float) -> str:
    """How long ago or how old, at most five characters."""
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    if seconds < 5999.5:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.0f}h"


def clock(seconds: float) -> str:
    """0:05, 12:41, 1:02:03."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def percent(share: float | None) -> str:
    """A share of one: 6.8%, 93%; a dash for none."""
    if share is None:
        return "–"
    value = share * 100
    if value < 0.05:
        return "0%"
    return f"{value:.1f}%" if value < 9.95 else f"{value:.0f}%"
