"""Copies a step's results to the host without stopping the device, and measures when it ran.

The only place on the step path where device values become host values. First the results, then the
clock for their times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from termgen.engine.device.runner.dispatch import Dispatch
from termgen.vocabulary.events import DraftChoice
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import (
    CORRUPT_TOKEN,
    FloatArray,
    StepLogprobs,
    StepPlan,
    StepResult,
    first_samples,
)

REFERENCE_MS = 4096.0
"""Interval after which another event becomes the reference: times between events are float32, which
at this distance still resolve quarters of a microsecond."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's results on the device."""

    tokens: torch.Tensor  # [S] int32, -1 for a sample that does not count, or CORRUPT_TOKEN
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """[S, 1 + K], [S, 1 + K] and [S], as in `LogprobTensors`."""
    prompt_logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """The same for the N prompt tokens of the plan's spans."""
    pooled: torch.Tensor | None = None
    """[N, hidden] float32, of the prompts that end in the step and want a vector."""

    def all(self) -> tuple[torch.Tensor, ...]:
        pooled = () if self.pooled is None else (self.pooled,)
        return (self.tokens, *pooled, *(self.logprobs or ()), *(self.prompt_logprobs or ()))


def make_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies to the host; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Launch:
    """One step's launch: everything in its result besides the samples."""

    plan: StepPlan
    dispatch: Dispatch
    started_ns: int
    """perf_counter_ns when the host began it; reported only if there is no `device_start`."""
    device_start: DeviceStart | None = None
    model_span_ns: tuple[int, int] = (0, 0)
    """See `StepResult`."""
    num_late_compiles: int = 0
    num_drafted: IntArray | None = None
    """See `StepResult`."""
    draft_choice: DraftChoice | None = None
    """Why the step had as many places for drafts as it had."""
    on_landing: Callable[[StepResult], None] | None = None
    """Called with the result, in the thread that asks for it."""


