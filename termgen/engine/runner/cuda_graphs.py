"""Recordings of whole steps, and their replay; `piecewise_graphs` has those cut at attention.

A full graph holds input preparation, the model, sampling, the state update and the hand-over of
the tokens to a ring, all reading their lengths and rows from device memory. Replaying a step whose
rows are those of the step before uploads nothing at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from termgen.engine.runner.address_check import AddressCheck
from termgen.engine.runner.dispatch import (
    BatchDescriptor,
    CudaGraphDispatcher,
    Dispatch,
    SamplingNeeds,
)
from termgen.engine.runner.input_batch import InputBatch
from termgen.engine.runner.piecewise_graphs import PiecewiseGraphs, Recorder
from termgen.engine.runner.row_header import RowHeader
from termgen.engine.runner.token_ring import TokenRing
from termgen.engine.step import StepPlan

DeviceStep = Callable[[torch.Tensor, torch.Tensor, BatchDescriptor, TokenRing], object]
"""(slots [B], num_tokens [B], descriptor, ring for the tokens); see ModelRunner.step_on_device."""


class RecordingError(Exception):
    """Operations that cannot be recorded, and why: the host waits for the device within them."""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
                graph.capture_end()
            except torch.OutOfMemoryError:
                self._abandon(graph)
                raise
            except RuntimeError as error:
                self._abandon(graph)
                raise RecordingError(_first_line(error)) from error
        torch.cuda.current_stream().wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the device can be used as before."""
        with suppress(RuntimeError):
            graph.capture_end()  # which says again that it failed, unless it was ended before
        with suppress(RuntimeError):
            # The allocator keeps memory for the capture until it is told: capture_end fails first.
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        torch.cuda.synchronize(self._stream.device)


class FullGraphs:
    """One recording per batch descriptor, and `pieces` for the steps that none of them serves."""

    def __init__(
        self,
        step: DeviceStep,
        dispatcher: CudaGraphDispatcher,
        header: RowHeader,
        pieces: PiecewiseGraphs,
        *,
        device: torch.device,
        address_check: AddressCheck | None = None,
    ) -> None:
        """header: holds the `max_rows` of the dispatcher; pieces: has its sizes."""
        self.dispatcher = dispatcher
        self.header = header
        self.pieces = pieces
        self._ring = TokenRing(RING_SIZE, max(1, dispatcher.max_rows), device)
        self._device_step = step
        self._check = address_check
        self._replays: dict[BatchDescriptor, Callable[[], None]] = {}
        self._next_ring_row = 0

    def dispatch(self, plan: StepPlan, needs: SamplingNeeds) -> Dispatch:
        return self.dispatcher.dispatch(
            num_rows=plan.num_rows, num_tokens=plan.total_tokens, sampling=needs.variant
        )

    @torch.inference_mode()
    def record_all(self, recorder: Recorder, on_progress: Callable[[float], None]) -> None:
        """Make every recording, of each kind the largest first. All rows are padding meanwhile."""
        work = [partial(self._record_pieces, recorder, size) for size in self.pieces.sizes]
        work += [partial(self._record, recorder, d) for d in self.dispatcher.descriptors()]
        collects_garbage = gc.isenabled()
        gc.disable()  # freeing a tensor of another stream is not allowed while recording
        try:
            for i, record in enumerate(work):
                on_progress(i / len(work))
                record()
        finally:
            if collects_garbage:
                gc.enable()
        # Recording ran the operations, or only seemed to: start the ring anew in either case.
        self._ring.restart()
        self._next_ring_row = 0

    def _record(self, recorder: Recorder, descriptor: BatchDescriptor) -> None:
        self._replays[descriptor] = recorder(partial(self._step, descriptor))
        if self._check is not None:
            self._check.note(descriptor)

    def _record_pieces(self, recorder: Recorder, size: int) -> None:
        self.pieces.record(size, recorder)
        if self._check is not None:
            self._check.note(size)

    def _step(self, descriptor: BatchDescriptor) -> None:
        slots, num_tokens = self.header.rows(descriptor.num_rows)
        self._device_step(slots, num_tokens, descriptor, self._ring)

    def replay(self, descriptor: BatchDescriptor, plan: StepPlan) -> torch.Tensor:
        """Run a recorded step; returns its tokens [padded rows], valid for RING_SIZE steps."""
        if self._check is not None:
            self._check.check(descriptor)
        self.header.upload(plan, descriptor.num_rows)
        self._replays[descriptor]()
        row = self._next_ring_row
        self._next_ring_row = (row + 1) % RING_SIZE
        return self._ring.tokens[row, : descriptor.num_rows]

    def replay_pieces(self, size: int, plan: StepPlan) -> tuple[InputBatch, torch.Tensor]:
        """Run the model on a step; see `PiecewiseGraphs.replay`."""
        if self._check is not None:
            self._check.check(size)
        return self.pieces.replay(size, plan)
