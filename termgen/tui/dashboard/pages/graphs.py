"""The device page: CUDA graphs by size and mode, misses with their reasons, memory, and start-up.

Without a GPU, the processor's figures replace those of the graphs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from termgen.client import ModelInfo
from termgen.tui.dashboard.pages.batch import MODE_ROLES
from termgen.tui.dashboard.pages.experts import experts_height, experts_panel
from termgen.tui.dashboard.pages.timeline import ON_CPU, PhaseTimes, phases_panel
from termgen.tui.dashboard.state.gpu_figures import (
    held_clocks,
    idle_power_w,
    joules_per_token,
    joules_words,
    power_words,
)
from termgen.tui.dashboard.state.store import DashboardView, GraphFigures, mode_letter
from termgen.tui.paint.formatting import count, duration, percent, plural
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import COLOUR_GLYPHS, Glyphs
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.series import bar, braille, labelled
from termgen.tui.paint.spans import Row, Span, cut, fit, merge
from termgen.vocabulary.device.gpu_reading import GpuHistory
from termgen.vocabulary.memory_ledger import MemoryLedger, size
from termgen.vocabulary.startup_phases import StartupPhase

TWO_COLUMNS = 100
BRIEF_EXPERTS = 2
"""Lines of the experts' panel in one column, where a processor has more to show."""
MEMORY_NAMES = {
    "weights": ("weights", "decode"),
    "activations": ("activations", "latency"),
    "cuda_graphs": ("CUDA graphs", "mode-full"),
    "workspace": ("workspace", "kv-shared"),
    "kv_cache": ("KV cache", "prefill"),
    "other": ("others", "muted"),
    "free_below_limit": ("free", "faint"),
    "free_above_limit": ("free above the limit", "faint"),
}
_LETTERS = {
    "weights": "w",
    "activations": "a",
    "cuda_graphs": "g",
    "workspace": "s",
    "kv_cache": "k",
    "other": "o",
}
GPU_NAME_WIDTH, GPU_FIGURE_WIDTH = 9, 16
NAME_WIDTH = 1 + max(len(name) for name, _ in MEMORY_NAMES.values())


