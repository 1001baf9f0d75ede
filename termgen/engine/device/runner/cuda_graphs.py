"""Recordings of whole steps, and their replay; `piecewise_graphs` has those cut at attention.

Skip on a first reading: a replayed step computes what `ModelRunner` launches op by op.

A full graph has input preparation, the model, sampling, the state update and the push of tokens and
log-probabilities to a ring; all read their lengths and rows, and what a row asks for, from device
memory. Replaying a step with the rows of the previous step uploads nothing. Sampling waits, in the
graph, for the masks of rows that need one.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from termgen.engine.device.runner.async_output import HostRows, StepTensors
from termgen.engine.device.runner.dispatch import (
    BatchDescriptor,
    CudaGraphDispatcher,
    Dispatch,
    GraphMode,
    SamplingVariant,
    variant_of,
)
from termgen.engine.device.runner.input_batch import InputBatch, RowHeader
from termgen.engine.device.runner.memory import is_out_of_memory
from termgen.engine.device.runner.piecewise_graphs import PiecewiseGraphs, Recorder
from termgen.engine.device.sampling.token_ring import TokenRing
from termgen.vocabulary.model_info import GraphStatus
from termgen.vocabulary.step import MAX_STEPS_IN_FLIGHT, StepPlan

NamedTensor = tuple[str, torch.Tensor]

RING_SIZE = 32
"""Steps whose tokens are kept: more than ever are in flight."""

MOST_PADDING = 2
"""Largest ratio of tokens of a recording that replaces a missing one."""

USEFUL_DECODES = 8
"""Decodes with up to this many rows are recorded before serving: a few conversations."""
USEFUL_TOKENS = 128
"""Steps with prompts of up to this many tokens are recorded before serving: most chat messages."""


def tensors_of(owner: str, holder: Any) -> list[NamedTensor]:
    """The tensors among an object's attributes, named `owner.attribute`."""
    names = vars(holder) if hasattr(holder, "__dict__") else holder.__slots__
    tensors = ((f"{owner}.{name}", getattr(holder, name)) for name in names)
    return [(name, value) for name, value in tensors if isinstance(value, torch.Tensor)]


class AddressCheck:
    """Checks that the tensors of recordings still have their addresses. For debugging.

    A graph has addresses, not tensors: a tensor reallocated since would be read at its old address,
    without an error. Used with the setting `debug`; costs microseconds per tensor. `tensors` yields
    the tensors of recordings by name; those that do not exist yet when a recording is made are not
    part of it.
    """

    def __init__(self, tensors: Callable[[], Iterable[NamedTensor]]) -> None:
        self._tensors = tensors
        self._recorded: dict[Hashable, dict[str, int]] = {}

    def note(self, recording: Hashable) -> None:
        """A recording was just made."""
        self._recorded[recording] = self._addresses()

    def check(self, recording: Hashable) -> None:
        """Before its replay."""
        now = self._addresses()
        recorded = self._recorded[recording]
        moved = [name for name, address in recorded.items() if now.get(name) != address]
        assert not moved, f"moved since {recording} was recorded: {', '.join(moved)}"

    def _addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._tensors()}


logger = logging.getLogger(__name__)

DeviceStep = Callable[[torch.Tensor, torch.Tensor, BatchDescriptor, TokenRing], object]
"""(slots [B], num_tokens [B], descriptor, ring for the tokens); see ModelRunner.step_on_device."""

Recording = BatchDescriptor | int
"""Key of a recording: the descriptor of a full graph, or the token count of piecewise graphs."""

assert RING_SIZE > MAX_STEPS_IN_FLIGHT