class HostRows(NamedTuple):
    """Results of a step in memory of the host, there when the step has ended and reused later."""

    tokens: IntArray  # [num_samples]
    logprobs: StepLogprobs | None = None
    drafts: IntArray | None = None
    """[num_rows] drafts that were there, of a step whose rows have places for as many. Each
    row has a sample for each of its places, and one more."""

    def of_drafts(self) -> HostRows:
        """The samples behind drafts that were there alone, and each row's first one."""
        if self.drafts is None:
            return self
        places = np.arange(len(self.tokens) // len(self.drafts))
        counted = np.flatnonzero(places <= self.drafts[:, None])
        logprobs = self.logprobs and StepLogprobs(
            self.logprobs.token_ids[counted],
            self.logprobs.logprobs[counted],
            self.logprobs.ranks[counted],
        )
        return HostRows(self.tokens[counted], logprobs, self.drafts)


class RecordedOutput:
    """A step whose results need no copy: the device writes them to host memory."""

    def __init__(self, launch: Launch, rows: HostRows) -> None:
        self._launch = launch
        self._rows = rows
        start = launch.device_start
        self._device_end = start.clock.end() if start is not None else None

    def result(self) -> StepResult:
        """Wait for the end of the step, with the GIL released, and return numpy arrays."""
        if self._device_end is not None:
            self._device_end.synchronize()
        tokens, kept, drafts = self._rows.of_drafts()
        if drafts is not None:
            self._launch.plan = self._launch.plan.with_drafts(drafts)
            self._launch.num_drafted = self._launch.plan.num_draft_tokens
        logprobs = kept and StepLogprobs(
            kept.token_ids.copy(), kept.logprobs.copy(), kept.ranks.copy()
        )
        return self._make_result(tokens, logprobs, was_waited_for=self._device_end is not None)

    def _make_result(
        self,
        tokens: IntArray,
        logprobs: StepLogprobs | None = None,
        prompt_logprobs: StepLogprobs | None = None,
        *,
        was_waited_for: bool,
        pooled: FloatArray | None = None,
    ) -> StepResult:
        launch = self._launch
        started_ns, ended_ns = launch.started_ns, time.perf_counter_ns()
        seen_ns = ended_ns if was_waited_for else 0
        if launch.device_start is not None and self._device_end is not None:
            clock, mark = launch.device_start
            started_ns, ended_ns = clock.read(mark, self._device_end, ended_ns)
        plan, dispatch = launch.plan, launch.dispatch
        tokens = tokens[: plan.num_samples].copy()  # the memory is reused
        num_sampled, corrupt = plan.num_tokens, None
        if not plan.is_decode or plan.num_drafts or np.minimum.reduce(tokens, initial=0) < 0:
            is_sampled = tokens >= 0
            is_corrupt = by_row(plan, tokens == CORRUPT_TOKEN)
            if pooled is not None:
                ended = [span.row for span in plan.pooled if span.length]
                is_corrupt[ended] = ~np.isfinite(pooled).all(axis=1)
            corrupt = is_corrupt.nonzero()[0].astype(np.int32)
            num_sampled, tokens = by_row(plan, is_sampled), tokens[is_sampled]
        choice = launch.draft_choice
        if choice is not None:
            choice = choice.as_ran(plan.most_guesses)
        result = StepResult(
            step_id=plan.step_id,
            num_sampled=num_sampled,
            token_ids=tokens,
            logprobs=logprobs,
            started_ns=started_ns,
            ended_ns=ended_ns,
            graph_mode=dispatch.mode.value,
            graph_reason=dispatch.reason,
            num_padded_tokens=dispatch.num_padded(plan.total_tokens),
            num_late_compiles=launch.num_late_compiles,
            prompt_logprobs=prompt_logprobs,
            corrupt=corrupt if corrupt is not None and len(corrupt) else None,
            num_drafted=launch.num_drafted,
            seen_ns=seen_ns,
            model_span_ns=launch.model_span_ns,
            draft_choice=choice,
            pooled=pooled,
        )
        if launch.on_landing is not None:
            launch.on_landing(result)
        return result


def by_row(plan: StepPlan, are: npt.NDArray[np.bool_]) -> IntArray:
    """[num_rows] how many of a row's samples are so."""
    if not plan.num_drafts:
        return are.astype(np.int32)
    return np.add.reduceat(are, first_samples(plan.num_draft_tokens), dtype=np.int32)


class AsyncOutput(RecordedOutput):
    """A step whose results are being copied to the host.

    On CUDA the copies run on `copy_stream` after the compute stream, and `result` waits for their
    event with the GIL released. The device tensors are kept alive until then.
    """

    def __init__(
        self, launch: Launch, tensors: StepTensors, copy_stream: torch.cuda.Stream | None
    ) -> None:
        self._tensors = tensors
        self._host = tensors.all()
        self._event: torch.cuda.Event | None = None
        super().__init__(launch, HostRows(np.zeros(0, np.int32)))
        if copy_stream is None:
            return
        compute = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            if self._device_end is None:
                copy_stream.wait_stream(compute)
            else:  # already recorded after the step: no further event needed
                copy_stream.wait_event(self._device_end)  # type: ignore[arg-type]
            self._host = tuple(t.to("cpu", non_blocking=True) for t in self._host)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def result(self) -> StepResult:
        """Wait for the copies and return numpy arrays."""
        if self._event is not None:
            self._event.synchronize()
        tokens, *arrays = (t.numpy() for t in self._host)
        pooled = arrays.pop(0) if self._tensors.pooled is not None else None
        logprobs = StepLogprobs(*arrays[:3]) if self._tensors.logprobs is not None else None
        of_prompts = None
        if self._tensors.prompt_logprobs is not None:
            of_prompts = StepLogprobs(*arrays[-3:])
        is_waited_for = self._event is not None
        return self._make_result(
            tokens, logprobs, of_prompts, was_waited_for=is_waited_for, pooled=pooled
        )


# The clock. With queued steps, the time of a launch says little about when the device ran it. Two
# events around the step's operations are exact, but only relative to other events. The runner has
# one clock per engine on CUDA; once it is created, it never waits for the device.


class TimingEvent(Protocol):
    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        """True if the event has happened."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to another of its kind; both have happened."""
        ...


def cuda_event(*, spins: bool = False) -> TimingEvent:
    """spins: the waiting thread keeps a core busy instead of sleeping."""
    return torch.cuda.Event(enable_timing=True, blocking=not spins)  # type: ignore[no-untyped-call]


class DeviceClock:
    """Maps events of the current stream to `time.perf_counter_ns`.

    The host notices an event some time after it happened, never before: the smallest delay seen is
    taken as zero, so that the two clocks cannot drift apart.
    """

    def __init__(
        self,
        make_event: Callable[[], TimingEvent] = cuda_event,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        stream: Any = None,
    ) -> None:
        """stream: of the steps; None: the current one, which torch looks up at every mark."""
        self._make_event = make_event
        self._spare: list[TimingEvent] = []
        """Marks that have been read, for reuse: creating an event takes as long as recording it."""
        self._stream = stream
        self._reference = self.mark()
        self._reference.synchronize()
        self._reference_ns = float(now_ns())
        self._least_delay_ns = math.inf
        self._last_end: TimingEvent | None = None

    def mark(self) -> TimingEvent:
        """An event that fires when everything launched so far is done."""
        event = self._spare.pop() if self._spare else self._make_event()
        event.record(self._stream)
        return event

    def start(self) -> DeviceStart:
        return DeviceStart(self, self.mark())

    def end(self) -> TimingEvent:
        """A mark after the operations of a step."""
        self._last_end = self.mark()
        return self._last_end

    @property
    def is_busy(self) -> bool:
        """True while a step runs on the device."""
        return self._last_end is not None and not self._last_end.query()

    def read(self, start: TimingEvent, end: TimingEvent, seen_ns: int) -> tuple[int, int]:
        """Host times of two marks that have happened, as the host noticed at `seen_ns`.

        The marks are reused afterwards, so read them only once.
        """
        since_ms = self._reference.elapsed_time(end)
        if since_ms > 2 * REFERENCE_MS:  # after a long idle time the drift is unknown
            self._reference_ns = seen_ns - since_ms * 1e6
        end_ns = self._reference_ns + since_ms * 1e6
        delay_ns = seen_ns - end_ns
        if delay_ns < 0:  # the reference was estimated too late
            self._reference_ns += delay_ns
            end_ns, delay_ns = float(seen_ns), 0.0
        self._least_delay_ns = min(self._least_delay_ns, delay_ns)
        start_ns = end_ns - start.elapsed_time(end) * 1e6
        self._spare.append(start)
        if since_ms > REFERENCE_MS:
            self._reference = end
            self._reference_ns = end_ns + self._least_delay_ns
            self._least_delay_ns = math.inf
        elif end is not self._last_end:
            self._spare.append(end)
        return round(start_ns), round(end_ns)


class DeviceStart(NamedTuple):
    """The mark of a step's begin in the compute stream, and its clock."""

    clock: DeviceClock
    mark: TimingEvent
