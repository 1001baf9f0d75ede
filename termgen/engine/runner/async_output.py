"""Brings one step's results to the host without stopping the device.

The only place of the step path where device values become host values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from termgen.engine.step import StepLogprobs, StepResult


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's results on the device."""

    sampled: torch.Tensor  # [B] int64
    takes: torch.Tensor  # [B] bool, whether the row's sample counts
    logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # [B,1+K], [B,1+K], [B]

    def all(self) -> tuple[torch.Tensor, ...]:
        return (self.sampled, self.takes, *(self.logprobs or ()))


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
        step_id: int,
        tensors: StepTensors,
        started_ns: int,
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        self._step_id = step_id
        self._tensors = tensors
        self._started_ns = started_ns
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._host = tensors.all()
            return
        compute = torch.cuda.current_stream()
        with torch.cuda.stream(copy_stream):
            copy_stream.wait_stream(compute)
            self._host = tuple(t.to("cpu", non_blocking=True) for t in tensors.all())
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def result(self) -> StepResult:
        """Wait for the copies and hand out plain arrays."""
        if self._event is not None:
            self._event.synchronize()
        ended_ns = time.perf_counter_ns()
        sampled, takes, *logprobs = (t.numpy() for t in self._host)
        return StepResult(
            step_id=self._step_id,
            num_sampled=takes.astype(np.int32),
            token_ids=sampled[takes].astype(np.int32),
            logprobs=StepLogprobs(*logprobs) if logprobs else None,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
        )
