"""Header, tiles, and the lines that replace them on small screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from termgen.client import ModelInfo
from termgen.tui.dashboard.state.gpu_figures import (
    HeldClocks,
    held_clocks,
    joules_per_token,
    joules_words,
    power_words,
)
from termgen.tui.dashboard.state.limits import Limit
from termgen.tui.dashboard.state.store import DashboardView, windowed
from termgen.tui.paint.formatting import clock, count, model_words, percent, rate, took
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.series import braille, labelled, length_words, span_words, spark
from termgen.tui.paint.spans import Row, Span, row_width, spread
from termgen.vocabulary.device.gpu_reading import GpuHistory, GpuReading
from termgen.vocabulary.memory_ledger import MemoryLedger, size
from termgen.vocabulary.step_figures import Values

ROOMY_TILE = 35
NUMBER_WIDTH = 6
TIME_WIDTH = 8
FOUR_NUMBERS = 46
"""Width at which the latencies get a third percentile."""
PLOT_WORDS = 29
"""Cells of text beside a rate's plot on a small screen."""
POINTS_PER_READING = 4
ALERT_OF = {"TTFT": "ttft_p95_ms", "ITL": "itl_p99_ms"}
COARSE_POINT_S = 10
COARSE_WORDS = "10 s each"
TITLE_WIDTH = 12
"""Cells of a frame's edge that are not for the words at its right."""
SPARK_WINDOW_S = 30
"""Length of time shown by the short series, unless another is chosen."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """State of the dashboard itself."""

    hz: float
    paused: bool
    healthy: bool
    observer_share: float | None
    """CPU share of the drawing thread, per second of wall time."""
    back: int = 0
    """Steps behind the newest, when paused."""
    trouble: str = "engine stopped"
    """The fault, when the engine is not healthy."""
    replay: str = ""
    """The recording's position and speed; empty when this is a live view."""


def memory_words(memory: MemoryLedger) -> tuple[str, str]:
    """What the engine itself holds: `weights 16.1 + KV 60.1 of 79.1 GiB`, and its last part for
    narrow screens."""
    weights, kv = size(memory.weights_bytes), size(memory.kv_cache_bytes)
    total = size(memory.total_bytes)
    parts = [one.removesuffix(total[-4:]) for one in (weights, kv)]
    return f"weights {parts[0]} + KV {parts[1]} of {total}", f"KV {kv}"


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
        details.append((f"runs up to {model.run_ahead_ms:g} ms ahead",))
    right = _live_words(view, live, width)
    room = width - row_width(tuple(right)) - 2
    for forms in details:  # each takes the first form that fits
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
    return _rate_tile("decode", view.series.decode, view.decode_rate, frame, view)


def prefill_tile(view: DashboardView, frame: Frame) -> list[Row]:
    return _rate_tile("prefill", view.series.prefill, view.prefill_rate, frame, view)


def _rate_tile(
    name: str, values: Values, now: float, frame: Frame, view: DashboardView
) -> list[Row]:
    """`name` is also the role. The plot is labelled with its full height and its length of time; on
    a narrow tile the number is kept and the unit dropped."""
    width, height = frame.inner_width, frame.inner_height
    shown = windowed(values, view.window_s, 2 * width)
    rows = braille(shown, width, height, role=name)
    top = max(shown, default=0.0)
    if rows:
        rows = labelled(rows, f"max {rate(top)}", _span(view, points=2 * width, room=width))
    title: list[Span] = [(name, "text/b")]
    number, room = rate(now), frame.width - 9 - len(name)
    unit = next((u for u in (" tok/s", "/s") if len(number + u) <= room), "")
    return frame.draw(title, [(number, f"{name}/b"), (unit, "muted")], rows)


def latency_tile(view: DashboardView, frame: Frame) -> list[Row]:
    """Latencies of requests and of steps: percentiles, each with its series. The longest time is
    the full height of a series."""
    width, series, beyond = frame.inner_width, view.series, view.beyond
    names = ("p50", "p95", "p99") if width >= FOUR_NUMBERS else ("p50", "p99")
    lines = (
        ("TTFT", view.ttft, series.ttft_ms, "prefill"),
        ("ITL", view.gap, series.gap_ms, "decode"),
        ("step", view.step, series.step_ms, "latency"),
        ("queue", view.queue, series.queue_ms, "warn"),
    )
    window_s = view.window_s or SPARK_WINDOW_S
    room = max(0, width - 6 - (len(names) + 1) * TIME_WIDTH)
    heads = "".join(name.rjust(TIME_WIDTH) for name in ("max", *names))
    body: list[Row] = [((" " * 6 + _span(view, room=room)[:room].ljust(room) + heads, "muted"),)]
    for name, times, values, role in lines:
        shown = windowed(values, window_s, room or SPARK_WINDOW_S)
        longest = max(shown, default=0.0)
        numbers = [longest or None, *(getattr(times, name) for name in names)]
        line = spark(shown, room, role=role, peak=longest)
        cells = "".join(took(value).rjust(TIME_WIDTH) for value in numbers)
        if ALERT_OF.get(name) in beyond:
            body.append(((name.ljust(4) + " !", "bad/b"), *line, (cells, "bad/b")))
        else:
            body.append(((name.ljust(6), "muted"), *line, (cells, "text")))
    right: list[Span] = [("±5%", "muted")] if view.is_coarse else []
    return frame.draw([("latency", "text/b")], right, body)


