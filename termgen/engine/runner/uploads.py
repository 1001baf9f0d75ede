"""What the host sends to the device with a step, from page-locked memory that is there already.

Locking pages in the middle of decoding takes milliseconds and waits for what the device has queued,
and torch locks more whenever copies that are still queued hold all it has of a size. So steps take
turns in the slots of one buffer. A slot comes round again only when the step that used it before
has landed: fewer steps are in flight than there are slots. Used by the runner, on its thread.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from termgen.engine.step import MAX_STEPS_IN_FLIGHT

NUM_SLOTS = MAX_STEPS_IN_FLIGHT + 1
BYTES_PER_STEP = 1 << 17
"""The ids of a prompt of 10,000 tokens, or the blocks of 256 rows and much more. What is larger
comes with prompts, whose steps take longer than locking memory for it."""
ALIGNMENT = 64


class Uploads:
    """One device's."""

    def __init__(self, device: torch.device, bytes_per_step: int = BYTES_PER_STEP) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        size = (NUM_SLOTS, bytes_per_step) if self._is_cuda else (0, 0)
        self._pages = torch.zeros(size, dtype=torch.uint8)
        if self._is_cuda:
            self._pages = self._pages.pin_memory()
        self._slot = 0
        self._used = 0
        """Bytes of the slot."""

    def next_step(self) -> None:
        """A step is about to be launched; at most MAX_STEPS_IN_FLIGHT have not landed with it."""
        self._slot = (self._slot + 1) % NUM_SLOTS
        self._used = 0

    def pinned(self, values: np.ndarray) -> torch.Tensor:
        """These values in memory that a device copies from without waiting; on a CPU as they are.
        Read them in this step only."""
        tensor = torch.from_numpy(values)
        if not self._is_cuda:
            return tensor
        start = self._used
        end = start + values.nbytes
        if end > self._pages.shape[1]:
            return tensor.pin_memory()
        self._used = math.ceil(end / ALIGNMENT) * ALIGNMENT
        page = self._pages[self._slot, start:end].view(tensor.dtype).view(tensor.shape)
        return page.copy_(tensor)

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        """A copy on the device, without waiting."""
        return self.pinned(values).to(self._device, non_blocking=True)
