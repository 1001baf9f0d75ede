"""Brings one step's results to the host without stopping the device.

The only place of the step path where device values become host values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from termgen.engine.device.runner.device_clock import DeviceStart
from termgen.engine.device.runner.dispatch import Dispatch
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import CORRUPT_TOKEN, StepLogprobs, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's results on the device."""

    tokens: torch.Tensor  # [B] int32, -1 for a row that sampled none, or CORRUPT_TOKEN
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """[B, 1 + K], [B, 1 + K] and [B], as in `LogprobTensors`."""
    prompt_logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """The same for the N prompt tokens of the plan's spans."""

    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.tokens, *(self.logprobs or ()), *(self.prompt_logprobs or ()))


def make_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies to the host; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Launch:
    """One step's launch: all that its result says besides what was sampled."""

    plan: StepPlan
    dispatch: Dispatch
    started_ns: int
    """perf_counter_ns when the host began it; reported only where there is no `device_start`."""
    device_start: DeviceStart | None = None
    model_span_ns: tuple[int, int] = (0, 0)
    """See `StepResult`."""
    num_late_compiles: int = 0


class RecordedOutput:
    """A step whose tokens need no copy: a recording writes them to memory of the host."""

    def __init__(self, launch: Launch, tokens: IntArray) -> None:
        """tokens: [padded rows], written when the step has ended."""
        self._launch = launch
        self._tokens = tokens
        start = launch.device_start
        self._device_end = start.clock.end() if start is not None else None

    def result(self) -> StepResult:
        """Wait for the end of the step, with the GIL released, and hand out plain arrays."""
        if self._device_end is not None:
            self._device_end.synchronize()
        return self._make_result(self._tokens, was_waited_for=self._device_end is not None)

    def _make_result(
        self,
        tokens: IntArray,
        logprobs: StepLogprobs | None = None,
        prompt_logprobs: StepLogprobs | None = None,
        *,
        was_waited_for: bool,
    ) -> StepResult:
        launch = self._launch
        started_ns, ended_ns = launch.started_ns, time.perf_counter_ns()
        seen_ns = ended_ns if was_waited_for else 0
        if launch.device_start is not None and self._device_end is not None:
            clock, mark = launch.device_start
            started_ns, ended_ns = clock.read(mark, self._device_end, ended_ns)
        plan, dispatch = launch.plan, launch.dispatch
        tokens = tokens[: plan.num_rows].copy()  # the memory is written again
        num_sampled, corrupt = plan.num_tokens, None
        if not plan.is_decode or np.minimum.reduce(tokens, initial=0) < 0:  # some row sampled none
            is_sampled = tokens >= 0
            corrupt = (tokens == CORRUPT_TOKEN).nonzero()[0].astype(np.int32)
            num_sampled, tokens = is_sampled.astype(np.int32), tokens[is_sampled]
        return StepResult(
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
            seen_ns=seen_ns,
            model_span_ns=launch.model_span_ns,
        )


class AsyncOutput(RecordedOutput):
    """A step's results on their way to the host.

    On CUDA the copies run on `copy_stream` behind the compute stream, and `result` waits for their
    event with the GIL released. The device tensors are kept alive until then.
    """

    def __init__(
        self, launch: Launch, tensors: StepTensors, copy_stream: torch.cuda.Stream | None
    ) -> None:
        self._tensors = tensors
        self._host = tensors.all()
        self._event: torch.cuda.Event | None = None
        super().__init__(launch, np.zeros(0, np.int32))
        if copy_stream is None:
            return
        compute = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            if self._device_end is None:
                copy_stream.wait_stream(compute)
            else:  # recorded behind the step: no need for an event more
                copy_stream.wait_event(self._device_end)  # type: ignore[arg-type]
            self._host = tuple(t.to("cpu", non_blocking=True) for t in self._host)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def result(self) -> StepResult:
        """Wait for the copies and hand out plain arrays."""
        if self._event is not None:
            self._event.synchronize()
        tokens, *arrays = (t.numpy() for t in self._host)
        logprobs = StepLogprobs(*arrays[:3]) if self._tensors.logprobs is not None else None
        of_prompts = None
        if self._tensors.prompt_logprobs is not None:
            of_prompts = StepLogprobs(*arrays[-3:])
        is_waited_for = self._event is not None
        return self._make_result(tokens, logprobs, of_prompts, was_waited_for=is_waited_for)
