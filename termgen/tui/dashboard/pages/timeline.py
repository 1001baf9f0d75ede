"""CPU and GPU lanes of the last steps on a time axis: overlap, and where the device waits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from termgen.tui.dashboard.pages.batch import no_step_words, step_line
from termgen.tui.paint.formatting import percent, plural, took
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.series import bar
from termgen.tui.paint.spans import Row, Span, fit
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.time_spread import quantiles

LABEL = 6
"""Cells of the label before a lane."""
LANES_HEIGHT = 9
MIN_STEPS, DEFAULT_STEPS, MAX_STEPS = 2, 8, 256
WAIT, PLAN, LAUNCH, APPLY, GPU, GPU_ODD, IDLE = range(7)

_SIGNS = {
    WAIT: ("·", "faint"),
    PLAN: ("s", "prefill"),
    LAUNCH: ("L", "accent"),
    APPLY: ("a", "latency"),
    IDLE: ("░", "bad"),
}
_PHASES: tuple[tuple[str, str, Callable[[StepRecord], float]], ...] = (
    ("schedule", "prefill", lambda s: s.schedule_us / 1e3),
    ("launch", "accent", lambda s: s.launch_us / 1e3),
    ("wait", "faint", lambda s: s.wait_us / 1e3),
    ("apply", "latency", lambda s: s.apply_us / 1e3),
    ("telling", "muted", lambda s: s.publish_us / 1e3),
    ("host in all", "text", lambda s: s.host_us / 1e3),
    ("device", "decode", lambda s: max(0, s.ended_ns - s.started_ns) / 1e6),
    ("idle", "bad", lambda s: s.idle_us / 1e3),
    ("input", "accent", lambda s: s.input_us / 1e3),
    ("model", "decode", lambda s: s.model_us / 1e3),
    ("sample", "kv-shared", lambda s: s.sample_us / 1e3),
)
"""Name, role and milliseconds of each phase of a step."""
_HOST_US = attrgetter("schedule_us", "launch_us", "wait_us", "apply_us", "publish_us", "host_us")
_DEVICE = attrgetter("started_ns", "ended_ns", "idle_us")
_PARTS_US = attrgetter("input_us", "model_us", "sample_us")
NAMES = [name for name, _, _ in _PHASES]
FIRST_PART = NAMES.index("input")
"""Index of the first phase that only newer engines report."""
ON_GPU = ("schedule", "launch", "wait", "apply", "telling", "host in all", "device", "idle")
ON_CPU = ("schedule", "input", "model", "sample", "apply", "telling", "device")
"""Phases of a step computed on the host: nothing is launched, and nothing waits."""
CPU_NAMES = {"apply": "output", "device": "step in all"}


def timeline_page(
    steps: Sequence[StepRecord],
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    boxed: bool,
    cursor: int | None = None,
    num_steps: int = DEFAULT_STEPS,
    phase_times: PhaseTimes | None = None,
    has_run: bool = False,
    on_cpu: bool = False,
) -> list[Row]:
    """The lanes above the phases above a list of steps. `cursor` counts back from the newest;
    `phase_times` caches the phase times of the last frame's steps; `has_run`: there were steps
    before the known ones; `on_cpu`: the engine has no device beside the host."""
    end = len(steps) - min(cursor or 0, max(0, len(steps) - 1))
    lanes = min(height, LANES_HEIGHT + (2 if boxed else 1))
    shown, frame = steps[max(0, end - num_steps) : end], Frame(width, lanes, boxed)
    rows = lanes_panel(shown, frame, glyphs, has_run=has_run, on_cpu=on_cpu)
    rest = height - lanes
    phases = min(rest, len(ON_CPU if on_cpu else ON_GPU) + 1 + (2 if boxed else 1))
    if phases > 2:
        took_ms = (phase_times or PhaseTimes()).of(steps)[:, :end]
        rows += phases_panel(took_ms, Frame(width, phases, boxed), on_cpu=on_cpu)
        rest -= phases
    if rest > 2:
        rows += list_panel(steps[:end], Frame(width, rest, boxed), on_cpu=on_cpu)
    return rows


def lanes_panel(
    steps: Sequence[StepRecord],
    frame: Frame,
    glyphs: Glyphs,
    *,
    has_run: bool = False,
    on_cpu: bool = False,
) -> list[Row]:
    """The steps side by side on one time scale; the last one is the marked one."""
    title: list[Span] = [("timeline", "text/b")]
    if not steps:
        return frame.draw(title, (), [(), ((no_step_words(has_run), "muted"),)])
    cells = max(1, frame.inner_width - LABEL)
    begin, end = _span(steps)
    per_cell = max(1, (end - begin) / cells)

    def at(time_ns: float) -> int:
        return min(cells, max(0, int((time_ns - begin) / per_cell)))

    title.append((f" · {plural(len(steps), 'step')} · {took((end - begin) / 1e6)}", "muted"))
    queue = _labels("queue", ((at(s.submitted_ns), str(s.queue_depth)) for s in steps), cells)
    body: list[Row] = [
        _lane("host", _host_lane(steps, cells, at), glyphs),
        _lane("step" if on_cpu else "GPU", _device_lane(steps, cells, at), glyphs),
        _labels("id", ((at(s.started_ns), str(s.step_id % 1000)) for s in steps), cells),
        *([] if on_cpu and not any(s.queue_depth for s in steps) else [queue]),
        _ruler(cells, end - begin),
        (),
        step_line(steps[-1], steps, frame.inner_width, on_cpu=on_cpu),
        _times_line(steps[-1], frame.inner_width, on_cpu=on_cpu),
        _legend(glyphs, on_cpu=on_cpu),
    ]
    return frame.draw(title, _busy_words(steps), body)


def _span(steps: Sequence[StepRecord]) -> tuple[int, int]:
    begin = min(min(s.planned_ns, s.started_ns) for s in steps)
    return begin, max(begin + 1, *(max(s.ended_ns, s.applied_ns) for s in steps))


def _host_lane(steps: Sequence[StepRecord], cells: int, at: Callable[[float], int]) -> list[int]:
    """Waiting is drawn first, so that it hides no working phase; each phase gets at least one
    cell."""
    lane = [-1] * cells
    for step in steps:
        landed = step.landed_ns or step.applied_ns
        _fill(lane, at(landed - step.wait_us * 1e3), at(landed), WAIT)
    for step in steps:
        _fill(lane, at(step.planned_ns), at(step.submitted_ns), PLAN)
        _fill(lane, at(step.submitted_ns), at(step.launched_ns), LAUNCH)
        if step.landed_ns:
            _fill(lane, at(step.landed_ns), at(step.applied_ns), APPLY)
    return lane


def _device_lane(steps: Sequence[StepRecord], cells: int, at: Callable[[float], int]) -> list[int]:
    """Neighbouring steps alternate in tint; idle time before a step is drawn if there was work."""
    lane = [-1] * cells
    for step in steps:
        kind = GPU_ODD if step.step_id % 2 else GPU
        _fill(lane, at(step.started_ns), at(step.ended_ns), kind)
    for step in steps:
        if step.idle_us > 0:
            last = at(step.started_ns)
            first = min(at(step.started_ns - step.idle_us * 1e3), last - 1)
            _fill(lane, max(0, first), last, IDLE)
    return lane


def _fill(lane: list[int], first: int, last: int, kind: int) -> None:
    for cell in range(first, min(len(lane), max(last, first + 1))):
        lane[cell] = kind


def _lane(name: str, lane: Sequence[int], glyphs: Glyphs) -> Row:
    signs = _SIGNS | {GPU: (glyphs.prefill, "decode"), GPU_ODD: (glyphs.decode, "kv-active-alt")}
    runs = [(len(list(alike)), *signs.get(kind, (" ", "text"))) for kind, alike in groupby(lane)]
    return ((name.ljust(LABEL), "muted"), *[(sign * cells, role) for cells, sign, role in runs])


def _labels(name: str, marks: Iterable[tuple[int, str]], cells: int) -> Row:
    """Short labels at cells of a lane; a label that would touch its predecessor is left out."""
    line = [" "] * cells
    free_from = 0
    for cell, text in marks:
        if cell >= free_from and cell + len(text) <= cells:
            line[cell : cell + len(text)] = text
            free_from = cell + len(text) + 1
    return (name.ljust(LABEL), "muted"), ("".join(line), "muted")


def _ruler(cells: int, span_ns: int) -> Row:
    """Times since the left edge, at most one mark in twelve cells."""
    line = ["─"] * cells
    for cell in range(0, cells - 9, max(12, cells // 8)):
        text = f"┴{took(span_ns * cell / cells / 1e6)} " if cell else "┴0 "
        line[cell : cell + len(text)] = text
    return (" " * LABEL, "muted"), ("".join(line), "faint")


def _busy_words(steps: Sequence[StepRecord]) -> list[Span]:
    """The device's busy share of the time from the first start to the last end."""
    begin, end = steps[0].started_ns, steps[-1].ended_ns
    ran = sum(max(0, s.ended_ns - s.started_ns) for s in steps)
    idle_ms = sum(s.idle_us for s in steps[1:]) / 1e3
    busy = min(1.0, ran / (end - begin)) if end > begin else None
    return [
        ("busy ", "muted"),
        (percent(busy), "decode/b"),
        ("  idle ", "muted"),
        (took(idle_ms / max(1, len(steps) - 1)), "bad/b" if idle_ms else "text"),
        (" a step", "muted"),
    ]


