"""The device's half of a drafter that is a whole model of the target's vocabulary.

At the end of a step it passes over the step's tokens, so that it has seen what the target has, and
then over each row's newest token, which gives the first draft, and over every draft but the last.
"""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.drafting.base import DraftedBatch, DraftedRows, TargetStates
from termgen.engine.device.drafting.passes import DraftPasses


class SmallModel(Protocol):
    """A loaded model."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """[N, hidden] states of the tokens that `ctx.wanted` names."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, vocab_size]"""


class SmallModelDrafts(DraftPasses):
    """A `DraftModel`."""

    reads_states = False
    is_lookup = False

    def __init__(
        self,
        model: SmallModel,
        attention: GroupedAttention,
        *,
        num_drafts: int,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(
            attention,
            max_rows=max_rows,
            max_tokens=max_tokens,
            block_size=block_size,
            device=device,
        )
        self.model = model
        self.num_ahead = num_drafts

    def draft(
        self,
        batch: DraftedBatch,
        states: TargetStates,
        kv_caches: list[torch.Tensor],
        rows: DraftedRows,
        num_drafts: int,
    ) -> None:
        """See `DraftModel`. The target's states are of no use to it."""
        slots, positions, first = batch.slots, batch.positions, batch.metadata[0]
        longest = rows.token_ids.shape[1]
        ids = rows.token_ids[self.slot_of_tokens(batch), positions]
        computed, draws = rows.num_computed[slots], self.draws(batch, rows)
        last = (first.query_start_loc[1:].long() - 1).clamp_(min=0)
        self.model(ids, positions, ForwardContext(batch.metadata, kv_caches, last))
        ids = rows.token_ids[slots, computed.clamp(max=longest - 1)]
        for number in range(num_drafts):
            at = (computed + number).clamp_(max=longest - 1)
            most = min(first.max_seq_len + number + 1, longest)
            metadata = self.one_each(slots, at, draws, rows, most)
            hidden = self.model(ids, at, ForwardContext(metadata, kv_caches))
            ids = self.model.compute_logits(hidden).argmax(dim=1)
            self.write(slots, number, ids, draws, rows)
        self.count(slots, num_drafts, draws, rows)
