"""The report of a load test or a sweep as one self-contained HTML file: tables and charts.

It needs no scripts and follows the browser's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from termgen.bench.serve import ServeRun
from termgen.bench.serve_report import rows_of
from termgen.bench.serve_result import TITLES
from termgen.bench.sweep import SweepResult, verdict
from termgen.vocabulary.durations import took

STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --paper: #fbfbf9; --grid: #d8dcdf;
  --s1: #0b6e99; --s2: #c2571a; --s3: #4d7c2a; --s4: #7b4fa3; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe5ea; --paper: #14181c;
  --grid: #333b42; --s1: #5cc3ec; --s2: #f0965a; --s3: #9bd06a; --s4: #c39be6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1360px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .9rem .15rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
td:first-child, th:first-child, .facts td { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--ink); }
.grid { stroke: var(--grid); } .limit { stroke: var(--s2); stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 1.8; } .warning { color: var(--s2); }
""" + "\n".join(
    f".line.s{i} {{ stroke: var(--s{i}); }} .dots.s{i}, .key.s{i} {{ fill: var(--s{i}); }}"
    for i in range(1, 5)
)

Rows = Sequence[Sequence[str]]

TICKS = 5
MOST_POINTS = 2000
"""Points per series; more would make the page heavy and the chart no clearer."""


def serve_page(run: ServeRun) -> str:
    result = run.result
    found, names = result.statistics(), [f"p{p:g}" for p in result.options.percentiles()]
    columns = ["mean", "std", *names]
    times = [
        [TITLES[m], *(took(found[f"{name}_{m}_ms"]) for name in columns)]
        for m in result.options.metrics()
    ]
    parts = [
        _warnings(run.warnings()),
        _table(rows_of(run), kind="facts"),
        "<h2>Times</h2>",
        _table(times, ["", *columns]),
        _charts(_serve_charts(run)),
    ]
    return _page(_title("Load test", run.result.options.label), parts)


def _serve_charts(run: ServeRun) -> list[tuple[str, str]]:
    result, slo = run.result, run.result.options.slo_ms()
    starts = [(t.start_s, t.ttft_s * 1e3) for t in result.times]
    charts = [
        (
            "Time to first token of each request",
            chart(
                [Series("TTFT", starts, is_dots=True)],
                x_title="sent at, s",
                y_title="TTFT, ms",
                limit=slo.get("ttft"),
            ),
        )
    ]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        values = result.values_ms(metric)
        if values:
            line = Series(metric, cumulative(values), style=2)
            title = f"{TITLES[metric].capitalize()}: share of all up to a time"
            charts.append((title, chart([line], x_title=f"{metric}, ms", y_title="percent")))
    by_second: tuple[tuple[str, str, Sequence[float], int], ...] = (
        ("Output tokens by second", "tokens/s", result.output_tokens_by_second(), 3),
        ("Requests under way, the most in each second", "requests", result.running_by_second(), 4),
    )
    for title, unit, counts, style in by_second:
        points = [(i + 0.5, float(count)) for i, count in enumerate(counts)]
        line = Series(unit, points, style=style)
        charts.append((title, chart([line], x_title="s", y_title=unit)))
    return charts


def sweep_page(result: SweepResult) -> str:
    title = {"concurrency": "clients", "rate": "asked requests/s"}[result.options.sweep_over]
    names = [title, "requests/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
    rows = []
    for step in result.steps:
        figures = step.run.result.as_json()
        times = [took(step.figure(m, p)) for m in ("ttft", "tpot") for p in (50, 99)]
        throughput = [f"{figures[f'{n}_throughput']:.2f}" for n in ("request", "output")]
        share = f"{step.good_share:.0%}" if result.options.goodput else "-"
        verdict_of_step = "kept" if step.is_kept else "too much"
        rows.append([f"{step.load:g}", *throughput, *times, share, verdict_of_step])
    warnings = [f"at {s.load:g}: {w}" for s in result.steps for w in s.run.warnings()]
    first, found = result.steps[0].run, verdict(result)
    facts = [("server", f"{first.url} ({first.model.owner}), model {first.model.model_id}")]
    parts = [
        _warnings(warnings),
        _table([*facts, ("dataset", result.options.dataset_name)], kind="facts"),
        f"<h2>{escape(found[0].upper() + found[1:])}</h2>",
        _table(rows, [*names, "good", ""]),
        _charts(_sweep_charts(result, title)),
    ]
    return _page(_title("Sweep", result.options.label), parts)


def _sweep_charts(result: SweepResult, x_title: str) -> list[tuple[str, str]]:
    charts, slo = [], result.options.slo_ms()
    for metric in ("ttft", "tpot"):
        lines = [
            Series(f"p{p}", [(s.load, s.figure(metric, p)) for s in result.steps], style)
            for p, style in ((50, 1), (99, 2))
        ]
        drawn = chart(lines, x_title=x_title, y_title="ms", limit=slo.get(metric))
        charts.append((TITLES[metric].capitalize(), drawn))
    figures = [(s.load, s.run.result.as_json()["output_throughput"]) for s in result.steps]
    line = Series("tokens/s", figures, style=3)
    charts.append(("Output tokens/s", chart([line], x_title=x_title, y_title="tokens/s")))
    return charts


def _title(kind: str, label: str | None) -> str:
    return kind if label is None else f"{kind}: {label}"


def _page(title: str, parts: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _warnings(warnings: Sequence[str]) -> str:
    return "".join(f'<p class="warning">{escape(w)}</p>' for w in warnings)


def _table(rows: Rows, titles: Sequence[str] = (), *, kind: str = "figures") -> str:
    lines = []
    if titles:
        lines.append("".join(f"<th>{escape(t)}</th>" for t in titles))
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    inner = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="{kind}">{inner}</table>'


def _charts(charts: Sequence[tuple[str, str]]) -> str:
    figures = [f"<figure><figcaption>{escape(t)}</figcaption>{svg}</figure>" for t, svg in charts]
    return f'<div class="charts">{"".join(figures)}</div>'


WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40


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
    """The next round number, for the end of an axis."""
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
