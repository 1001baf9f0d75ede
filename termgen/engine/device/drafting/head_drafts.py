"""The device's half of a drafter that is a head of its target.

A head guesses the token after next: at position p it takes up what the target made of token p, and
the embedding of token p + 1, and its guess is for p + 2. So at the end of a step it passes over the
step's tokens, each beside the one behind it, the newest of which the step has drawn. The last pass
of a row gives its first draft; every further one comes from a pass over the draft before it, with
the head's own states in the place of the target's. Keys and values of positions whose tokens did
not stay are written again by the step that computes them anew, as the target's are.

In blocks that another request continues, the last slot was made beside that other's next token. It
is left so: one slot of a block may make a draft worse, and no draft changes the text.
"""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.engine.device.attention.base import ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.drafting.base import DraftedBatch, DraftedRows, TargetStates
from termgen.engine.device.drafting.passes import DraftPasses


class Head(Protocol):
    """The layers of a drafter, loaded."""

    kept_layers: tuple[int, ...]
    """See `DraftModel`."""

    def begin(self, normed: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        """[T, hidden] the states it takes up of the target's tokens."""

    def __call__(
        self,
        input_ids: torch.Tensor,  # [T]
        positions: torch.Tensor,  # [T] int64
        states: torch.Tensor,  # [T, hidden]
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """[N, hidden] states of the tokens that `ctx.wanted` names."""

    def store(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """Write the keys and values of these tokens, and no more."""

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """[N] int64 the likeliest next token of each."""


class HeadDrafts(DraftPasses):
    """A `DraftModel`."""

    reads_states = True
    is_lookup = False

    def __init__(
        self,
        head: Head,
        attention: GroupedAttention,
        *,
        num_drafts: int,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """attention: of the target's layers and the head's."""
        super().__init__(
            attention,
            max_rows=max_rows,
            max_tokens=max_tokens,
            block_size=block_size,
            device=device,
        )
        self.head = head
        self.kept_layers = head.kept_layers
        self.num_ahead = num_drafts - 1

    def draft(
        self,
        batch: DraftedBatch,
        states: TargetStates,
        kv_caches: list[torch.Tensor],
        rows: DraftedRows,
        num_drafts: int,
    ) -> None:
        """See `DraftModel`."""
        slots, positions, first = batch.slots, batch.positions, batch.metadata[0]
        longest = rows.token_ids.shape[1]
        following = (positions + 1).clamp_(max=longest - 1)
        ids = rows.token_ids[self.slot_of_tokens(batch), following]

        computed, draws = rows.num_computed[slots], self.draws(batch, rows)
        last = self.last_kept(batch, rows)

        taken = self.head.begin(states.normed, list(states.kept))
        ctx = ForwardContext(batch.metadata, kv_caches, last)
        if not num_drafts:
            self.head.store(ids, positions, taken, ctx)
            self.count(slots, 0, draws, rows)
            return
        made = self.head(ids, positions, taken, ctx)
        for number in range(num_drafts):
            if number:
                at = (computed - 1 + number).clamp_(0, longest - 1)
                most = min(first.max_seq_len + number, longest)
                metadata = self.one_each(slots, at, draws, rows, most)
                made = self.head(ids, at, made, ForwardContext(metadata, kv_caches))
            ids = self.head.guess(made)
            self.write(slots, number, ids, draws, rows)
        self.count(slots, num_drafts, draws, rows)
