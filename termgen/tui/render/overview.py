"""Header, tiles and the numbers line of the dashboard."""

from __future__ import annotations

from dataclasses import dataclass

from termgen.client import ModelInfo
from termgen.engine.memory_ledger import MemoryLedger, size
from termgen.tui.formatting import clock, count, milliseconds, percent, rate
from termgen.tui.gpu_meter import GpuReading
from termgen.tui.render.frame import Frame
from termgen.tui.render.series import bar, braille, spark
from termgen.tui.sanitize import clean_line
from termgen.tui.spans import Row, Span, row_width, spread
from termgen.tui.store import DashboardView, windowed

ROOMY_TILE = 35


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
    right = [(rate(view.decode_rate), "decode/b"), (" tok/s", "muted")]
    return _series_tile("decode", view.decode_series, right, "decode", frame, view.window_s)


def prefill_tile(view: DashboardView, frame: Frame) -> list[Row]:
    right = [(rate(view.prefill_rate), "prefill/b"), (" tok/s", "muted")]
    return _series_tile("prefill", view.prefill_series, right, "prefill", frame, view.window_s)


def step_tile(view: DashboardView, frame: Frame) -> list[Row]:
    p50, p99 = milliseconds(view.step_p50_ms), milliseconds(view.step_p99_ms)
    right: list[Span] = [(p50, "latency/b"), ("/", "muted"), (p99, "latency/b"), (" ms", "muted")]
    if frame.width >= ROOMY_TILE:
        right = [("p50 ", "muted"), right[0], ("  p99 ", "muted"), *right[2:]]
    return _series_tile("step", view.step_series, right, "latency", frame, view.window_s)


def _series_tile(
    name: str,
    values: tuple[float, ...],
    right: list[Span],
    role: str,
    frame: Frame,
    window_s: int | None,
) -> list[Row]:
    width, height = frame.inner_width, frame.inner_height
    rows = braille(windowed(values, window_s, 2 * width), width, height, role=role)
    title: list[Span] = [(name, "text/b")]
    if window_s is not None:
        title.append((f" {window_s} s", "muted"))
    return frame.draw(title, right, rows)


def gauges_tile(view: DashboardView, frame: Frame, gpu: GpuReading | None = None) -> list[Row]:
    """Running, KV usage, prefix hits and time to first token, each against its limit.

    The GPU has a line where there is room for one, or a word in the title.
    """
    width = frame.inner_width
    seats = view.max_num_seqs or 0
    running = f"{view.num_running}/{count(seats)}" if seats else f"{view.num_running}"
    hit = view.prefix_hit_rate
    rows = [
        _gauge("running", view.num_running / seats if seats else 0.0, running, "decode", width),
        _gauge("KV used", view.kv_usage, percent(view.kv_usage), "kv-active", width),
        _gauge("prefix hit", hit or 0.0, percent(hit), "kv-shared", width),
    ]
    ttft = f"{milliseconds(view.ttft_p50_ms)} / {milliseconds(view.ttft_p99_ms)} ms"
    name = "TTFT p50 / p99" if frame.width >= ROOMY_TILE else "TTFT"
    rows.append(spread([(name, "muted")], [(ttft, "text")], width))
    right: list[Span] = [(f"{view.num_waiting} waiting", "warn" if view.num_waiting else "muted")]
    if rest := _rest(view):
        is_roomy = frame.width >= ROOMY_TILE
        right = [(f"{rest}  ", "warn/b"), *right] if is_roomy else [(rest, "warn/b")]
    title: list[Span] = [("now", "text/b")]
    if gpu is not None and frame.inner_height > len(rows):
        used = f"{gpu.used_bytes / 2**30:.0f}/{gpu.total_bytes / 2**30:.0f} GiB"
        rows.append(_gauge("GPU busy", gpu.busy, percent(gpu.busy), "decode", width))
        words = f" · {used}"
    else:
        words = f" · GPU {percent(gpu.busy)}" if gpu is not None else ""
    if row_width((*title, (words, "muted"), *right)) + 9 <= frame.width:
        title.append((words, "muted"))
    return frame.draw(title, right, rows)


def _rest(view: DashboardView) -> str:
    """How the engine, not the picture of it, is held back; empty when it is not."""
    if view.snapshot is None or not view.snapshot.paused:
        return ""
    return "asleep" if view.snapshot.sleep_level else "paused"


def _gauge(name: str, share: float, value: str, role: str, width: int) -> Row:
    label, number = name.ljust(11), value.rjust(7)
    room = max(1, width - len(label) - len(number))
    return ((label, "muted"), *bar(share, room, role=role), (number, "text"))


def numbers_line(view: DashboardView, width: int, gpu: GpuReading | None = None) -> Row:
    """The tiles' numbers in one row, for small terminals; the last ones drop out first."""
    groups: list[list[Span]] = [
        [(" out ", "muted"), (rate(view.decode_rate), "decode/b")],
        [("  in ", "muted"), (rate(view.prefill_rate), "prefill/b"), (" tok/s", "muted")],
        [("  run ", "muted"), (str(view.num_running), "text/b")],
        [("  wait ", "muted"), (str(view.num_waiting), "warn/b" if view.num_waiting else "text/b")],
        [("  KV ", "muted"), (percent(view.kv_usage), "text/b")],
        [("  hit ", "muted"), (percent(view.prefix_hit_rate), "text/b")],
        [
            ("  step ", "muted"),
            (f"{milliseconds(view.step_p50_ms)}/{milliseconds(view.step_p99_ms)}", "latency/b"),
            (" ms", "muted"),
        ],
    ]
    if gpu is not None:
        groups.append([("  GPU ", "muted"), (percent(gpu.busy), "text/b")])
    rest = _rest(view)
    spans: list[Span] = [(f" {rest} ", "warn/b")] if rest else []
    for group in groups:
        if row_width((*spans, *group)) >= width:
            break
        spans += group
    return tuple(spans)


def sparks_line(view: DashboardView, width: int) -> Row:
    """Decode, prefill and step time as three sparks in one row."""
    labels = (" out ", "  in ", "  step ")
    room = max(3, width - 1 - sum(len(label) for label in labels)) // 3
    return (
        (labels[0], "muted"),
        *spark(windowed(view.decode_series, view.window_s, room), room, role="decode"),
        (labels[1], "muted"),
        *spark(windowed(view.prefill_series, view.window_s, room), room, role="prefill"),
        (labels[2], "muted"),
        *spark(windowed(view.step_series, view.window_s, room), room, role="latency"),
    )
