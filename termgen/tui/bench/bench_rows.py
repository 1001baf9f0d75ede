"""The bench screen: progress, targets, figures so far, and the final report. Pure functions of a
`BenchView`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from termgen.tui.bench.bench_view import BenchView, Plane, Section, Series, Spread
from termgen.tui.paint.formatting import clock, percent, took
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.series import BARS, bar, braille, spark
from termgen.tui.paint.spans import Row, Span, fit, row_width, spread, wrap

WIDE = 100
HEAD_ROWS = 2
NUMBER_WIDTH = 9
NAME_WIDTH = 15
_PLOT_ROLES = {
    **dict.fromkeys("▏▎▍▌▋▊▉█▁▂▃▄▅▆▇", "decode"),
    **dict.fromkeys("┤└─│┄", "border"),
    "●": "good",
    "○": "bad",
}


def bench_page(view: BenchView, width: int, height: int, *, boxed: bool) -> list[Row]:
    """The figures, in boxes side by side, or stacked on a narrow screen."""
    rows = [header(view, width), progress_row(view, width)]
    left = height - HEAD_ROWS
    if width >= WIDE:
        half = width * 3 // 5
        above = len(view.times) + len(view.rates) + len(view.targets) + (6 if boxed else 5)
        above = min(above, max(0, left - 6))
        first = figures_panel(view, Frame(half, above, boxed))
        second = side_panel(view, Frame(width - half, above, boxed))
        rows += [(*a, *b) for a, b in zip(first, second, strict=True)]
        return rows + series_panel(view.series, Frame(width, left - above, boxed))
    above = min(left, len(view.times) + len(view.rates) + len(view.targets) + 4)
    rows += figures_panel(view, Frame(width, above, boxed))
    below = left - above
    if below > 1:
        rows += series_panel(view.series, Frame(width, below, boxed))
    return rows[:height]


def report_page(view: BenchView, body: Sequence[Row], first: int, frame: Frame) -> list[Row]:
    """The report, from its row `first` on; `frame` is below the head."""
    rows = [header(view, frame.width), progress_row(view, frame.width)]
    end = min(len(body), first + frame.inner_height)
    place = f"{first + 1}–{end} of {len(body)}" if len(body) > frame.inner_height else ""
    right = [(place, "muted")] if place else []
    return rows + frame.draw([("report", "text/b")], right, list(body[first:end]))


def report_rows(sections: Sequence[Section], width: int) -> list[Row]:
    """Wrap what is longer than a row after a whole word."""
    rows: list[Row] = []
    for section in sections:
        if rows:
            rows.append(())
        rows += wrap([(clean_line(section.title), "heading/b")], width)
        for line in section.lines:
            row = plot_row(line)
            rows += [row] if row_width(row) <= width else wrap(row, width)
    return rows


def plot_row(line: str) -> Row:
    """A line of a text plot or a table, with bars, axes and marks in their colours."""
    runs = itertools.groupby(clean_line(line), key=lambda char: _PLOT_ROLES.get(char, "text"))
    return tuple(("".join(chars), role) for role, chars in runs)


def header(view: BenchView, width: int) -> Row:
    left: list[Span] = [(" termgen", "accent/b"), (" ▸ ", "faint"), ("bench  ", "text/b")]
    left += [(clean_line(view.load), "text")]
    if view.subject:
        left.append((f" · {clean_line(view.subject)}", "muted"))
    words = f"{clean_line(view.step)} · {view.phase}" if view.step else view.phase
    role = {"done": "good/b", "stopped": "warn/b"}.get(view.phase, "text/b")
    return spread(left, [(f" {words} ", role)], width)


def progress_row(view: BenchView, width: int) -> Row:
    share = view.num_done / view.num_requests if view.num_requests else 0.0
    right: list[Span] = [(percent(share).rjust(6), "text/b")]
    right.append((f"  {view.num_done}/{view.num_requests}", "muted"))
    if view.is_over:
        right.append((f"  {clock(view.elapsed_s)} ", "text"))
    else:
        left_words = f"{clock(view.left_s)} left" if view.left_s is not None else "–:–– left"
        right.append((f"  {left_words} ", "text"))
    room = max(1, width - row_width(tuple(right)) - 1)
    return fit(((" ", "text"), *bar(share, room, role="accent"), *right), width)


def figures_panel(view: BenchView, frame: Frame) -> list[Row]:
    """Targets, then times, then rates."""
    columns = "".join(name.rjust(NUMBER_WIDTH) for name in ("mean", "p50", "p90", "p99"))
    rows: list[Row] = []
    for target in view.targets:
        mark, role = {True: (" ✓", "good"), False: (" ✗", "bad"), None: ("", "text")}[
            target.is_kept
        ]
        rows.append(
            (
                (clean_line(target.name).ljust(NAME_WIDTH), "muted"),
                (clean_line(target.asked), "text"),
                ("  now ", "faint"),
                (target.now, "text/b"),
                (mark, role),
            )
        )
    if rows:
        rows.append(())
    rows.append((("times".ljust(NAME_WIDTH), "muted"), (columns, "muted")))
    for line in view.times:
        cells = (line.mean, line.p50, line.p90, line.p99)
        numbers = "".join(took(cell).rjust(NUMBER_WIDTH) for cell in cells)
        rows.append(((line.name.ljust(NAME_WIDTH), "muted"), (numbers, "latency/b")))
    if frame.inner_height > len(rows) + len(view.rates):
        rows.append(())
    rows += [((name.ljust(NAME_WIDTH), "muted"), (value, "text/b")) for name, value in view.rates]
    return frame.draw([("figures so far" if not view.is_over else "figures", "text/b")], (), rows)


def side_panel(view: BenchView, frame: Frame) -> list[Row]:
    """The curve of a sweep so far; for any other run, the spread of the times to first token."""
    if view.plane is not None:
        return plane_panel(view.plane, frame)
    if view.spread is None or not any(view.spread.counts):
        words = "no answer has begun yet"
        return frame.draw([("time to first token", "text/b")], (), [((words, "muted"),)])
    return spread_panel(view.spread, frame)


def spread_panel(data: Spread, frame: Frame) -> list[Row]:
    """One bar for each bucket, over the whole width."""
    width, height = frame.inner_width, frame.inner_height - 1
    cells = [data.counts[i * len(data.counts) // width] for i in range(width)]
    rows = _bars(cells, height, "latency") if height > 0 else []
    low, high = took(data.low), f"{took(data.high)} (p99)"
    rows.append(spread([(low, "muted")], [(high, "muted")], width))
    return frame.draw([(data.title, "text/b")], (), rows)


def _bars(values: Sequence[float], height: int, role: str) -> list[Row]:
    top = max(values) or 1
    levels = [max(1, round(v / top * height * 8)) if v > 0 else 0 for v in values]
    return [
        (("".join(BARS[min(8, max(0, n - 8 * (height - 1 - y)))] for n in levels), role),)
        for y in range(height)
    ]


def plane_panel(plane: Plane, frame: Frame) -> list[Row]:
    """A scatter plot from 0 up; the limit is a dotted horizontal line."""
    width, height = frame.inner_width, frame.inner_height - 1
    right = [("● kept ", "good"), ("○ too much", "bad")]
    if not plane.points or height < 2:
        words = "no step has ended yet"
        return frame.draw([(plane.title, "text/b")], right, [((words, "muted"),)])
    label = 9
    columns = max(2, width - label)
    far = max(x for x, _, _ in plane.points) or 1.0
    top = max([y for _, y, _ in plane.points] + [plane.limit or 0.0]) or 1.0
    cells: list[list[Span]] = [[(" ", "text")] * columns for _ in range(height)]

    def row_of(y: float) -> int:
        return height - 1 - min(height - 1, max(0, round(y / top * (height - 1))))

    if plane.limit is not None:
        cells[row_of(plane.limit)] = [("┄", "warn")] * columns
    for x, y, kept in plane.points:
        place = min(columns - 1, round(x / far * (columns - 1)))
        cells[row_of(y)][place] = ("●", "good") if kept else ("○", "bad")
    rows: list[Row] = []
    for i, row in enumerate(cells):
        value = top * (height - 1 - i) / (height - 1)
        name = took(value) if i % 3 == 0 or i == height - 1 else ""
        rows.append(((f"{name:>{label - 2}} ", "muted"), ("│", "border"), *row))
    end = f"{far:g} {plane.x_title}"
    rows.append(spread([(" " * label + "0", "muted")], [(end, "muted")], width))
    return frame.draw([(plane.title, "text/b")], right, rows)


def series_panel(series: Sequence[Series], frame: Frame) -> list[Row]:
    """Series with the newest value at the right: areas where there is room, else one line each."""
    width, height = frame.inner_width, frame.inner_height
    title: list[Span] = [("over time", "text/b"), (" · 4 values a second", "muted")]
    if not series:
        return frame.draw(title, (), [(("nothing was sent yet", "muted"),)])
    each = height // len(series)
    label, number = NAME_WIDTH, 9
    room = max(1, width - label - number - 1)
    rows: list[Row] = []
    for one in series:
        name: Span = (one.name.ljust(label), "muted")
        now: Span = (" " + one.now.rjust(number), f"{one.role}/b")
        if each < 3:
            rows.append((name, *spark(one.values, room, role=one.role), now))
            continue
        blank: Span = (" " * label, "muted")
        area = braille(one.values, room, each - 1, role=one.role)
        rows += [
            (name if i == 0 else blank, *row, now) if i == 0 else (blank, *row)
            for i, row in enumerate(area)
        ]
        rows.append(())
    return frame.draw(title, (), rows)
