"""Which slots a recorded step computes, and how many tokens of each: all it takes from the host.

One buffer that every recording reads. It is sent only when the rows changed, so that a replay of
the same rows uploads nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan


class RowHeader:
    """Row i of a step is slot `tensor[0, i]` and `tensor[1, i]` tokens; the rest is padding."""

    def __init__(self, size: int, *, pad_row: int, device: torch.device) -> None:
        """size: the most rows of any recording; pad_row: the slot that is nobody's."""
        self.tensor = torch.zeros((2, size), dtype=torch.int64, device=device)
        self.tensor[0] = pad_row
        self.num_uploads = 0
        self._pad_row = pad_row
        self._device = device
        self._rows_on_device: tuple[IntArray, IntArray] = (np.zeros(0, np.int32),) * 2
        self._size_on_device = 0

    def rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """slots [size] and num_tokens [size], int64, as they are at any time."""
        return self.tensor[0, :size], self.tensor[1, :size]

    def clear(self) -> None:
        """Make all rows padding."""
        self.tensor[0].fill_(self._pad_row)
        self.tensor[1].zero_()
        self._size_on_device = 0

    def upload(self, plan: StepPlan, size: int) -> None:
        """Make the first `size` rows those of a plan and padding after them."""
        old_slots, old_tokens = self._rows_on_device
        if (
            size == self._size_on_device
            and (plan.slots is old_slots or np.array_equal(plan.slots, old_slots))
            and (plan.num_tokens is old_tokens or np.array_equal(plan.num_tokens, old_tokens))
        ):
            return
        header = np.zeros((2, size), np.int64)
        header[0] = self._pad_row
        header[0, : plan.num_rows] = plan.slots
        header[1, : plan.num_rows] = plan.num_tokens
        host = torch.from_numpy(header)
        if self._device.type == "cuda":
            host = host.pin_memory()
        with torch.inference_mode():
            self.tensor[:, :size].copy_(host, non_blocking=True)
        self._rows_on_device, self._size_on_device = (plan.slots, plan.num_tokens), size
        self.num_uploads += 1