def gauges_tile(view: DashboardView, frame: Frame, gpu: GpuHistory = ()) -> list[Row]:
    """Gauges (share in use), each with its series and its number, relative to the full height.

    The GPU has lines of its own where there is room, otherwise a word in the title.
    """
    roomy = frame.width >= ROOMY_TILE
    gauges = _standing(view, roomy=roomy)
    right: list[Span] = [(_length_words(view, frame.width - TITLE_WIDTH), "muted")]
    if rest := _rest(view):
        right = [(rest, "warn/b")]
    title: list[Span] = [("now", "text/b")]
    lines = _gpu_lines(gpu, view, roomy=roomy) if gpu else []
    room = max(0, frame.inner_height - len(gauges))
    if gpu and gpu[-1].busy is not None and len(lines) > room:
        title.append((f" · {lines[0].name} {lines[0].number}", "muted"))
        lines = lines[1:]
    gauges += lines[:room]
    if view.on_cpu and len(gauges) > frame.inner_height and view.host:
        title.append((f" · memory {gauges[-1].number}" if roomy else "", "muted"))
        gauges = gauges[: frame.inner_height]
    label = max(len(gauge.name) for gauge in gauges) + 1
    number = max(NUMBER_WIDTH, *(len(gauge.number) for gauge in gauges))
    rows = [_gauge_row(gauge, frame.inner_width, label, number, view) for gauge in gauges]
    return frame.draw(title, right, rows)


class _Gauge(NamedTuple):
    name: str
    values: Sequence[float] | Values
    peak: float | None
    """The value at the full height of the series; None: the highest shown."""
    number: str
    role: str
    is_beyond: bool = False
    """Its limit is exceeded: it is marked."""


def _standing(view: DashboardView, *, roomy: bool) -> list[_Gauge]:
    seats, series = view.max_num_seqs or 0, view.series
    running = f"{view.num_running}/{count(seats)}" if seats else f"{view.num_running}"
    most = max(windowed(series.waiting, view.window_s or SPARK_WINDOW_S, 1), default=0.0)
    waiting = f"{view.num_waiting}/{count(most)}" if most else "0"
    hits = percent(view.prefix_hit_rate)
    beyond = view.beyond
    gauges = [
        _Gauge("running", series.running, float(seats) or None, running, "decode"),
        _Gauge(
            "waiting/max" if roomy else "waiting",
            series.waiting,
            None,
            waiting,
            "warn",
            is_beyond="waiting" in beyond,
        ),
        _Gauge(
            "KV used",
            series.kv_share,
            1.0,
            percent(view.kv_usage),
            "kv-active",
            is_beyond="kv_use" in beyond,
        ),
        _Gauge("prefix hits" if roomy else "hits", series.hit_share, 1.0, hits, "kv-shared"),
    ]
    if "preemptions_per_s" in beyond:
        words = f"{view.preemption_rate:.0f}/s"
        gauges.append(_Gauge("preempted", series.preempted, None, words, "bad", is_beyond=True))
    elif view.is_coarse and (preempted := float(series.preempted.sum())):
        gauges.append(_Gauge("preempted", series.preempted, None, count(preempted), "bad"))
    if view.on_cpu:
        return gauges + host_lines(view, roomy=roomy)
    graphs = percent(view.graphs.share_recorded)
    name = "CUDA graphs" if roomy else "graphs"
    return [*gauges, _Gauge(name, series.graph_share, 1.0, graphs, "good")]


def host_lines(view: DashboardView, *, roomy: bool) -> list[_Gauge]:
    """Lines for an engine on a CPU: the cores it keeps busy, and the memory of its process."""
    if not view.host:
        return []
    now = view.host[-1]
    cores = _points([reading.cores for reading in view.host], view)
    memory = _points([float(reading.resident_bytes) for reading in view.host], view)
    total = f"/{view.num_cores}" if view.num_cores else ""
    gib = now.resident_bytes / 2**30
    words = f"{gib:.2f} GiB" if gib < 9.995 else f"{gib:.1f} GiB"
    peak = float(view.num_cores) or None
    lines = [
        _Gauge("busy cores" if roomy else "cores", cores, peak, f"{now.cores:.1f}{total}", "good")
    ]
    if now.resident_bytes:
        lines.append(_Gauge("memory" if roomy else "mem", memory, None, words, "prefill"))
    return lines