def _times_line(step: StepRecord, width: int, *, on_cpu: bool = False) -> Row:
    """Every phase; a narrow screen omits the sums and parts, which the panel below has."""
    kinds = {name: (role, ms_of) for name, role, ms_of in _PHASES}
    values = {
        CPU_NAMES.get(name, name) if on_cpu else name: (kinds[name][0], kinds[name][1](step))
        for name in (ON_CPU if on_cpu else ON_GPU)
    }
    spans = _times(values)
    for left_out in (("telling", "host in all"), ("telling", "host in all", "launch")):
        if sum(len(text) for text, _ in spans) - 2 > width:
            spans = _times({n: values[n] for n in values if n not in left_out})
    return fit(spans, width)


def _times(values: Mapping[str, tuple[str, float]]) -> list[Span]:
    spans: list[Span] = []
    for name, (role, value) in values.items():
        quiet = name == "idle" and not value
        spans += [(f"{name} ", "muted"), (f"{took(value)}  ", "text" if quiet else role)]
    return spans


def _legend(glyphs: Glyphs, *, on_cpu: bool) -> Row:
    names: tuple[tuple[int, str], ...] = (
        (PLAN, "schedule"),
        (LAUNCH, "launch"),
        (APPLY, "apply"),
        (WAIT, "wait"),
        (IDLE, "idle"),
    )
    if on_cpu:
        names = ((PLAN, "schedule"), (LAUNCH, "compute"), (APPLY, "output"), (IDLE, "between"))
    spans: list[Span] = []
    for kind, name in names:
        sign, role = _SIGNS[kind]
        spans += [(sign, role), (f" {name}  ", "muted")]
    return (
        *spans,
        (glyphs.prefill, "decode"),
        (" step" if on_cpu else " step on the device", "muted"),
    )


