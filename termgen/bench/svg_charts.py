"""Charts as SVG text for a page that loads nothing. Colours come from the page's style sheet.

Axes begin at 0 and end at a round number; a chart has one unit on each axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40
TICKS = 5
MOST_POINTS = 2000
"""Of one series; more would make the page heavy and the chart no clearer."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points by x; `style` is the number of a colour, 1 to 4."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 1
    is_dots: bool = False


def chart(
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    limit: float | None = None,
) -> str:
    """Lines or dots; `limit` is a dashed line across."""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points] + ([limit] if limit is not None else [])
    right, top = round_up(max(xs, default=0.0)), round_up(max(ys, default=0.0))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(y_title)} by {escape(x_title)}">',
        *_axes(right, top, x_title, y_title),
    ]
    if limit is not None:
        y = _y(limit, top)
        parts.append(f'<line class="limit" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
    for s in series:
        places = [(_x(x, right), _y(y, top)) for x, y in _thinned(s.points)]
        if s.is_dots:
            dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5"/>' for x, y in places)
            parts.append(f'<g class="dots s{s.style}">{dots}</g>')
        else:
            path = " ".join(f"{x},{y}" for x, y in places)
            parts.append(f'<polyline class="line s{s.style}" points="{path}"/>')
    if len(series) > 1:
        parts += _legend(series)
    return "\n".join([*parts, "</svg>"])


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, percent of values up to it)."""
    ordered = sorted(values)
    return [(v, 100 * (i + 1) / len(ordered)) for i, v in enumerate(ordered)]


def round_up(value: float) -> float:
    """The next round number: axes end there."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        m * power for m in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if m * power >= value * (1 - 1e-9)
    )


def _axes(right: float, top: float, x_title: str, y_title: str) -> list[str]:
    parts = []
    for i in range(TICKS + 1):
        y, x = _y(top * i / TICKS, top), _x(right * i / TICKS, right)
        parts += [
            f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>',
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">'
            f"{top * i / TICKS:.4g}</text>",
            f'<text class="tick" x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{right * i / TICKS:.4g}</text>",
        ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_title)}</text>',
    ]
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    for i, s in enumerate(series):
        y = TOP + 12 + 16 * i
        parts += [
            f'<rect class="key s{s.style}" x="{LEFT + 8}" y="{y - 8}" width="10" height="10"/>',
            f'<text x="{LEFT + 24}" y="{y + 1}">{escape(s.name)}</text>',
        ]
    return parts


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = max(1, math.ceil(len(points) / MOST_POINTS))
    kept = list(points[::step])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _x(value: float, right: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * value / right, 1)


def _y(value: float, top: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top, 1)
