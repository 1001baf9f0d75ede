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

from termgen.engine.device.attention.base import AttentionMetadata, ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention, by_group
from termgen.engine.device.drafting.base import DraftedBatch, DraftedRows, TargetStates


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

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """[N] int64 the likeliest next token of each."""


class HeadDrafts:
    """A `DraftModel`."""

    reads_states = True

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
        self.head = head
        self.kept_layers = head.kept_layers
        self.num_ahead = num_drafts - 1
        self._attention = attention
        self._block_size = block_size
        self._tokens = torch.arange(max(max_rows, max_tokens) + 1, device=device)
        self._starts = self._tokens[: max_rows + 1].int()

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
        starts = first.query_start_loc.long()
        of_token = torch.searchsorted(starts[1:], self._tokens[: len(positions)], right=True)
        of_token.clamp_(max=len(slots) - 1)
        following = (positions + 1).clamp_(max=longest - 1)
        ids = rows.token_ids[slots[of_token], following]

        total, computed = rows.total_len[slots], rows.num_computed[slots]
        draws = (computed == total - 1) & ~rows.finished[slots] & (batch.num_tokens > 0)
        begin = starts[:-1].clamp(max=len(positions) - 1)
        # The last of the tokens that stayed, by row.
        last = begin + (computed - 1 - positions[begin]).clamp_(min=0)
        last = torch.minimum(last, (starts[1:] - 1).clamp_(min=0))

        taken = self.head.begin(states.normed, list(states.kept))
        ctx = ForwardContext(batch.metadata, kv_caches, last)
        made = self.head(ids, positions, taken, ctx)
        for number in range(num_drafts):
            if number:
                at = (computed - 1 + number).clamp_(0, longest - 1)
                most = min(first.max_seq_len + number, longest)
                metadata = self._one_each(slots, at, draws, rows, most)
                self._attention.prepare(metadata)
                made = self.head(ids, at, made, ForwardContext(metadata, kv_caches))
            ids = self.head.guess(made)
            behind = total + number
            places = behind.clamp(max=longest - 1)
            old = rows.token_ids[slots, places]
            is_written = draws & (behind < longest)
            rows.token_ids[slots, places] = torch.where(is_written, ids.to(old.dtype), old)
        rows.num_drafts[slots] = (longest - total).clamp_(0, num_drafts) * draws

    def _one_each(
        self,
        slots: torch.Tensor,  # [B] int64
        positions: torch.Tensor,  # [B] int64
        is_live: torch.Tensor,  # [B] bool: others write to the null block
        rows: DraftedRows,
        max_seq_len: int,
    ) -> tuple[AttentionMetadata, ...]:
        """The metadata of a pass over one token of each row, by group."""
        num_rows, size = len(slots), self._block_size
        blocks = rows.block_tables[:, slots, positions // size].long() * is_live
        tables = rows.block_tables[:, slots, : -(-max_seq_len // size)]
        places = blocks * size + positions % size
        metadata = AttentionMetadata(
            query_start_loc=self._starts[: num_rows + 1],
            seq_lens=(positions + 1).int(),
            block_table=tables[0],
            slot_mapping=places[0],
            num_rows=num_rows,
            num_tokens=num_rows,
            num_decodes=num_rows,
            max_query_len=1,
            max_seq_len=max_seq_len,
            block_size=size,
        )
        return by_group(metadata, tables, places)
