"""Recordings of whole steps, and their replay.

A full graph holds input preparation, the model, sampling, the state update and the hand-over of
the tokens to a ring, all reading their lengths and rows from device memory. Replaying a step whose
rows are those of the step before uploads nothing at all.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from termgen.engine.request import IntArray
from termgen.engine.runner.capture_order import next_larger, split_by_use
from termgen.engine.runner.dispatch import (
    BatchDescriptor,
    CudaGraphDispatcher,
    Dispatch,
    GraphMode,
    SamplingNeeds,
)
from termgen.engine.runner.token_ring import TokenRing
from termgen.engine.step import GraphStatus, StepPlan

logger = logging.getLogger(__name__)

DeviceStep = Callable[[torch.Tensor, torch.Tensor, BatchDescriptor, TokenRing], object]
"""(slots [B], num_tokens [B], descriptor, ring for the tokens); see ModelRunner.step_on_device."""

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns operations into something that repeats them on the same memory."""

RING_SIZE = 16
"""Steps whose tokens are kept: more than ever are in flight."""

MOST_PADDING = 2
"""How many times as many tokens a recording may have that stands in for a missing one."""


class CudaRecorder:
    """Records into CUDA graphs that share one memory pool, on a stream of its own.

    Begins and ends captures itself: `torch.cuda.graph` collects garbage and empties the allocator's
    cache every time, which for a hundred recordings takes seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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
        self._waiting: deque[BatchDescriptor] = deque()
        """To be recorded in idle moments."""
        self._recorder: Recorder | None = None
        self._header = torch.zeros((2, size), dtype=torch.int64, device=device)
        self._header[0] = pad_row
        self._ring = TokenRing(RING_SIZE, size, device)
        self._next_ring_row = 0
        self._rows_on_device: tuple[IntArray, IntArray] = (np.zeros(0, np.int32),) * 2
        self._size_on_device = 0
        self.num_uploads = 0
        """Times the rows of a step had to be sent to the device."""

    @property
    def status(self) -> GraphStatus:
        return GraphStatus(len(self._replays), len(self._replays) + len(self._waiting))

    def dispatch(self, plan: StepPlan, needs: SamplingNeeds) -> Dispatch:
        found = self.dispatcher.dispatch(
            num_rows=plan.num_rows, num_tokens=plan.total_tokens, sampling=needs.variant
        )
        if found.descriptor is None or found.descriptor in self._replays:
            return found
        other = next_larger(found.descriptor, tuple(self._replays), most_padding=MOST_PADDING)
        if other is None:
            why = "not recorded yet" if self._waiting else "not recorded for lack of memory"
            return Dispatch(GraphMode.NONE, None, why)
        return Dispatch(GraphMode.FULL, other)

    def record_all(self, recorder: Recorder, on_progress: Callable[[float], None]) -> None:
        """Make every recording, the largest first. No step may be in flight."""
        self._record(self.dispatcher.descriptors(), recorder, on_progress)

    def record_useful(self, recorder: Recorder, on_progress: Callable[[float], None]) -> None:
        """Make the recordings that most steps need; `record_next` makes the others."""
        first, later = split_by_use(self.dispatcher.descriptors())
        self._record(first, recorder, on_progress)
        self._waiting, self._recorder = deque(later), recorder

    def record_next(self) -> bool:
        """Make one of the recordings that wait; False when none does. No step may be in flight."""
        if not self._waiting:
            return False
        assert self._recorder is not None
        try:
            self._record([self._waiting[0]], self._recorder, lambda done: None)
        except torch.OutOfMemoryError:
            logger.warning("no memory for more CUDA graphs; %d are not made", len(self._waiting))
            self._waiting.clear()
        else:
            self._waiting.popleft()
        return True

    @torch.inference_mode()
    def _record(
        self,
        descriptors: Sequence[BatchDescriptor],
        recorder: Recorder,
        on_progress: Callable[[float], None],
    ) -> None:
        self._forget_rows()  # while recording, all rows are padding
        collects_garbage = gc.isenabled()
        gc.disable()  # freeing a tensor of another stream is not allowed while recording
        try:
            for i, descriptor in enumerate(descriptors):
                on_progress(i / len(descriptors))
                self._replays[descriptor] = recorder(partial(self.run_padding, descriptor))
        finally:
            if collects_garbage:
                gc.enable()
            # Recording ran the operations, or only seemed to: start the ring anew in either case.
            self._ring.restart()
            self._next_ring_row = 0

    def _forget_rows(self) -> None:
        self._header[0].fill_(self._pad_row)
        self._header[1].zero_()
        self._size_on_device = 0

    def run_padding(self, descriptor: BatchDescriptor) -> None:
        """The operations of a recording. Their rows are those of the last upload, at first padding:
        run like this, a step computes for nobody."""
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
