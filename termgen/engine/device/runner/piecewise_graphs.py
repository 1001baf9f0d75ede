"""Piecewise graphs: recordings of steps cut at attention, which depend on the token count alone.

Skip on a first reading: a replayed step computes what `ModelRunner` launches op by op.

For each size (a number of tokens) there is one graph for the inputs, one for the model up to the
first attention, one between each two attentions, and one for the end up to each row's hidden state.
Attention runs eagerly between them, with the step's own rows and lengths; logits and sampling after
them. So any rows and any sampling fit, and only tokens are padded.

Tensors shared by eager operations and graphs (queries, attention's results, hidden states) are in
buffers of the largest size, of which smaller sizes use the front. All other results of a piece are
in the recorder's pool, where later pieces reuse the memory. That is sound because the pieces of a
size are replayed in the order of recording, and two sizes never at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import cast

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.config.model_config import ModelConfig
from termgen.engine.device.models.pieces import Carried, PiecewiseModel
from termgen.engine.device.runner.input_batch import InputBatch, InputBuffers, RowHeader
from termgen.engine.device.runner.request_state import RequestState
from termgen.vocabulary.step import StepPlan

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Records operations; returns a function that replays them on the same memory."""


class PiecewiseGraphs:
    """One list of recorded pieces per token count."""

    def __init__(
        self,
        model: object,
        attention: GroupedAttention,
        kv_caches: list[torch.Tensor],
        *,
        config: ModelConfig,
        buffers: InputBuffers,
        state: RequestState,
        header: RowHeader,
        sizes: Sequence[int],
        max_num_seqs: int,
        dtype: torch.dtype,
    ) -> None:
        """model: must be a `PiecewiseModel` where there are sizes."""
        assert not sizes or isinstance(model, PiecewiseModel), type(model)
        self.sizes = tuple(sorted(sizes, reverse=True))
        """Largest first, the order in which to record them."""
        self.model = cast(PiecewiseModel, model)
        self.attention = attention
        self.kv_caches = kv_caches
        self.buffers = buffers
        self.state = state
        self.header = header
        self._max_num_seqs = max_num_seqs
        self._replays: dict[int, list[Callable[[], None]]] = {}
        most = max(self.sizes, default=0)
        most_rows = self.max_rows(most)
        self._num_heads = config.num_heads
        largest = max(config.kv_heads(layer)[1] for layer in range(config.num_layers))
        numbers = most * config.num_heads * largest
        self.q, self.attended = (
            torch.zeros(numbers, dtype=dtype, device=state.device) for _ in range(2)
        )
        self.last_tokens = torch.zeros(most_rows, dtype=torch.int64, device=state.device)
        """[B]: index of each row's last token."""
        shape = (most_rows, config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=dtype, device=state.device)
        """[B, hidden]: the normed hidden state of each row's last token."""

    @property
    def recorded(self) -> tuple[int, ...]:
        """The sizes recorded so far."""
        return tuple(self._replays)

    def heads(self, memory: torch.Tensor, index: int, num_tokens: int) -> torch.Tensor:
        """The queries of an attention, or its results, in `q` or `attended`:
        [T, num_heads, head_dim]."""
        shape = num_tokens, self._num_heads, self.model.head_dim(index)
        return memory[: math.prod(shape)].view(shape)

    def max_rows(self, size: int) -> int:
        """Rows of the recordings of a size: as many as possible."""
        return min(size, self._max_num_seqs)

    def record(self, size: int, recorder: Recorder) -> None:
        """Record all pieces of a size, with padding rows only."""
        forward = _RecordedForward(self, size)
        pieces: list[Callable[[], None]] = [forward.inputs, forward.first]
        pieces += [partial(forward.next, i) for i in range(self.model.num_attentions - 1)]
        pieces.append(forward.last)
        replays = []
        for piece in pieces:
            replay = recorder(piece)
            replay()  # so that the next piece gets computed values instead of garbage
            replays.append(replay)
        self._replays[size] = replays

    def replay(self, size: int, plan: StepPlan) -> tuple[InputBatch, torch.Tensor]:
        """Run the model on a step. Returns its inputs, and the hidden states [B, hidden] of its
        rows' last tokens, which the next replay overwrites."""
        self.header.upload(plan, self.max_rows(size))
        inputs, first, *others = self._replays[size]
        inputs()
        batch = self._batch(plan)
        # Attention may read its plan before the preceding kernel has ended (`kernels.launch`), so
        # the plan is made one graph earlier.
        self.attention.prepare(batch.metadata)
        first()
        context = ForwardContext(batch.metadata, self.kv_caches)
        num_tokens = plan.total_tokens
        for index, piece in enumerate(others):
            q, attended = (self.heads(all_, index, num_tokens) for all_ in (self.q, self.attended))
            self.model.attend(index, q, context, out=attended)
            piece()
        return batch, self.hidden[: plan.num_rows]

    def _batch(self, plan: StepPlan) -> InputBatch:
        """The inputs without padding, as they have just been computed."""
        num_rows, num_tokens, buffers = plan.num_rows, plan.total_tokens, self.buffers
        slots, counts = self.header.rows(num_rows)
        max_seq_len = int((plan.num_computed + plan.num_tokens).max())
        num_blocks = -(-max_seq_len // buffers.block_size)
        metadata = buffers.metadata(
            self.state.block_tables[:, slots, :num_blocks],
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_decodes=plan.num_single_rows,
            max_query_len=int(plan.num_tokens.max()),
            max_seq_len=max_seq_len,
        )
        ids, positions = buffers.input_ids[:num_tokens], buffers.positions[:num_tokens]
        return InputBatch(slots, counts, ids, positions, self.last_tokens[:num_rows], metadata)


class _RecordedForward:
    """The pieces of one size during recording. It is dropped afterwards, with the tensors passed
    from piece to piece, so that smaller sizes reuse their memory."""

    def __init__(self, graphs: PiecewiseGraphs, size: int) -> None:
        self._graphs = graphs
        self._size = size
        self._num_rows = graphs.max_rows(size)
        self._batch: InputBatch | None = None
        self._context: ForwardContext | None = None
        self._carried: Carried | None = None
        self._before: Carried | None = None
        self._piece = -1

    def _go_on(self, piece: int) -> Carried:
        """The pass as the piece before this one left it: a copy, as a recorder runs a piece twice,
        and each piece changes what it gets."""
        if piece != self._piece:
            self._piece, self._before = piece, self._carried
        assert self._before is not None
        self._carried = copy(self._before)
        return self._carried

    def inputs(self) -> None:
        graphs, num_rows = self._graphs, self._num_rows
        slots, num_tokens = graphs.header.rows(num_rows)
        batch = graphs.buffers.prepare_ragged(
            slots,
            num_tokens,
            graphs.state,
            total=self._size,
            num_decodes=None,
            max_query_len=self._size,
            max_seq_len=0,  # block ids are for attention, which takes those of the step
        )
        assert batch.logits_indices is not None
        graphs.last_tokens[:num_rows].copy_(batch.logits_indices)
        self._batch = batch
        self._context = ForwardContext(batch.metadata, graphs.kv_caches)

    def first(self) -> None:
        assert self._batch is not None and self._context is not None
        ids, positions = self._batch.input_ids, self._batch.positions
        q = self._graphs.heads(self._graphs.q, 0, self._size)
        self._piece = 0
        self._carried, _ = self._graphs.model.first_piece(ids, positions, self._context, q=q)

    def next(self, index: int) -> None:
        assert self._context is not None
        graphs, carried = self._graphs, self._go_on(index + 1)
        attended = graphs.heads(graphs.attended, index, self._size)
        q = graphs.heads(graphs.q, index + 1, self._size)
        graphs.model.next_piece(index, attended, carried, self._context, q=q)

    def last(self) -> None:
        graphs, num_rows = self._graphs, self._num_rows
        wanted = graphs.last_tokens[:num_rows]
        num_attentions = graphs.model.num_attentions
        attended = graphs.heads(graphs.attended, num_attentions - 1, self._size)
        hidden = graphs.model.last_piece(attended, self._go_on(num_attentions), wanted)
        graphs.hidden[:num_rows].copy_(hidden)
