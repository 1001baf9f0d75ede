"""Durations as text for people."""

from __future__ import annotations


def took(ms: float | None) -> str:
    """A measured time with its unit, at most seven characters: `35 µs`, `4.90 ms`, `840 ms`,
    `3.73 s`, `3:05`; a dash for none."""
    if ms is None:
        return "–"
    if 0 < ms < 0.0995:
        return f"{ms * 1e3:.0f} µs" if ms >= 0.00095 else "1 µs"
    if ms < 99.95:
        return f"{ms:.2f} ms" if 0 < ms < 9.995 else f"{ms:.1f} ms" if ms else "0 ms"
    return duration(ms / 1e3)


def duration(seconds: float) -> str:
    """142 ms, 1.24 s, 3:05."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    return clock(seconds)


def clock(seconds: float) -> str:
    """0:05, 12:41, 1:02:03."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
