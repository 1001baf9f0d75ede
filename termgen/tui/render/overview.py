"""Header, tiles and the lines that stand for them on small screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from termgen.client import ModelInfo
from termgen.engine.memory_ledger import MemoryLedger, size
from termgen.tui.formatting import clock, count, milliseconds, percent, rate
from termgen.tui.gpu_meter import GpuHistory
from termgen.tui.render.frame import Frame
from termgen.tui.render.series import braille, spark
from termgen.tui.sanitize import clean_line
from termgen.tui.spans import Row, Span, row_width, spread
from termgen.tui.step_figures import Values
from termgen.tui.store import DashboardView, windowed

ROOMY_TILE = 35
NUMBER_WIDTH = 6
POINTS_PER_READING = 4
SPARK_WINDOW_S = 30
"""What the short series show, unless one asks for another length of time."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """How the dashboard itself is doing."""

    hz: float
    paused: bool
    healthy: bool
    observer_share: float | None
    """CPU share of the thread that draws, per wall second."""
    back: int = 0
    """Steps behind the newest, when paused."""
    trouble: str = "engine stopped"
    """What is wrong when not healthy."""
    replay: str = ""
    """Where a recording is, and its speed; empty when this is no recording."""


def model_words(model: ModelInfo) -> str:
    """`smollm2-135m float32` with the quantization in place of the type if there is one. Of a
    model elsewhere the type may not be known."""
    return f"{clean_line(model.model_id)} {model.quantization or model.dtype}".rstrip()


def memory_words(memory: MemoryLedger) -> tuple[str, str]:
    """`memory 71.2 of 79.1 GiB, KV 60.1 GiB`, and the end of it for narrow screens."""
    used = size(memory.total_bytes - memory.free_bytes)
    total, kv = size(memory.total_bytes), f"KV {size(memory.kv_cache_bytes)}"
    if used[-3:] == total[-3:]:
        used = used[:-4]
    return f"memory {used} of {total}, {kv}", kv


def header(model: ModelInfo, view: DashboardView, live: LiveState, width: int) -> Row:
    left: list[Span] = [
        (" termgen", "accent/b"),
        (" ▸ ", "faint"),
        ("engine  ", "text/b"),
        (model_words(model), "text"),
    ]
    details: list[tuple[str, ...]] = [
        (clean_line(model.device_name),),
        (f"{count(model.max_model_len)} context",),
        (f"block {model.block_size}",),
    ]
    if model.memory is not None:
        details.append(memory_words(model.memory))
    if model.run_ahead_ms:
        details.append((f"runs {model.run_ahead_ms:g} ms ahead",))
    right = _live_words(view, live, width)
    room = width - row_width(tuple(right)) - 2
    for forms in details:  # each in the first form that fits
        spans: list[Span] = [(f" · {form}", "muted") for form in forms]
        fitting = [span for span in spans if row_width((*left, span)) <= room]
        if not fitting:
            break
        left.append(fitting[0])
    return spread(left, right, width)


def _live_words(view: DashboardView, live: LiveState, width: int) -> list[Span]:
    right: list[Span] = []
    if not live.healthy:
        right.append((f"✗ {live.trouble}  ", "bad/b"))
    elif live.paused:
        back = f" −{live.back}" if live.back else ""
        right.append((f"❚❚ paused{back}  ", "warn/b"))
    elif live.replay:
        right.append(("▶ replay  ", "accent/b"))
    else:
        right += [("● ", "good"), (f"live {live.hz:g} Hz  ", "text")]
    if view.num_dropped:
        right.append((f"{count(view.num_dropped)} lost  ", "warn"))
    if live.observer_share is not None:
        name = "observer" if width >= 100 else "obs"
        right.append((f"{name} {percent(live.observer_share)}  ", "muted"))
    right.append(((live.replay or clock(view.uptime_s)) + " ", "muted"))
    return right


def decode_tile(view: DashboardView, frame: Frame) -> list[Row]:
    return _rate_tile("decode", view.series.decode, view.decode_rate, frame, view.window_s)


def prefill_tile(view: DashboardView, frame: Frame) -> list[Row]:
    return _rate_tile("prefill", view.series.prefill, view.prefill_rate, frame, view.window_s)


def _rate_tile(
    name: str, values: Values, now: float, frame: Frame, window_s: int | None
) -> list[Row]:
    """The name is also the role. Window and unit give way to the number."""
    width, height = frame.inner_width, frame.inner_height
    rows = braille(windowed(values, window_s, 2 * width), width, height, role=name)
    title: list[Span] = [(name, "text/b")]
    number, room = rate(now), frame.width - 9 - len(name)
    window = f" {window_s} s" if window_s is not None else ""
    if len(window + number) <= room:
        title.append((window, "muted"))
        room -= len(window)
    unit = next((u for u in (" tok/s", "/s") if len(number + u) <= room), "")
    return frame.draw(title, [(number, f"{name}/b"), (unit, "muted")], rows)


def latency_tile(view: DashboardView, frame: Frame) -> list[Row]:
    """What users wait for, and what a step takes: percentiles, each with its series."""
    width, series = frame.inner_width, view.series
    lines = (
        ("TTFT", view.ttft, series.ttft_ms, "prefill"),
        ("ITL", view.gap, series.gap_ms, "decode"),
        ("step", view.step, series.step_ms, "latency"),
        ("queue", view.queue, series.queue_ms, "warn"),
    )
    room = max(0, width - 7 - 3 * NUMBER_WIDTH)
    heads = "".join(name.rjust(NUMBER_WIDTH) for name in ("p50", "p95", "p99"))
    body: list[Row] = [((" " * (7 + room) + heads, "muted"),)]
    for name, times, values, role in lines:
        numbers = "".join(milliseconds(value).rjust(NUMBER_WIDTH) for value in times)
        line = spark(windowed(values, view.window_s or SPARK_WINDOW_S, room), room, role=role)
        body.append(((name.ljust(7), "muted"), *line, (numbers, "text")))
    title: list[Span] = [("latency", "text/b"), (" · ms", "muted")]
    if view.window_s is not None:
        title.append((f" {view.window_s} s", "muted"))
    return frame.draw(title, (), body)


def gauges_tile(view: DashboardView, frame: Frame, gpu: GpuHistory = ()) -> list[Row]:
    """How full everything is, each with its series and its number.

    The GPU has lines where there is room for them, or a word in the title.
    """
    roomy = frame.width >= ROOMY_TILE
    gauges = _standing(view, roomy=roomy)
    right: list[Span] = []
    if rest := _rest(view):
        right = [(rest, "warn/b")]
    title: list[Span] = [("now", "text/b")]
    if gpu and frame.inner_height > len(gauges) + 1:
        gauges += _gpu_lines(gpu, roomy=roomy)
    elif gpu:
        title.append((f" · GPU {percent(gpu[-1].busy)}", "muted"))
    label = max(len(gauge.name) for gauge in gauges) + 1
    rows = [_gauge_row(gauge, frame.inner_width, label, view.window_s) for gauge in gauges]
    return frame.draw(title, right, rows)


class _Gauge(NamedTuple):
    name: str
    values: Sequence[float] | Values
    peak: float | None
    """What the height of the series is; None: the highest shown."""
    number: str
    role: str
    unit: str = ""


def _standing(view: DashboardView, *, roomy: bool) -> list[_Gauge]:
    seats, series = view.max_num_seqs or 0, view.series
    running = f"{view.num_running}/{count(seats)}" if seats else f"{view.num_running}"
    hits, graphs = percent(view.prefix_hit_rate), percent(view.graphs.share_recorded)
    return [
        _Gauge("running", series.running, float(seats) or None, running, "decode"),
        _Gauge("waiting", series.waiting, None, str(view.num_waiting), "warn"),
        _Gauge("KV used", series.kv_share, 1.0, percent(view.kv_usage), "kv-active"),
        _Gauge("prefix hits" if roomy else "hits", series.hit_share, 1.0, hits, "kv-shared"),
        _Gauge("CUDA graphs" if roomy else "graphs", series.graph_share, 1.0, graphs, "good"),
    ]


def _gpu_lines(gpu: GpuHistory, *, roomy: bool) -> list[_Gauge]:
    """NVML is read once a second, the series have four points for it."""
    used, total = gpu[-1].used_bytes / 2**30, gpu[-1].total_bytes / 2**30
    points = [reading for reading in gpu for _ in range(POINTS_PER_READING)]
    busy = [reading.busy for reading in points]
    memory = [reading.used_bytes / reading.total_bytes for reading in points]
    words = f"{used:.0f}/{total:.0f} GiB" if roomy else f"{used:.0f}/{total:.0f}G"
    return [
        _Gauge("GPU busy" if roomy else "GPU", busy, 1.0, percent(gpu[-1].busy), "decode"),
        _Gauge("GPU memory" if roomy else "GPU mem", memory, 1.0, words, "prefill"),
    ]


def _rest(view: DashboardView) -> str:
    """How the engine, not the picture of it, is held back; empty when it is not."""
    if view.snapshot is None or not view.snapshot.paused:
        return ""
    return "asleep" if view.snapshot.sleep_level else "paused"


def _gauge_row(gauge: _Gauge, width: int, label: int, window_s: int | None) -> Row:
    number = gauge.number.rjust(NUMBER_WIDTH)
    room = max(0, width - label - len(number) - 1)
    values = windowed(gauge.values, window_s or SPARK_WINDOW_S, room)
    series = spark(values, room, role=gauge.role, peak=gauge.peak)
    return ((gauge.name.ljust(label), "muted"), *series, (" " + number, "text"))


def numbers_lines(view: DashboardView, width: int, height: int, gpu: GpuHistory = ()) -> list[Row]:
    """What the tiles have, for small terminals: three rows with the series, or a single one."""
    rest = _rest(view)
    head: list[Span] = [(f" {rest} ", "warn/b")] if rest else []
    rates = [
        _Gauge("out", view.series.decode, None, rate(view.decode_rate), "decode"),
        _Gauge("in", view.series.prefill, None, rate(view.prefill_rate), "prefill", " tok/s"),
    ]
    run, wait, kv, hits, graphs = (
        gauge._replace(name=name)
        for gauge, name in zip(
            _standing(view, roomy=False), ("run", "wait", "KV", "hit", "graphs"), strict=True
        )
    )
    times = [
        _Gauge(name, values, None, "/".join(map(milliseconds, at)), role, unit)
        for name, at, values, role, unit in (
            ("TTFT", view.ttft, view.series.ttft_ms, "prefill", ""),
            ("ITL", view.gap, view.series.gap_ms, "decode", " ms p50/p95/p99"),
        )
    ]
    busy = [_gpu_lines(gpu, roomy=False)[0]] if gpu else []
    if height < 3:
        return [_line([*rates, run, wait, kv, hits, *busy, times[0]], 0, head, view, width)]
    lines = ([*rates, *busy, graphs], [run, wait, kv, hits], times)
    heads: tuple[list[Span], ...] = (head, [], [])
    return [
        _line(line, _room(line, width - row_width(first)), first, view, width)
        for line, first in zip(lines, heads, strict=True)
    ]


def _room(gauges: Sequence[_Gauge], width: int) -> int:
    """Cells for each series beside the names and numbers of a line."""
    fixed = sum(len(g.name) + _number_width(g) + len(g.unit) + 4 for g in gauges)
    return max(0, (width - fixed) // len(gauges))


def _number_width(gauge: _Gauge) -> int:
    """So that nothing jumps when a number grows."""
    return max(len(gauge.number), 14 if gauge.number.count("/") == 2 else 4)


def _line(
    gauges: Sequence[_Gauge], room: int, head: list[Span], view: DashboardView, width: int
) -> Row:
    """Side by side; the last ones drop out first."""
    spans = list(head)
    for gauge in gauges:
        values = windowed(gauge.values, view.window_s or SPARK_WINDOW_S, room)
        number = gauge.number.rjust(_number_width(gauge)) if room else gauge.number
        group: list[Span] = [(f"{' ' if len(spans) > len(head) else ''} {gauge.name} ", "muted")]
        if room:
            group += spark(values, room, role=gauge.role, peak=gauge.peak)
            group.append((" ", "text"))
        role = "text" if gauge.role in ("good", "kv-active", "kv-shared") else gauge.role
        group += [(number, f"{role}/b"), (gauge.unit, "muted")]
        if row_width((*spans, *group)) > width:
            break
        spans += group
    return tuple(spans)