def graphs_page(
    view: DashboardView,
    model: ModelInfo,
    width: int,
    height: int,
    glyphs: Glyphs = COLOUR_GLYPHS,
    *,
    boxed: bool,
    phase_times: PhaseTimes | None = None,
    gpu: GpuHistory = (),
) -> list[Row]:
    """Two columns where there is room: graphs on the left, the GPU, memory and start-up on the
    right.
    `phase_times` caches the phase times of the last frame's steps."""
    edge = 2 if boxed else 1
    if view.on_cpu:
        return _cpu_page(view, model, width, height, glyphs, boxed, phase_times or PhaseTimes())
    if width >= TWO_COLUMNS:
        left, right = width * 3 // 5, width - width * 3 // 5
        missed = min(max(5, height // 3), height)
        memory = min(len(MEMORY_NAMES) + 4, height)
        experts = experts_height(view, model, (height - missed) // 2, edge)
        first = sizes_panel(view, Frame(left, height - missed - experts, boxed))
        first += experts_panel(view, model, Frame(left, experts, boxed)) if experts else []
        first += misses_panel(view.graphs, Frame(left, missed, boxed))
        figures = gpu_lines(view, gpu)
        device = min(len(figures) + edge, height - memory) if figures else 0
        second = memory_panel(model.memory, Frame(right, memory, boxed), glyphs)
        second += gpu_panel(figures, Frame(right, device, boxed)) if device > edge else []
        second += startup_panel(model.startup, Frame(right, height - len(second), boxed))
        return [(*a, *b) for a, b in zip(first, second, strict=True)]
    missed = max(3, height // 5)
    memory = max(3, height // 3)
    started = max(3, height // 5)
    rest = max(1, height - missed - memory - started)
    experts = experts_height(view, model, rest // 2, edge)
    rest -= experts
    figures = gpu_lines(view, gpu)
    device = min(len(figures) + edge, rest - 3) if figures else 0
    rows = gpu_panel(figures, Frame(width, device, boxed)) if device > edge else []
    rows = sizes_panel(view, Frame(width, rest - len(rows), boxed)) + rows
    rows += experts_panel(view, model, Frame(width, experts, boxed)) if experts else []
    rows += misses_panel(view.graphs, Frame(width, missed, boxed))
    rows += memory_panel(model.memory, Frame(width, memory, boxed), glyphs)
    rows += startup_panel(model.startup, Frame(width, started, boxed))
    return rows[:height]


def _cpu_page(
    view: DashboardView,
    model: ModelInfo,
    width: int,
    height: int,
    glyphs: Glyphs,
    boxed: bool,
    phase_times: PhaseTimes,
) -> list[Row]:
    took_ms, edge = phase_times.of(view.steps), 2 if boxed else 1
    phases = len(ON_CPU) + 1 + edge
    if width >= TWO_COLUMNS:
        left, right = width * 3 // 5, width - width * 3 // 5
        cpu = max(0, height - phases)
        experts = experts_height(view, model, cpu * 2 // 3, edge)
        first = cpu_panel(view, model, Frame(left, cpu - experts, boxed))
        first += experts_panel(view, model, Frame(left, experts, boxed)) if experts else []
        first += phases_panel(took_ms, Frame(left, height - cpu, boxed), on_cpu=True)
        memory = min(len(MEMORY_NAMES) + 4, height)
        second = memory_panel(model.memory, Frame(right, memory, boxed), glyphs)
        second += startup_panel(model.startup, Frame(right, height - memory, boxed))
        return [(*a, *b) for a, b in zip(first, second, strict=True)]
    cpu = min(height, 3 + edge)
    experts = experts_height(view, model, min(edge + BRIEF_EXPERTS, height - cpu - phases), edge)
    memory = max(0, min(len(MEMORY_NAMES) + edge, height - cpu - phases - experts))
    rows = cpu_panel(view, model, Frame(width, cpu, boxed))
    rows += phases_panel(took_ms, Frame(width, min(phases, height - cpu), boxed), on_cpu=True)
    rows += experts_panel(view, model, Frame(width, experts, boxed)) if experts else []
    rows += memory_panel(model.memory, Frame(width, memory, boxed), glyphs) if memory else []
    rest = height - len(rows)
    if rest > edge:
        rows += startup_panel(model.startup, Frame(width, rest, boxed))
    return rows + [()] * (height - len(rows))


def cpu_panel(view: DashboardView, model: ModelInfo, frame: Frame) -> list[Row]:
    """Threads that compute, cores they keep busy, and memory of the process."""
    now = view.host[-1] if view.host else None
    threads = plural(model.num_threads, "thread") if model.num_threads else "threads not known"
    cores = f" of {plural(view.num_cores, 'core')}" if view.num_cores else ""
    words = f"{threads}{cores}"
    if now is None:
        body: list[Row] = [((f"{words} · no reading yet", "muted"),)]
        return frame.draw([("processor", "text/b")], (), body)
    right: list[Span] = [(f"{now.cores:.1f}", "decode/b"), (" cores busy", "muted")]
    if now.resident_bytes:
        right += [(" · resident ", "muted"), (size(now.resident_bytes), "text/b")]
    shown = [reading.cores for reading in view.host]
    width, height = frame.inner_width, max(0, frame.inner_height - 1)
    top = float(view.num_cores) or max(shown)
    body = [((words, "text"), (f" · {clean_line(model.device_name)}", "muted"))]
    if height > 0:
        points = [cores for cores in shown for _ in range(2)]  # a cell a second
        rows = braille(points, width, height, role="decode", peak=top)
        body += labelled(rows, f"max {plural(round(top), 'core')}", f"−{width} s")
    return frame.draw([("processor", "text/b")], right, body)


def gpu_lines(view: DashboardView, gpu: GpuHistory) -> list[tuple[str, str, str]]:
    """(name, figure, what goes with it) of what the driver reports now, as far as it does."""
    if not gpu:
        return []
    now, idle_w, joules = gpu[-1], idle_power_w(gpu), joules_per_token(view, gpu)
    lines = []
    if now.power_w is not None:
        beside = f"idle {idle_w:.0f} W" if idle_w is not None else ""
        lines.append(("power", power_words(now, brief=False), beside))
    if joules is not None:
        words = "with prompts"
        lines.append(("energy", f"{joules_words(joules)}/token", words))
    if now.sm_mhz is not None:
        most = f"/{now.max_sm_mhz:,}" if now.max_sm_mhz else ""
        memory = f"memory {now.memory_mhz:,} MHz" if now.memory_mhz is not None else ""
        lines.append(("clock", f"{now.sm_mhz:,}{most} MHz", memory))
    if (held := held_clocks(view, gpu)) is not None:
        lines.append(("held by", held.brief, ""))
    if now.temperature_c is not None:
        lines.append(("heat", f"{now.temperature_c} °C", ""))
    return lines


def gpu_panel(lines: Sequence[tuple[str, str, str]], frame: Frame) -> list[Row]:
    """Power, energy for each token, clocks and temperature, from the GPU's driver."""
    body: list[Row] = []
    for name, figure, beside in lines:
        room = max(0, frame.inner_width - GPU_NAME_WIDTH - GPU_FIGURE_WIDTH)
        cells = figure.ljust(GPU_FIGURE_WIDTH)
        row: list[Span] = [(name.ljust(GPU_NAME_WIDTH), "muted"), (cells, "text")]
        body.append((*row, (cut(beside, room), "muted")) if room > len("idle") else tuple(row))
    return frame.draw([("GPU", "text/b")], (), body)


def capture_words(view: DashboardView) -> str:
    """`34 recorded`, `12 of 34 recorded`, or a note that none is recorded."""
    snapshot = view.snapshot
    if snapshot is None:
        return ""
    if not snapshot.num_graphs:
        return "none recorded"
    if snapshot.num_graphs_recorded < snapshot.num_graphs:
        return f"{snapshot.num_graphs_recorded} of {snapshot.num_graphs} recorded"
    return f"{snapshot.num_graphs} recorded"


def sizes_panel(view: DashboardView, frame: Frame) -> list[Row]:
    """Every size that was hit, the most frequent first, with its share of padding."""
    figures, width = view.graphs, frame.inner_width
    title: list[Span] = [("CUDA graphs", "text/b"), (f" · {capture_words(view)}", "muted")]
    right: list[Span] = []
    for mode, number in figures.modes:
        share = percent(number / figures.num_steps)
        role = MODE_ROLES.get(mode_letter(mode), "mode-none")
        right += [("  " if right else "", "muted"), (f"{share} {mode}", role)]
    if not figures.num_steps:
        return frame.draw(title, (), [(("no step to show: sizes come as they are hit", "muted"),)])
    if not figures.sizes:
        text = "no step was run from a graph"
        return frame.draw(title, right, [((text, "muted"),)])
    room = max(4, width - 46)
    head = "mode       tokens     hits" + " " * (room + 2) + "   padded   waste"
    body: list[Row] = [((cut(head, width), "muted"),)]
    most = figures.sizes[0].hits
    for one in figures.sizes:
        role = MODE_ROLES.get(mode_letter(one.mode), "mode-none")
        body.append(
            (
                (f"{one.mode:10}", role),
                (f"{one.size:7}{count(one.hits):>9}  ", "text"),
                *bar(one.hits / most, room, role=role),
                (f"{count(one.padded):>9}", "muted" if one.padded else "faint"),
                (f"{percent(one.waste):>8}", "warn" if one.waste > 0.25 else "text"),
            )
        )
    return frame.draw(title, right, body)


def misses_panel(figures: GraphFigures, frame: Frame) -> list[Row]:
    """Why steps ran without a graph, or with a piecewise one."""
    total = sum(number for _, _, number in figures.reasons)
    right: list[Span] = [(plural(total, "step"), "muted")] if total else []
    body: list[Row] = []
    for mode, why, number in figures.reasons:
        role = MODE_ROLES.get(mode_letter(mode), "mode-none")
        words = "no graph" if mode == "NONE" else "no full graph"
        text = cut(f"{words}: {clean_line(why)}", max(1, frame.inner_width - 9))
        body.append(((f"{count(number):>7}  ", "text"), (text, role)))
    if not body:
        is_whole = all(mode == "FULL" for mode, _ in figures.modes)
        body = [(("none missed" if is_whole else "for no known reason", "muted"),)]
    return frame.draw([("misses", "text/b")], right, body)


def memory_panel(
    memory: MemoryLedger | None, frame: Frame, glyphs: Glyphs = COLOUR_GLYPHS
) -> list[Row]:
    """The memory ledger as one bar, and one line for each part."""
    if memory is None:
        return frame.draw([("memory", "text/b")], (), [(("known at the other end", "muted"),)])
    width = frame.inner_width
    parts = {kind: nbytes for kind, nbytes in memory.parts().items() if nbytes > 0}
    body: list[Row] = [_memory_bar(parts, memory.total_bytes, width, glyphs)]
    if (experts := memory.host_experts) is not None:
        words = f"{experts}, out of {size(experts.nbytes)} of main memory"
        body += [((line, "muted"),) for line in textwrap.wrap(words, max(1, width))]
    for kind, nbytes in sorted(parts.items(), key=lambda item: -item[1]):
        name, role = MEMORY_NAMES[kind]
        room = max(2, width - NAME_WIDTH - 19)
        body.append(
            (
                (f"{_sign(kind, glyphs)} ", role),
                (name.ljust(NAME_WIDTH), "muted"),
                *bar(nbytes / memory.total_bytes, room, role=role),
                (size(nbytes).rjust(10), "text"),
                (percent(nbytes / memory.total_bytes).rjust(7), "muted"),
            )
        )
    right: list[Span] = [(f"{count(memory.kv_cache_tokens)} tokens of KV", "muted")]
    return frame.draw(
        [(memory.name, "text/b"), (f" · {size(memory.total_bytes)}", "muted")], right, body
    )


def _sign(kind: str, glyphs: Glyphs) -> str:
    letter = _LETTERS.get(kind, "·")
    return letter if glyphs.is_lettered or letter == "·" else "■"


def _memory_bar(parts: dict[str, int], total: int, width: int, glyphs: Glyphs) -> Row:
    """The parts of memory side by side; the free part comes last and absorbs rounding."""
    spans: list[Span] = []
    used, so_far = 0, 0
    for kind, nbytes in parts.items():
        so_far += nbytes
        role = MEMORY_NAMES[kind][1]
        end = min(width, round(width * so_far / max(1, total)))
        spans.append((_sign(kind, glyphs) * (end - used), role))
        used = end
    return fit(merge(spans), width)


def startup_panel(phases: tuple[StartupPhase, ...], frame: Frame) -> list[Row]:
    """The start-up phases one below the other, each at its offset in the whole time.

    The shortest are left out where there is no room for all.
    """
    total = sum(phase.seconds for phase in phases)
    title: list[Span] = [("start", "text/b")]
    if not phases or total <= 0:
        return frame.draw(title, (), [(("its phases are not known", "muted"),)])
    room = max(4, frame.inner_width - 22)
    longest = sorted((phase.seconds for phase in phases), reverse=True)[: frame.inner_height]
    body: list[Row] = []
    begun = 0.0
    for phase in phases:
        first = min(room - 1, int(room * begun / total))
        begun += phase.seconds
        cells = max(1, round(room * begun / total) - first)
        if not longest or phase.seconds < longest[-1]:
            continue
        body.append(
            (
                (clean_line(phase.name)[:11].ljust(12), "muted"),
                (" " * first, "text"),
                ("━" * min(cells, room - first), "accent"),
                (" " * max(0, room - first - cells), "text"),
                (duration(phase.seconds).rjust(10), "text"),
            )
        )
    return frame.draw(title, [("ready in ", "muted"), (duration(total), "text")], body)