def _gpu_lines(gpu: GpuHistory, view: DashboardView, *, roomy: bool) -> list[_Gauge]:
    """A line for each figure that the driver reports now."""
    now, lines = gpu[-1], list[_Gauge]()
    if now.busy is not None:
        busy = _points([reading.busy or 0.0 for reading in gpu], view)
        name = "GPU busy" if roomy else "GPU"
        lines.append(_Gauge(name, busy, 1.0, percent(now.busy), "decode"))
    if now.memory_share is not None:
        used, total = (now.used_bytes or 0) / 2**30, (now.total_bytes or 0) / 2**30
        memory = _points([reading.memory_share or 0.0 for reading in gpu], view)
        words = f"{used:.0f}/{total:.0f} GiB" if roomy else f"{used:.0f}/{total:.0f}G"
        name = "GPU memory" if roomy else "GPU mem"
        lines.append(_Gauge(name, memory, 1.0, words, "prefill"))
    if now.power_w is not None:
        drawn = _points([reading.power_w or 0.0 for reading in gpu], view)
        words = power_words(now, brief=not roomy)
        name = "GPU power" if roomy else "GPU pow"
        lines.append(_Gauge(name, drawn, now.power_limit_w or None, words, "latency"))
    if (joules := joules_per_token(view, gpu)) is not None:
        name = "energy/token" if roomy else "J/token"
        lines.append(_Gauge(name, (), None, joules_words(joules), "latency"))
    return lines


def _gpu_words(reading: GpuReading) -> str:
    busy = "" if reading.busy is None else percent(reading.busy)
    power = "" if reading.power_w is None else f"{reading.power_w:.0f}W"
    return f"{busy} {power}".strip()


def _points(readings: Sequence[float], view: DashboardView) -> list[float]:
    """Readings, one a second, as four points each; of a long window the begin is not known."""
    points = [value for value in readings for _ in range(POINTS_PER_READING)]
    wanted = POINTS_PER_READING * (view.window_s or 0) if view.is_coarse else 0
    return [0.0] * (wanted - len(points)) + points


def _span(view: DashboardView, *, points: int = 0, room: int) -> str:
    """How far back a series goes, and that its points are long where they are."""
    length = view.window_s if points else view.window_s or SPARK_WINDOW_S
    words = span_words(points, length)
    coarse = f"{words} · {COARSE_WORDS}"
    return coarse if view.is_coarse and len(coarse) < room else words


def _length_words(view: DashboardView, room: int) -> str:
    """The length of time of the gauges. A long one also says how much of it is known."""
    window_s = view.window_s or SPARK_WINDOW_S
    words = f"last {length_words(window_s)}"
    if not view.is_coarse:
        return words
    known = f"{words} · {length_words(view.known_s)} known"
    return known if view.known_s + COARSE_POINT_S < window_s and len(known) <= room else words


def _rest(view: DashboardView) -> str:
    """The state that holds the engine itself back, not only this view of it; empty when running."""
    if view.snapshot is None or not view.snapshot.paused:
        return ""
    return "asleep" if view.snapshot.sleep_level else "paused"


def _gauge_row(gauge: _Gauge, width: int, label: int, number: int, view: DashboardView) -> Row:
    room = max(0, width - label - number - 1)
    values = windowed(gauge.values, view.window_s or SPARK_WINDOW_S, room)
    series = spark(values, room, role=gauge.role, peak=gauge.peak)
    words = (f"!{gauge.number}" if gauge.is_beyond else gauge.number).rjust(number + 1)
    role = "bad/b" if gauge.is_beyond else "text"
    return ((gauge.name.ljust(label), "muted"), *series, (words, role))


def limit_spans(
    limit: Limit | None, slow_start: str, room: int, held: HeldClocks | None = None
) -> list[Span]:
    """What limits now, in the longest form for which there is room; empty if there is none.
    held: what holds the GPU's clocks back meanwhile, which is left out last."""
    if limit is None:
        return []
    for label, words in (*_held_forms(limit, slow_start, held), *_limit_forms(limit, slow_start)):
        spans: list[Span] = [(label, "muted"), (words, "text")]
        if row_width(tuple(spans)) <= room:
            return spans
    return []