def phases_panel(
    took_ms: npt.NDArray[np.float64], frame: Frame, *, on_cpu: bool = False
) -> list[Row]:
    """Median and 99th percentile of every phase of a step, to one scale.
    took_ms: [phases, steps]"""
    num_steps = took_ms.shape[1]
    right = [(f"last {plural(num_steps, 'step')}", "muted")]
    title: list[Span] = [("where a step goes", "text/b")]
    if not num_steps:
        return frame.draw(title, (), [])
    rows = [NAMES.index(name) for name in (ON_CPU if on_cpu else ON_GPU)]
    rows = [row for row in rows if row < FIRST_PART or took_ms[row].any()]
    figures = [
        (CPU_NAMES.get(NAMES[row], NAMES[row]) if on_cpu else NAMES[row], _PHASES[row][1], *found)
        for row, found in zip(rows, quantiles(took_ms[rows], 50, 99).tolist(), strict=True)
    ]
    top = max(p50 for _, _, p50, _ in figures) or 1.0
    room = max(4, frame.inner_width - 34)
    body: list[Row] = [((" " * (14 + room) + "p50".rjust(9) + "p99".rjust(9), "muted"),)]
    for name, role, p50, p99 in figures:
        body.append(
            (
                (name.ljust(14), "muted"),
                *bar(p50 / top, room, role=role),
                (took(p50).rjust(9), "text"),
                (took(p99).rjust(9), "text"),
            )
        )
    return frame.draw(title, right, body)


