"""The device's half of a drafter that reads the target's own keys and values, and stores none.

It drafts for a row from the place of its newest token, whose keys the target has yet to make: every
pass of a step is at that place, and sees the tokens before it. What a pass knows of the drafts
ahead of it is in its state alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.drafting.base import DraftedBatch, DraftedRows, TargetStates
from termgen.engine.device.drafting.passes import DraftPasses


class Assistant(Protocol):
    """The layers of a drafter, loaded."""

    attention: GroupedAttention
    """Its own, over the target's groups."""

    def __call__(
        self,
        input_ids: torch.Tensor,  # [B]
        positions: torch.Tensor,  # [B] int64
        states: torch.Tensor,  # [B, hidden of the target]
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """[B, hidden]"""

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """[B] int64 the likeliest next token of each."""

    def next_states(self, states: torch.Tensor) -> torch.Tensor:
        """[B, hidden of the target]: what a further draft begins with."""


class AssistantDrafts(DraftPasses):
    """A `DraftModel`."""

    reads_states = True
    is_lookup = False
    num_ahead = 0

    def __init__(
        self,
        head: Assistant,
        *,
        most_drafted: int,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """most_drafted: see `BlockDrafts`."""
        super().__init__(
            head.attention,
            max_rows=max_rows,
            max_tokens=max_tokens,
            block_size=block_size,
            device=device,
        )
        self.head = head
        self._most_drafted = most_drafted

    def draft(
        self,
        batch: DraftedBatch,
        states: TargetStates,
        kv_caches: list[torch.Tensor],
        rows: DraftedRows,
        num_drafts: int,
    ) -> None:
        """See `DraftModel`."""
        slots, draws = batch.slots, self.draws(batch, rows)
        num_drafts = max(0, min(num_drafts, self._most_drafted // len(slots) - 1))
        if num_drafts:
            longest = rows.token_ids.shape[1]
            place = rows.num_computed[slots].clamp(max=longest - 1)
            seen = (place - 1).clamp_(min=0)
            metadata = self.one_each(slots, seen, draws, rows, batch.metadata[0].max_seq_len)
            ctx = ForwardContext(metadata, kv_caches)
            ids, begun = rows.token_ids[slots, place], states.normed[self.last_kept(batch, rows)]
            for number in range(num_drafts):
                made = self.head(ids, place, begun, ctx)
                ids = self.head.guess(made)
                self.write(slots, number, ids, draws, rows)
                if number < num_drafts - 1:
                    begun = self.head.next_states(made)
        self.count(slots, num_drafts, draws, rows)
