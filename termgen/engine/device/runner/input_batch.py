"""Builds a step's input tensors from its plan and the device's rows.

Everything that depends on token counts known only to the device (ids, positions, lengths, where
KV goes) is computed on the device from its own rows. Buffers are allocated once; a step uses
leading slices of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from termgen.engine.device.attention.base import AttentionMetadata
from termgen.engine.device.attention.groups import by_group
from termgen.engine.device.drafting.acceptance import Samples
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.recurrent.base import RecurrentMetadata
from termgen.engine.device.recurrent.replay import take_up
from termgen.engine.device.runner.request_state import RequestState
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan


@dataclass(slots=True)
class InputBatch:
    """One step's inputs: B rows, T tokens."""

    slots: torch.Tensor  # [B] int64
    num_tokens: torch.Tensor  # [B] int64
    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    logits_indices: torch.Tensor | None
    """[S] int64, the tokens behind which one is drawn; None for all."""
    metadata: tuple[AttentionMetadata, ...]
    """One for each group of layers."""
    recurrent: RecurrentMetadata | None = None
    """For models with recurrent layers."""
    samples: Samples | None = None
    """Where rows have drafts; else S is B, the last token of each row."""

    def sampled(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [S, ...]: the values of the tokens behind which one is drawn."""
        return values if self.logits_indices is None else values[self.logits_indices]


class InputBuffers:
    """Persistent buffers and the computation that fills them."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        is_recurrent: bool = False,
    ) -> None:
        self.is_recurrent = is_recurrent
        self.block_size = block_size
        self.fused = not why_unusable(device)
        """True if one kernel replaces many torch operations."""
        # [groups, rows, max_blocks], where it is used
        self._block_tables: torch.Tensor | None = None

        def buffer(size: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.input_ids = buffer(max_num_tokens, torch.int32)
        self.positions = buffer(max_num_tokens, torch.int64)
        self.slot_mappings = buffer((num_groups, max_num_tokens), torch.int64)
        self.query_start_loc = buffer(max_num_seqs + 1, torch.int32)
        self.seq_lens = buffer(max_num_seqs, torch.int32)
        self.arange = torch.arange(max(max_num_tokens, max_num_seqs) + 1, device=device)

    def prepare(self, plan: StepPlan, state: RequestState) -> InputBatch:
        """Compute a step's inputs on the device, without any copy to the host."""
        header = state.upload(np.stack((plan.slots, plan.num_tokens)).astype(np.int64))
        slots, num_tokens = header[0], header[1]
        max_seq_len = int((plan.num_computed + plan.num_tokens).max())
        if plan.total_tokens == plan.num_rows:
            return self.prepare_decode(slots, num_tokens, state, max_seq_len=max_seq_len)
        batch = self.prepare_ragged(
            slots,
            num_tokens,
            state,
            total=plan.total_tokens,
            num_decodes=plan.num_single_rows,
            max_query_len=int(plan.num_tokens.max()),
            max_seq_len=max_seq_len,
        )
        if plan.num_drafts:
            samples = batch.samples = Samples.of_plan(plan, slots.device)
            firsts = num_tokens.cumsum(0) - 1 - samples.drafts
            batch.logits_indices = firsts[samples.rows] + samples.places
        return batch

    def prepare_ragged(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64, 0 for a padded row
        state: RequestState,
        *,
        total: int,
        num_decodes: int | None,
        max_query_len: int,
        max_seq_len: int,
    ) -> InputBatch:
        """Inputs of a step with any number of tokens per row, padded rows and tokens included.

        total: at least the sum of num_tokens; the rest is padding. num_decodes: None if only the
        device knows. Everything else is read from device memory.
        """
        num_rows = slots.shape[0]
        ends = num_tokens.cumsum(0)
        query_start_loc = self.query_start_loc[: num_rows + 1]
        query_start_loc[1:].copy_(ends)
        computed = state.num_computed[slots]
        seq_lens = self.seq_lens[:num_rows]
        seq_lens.copy_((computed + num_tokens) * (num_tokens > 0))
        tokens = self.arange[:total]
        row = torch.searchsorted(ends, tokens, right=True)
        is_live = row < num_rows
        row.clamp_(max=num_rows - 1)
        positions = self.positions[:total]
        positions.copy_(((computed - ends + num_tokens)[row] + tokens) * is_live)
        token_slots = slots[row].masked_fill_(~is_live, state.pad_row)
        input_ids = self._fill_tokens(token_slots, positions, state)
        metadata = self.metadata(
            state.block_tables[:, slots, : self._num_blocks(max_seq_len)],
            num_rows=num_rows,
            num_tokens=total,
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        last = (ends - 1).clamp_(min=0)
        recurrent = None
        if self.is_recurrent:
            recurrent = take_up(slots, num_tokens, state, metadata[0])
        return InputBatch(slots, num_tokens, input_ids, positions, last, metadata, recurrent)

    def prepare_decode(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64: 1, or 0 for a padded row
        state: RequestState,
        *,
        max_seq_len: int,
    ) -> InputBatch:
        """Inputs of a step with one token per row, padded rows included.

        Everything that varies from step to step is read from device memory, so that these
        operations can be recorded.
        """
        num_rows = slots.shape[0]
        num_blocks = self._num_blocks(max_seq_len)
        fill = self._fill_fused if self.fused else self._fill_with_torch
        metadata = self.metadata(
            fill(slots, num_tokens, state, num_blocks),
            num_rows=num_rows,
            num_tokens=num_rows,
            num_decodes=num_rows,
            max_query_len=1,
            max_seq_len=max_seq_len,
        )
        return InputBatch(
            slots,
            num_tokens,
            self.input_ids[:num_rows],
            self.positions[:num_rows],
            None,
            metadata,
            take_up(slots, num_tokens, state, metadata[0]) if self.is_recurrent else None,
        )

    def metadata(
        self,
        block_tables: torch.Tensor,  # [groups, B, max_blocks]
        *,
        num_rows: int,
        num_tokens: int,
        num_decodes: int | None,
        max_query_len: int,
        max_seq_len: int,
        positions: torch.Tensor | None = None,
    ) -> tuple[AttentionMetadata, ...]:
        """The metadata of each group, over the buffers as they are filled now."""
        slot_mappings = self.slot_mappings[:, :num_tokens]
        metadata = AttentionMetadata(
            query_start_loc=self.query_start_loc[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            block_table=block_tables[0],
            slot_mapping=slot_mappings[0],
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_size=self.block_size,
            positions=positions,
        )
        return by_group(metadata, block_tables, slot_mappings)

    def _fill_with_torch(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        state: RequestState,
        num_blocks: int,
    ) -> torch.Tensor:
        """Fill the buffers for one token per row; returns the rows' block ids
        [groups, B, num_blocks]."""
        num_rows = len(slots)
        positions = self.positions[:num_rows]
        positions.copy_(state.num_computed[slots])
        self._fill_tokens(slots, positions, state)
        self.seq_lens[:num_rows].copy_((positions + 1) * num_tokens)
        self.query_start_loc[: num_rows + 1].copy_(self.arange[: num_rows + 1])
        return state.block_tables[:, slots, :num_blocks]

    def _fill_fused(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        state: RequestState,
        num_blocks: int,
    ) -> torch.Tensor:
        """Fast path, skip on a first reading: the same in one kernel, which leaves out block ids
        beyond a row's length."""
        from termgen.engine.device.kernels.rows.step_ends import prepare_decode

        num_rows = len(slots)
        block_tables = self.tables(state)[:, :num_rows]
        prepare_decode(
            slots,
            num_tokens,
            num_computed=state.num_computed,
            finished=state.finished,
            token_ids=state.token_ids,
            state_tables=state.block_tables,
            block_size=self.block_size,
            input_ids=self.input_ids[:num_rows],
            positions=self.positions[:num_rows],
            slot_mappings=self.slot_mappings[:, :num_rows],
            seq_lens=self.seq_lens[:num_rows],
            query_start_loc=self.query_start_loc[: num_rows + 1],
            block_tables=block_tables,
        )
        return block_tables[:, :, :num_blocks]

    def tables(self, state: RequestState) -> torch.Tensor:
        """[groups, rows, max_blocks] block ids, for kernels that copy what they need."""
        if self._block_tables is None:
            num_groups, _, width = state.block_tables.shape
            shape = (num_groups, len(self.seq_lens), width)
            self._block_tables = torch.zeros(shape, dtype=torch.int32, device=state.device)
        return self._block_tables

    def _fill_tokens(
        self,
        slots: torch.Tensor,  # [T] int64, the slot of each token
        positions: torch.Tensor,  # [T] int64
        state: RequestState,
    ) -> torch.Tensor:
        """Token ids [T]; fills in where their KV goes, by group."""
        input_ids = self.input_ids[: len(slots)]
        input_ids.copy_(state.token_ids[slots, positions])
        block = state.block_tables[:, slots, positions // self.block_size].long()
        # A row that stopped on the device may still be in a plan made before the host knew:
        # it writes to the null block. So do padded rows.
        block *= ~state.finished[slots]
        slot_mappings = self.slot_mappings[:, : len(slots)]
        torch.add(block * self.block_size, positions % self.block_size, out=slot_mappings)
        return input_ids

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class RowHeader:
    """The slots of a recorded step and their token counts: its only input from the host.

    Row i is slot `tensor[0, i]` and `tensor[1, i]` tokens; the rest is padding. Every recording
    reads this one buffer. It is sent only when the rows changed: a replay of the same rows uploads
    nothing. Skip on a first reading: only recorded steps have one.
    """

    def __init__(self, size: int, *, pad_row: int, device: torch.device) -> None:
        """size: the most rows of any recording; pad_row: the slot that no request has."""
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