class PhaseTimes:
    """A cache of the steps' phase times: most steps of a frame were in the frame before."""

    def __init__(self) -> None:
        self._steps: Sequence[StepRecord] = ()
        self._took_ms = np.empty((len(_PHASES), 0))

    def of(self, steps: Sequence[StepRecord]) -> npt.NDArray[np.float64]:
        """[phases, steps]"""
        known = self._num_known(steps)
        kept = self._took_ms[:, len(self._steps) - known :]
        self._took_ms = np.hstack((kept, phases_ms(steps[known:])))
        self._steps = steps
        return self._took_ms

    def _num_known(self, steps: Sequence[StepRecord]) -> int:
        """The number of leading steps that the last call ended with."""
        if not self._steps or not steps:
            return 0
        last = self._steps[-1]
        known = bisect_left(steps, last.step_id, key=attrgetter("step_id")) + 1
        is_same = (
            known <= min(len(steps), len(self._steps))
            and steps[known - 1] is last
            and steps[0] is self._steps[-known]
        )
        return known if is_same else 0


def phases_ms(steps: Sequence[StepRecord]) -> npt.NDArray[np.float64]:
    """[phases, steps] in the order of `_PHASES`, computed for all steps at once."""
    if not steps:
        return np.empty((len(_PHASES), 0))
    host = np.array(list(map(_HOST_US, steps)), np.float64).T / 1e3
    device = np.array(list(map(_DEVICE, steps)), np.float64).T
    ran_ms = np.maximum(0.0, device[1] - device[0]) / 1e6
    parts = np.array(list(map(_PARTS_US, steps)), np.float64).T / 1e3
    return np.vstack((host, ran_ms, device[2] / 1e3, parts))


def list_panel(steps: Sequence[StepRecord], frame: Frame, *, on_cpu: bool = False) -> list[Row]:
    """One row for each of the newest steps, with every time the engine reports."""
    head = "     step  mode        decode  prefill   pad  queue"
    names: tuple[str, ...] = ("schedule", "launch", "wait", "apply", "device", "idle")
    if on_cpu:
        head = "     step   decode  prefill"
        names = ("schedule", "input", "model", "sample", "apply", "device")
    titles = (CPU_NAMES.get(name, name) if on_cpu else name for name in names)
    body: list[Row] = [((head + "".join(f"{t:>12}" for t in titles), "muted"),)]
    kinds = {name: (role, ms_of) for name, role, ms_of in _PHASES}
    for step in steps[-max(1, frame.inner_height - 1) :][::-1]:
        spans: list[Span] = [
            (f"{step.step_id:9}" + ("" if on_cpu else f"  {step.graph_mode:9}"), "text"),
            (f"{step.num_decode_rows:9}", "decode"),
            (f"{step.num_prefill_tokens:9}", "prefill" if step.num_prefill_tokens else "faint"),
        ]
        if not on_cpu:
            spans.append((f"{step.num_padded_tokens:6}{step.queue_depth:7}", "muted"))
        for name in names:
            role, ms_of = kinds[name]
            value = ms_of(step)
            spans.append((took(value).rjust(12), role if value else "faint"))
        body.append(fit(spans, frame.inner_width))
    return frame.draw([("steps", "text/b"), (" · the newest first", "muted")], (), body)
