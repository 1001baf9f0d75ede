"""Engine events as a trace in Chrome's JSON format, gzipped, which Perfetto opens.

A process of the trace is one engine: tracks for what the host does, for the steps on the device and
for the way of their results, an arrow from each launch to its step, counters, and each request as
nested spans (queued, prefill, decode). Slices of one track never overlap, as the format demands:
where steps do, they are spread over several tracks. Times are microseconds since the first event.

Format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from termgen.vocabulary.events import EngineEvent, RequestEvent, RequestEventKind, StepRecord

COMPRESSION = 6
HOST, DEVICE, RESULTS = range(3)
_NAMES = {HOST: "host", DEVICE: "device", RESULTS: "results"}
_TRACKS_OF_A_KIND = 100
"""Track ids set aside for one kind: slices that overlap need more than one track."""
_FIRST_TRACK = 1
_SLICES_KEPT = 64
"""More than are written between the begin of a step and its end."""

TraceEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TracePart:
    """The events of one engine, in the order in which it published them."""

    name: str
    events: Callable[[], Iterable[EngineEvent]]
    """Called twice: for the first time, and to write."""
    on_cpu: bool = False
    offset_ns: int = 0
    """Added to all times, so that the clocks of several engines agree."""


@dataclass(slots=True)
class TraceTotals:
    num_steps: int = 0
    num_events: int = 0
    """Events of the trace."""
    length_ns: int = 0
    """From the first event to the last."""


def write_trace(
    out: BinaryIO, parts: Sequence[TracePart], *, about: Mapping[str, str] | None = None
) -> TraceTotals:
    """Write a whole file. about: facts shown beside the trace. Raises OSError."""
    times = (earliest(event) + part.offset_ns for part in parts for event in part.events())
    origin_ns = min(times, default=0)
    totals = TraceTotals()
    with gzip.GzipFile("", "wb", COMPRESSION, out, mtime=0) as packed:
        head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about or {})})
        packed.write(head[:-1].encode() + b',"traceEvents":[')
        for pid, part in enumerate(parts, start=1):
            process = _Process(pid, part, origin_ns)
            for event in process.trace_events():
                comma = b",\n" if totals.num_events else b"\n"
                packed.write(comma + json.dumps(event, separators=(",", ":")).encode())
                totals.num_events += 1
            totals.num_steps += process.num_steps
            totals.length_ns = max(totals.length_ns, process.last_ns)
        packed.write(b"\n]}\n")
    return totals


def earliest(event: EngineEvent) -> int:
    """The first time that an event tells."""
    if isinstance(event, RequestEvent):
        return event.time_ns
    return min(event.planned_ns, event.started_ns)


class _Process:
    """One engine as a process of the trace."""

    def __init__(self, pid: int, part: TracePart, origin_ns: int) -> None:
        self._pid = pid
        self._part = part
        self._shift_ns = part.offset_ns - origin_ns
        self._tracks: dict[int, list[_Track]] = {kind: [] for kind in _NAMES}
        self._counts: dict[str, dict[str, int]] = {}
        self._requests: dict[str, _Request] = {}
        self.num_steps = 0
        self.last_ns = 0
        """Since the origin."""

    def trace_events(self) -> Iterator[TraceEvent]:
        yield self._meta("process_name", 0, name=self._part.name)
        for event in self._part.events():
            if isinstance(event, StepRecord):
                self.num_steps += 1
                yield from self._step(event)
            else:
                yield from self._request(event)
        for request in self._requests.values():  # what has not ended yet
            request.time_ns = self.last_ns - self._shift_ns
            yield from self._close(request)
        for kind, tracks in self._tracks.items():
            for index in range(len(tracks)):
                more = f" {index + 1}" if index else ""
                name = "steps" if kind == DEVICE and self._part.on_cpu else _NAMES[kind]
                track = _FIRST_TRACK + kind * _TRACKS_OF_A_KIND + index
                yield self._meta("thread_name", track, name=name + more)
                yield self._meta("thread_sort_index", track, sort_index=track)

    # -- steps -----------------------------------------------------------------------------

    def _step(self, step: StepRecord) -> Iterator[TraceEvent]:
        begin, end = step.started_ns, max(step.started_ns, step.ended_ns)
        device = self._track(DEVICE, begin, end)
        yield self._slice(kind_of(step), device, begin, end, **_facts(step))
        yield from self._parts(step, device, begin, end)
        launched_ns = step.submitted_ns if self._part.on_cpu else step.launched_ns
        host = self._track(HOST, step.planned_ns, launched_ns)
        yield self._slice("schedule", host, step.planned_ns, step.submitted_ns)
        if not self._part.on_cpu:
            yield self._slice("launch", host, step.submitted_ns, launched_ns)
            yield self._flow("s", host, step.submitted_ns, step.step_id)
            yield self._flow("f", device, begin, step.step_id)
        if step.landed_ns > end:
            results = self._track(RESULTS, end, step.landed_ns)
            yield self._slice("results", results, end, step.landed_ns)
        if step.landed_ns:
            host = self._track(HOST, step.landed_ns, step.applied_ns)
            yield self._slice("apply", host, step.landed_ns, step.applied_ns)
        yield from self._counters(
            begin,
            rows={"decode": step.num_decode_rows, "prompts": step.num_prefill_rows},
            tokens={
                "decode": step.num_decode_rows,
                "prompts": step.num_prefill_tokens,
                "padding": step.num_padded_tokens,
            },
        )
        yield from self._counters(
            step.applied_ns,
            requests={"running": step.num_running, "waiting": step.num_waiting},
            blocks={
                "used": step.num_used_blocks,
                "cached": step.num_cached_blocks,
                "free": step.num_free_blocks,
            },
        )

    def _parts(self, step: StepRecord, track: int, begin: int, end: int) -> Iterator[TraceEvent]:
        """The parts of a step that a CPU computes, which it measures."""
        if not step.model_us:
            return
        parts = {"input": step.input_us, "model": step.model_us, "sample": step.sample_us}
        for name, part_us in parts.items():
            until = min(end, begin + round(part_us * 1e3))
            yield self._slice(name, track, begin, until)
            begin = until

    def _track(self, kind: int, begin_ns: int, end_ns: int) -> int:
        """The first track of a kind that is free in this time, which is taken."""
        tracks = self._tracks[kind]
        index = next((i for i, one in enumerate(tracks) if one.take(begin_ns, end_ns)), len(tracks))
        if index == len(tracks):
            tracks.append(_Track())
            tracks[index].take(begin_ns, end_ns)
        return _FIRST_TRACK + kind * _TRACKS_OF_A_KIND + index

    def _counters(self, time_ns: int, **counters: dict[str, int]) -> Iterator[TraceEvent]:
        """A counter holds its values until the next event of it."""
        for name, values in counters.items():
            if self._counts.get(name) != values:
                self._counts[name] = values
                at = self._time(time_ns)
                yield {"ph": "C", "name": name, "pid": self._pid, "ts": at, "args": values}

    # -- requests --------------------------------------------------------------------------

    def _request(self, event: RequestEvent) -> Iterator[TraceEvent]:
        request_id, kinds = event.request_id, RequestEventKind
        request = self._requests.get(request_id)
        if request is None:  # it may have begun before the first event
            request = self._requests[request_id] = _Request(event.time_ns)
            yield from self._open(request, request_id, prompt_tokens=event.num_prompt_tokens)
        request.time_ns = max(request.time_ns, event.time_ns)
        following = {
            kinds.QUEUED: "queued",
            kinds.SCHEDULED: "decode" if request.has_begun else "prefill",
            kinds.FIRST_TOKEN: "decode",
            kinds.PREEMPTED: "preempted",
        }.get(event.kind)
        request.has_begun |= event.kind is kinds.FIRST_TOKEN
        if request.spans[1:] != [following]:
            yield from self._close(request, down_to=1)
        if following is not None and not request.spans[1:]:
            yield from self._open(
                request, following, detail=event.detail, cached_tokens=event.num_cached_tokens
            )
        if event.kind is kinds.FINISHED:
            yield from self._close(
                request, reason=event.detail, output_tokens=event.num_output_tokens
            )
            del self._requests[request_id]

    def _open(self, request: _Request, name: str, **facts: Any) -> Iterator[TraceEvent]:
        request.spans.append(name)
        yield self._async("b", name, request, {key: value for key, value in facts.items() if value})

    def _close(self, request: _Request, down_to: int = 0, **facts: Any) -> Iterator[TraceEvent]:
        while len(request.spans) > down_to:
            is_last = len(request.spans) == 1
            yield self._async("e", request.spans[-1], request, facts if is_last else {})
            request.spans.pop()

    # -- the format's events ---------------------------------------------------------------

    def _since(self, time_ns: int) -> int:
        """Nanoseconds since the origin."""
        since = time_ns + self._shift_ns
        self.last_ns = max(self.last_ns, since)
        return since

    def _time(self, time_ns: int) -> float:
        """Microseconds since the origin, exact to the nanosecond."""
        return self._since(time_ns) / 1e3

    def _slice(self, name: str, track: int, begin: int, end: int, **args: Any) -> TraceEvent:
        at, length = self._time(begin), (self._since(max(begin, end)) - self._since(begin)) / 1e3
        event = {"ph": "X", "name": name, "pid": self._pid, "tid": track, "ts": at, "dur": length}
        return {**event, "args": args} if args else event

    def _flow(self, phase: str, track: int, time_ns: int, step_id: int) -> TraceEvent:
        event: TraceEvent = {
            "ph": phase,
            "name": "launch",
            "cat": "launch",
            "pid": self._pid,
            "tid": track,
        }
        event |= {"ts": self._time(time_ns), "id": step_id}
        return {**event, "bp": "e"} if phase == "f" else event

    def _async(self, phase: str, name: str, request: _Request, args: dict[str, Any]) -> TraceEvent:
        event: TraceEvent = {"ph": phase, "cat": "request", "name": name, "pid": self._pid}
        event |= {"id": request.spans[0], "tid": 0, "ts": self._time(request.time_ns)}
        return {**event, "args": args} if args else event

    def _meta(self, kind: str, track: int, **args: Any) -> TraceEvent:
        return {"ph": "M", "name": kind, "pid": self._pid, "tid": track, "args": args}


class _Track:
    """The times of a track's newest slices. A step is written when it has been applied, after which
    the host has planned others: slices come out of order."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []
        self._full_until = -math.inf
        """Older slices are forgotten: before this time nothing is free."""

    def take(self, begin_ns: int, end_ns: int) -> bool:
        """Take a time, if nothing else has any of it."""
        end_ns = max(begin_ns, end_ns)
        taken = self._taken
        place = bisect_right(taken, (begin_ns, end_ns))
        if begin_ns < self._full_until or (place and taken[place - 1][1] > begin_ns):
            return False
        if place < len(taken) and taken[place][0] < end_ns:
            return False
        taken.insert(place, (begin_ns, end_ns))
        if len(taken) > _SLICES_KEPT:
            self._full_until = taken.pop(0)[1]
        return True


@dataclass(slots=True)
class _Request:
    time_ns: int
    """The newest time known of it: its events may come a little out of order."""
    has_begun: bool = False
    """True once its first token was there."""
    spans: list[str] = field(default_factory=list)
    """Names of the open spans: its id, and what it does."""


def kind_of(step: StepRecord) -> str:
    """What a step computes: decode, prefill or mixed."""
    if not step.num_prefill_rows:
        return "decode"
    return "mixed" if step.num_decode_rows else "prefill"


def _facts(step: StepRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "step": step.step_id,
        "decode_rows": step.num_decode_rows,
        "prompt_tokens": step.num_prefill_tokens,
        "graph": step.graph_mode,
    }
    if step.graph_reason:
        facts["why"] = step.graph_reason
    if step.prefill_ids:
        facts["prompts"] = " ".join(step.prefill_ids)
    return facts