def _limit_forms(limit: Limit, slow_start: str) -> list[tuple[str, str]]:
    long = f"{limit.words}; {slow_start}" if slow_start else limit.words
    return [
        ("limited by ", f"{limit.cause}: {long}"),
        ("limited by ", f"{limit.cause}: {limit.words}"),
        ("limited by ", f"{limit.cause}: {limit.figures or limit.words}"),
        ("limited by ", limit.brief),
        ("limit ", limit.brief),
        ("limit ", limit.cause),
    ]


def _held_forms(limit: Limit, slow_start: str, held: HeldClocks | None) -> list[tuple[str, str]]:
    """The same with what holds the clocks back."""
    if held is None:
        return []
    *longer, brief, short, _ = _limit_forms(limit, slow_start)
    long = [(label, f"{words}; {held.words}") for label, words in longer[:3]]
    return [
        *long,
        *((label, f"{words}; {held.brief}") for label, words in (*longer[2:], brief, short)),
    ]


def numbers_lines(
    view: DashboardView,
    width: int,
    height: int,
    gpu: GpuHistory = (),
    limit: Limit | None = None,
) -> list[Row]:
    """The tiles' figures for small terminals, in three rows or a single one. The two rates keep
    their series, with its highest value and its length of time."""
    rest = _rest(view)
    head: list[Span] = [(f" {rest} ", "warn/b")] if rest else []
    out, into = rate(view.decode_rate), rate(view.prefill_rate)
    run, wait, kv, hits, *others = _standing(view, roomy=False)
    device = [words for reading in gpu[-1:] if (words := _gpu_words(reading))]
    parts = [
        _named("run", run.number, "decode"),
        _marked("wait", wait.number.partition("/")[0], "warn", is_beyond=wait.is_beyond),
        _marked("KV", kv.number, "text", is_beyond=kv.is_beyond),
        _named("hits", hits.number, "text"),
        *(_marked(one.name, one.number, "text", is_beyond=one.is_beyond) for one in others),
        *(_named("GPU", words, "text") for words in device),
    ]
    if (joules := joules_per_token(view, gpu)) is not None:
        parts.append(_named("token", joules_words(joules), "text"))
    if limit is not None:  # at least its name, before what may be left out
        taken = row_width(tuple(span for part in parts for span in part)) + 2
        room = max(width - taken, len(f"limit {limit.cause}"))
        held = held_clocks(view, gpu)
        parts.insert(4, [("  ", "muted"), *limit_spans(limit, "", room, held)])
    if height < 3:
        rates = [_named("out", out, "decode", " tok/s"), _named("in", into, "prefill", " tok/s")]
        is_slow = "ttft_p95_ms" in view.beyond
        first = [_marked("TTFT", took(view.ttft.p50), "prefill", is_beyond=is_slow)]
        return [_joined([head, *rates, *parts, *first], width)]
    window_s = view.window_s or SPARK_WINDOW_S
    series, span = view.series, f"  {span_words(0, window_s)}"
    both = (("out", series.decode, out, "decode"), ("in", series.prefill, into, "prefill"))
    plots: list[list[Span]] = []
    room = max(0, (width - row_width(tuple(head)) - len(span)) // 2 - PLOT_WORDS)
    for name, values, now, role in both:
        shown = windowed(values, window_s, room)
        top = max(shown, default=0.0)
        plots.append(
            [
                *_named(name, now.rjust(5), role, " tok/s "),
                *spark(shown, room, role=role, peak=top),
                (f" max {rate(top):5}", "muted"),
            ]
        )
    plots.append([(span, "muted")])
    times = [
        _marked(name, "/".join(map(took, at)), role, is_beyond=ALERT_OF[name] in view.beyond)
        for name, at, role in (("TTFT", view.ttft, "prefill"), ("ITL", view.gap, "decode"))
    ]
    times.append([("  p50/95/99", "muted")])
    if view.is_coarse:
        times[-1].append((" ±5%", "muted"))
        times.append([(f"  {COARSE_WORDS}", "muted")])
    return [_joined([head, *plots], width), _joined(parts, width), _joined(times, width)]


def _named(name: str, number: str, role: str, unit: str = "") -> list[Span]:
    spans: list[Span] = [(f"  {name} ", "muted"), (number, f"{role}/b")]
    return [*spans, (unit, "muted")] if unit else spans


def _marked(name: str, number: str, role: str, *, is_beyond: bool) -> list[Span]:
    """A figure; one whose limit is exceeded has a mark and another colour."""
    return _named(name, f"!{number}", "bad") if is_beyond else _named(name, number, role)


def _joined(groups: Sequence[Sequence[Span]], width: int) -> Row:
    """Groups side by side; the last ones are dropped first."""
    spans: list[Span] = []
    for group in groups:
        if row_width((*spans, *group)) > width:
            break
        spans += group
    return tuple(spans)
