"""From a plan and the device's rows to the tensors one step computes on.

Everything that depends on token counts known only to the device (ids, positions, lengths, where
KV goes) is computed on the device from its own rows. Buffers are allocated once; a step uses
leading slices of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from termgen.engine.attention.base import AttentionMetadata
from termgen.engine.runner.request_state import RequestState
from termgen.engine.step import StepPlan


@dataclass(slots=True)
class InputBatch:
    """One step's inputs: B rows, T tokens."""

    slots: torch.Tensor  # [B] int64
    num_tokens: torch.Tensor  # [B] int64
    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    logits_indices: torch.Tensor  # [B] int64, each row's last token
    metadata: AttentionMetadata


class InputBuffers:
    """Persistent buffers and the computation that fills them."""

    def __init__(
        self, *, max_num_tokens: int, max_num_seqs: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size

        def buffer(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.input_ids = buffer(max_num_tokens, torch.int32)
        self.positions = buffer(max_num_tokens, torch.int64)
        self.slot_mapping = buffer(max_num_tokens, torch.int64)
        self.query_start_loc = buffer(max_num_seqs + 1, torch.int32)
        self.seq_lens = buffer(max_num_seqs, torch.int32)
        self.arange = torch.arange(max(max_num_tokens, max_num_seqs + 1), device=device)

    def prepare(self, plan: StepPlan, state: RequestState) -> InputBatch:
        """Compute the step's inputs on the device. No value comes back to the host."""
        num_rows, total = plan.num_rows, plan.total_tokens
        header = state.upload(np.stack((plan.slots, plan.num_tokens)).astype(np.int64))
        slots, num_tokens = header[0], header[1]
        query_start_loc = self.query_start_loc[: num_rows + 1]
        torch.cumsum(num_tokens, 0, dtype=torch.int32, out=query_start_loc[1:])
        ends = query_start_loc[1:].long()
        computed = state.num_computed[slots]
        seq_lens = self.seq_lens[:num_rows]
        seq_lens.copy_(computed + num_tokens)

        positions = self.positions[:total]
        if total == num_rows:  # every row computes one token
            token_slots = slots
            positions.copy_(computed)
        else:
            row = torch.repeat_interleave(self.arange[:num_rows], num_tokens, output_size=total)
            token_slots = slots[row]
            positions.copy_((computed - ends + num_tokens)[row] + self.arange[:total])
        input_ids = self.input_ids[:total]
        input_ids.copy_(state.token_ids[token_slots, positions])
        block = state.block_table[token_slots, positions // self.block_size].long()
        # A row that stopped on the device may still be in a plan made before the host knew:
        # it writes to the null block.
        block *= ~state.finished[token_slots]
        slot_mapping = self.slot_mapping[:total]
        torch.add(block * self.block_size, positions % self.block_size, out=slot_mapping)

        max_seq_len = int((plan.num_computed + plan.num_tokens).max())
        max_blocks = -(-max_seq_len // self.block_size)
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=state.block_table[slots, :max_blocks],
            slot_mapping=slot_mapping,
            num_rows=num_rows,
            num_tokens=total,
            num_decodes=int(np.count_nonzero(plan.num_tokens == 1)),
            max_query_len=int(plan.num_tokens.max()),
            max_seq_len=max_seq_len,
            block_size=self.block_size,
        )
        return InputBatch(slots, num_tokens, input_ids, positions, ends - 1, metadata)
