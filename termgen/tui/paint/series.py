"""Series as filled braille areas, block bars and single-row sparks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from termgen.tui.paint.spans import Row

POINT_S = 0.25
"""Time between two points of a live series."""
BARS = " ▁▂▃▄▅▆▇█"
_LEFT = (0x00, 0x40, 0x44, 0x46, 0x47)
_RIGHT = (0x00, 0x80, 0xA0, 0xB0, 0xB8)


def braille(
    values: Sequence[float], width: int, height: int, *, role: str, peak: float | None = None
) -> list[Row]:
    """A filled area of 2x4 dots a cell, the newest value at the right edge.

    `peak` is the value of the full height; by default the largest shown. A value above zero
    always shows at least one dot.
    """
    points = _tail(values, width * 2)
    top = peak if peak is not None else max(points, default=0.0)
    levels = _levels(points, top, height * 4)
    pairs = zip(levels[::2], levels[1::2], strict=True)
    columns = [_column(left, right, height) for left, right in pairs]
    return [(("".join(line), role),) for line in zip(*columns, strict=True)]


@lru_cache(maxsize=4096)
def _column(left: int, right: int, height: int) -> str:
    """Braille characters of two neighbouring values, from the top down."""
    signs = (
        chr(0x2800 + _LEFT[min(4, max(0, left - base))] + _RIGHT[min(4, max(0, right - base))])
        for base in range((height - 1) * 4, -1, -4)
    )
    return "".join(signs).replace("\u2800", " ")


def spark(values: Sequence[float], width: int, *, role: str, peak: float | None = None) -> Row:
    """One row of block bars, the newest value at the right."""
    points = _tail(values, width)
    top = peak if peak is not None else max(points, default=0.0)
    return (("".join([BARS[level] for level in _levels(points, top, 8)]), role),)


def labelled(rows: Sequence[Row], top: str, span: str) -> list[Row]:
    """Label a plot with its full height at the top left and its length of time at the bottom left;
    a single row takes both."""
    if len(rows) == 1:
        return [_over(rows[0], f"{top} · {span} ")]
    return [_over(rows[0], top + " "), *rows[1:-1], _over(rows[-1], span + " ")]


def _over(row: Row, words: str) -> Row:
    """Write `words` over the first cells of a plotted row."""
    (line, role), *_ = row
    return ((words, "muted"), (line[len(words) :], role)) if len(words) < len(line) else row


def span_words(points: int, window_s: int | None) -> str:
    """The length of time that this many points cover."""
    return f"−{length_words(window_s if window_s is not None else points * POINT_S)}"


def length_words(seconds: float) -> str:
    """`30 s`, `10 min`, `1 h`: seconds up to two minutes."""
    if seconds <= 120:
        return f"{seconds:g} s"
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def bar(share: float, width: int, *, role: str, track: str = "border") -> Row:
    """A horizontal bar filled to `share`, in half cells: heavy where filled, light where not."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    if share > 0:
        halves = max(1, halves)
    full, half = divmod(halves, 2)
    done = "━" * full + "╸" * half
    return (done, role), ("─" * (width - full - half), track)


def _tail(values: Sequence[float], count: int) -> list[float]:
    tail = list(values[-count:]) if count else []
    return [0.0] * (count - len(tail)) + tail


def _levels(values: Sequence[float], top: float, levels: int) -> list[int]:
    """The height of each value, up to `levels` for `top`; at least 1 for values above zero."""
    if top <= 0:
        return [0] * len(values)
    return [(min(levels, round(value / top * levels)) or 1) if value > 0 else 0 for value in values]
