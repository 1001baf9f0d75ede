"""Recordings of whole steps, and their replay.

A full graph holds input preparation, the model, sampling, the state update and the hand-over of
the tokens to a ring, all reading their lengths and rows from device memory. Replaying a step whose
rows are those of the step before uploads nothing at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from termgen.engine.request import IntArray
from termgen.engine.runner.dispatch import (
    BatchDescriptor,
    CudaGraphDispatcher,
    Dispatch,
    SamplingNeeds,
)
from termgen.engine.runner.token_ring import TokenRing
from termgen.engine.step import StepPlan

DeviceStep = Callable[[torch.Tensor, torch.Tensor, BatchDescriptor, TokenRing], object]
"""(slots [B], num_tokens [B], descriptor, ring for the tokens); see ModelRunner.step_on_device."""

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns operations into something that repeats them on the same memory."""

RING_SIZE = 16
"""Steps whose tokens are kept: more than ever are in flight."""


class CudaRecorder:
    """Records into CUDA graphs that share one memory pool, on a stream of its own.

    Begins and ends captures itself: `torch.cuda.graph` collects garbage and empties the allocator's
    cache every time, which for a hundred recordings takes seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def new_pool(self) -> None:
        """What was recorded so far is gone: further recordings share memory of their own."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            operations()  # compiles kernels and fills caches: neither is allowed while recording
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                operations()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


class FullGraphs:
    """One recording per batch descriptor."""

    def __init__(
        self,
        step: DeviceStep,
        dispatcher: CudaGraphDispatcher,
        *,
        pad_row: int,
        device: torch.device,
    ) -> None:
        size = max(1, dispatcher.max_rows)
        self.dispatcher = dispatcher
        self._device_step = step
        self._pad_row = pad_row
        self._device = device
        self._replays: dict[BatchDescriptor, Callable[[], None]] = {}
        self._header = torch.zeros((2, size), dtype=torch.int64, device=device)
        self._header[0] = pad_row
        self._ring = TokenRing(RING_SIZE, size, device)
        self._next_ring_row = 0
        self._rows_on_device: tuple[IntArray, IntArray] = (np.zeros(0, np.int32),) * 2
        self._size_on_device = 0
        self.num_uploads = 0
        """Times the rows of a step had to be sent to the device."""

    def dispatch(self, plan: StepPlan, needs: SamplingNeeds) -> Dispatch:
        return self.dispatcher.dispatch(
            num_rows=plan.num_rows, num_tokens=plan.total_tokens, sampling=needs.variant
        )

    @torch.inference_mode()
    def record_all(self, recorder: Recorder, on_progress: Callable[[float], None]) -> None:
        """Make every recording, the largest first. All rows are padding meanwhile."""
        descriptors = self.dispatcher.descriptors()
        collects_garbage = gc.isenabled()
        gc.disable()  # freeing a tensor of another stream is not allowed while recording
        try:
            for i, descriptor in enumerate(descriptors):
                on_progress(i / len(descriptors))
                self._replays[descriptor] = recorder(partial(self._step, descriptor))
        finally:
            if collects_garbage:
                gc.enable()
        # Recording ran the operations, or only seemed to: start the ring anew in either case.
        self._ring.restart()
        self._next_ring_row = 0

    def _step(self, descriptor: BatchDescriptor) -> None:
        size = descriptor.num_rows
        slots, num_tokens = self._header[0, :size], self._header[1, :size]
        self._device_step(slots, num_tokens, descriptor, self._ring)

    def replay(self, descriptor: BatchDescriptor, plan: StepPlan) -> torch.Tensor:
        """Run a recorded step; returns its tokens [padded rows], valid for RING_SIZE steps."""
        self._upload_rows(plan.slots, plan.num_tokens, descriptor.num_rows)
        self._replays[descriptor]()
        row = self._next_ring_row
        self._next_ring_row = (row + 1) % RING_SIZE
        return self._ring.tokens[row, : descriptor.num_rows]

    def _upload_rows(self, slots: IntArray, num_tokens: IntArray, size: int) -> None:
        old_slots, old_tokens = self._rows_on_device
        if (
            size == self._size_on_device
            and np.array_equal(slots, old_slots)
            and np.array_equal(num_tokens, old_tokens)
        ):
            return
        header = np.zeros((2, size), np.int64)
        header[0] = self._pad_row
        header[0, : len(slots)] = slots
        header[1, : len(slots)] = num_tokens
        host = torch.from_numpy(header)
        if self._device.type == "cuda":
            host = host.pin_memory()
        self._header[:, :size].copy_(host, non_blocking=True)
        self._rows_on_device, self._size_on_device = (slots, num_tokens), size
        self.num_uploads += 1
