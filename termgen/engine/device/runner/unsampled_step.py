"""A step whose model has been launched, and what sampling needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from termgen.engine.device.runner.async_output import RecordedOutput
from termgen.vocabulary.step import StepResult
from termgen.vocabulary.token_mask import RowMasks


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What the model made of a step's B rows."""

    slots: torch.Tensor  # [B] int64
    num_tokens: torch.Tensor  # [B] int64
    hidden: torch.Tensor  # [B, hidden], normed, of each row's last token
    prompt_logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """As in `StepTensors`."""
    span_ns: tuple[int, int] = (0, 0)
    """On a CPU, perf_counter_ns when the model began and when it had ended. A GPU runs the model
    later than the host calls it."""


class UnsampledStep:
    """A step that waits for the masks of its constrained rows."""

    def __init__(self, sample: Callable[[RowMasks], RecordedOutput]) -> None:
        self.sample = sample
        """Launches the rest. To be called once, before the next step is launched."""

    def result(self) -> StepResult:
        raise AssertionError("nothing is sampled before the masks are there")
