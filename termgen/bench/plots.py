"""Small plots in text: a line of blocks, bars, a plane of points. Plain strings, no colours."""

from __future__ import annotations

from collections.abc import Sequence

from termgen.vocabulary.durations import took

BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A line of blocks scaled to 0 .. maximum; more values than `width` are averaged in groups."""
    columns = _grouped(values, width)
    top = max(columns, default=0.0)
    if top <= 0:
        return BLOCKS[1] * len(columns)
    return "".join(BLOCKS[max(1, round(v / top * 8))] for v in columns)


def bar(share: float, width: int = 30) -> str:
    """A bar for a share in 0..1, drawn to an eighth of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def histogram(times_ms: Sequence[float], *, rows: int = 8, width: int = 40) -> list[str]:
    """Counts in equal ranges from the minimum to the 99th percentile; the last row has the rest."""
    ordered = sorted(times_ms)
    if not ordered:
        return []
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    step = (high - low) / rows
    if step <= 0:
        return [f"  {took(low)}  {bar(1.0, width)} {len(ordered)}"]
    counts = [0] * rows
    for value in ordered:
        counts[min(rows - 1, int((value - low) / step))] += 1
    top = max(counts)
    edges = [took(low + i * step).rjust(7) for i in range(rows)]
    ends = [f"to {edge}" for edge in edges[1:]] + ["or more"]
    return [
        f"  {begin} {end:10}  {bar(count / top, width)} {count}"
        for begin, end, count in zip(edges, ends, counts, strict=True)
    ]


def columns(
    values: Sequence[float], *, x_title: str, width: int = 60, height: int = 4
) -> list[str]:
    """A column per value, from 0; more values than `width` are averaged in groups."""
    found = _grouped(values, width)
    top = max(found, default=0.0) or 1.0
    levels = [max(1, round(v / top * height * 8)) if v > 0 else 0 for v in found]
    lines = []
    for row in range(height - 1, -1, -1):
        shown = f"{top * (row + 1) / height:8.4g}" if row in (0, height - 1) else " " * 8
        cells = "".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in levels)
        lines.append(f"{shown} ┤{cells.rstrip()}")
    end = f"{len(values)} {x_title}"
    lines.append(" " * 9 + "└" + "─" * len(found))
    lines.append(" " * 10 + "0" + end.rjust(max(len(end) + 1, len(found) - 1)))
    return lines


def scatter(
    points: Sequence[tuple[float, float, str]],
    *,
    title: str,
    x_title: str,
    limit: float | None = None,
    width: int = 56,
    height: int = 10,
) -> list[str]:
    """Points (x, milliseconds, mark) on axes that begin at 0; `limit` is a dotted horizontal
    line."""
    right = max((x for x, _, _ in points), default=0.0) or 1.0
    top = max([y for _, y, _ in points] + ([limit] if limit is not None else [])) or 1.0
    cells = [[" "] * width for _ in range(height)]
    if limit is not None:
        cells[_row(limit, top, height)] = ["┄"] * width
    for x, y, mark in points:
        cells[_row(y, top, height)][min(width - 1, round(x / right * (width - 1)))] = mark
    lines = [title]
    for i, row in enumerate(cells):
        value = top * (height - 1 - i) / (height - 1)
        shown = took(value).rjust(8) if i % 3 == 0 or i == height - 1 else " " * 8
        lines.append(f"{shown} ┤{''.join(row).rstrip()}")
    lines.append(" " * 9 + "└" + "─" * width)
    lines.append(" " * 10 + "0" + f"{right:.4g} {x_title}".rjust(width - 1))
    return lines


def _row(y: float, top: float, height: int) -> int:
    return height - 1 - min(height - 1, max(0, round(y / top * (height - 1))))


def _grouped(values: Sequence[float], width: int) -> list[float]:
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count else [0]
    pairs = zip(edges, edges[1:], strict=False)
    return [sum(values[a:b]) / (b - a) for a, b in pairs]