class RecordingError(Exception):
    """Operations that cannot be recorded, with the reason: the host waits for the device."""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Operations to record, with a shorter rehearsal to run before."""

    operations: Callable[[], None]
    rehearsal: Callable[[], None]
    """Loads every kernel and fills every cache that the operations need."""

    def __call__(self) -> None:
        self.operations()


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, on its own stream.

    Does not use `torch.cuda.graph`, which collects garbage and empties the allocator's cache every
    time: seconds for a hundred recordings.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def new_pool(self) -> None:
        """Use a new memory pool, as the recordings so far have been dropped."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                # Compiles kernels and fills caches, which is not allowed while recording.
                (operations.rehearsal if isinstance(operations, Rehearsed) else operations)()
            finally:
                self._stream.synchronize()  # steps may follow, even if this failed
            graph.capture_begin(pool=self._pool)
            try:
                operations()
                graph.capture_end()
            except RuntimeError as error:
                self._abandon(graph)
                if is_out_of_memory(error):
                    raise
                raise RecordingError(_first_line(error)) from error
        torch.cuda.current_stream().wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the device can be used as before."""
        with suppress(RuntimeError):
            graph.capture_end()  # raises again that it failed, unless it was ended before
        with suppress(RuntimeError):
            # The allocator keeps memory for the capture until this call: capture_end fails first.
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        torch.cuda.synchronize(self._stream.device)


class FullGraphs:
    """Full graphs by batch descriptor, and `pieces` for the steps that none of them fits."""

    def __init__(
        self,
        step: DeviceStep,
        dispatcher: CudaGraphDispatcher,
        header: RowHeader,
        pieces: PiecewiseGraphs,
        *,
        ring: TokenRing,
        address_check: AddressCheck | None = None,
        rehearsing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """header and ring: hold the dispatcher's `max_rows`. pieces: has its sizes. rehearsing:
        meanwhile a step runs as little as uses every kernel it would."""
        self.dispatcher = dispatcher
        self.header = header
        self.pieces = pieces
        self.ring = ring
        self._device_step = step
        self._check = address_check
        self._rehearsing = rehearsing
        self._replays: dict[BatchDescriptor, Callable[[], None]] = {}
        self._waiting: deque[Recording] = deque()
        """Left to be recorded in idle moments."""
        self._recorder: Recorder | None = None
        self._why_missing = "not recorded yet"
        self._next_ring_row = 0
        self._last: tuple[object, Dispatch] | None = None
        """(key, result) of the last lookup."""

    @property
    def num_waiting(self) -> int:
        """Recordings left for idle moments."""
        return len(self._waiting)

    @property
    def status(self) -> GraphStatus:
        num_recorded = len(self._replays) + len(self.pieces.recorded)
        return GraphStatus(num_recorded, num_recorded + self.num_waiting)

    def dispatch(self, plan: StepPlan, *, is_idle: bool = False) -> Dispatch:
        """is_idle: see `DraftSteps`."""
        sampling = variant_of(plan.sampling)
        most_drafts = int(plan.num_draft_tokens.max()) if plan.num_drafts else 0
        # Recordings keep the hidden states of each row's last token alone, and for sampling.
        reads = "log-probabilities of a prompt" if plan.prompt_spans else ""
        reads = reads or ("an embedding is computed" if plan.pooled else "")
        kind = (plan.num_rows, plan.total_tokens, sampling, reads, most_drafts, is_idle)
        if self._last is None or self._last[0] != kind:
            self._last = kind, self._dispatch(*kind)
        return self._last[1]

    def _dispatch(
        self,
        num_rows: int,
        num_tokens: int,
        sampling: SamplingVariant,
        reads: str,
        num_drafts: int,
        is_idle: bool,
    ) -> Dispatch:
        found = self.dispatcher.dispatch(
            num_rows=num_rows,
            num_tokens=num_tokens,
            sampling=sampling,
            num_drafts=num_drafts,
            is_idle=is_idle,
        )
        if found.mode is GraphMode.NONE:
            return found
        if reads:
            return Dispatch(GraphMode.NONE, reason=reads)
        if self._has(found):
            return found
        other = self._stand_in(found)
        return Dispatch(GraphMode.NONE, reason=self._why_missing) if other is None else other

    def draft_lengths(self, plan: StepPlan, lengths: Sequence[int]) -> Sequence[int]:
        """Those of these numbers of drafts that each row of a decode may have."""
        rows, sampling = plan.num_rows, variant_of(plan.sampling)
        if self.dispatcher.disabled_reason:  # every step runs as it comes
            return lengths
        return [
            k
            for k in lengths
            if self._dispatch(rows, rows * (1 + k), sampling, "", k, False).descriptor is not None
        ]

    def _has(self, found: Dispatch) -> bool:
        if found.descriptor is not None:
            return found.descriptor in self._replays
        return found.padded_tokens in self.pieces.recorded

    def _stand_in(self, found: Dispatch) -> Dispatch | None:
        """A larger recording to replace one that is not made yet."""
        if found.descriptor is not None:
            other = next_larger(found.descriptor, tuple(self._replays), most_padding=MOST_PADDING)
            return None if other is None else Dispatch(GraphMode.FULL, other, other.num_tokens)
        assert found.padded_tokens is not None
        least, most = found.padded_tokens, MOST_PADDING * found.padded_tokens
        size = min((n for n in self.pieces.recorded if least <= n <= most), default=None)
        if size is None:
            return None
        return Dispatch(GraphMode.PIECEWISE, padded_tokens=size, reason=found.reason)

    def record_all(self, recorder: Recorder, on_progress: Callable[[float], None]) -> None:
        """Make every recording, of each kind the largest first. No step may be in flight."""
        self._record([*self.pieces.sizes, *self.dispatcher.descriptors()], recorder, on_progress)

    def record_useful(self, recorder: Recorder, on_progress: Callable[[float], None]) -> None:
        """Make the recordings that most steps need; `record_next` makes the others."""
        first, later = split_by_use(self.dispatcher.descriptors())
        first_pieces, later_pieces = split_pieces_by_use(self.pieces.sizes)
        self._record([*first_pieces, *first], recorder, on_progress)
        self._waiting, self._recorder = deque([*later, *later_pieces]), recorder

    def record_next(self) -> bool:
        """Make one of the recordings that wait; False when none does. No step may be in flight.

        Steps run without those that cannot be made: requests must not fail for a saving of time.
        """
        if not self._waiting:
            return False
        assert self._recorder is not None
        self._last = None
        try:
            self._record([self._waiting[0]], self._recorder, lambda done: None)
        except (RecordingError, RuntimeError) as error:
            if is_out_of_memory(error):
                self._why_missing = "not recorded for lack of memory"
            elif isinstance(error, RecordingError):
                self._why_missing = f"cannot be recorded: {error}"
            else:
                raise
            logger.warning("%d CUDA graphs are not made: %s", len(self._waiting), error)
            self._waiting.clear()
        else:
            self._waiting.popleft()
        return True

    @torch.inference_mode()
    def _record(
        self,
        recordings: Sequence[Recording],
        recorder: Recorder,
        on_progress: Callable[[float], None],
    ) -> None:
        self.header.clear()  # while recording, all rows are padding
        self._last = None
        collects_garbage = gc.isenabled()
        gc.disable()  # freeing a tensor of another stream is not allowed while recording
        try:
            for i, recording in enumerate(recordings):
                on_progress(i / len(recordings))
                if isinstance(recording, int):
                    self.pieces.record(recording, recorder)
                else:
                    run = partial(self.run_padding, recording)
                    rehearsal = partial(self._rehearse, recording)
                    self._replays[recording] = recorder(Rehearsed(run, rehearsal))
                if self._check is not None:
                    self._check.note(recording)
        finally:
            if collects_garbage:
                gc.enable()
            # Recording ran the operations, or only seemed to: start the ring anew in either case.
            self.ring.restart()
            self._next_ring_row = 0

    def run_padding(self, descriptor: BatchDescriptor) -> None:
        """The operations of a recording. Their rows are those of the last upload, at first padding:
        run like this, a step computes for no request."""
        slots, num_tokens = self.header.rows(descriptor.num_rows)
        self._device_step(slots, num_tokens, descriptor, self.ring)

    def _rehearse(self, descriptor: BatchDescriptor) -> None:
        with self._rehearsing():
            self.run_padding(descriptor)

    def replay(self, descriptor: BatchDescriptor, plan: StepPlan) -> StepTensors | HostRows:
        """Run a recorded step. Returns where its results will be; see `pushed`."""
        if self._check is not None:
            self._check.check(descriptor)
        self.header.upload(plan, descriptor.num_rows)
        self._replays[descriptor]()
        return self.pushed(plan, descriptor.num_drafts)

    def pushed(self, plan: StepPlan, num_drafts: int = 0) -> StepTensors | HostRows:
        """What the last launched step pushes to the ring, valid for RING_SIZE steps: in host memory
        if mapped, else on the device. num_drafts: of each row, where all have as many."""
        row, ring, num_rows = self._next_ring_row, self.ring, plan.num_samples
        if num_drafts:
            num_rows = plan.num_rows * (1 + num_drafts)
        self._next_ring_row = (row + 1) % RING_SIZE
        most = plan.sampling.max_logprobs
        if ring.host is None:
            logprobs = None if most is None else ring.device_logprobs(row, num_rows, most)
            return StepTensors(ring.tokens[row, :num_rows], logprobs)
        kept = None if most is None else ring.host_logprobs(row, num_rows, most)
        drafts = ring.host_drafts[row, : plan.num_rows] if num_drafts else None
        return HostRows(ring.host[row, :num_rows], kept, drafts)

    def replay_pieces(self, size: int, plan: StepPlan) -> tuple[InputBatch, torch.Tensor]:
        """Run the model on a step; see `PiecewiseGraphs.replay`."""
        if self._check is not None:
            self._check.check(size)
        return self.pieces.replay(size, plan)


# The order of recordings. All share one memory pool, so the largest of each kind comes first: the
# pool then has its full size, and every later recording fits into it, whatever the order. With
# capture in the background serving waits only for the most useful sizes.


def split_by_use(
    descriptors: Sequence[BatchDescriptor],
) -> tuple[list[BatchDescriptor], list[BatchDescriptor]]:
    """(those to record before serving, those for idle moments), each in the order to make them."""
    largest: dict[Hashable, BatchDescriptor] = {}
    for descriptor in descriptors:
        kind = (
            descriptor.is_decode, descriptor.sampling, descriptor.num_drafts, descriptor.is_idle,
        )  # fmt: skip
        if kind not in largest or descriptor.num_tokens > largest[kind].num_tokens:
            largest[kind] = descriptor
    first = sorted(largest.values(), key=lambda d: (-d.num_tokens, -d.num_rows))
    others = [d for d in _by_use(descriptors) if d not in first]
    useful = [d for d in others if _is_useful(d)]
    return first + useful, [d for d in others if not _is_useful(d)]


def split_pieces_by_use(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same of recordings cut at attention. A power of two stands in for those down to its half,
    so the small ones serve all short steps."""
    ordered = sorted(sizes)
    small = [n for n in ordered[:-1] if n <= USEFUL_TOKENS and n & (n - 1) == 0]
    first = ordered[-1:] + small
    return first, [n for n in ordered if n not in first]


def _is_useful(descriptor: BatchDescriptor) -> bool:
    if descriptor.is_decode:
        return descriptor.num_rows <= USEFUL_DECODES
    return descriptor.num_tokens <= USEFUL_TOKENS


def _by_use(descriptors: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
    """Smallest first, as small batches are the most frequent."""
    return sorted(descriptors, key=lambda d: (d.num_tokens, not d.is_decode))


def next_larger(
    wanted: BatchDescriptor, recorded: Sequence[BatchDescriptor], *, most_padding: int
) -> BatchDescriptor | None:
    """The smallest recording that can stand in for one that is not made yet.

    A decode reads the weights whatever its size, so any size will do; a step with prompts costs
    its tokens, so not one of more than `most_padding` times as many.
    """
    fits = [
        d
        for d in recorded
        if (d.is_decode, d.sampling) == (wanted.is_decode, wanted.sampling)
        and (d.num_drafts, d.is_idle) == (wanted.num_drafts, wanted.is_idle)
        and d.num_tokens >= wanted.num_tokens
        and d.num_rows >= wanted.num_rows
        and (d.is_decode or d.num_tokens <= most_padding * wanted.num_tokens)
    ]
    return min(fits, key=lambda d: d.num_tokens, default=None)
