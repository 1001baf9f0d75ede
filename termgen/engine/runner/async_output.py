"""Brings one step's results to the host without stopping the device.

The only place of the step path where device values become host values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from termgen.engine.runner.device_clock import DeviceStart
from termgen.engine.runner.dispatch import Dispatch
from termgen.engine.step import StepLogprobs, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's results on the device."""

    tokens: torch.Tensor  # [B] int32, -1 for a row that sampled none
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # [B,1+K], [B,1+K], [B]

    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.tokens, *(self.logprobs or ()))


def make_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies to the host; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class AsyncOutput:
    """A step's results on their way to the host.

    On CUDA the copies run on `copy_stream` behind the compute stream, and `result` waits for their
    event with the GIL released. The device tensors are kept alive until then.
    """

    def __init__(
        self,
        plan: StepPlan,
        tensors: StepTensors,
        dispatch: Dispatch,
        started_ns: int,
        copy_stream: torch.cuda.Stream | None,
        *,
        device_start: DeviceStart | None = None,
        num_late_compiles: int = 0,
    ) -> None:
        """started_ns: when the host began the step; told only where there is no `device_start`."""
        self._step_id = plan.step_id
        self._num_rows = plan.num_rows
        self._num_tokens = plan.total_tokens
        self._dispatch = dispatch
        self._tensors = tensors
        self._started_ns = started_ns
        self._device_start = device_start
        self._device_end = device_start.clock.end() if device_start is not None else None
        self._num_late_compiles = num_late_compiles
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._host = tensors.all()
            return
        compute = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            if self._device_end is None:
                copy_stream.wait_stream(compute)
            else:  # recorded behind the step: no need for an event more
                copy_stream.wait_event(self._device_end)  # type: ignore[arg-type]
            self._host = tuple(t.to("cpu", non_blocking=True) for t in tensors.all())
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def result(self) -> StepResult:
        """Wait for the copies and hand out plain arrays."""
        if self._event is not None:
            self._event.synchronize()
        started_ns, ended_ns = self._started_ns, time.perf_counter_ns()
        seen_ns = ended_ns if self._event is not None else 0
        if self._device_start is not None and self._device_end is not None:
            start = self._device_start
            started_ns, ended_ns = start.clock.read(start.mark, self._device_end, ended_ns)
        tokens, *logprobs = (t.numpy() for t in self._host)
        tokens = tokens[: self._num_rows]
        return StepResult(
            step_id=self._step_id,
            num_sampled=(tokens >= 0).astype(np.int32),
            token_ids=tokens[tokens >= 0],
            logprobs=StepLogprobs(*logprobs) if logprobs else None,
            started_ns=started_ns,
            ended_ns=ended_ns,
            graph_mode=self._dispatch.mode.value,
            graph_reason=self._dispatch.reason,
            num_padded_tokens=self._dispatch.num_padded(self._num_tokens),
            num_late_compiles=self._num_late_compiles,
            seen_ns=seen_ns,
        )
