"""What the passes of drafters that are models have in common: which rows draw, what a pass over one
token of each reads, and where drafts go. Operations on tensors alone."""

from __future__ import annotations

import torch

from termgen.engine.device.attention.base import AttentionMetadata
from termgen.engine.device.attention.groups import GroupedAttention, by_group
from termgen.engine.device.drafting.base import DraftedBatch, DraftedRows


class DraftPasses:
    """The base of every `DraftModel`."""

    kept_layers: tuple[int, ...] = ()

    def __init__(
        self,
        attention: GroupedAttention,
        *,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """attention: of the target's layers and the drafter's."""
        self._attention = attention
        self._block_size = block_size
        self._tokens = torch.arange(max(max_rows, max_tokens) + 1, device=device)
        self._starts = self._tokens[: max_rows + 1].int()

    def slot_of_tokens(self, batch: DraftedBatch) -> torch.Tensor:
        """[T] int64 the slot of each token of a step."""
        ends = batch.metadata[0].query_start_loc[1:].long()
        row = torch.searchsorted(ends, self._tokens[: len(batch.positions)], right=True)
        return batch.slots[row.clamp_(max=len(batch.slots) - 1)]

    def draws(self, batch: DraftedBatch, rows: DraftedRows) -> torch.Tensor:
        """[B] bool: the rows that have drawn a token, and go on."""
        slots = batch.slots
        has_drawn = rows.num_computed[slots] == rows.total_len[slots] - 1
        return has_drawn & ~rows.finished[slots] & (batch.num_tokens > 0)

    def last_kept(self, batch: DraftedBatch, rows: DraftedRows) -> torch.Tensor:
        """[B] int64 the last of a step's tokens that stayed, by row."""
        starts = batch.metadata[0].query_start_loc.long()
        begin = starts[:-1].clamp(max=len(batch.positions) - 1)
        computed = rows.num_computed[batch.slots]
        last = begin + (computed - 1 - batch.positions[begin]).clamp_(min=0)
        return torch.minimum(last, (starts[1:] - 1).clamp_(min=0))

    def write(
        self,
        slots: torch.Tensor,  # [B] int64
        number: int,
        ids: torch.Tensor,  # [B]
        draws: torch.Tensor,  # [B] bool
        rows: DraftedRows,
    ) -> None:
        """Write the draft of that number of each row, where there is a place for it."""
        longest = rows.token_ids.shape[1]
        behind = rows.total_len[slots] + number
        places = behind.clamp(max=longest - 1)
        old = rows.token_ids[slots, places]
        is_written = draws & (behind < longest)
        rows.token_ids[slots, places] = torch.where(is_written, ids.to(old.dtype), old)

    def write_all(
        self,
        slots: torch.Tensor,  # [B] int64
        ids: torch.Tensor,  # [B, num_drafts]
        draws: torch.Tensor,  # [B] bool
        rows: DraftedRows,
    ) -> None:
        """Write all drafts of each row, where there are places for them."""
        total = rows.total_len[slots][:, None]
        behind = total + self._tokens[: ids.shape[1]]
        is_written = draws[:, None] & (behind < rows.token_ids.shape[1])
        # The others write the newest token again, so that what is written twice is the same.
        places = torch.where(is_written, behind, (total - 1).clamp_(min=0))
        of_rows = slots[:, None].expand_as(places)
        old = rows.token_ids[of_rows, places]
        rows.token_ids[of_rows, places] = torch.where(is_written, ids.to(old.dtype), old)

    def count(
        self, slots: torch.Tensor, num_drafts: int, draws: torch.Tensor, rows: DraftedRows
    ) -> None:
        """Note how many of so many drafts each row has."""
        room = rows.token_ids.shape[1] - rows.total_len[slots]
        rows.num_drafts[slots] = room.clamp_(0, num_drafts) * draws

    def one_each(
        self,
        slots: torch.Tensor,  # [B] int64
        positions: torch.Tensor,  # [B] int64
        is_live: torch.Tensor,  # [B] bool: others write to the null block
        rows: DraftedRows,
        max_seq_len: int,
    ) -> tuple[AttentionMetadata, ...]:
        """The metadata of a pass over one token of each row, by group; attention is prepared for
        it."""
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
        of_groups = by_group(metadata, tables, places)
        self._attention.prepare(of_groups)
        return of_groups
