"""The device's half of a drafter that guesses a block of tokens in one pass.

At the end of a step it takes up what the target made of the step's tokens as more context, and
passes over a block of each row: its newest token, and noise behind it. Each place of noise gives
the draft that would stand there. The block's own keys and values lie behind those of the context,
where the next step's context is written over them. A block ends early where a row has no KV blocks
for it, as at the end of what a request may have.

Attention knows of no tokens that see later ones. Here, all keys of a block are written before any
is read, so a query sees the whole of a sequence if it is said to be the last token of it: a block
is cut into rows of as many queries as attention takes at explicit positions, one where it takes
none, each of the block's whole length. That is what windows are counted from, so each of a block's
tokens sees as far back as its first one (`dflash_config` makes them longer).
"""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.engine.device.attention.base import AttentionMetadata, ForwardContext
from termgen.engine.device.attention.groups import GroupedAttention, by_group
from termgen.engine.device.drafting.base import DraftedBatch, DraftedRows, TargetStates
from termgen.engine.device.drafting.passes import DraftPasses


class BlockHead(Protocol):
    """The layers of a drafter, loaded."""

    kept_layers: tuple[int, ...]
    """See `DraftModel`."""

    attention: GroupedAttention
    """That prepares no more than its layers need."""

    def store(self, kept: list[torch.Tensor], positions: torch.Tensor, ctx: ForwardContext) -> None:
        """Write keys and values of the target's tokens."""

    def __call__(
        self,
        kept: list[torch.Tensor],  # each [T, hidden]
        input_ids: torch.Tensor,  # [M]: the tokens of blocks
        positions: torch.Tensor,  # [T + M] int64, those of the target's tokens first
        ctx: ForwardContext,
    ) -> torch.Tensor:
        """[N, hidden] states of the blocks' tokens that `ctx.wanted` names. ctx: its rows are of
        blocks, its slots are those of T + M tokens."""

    def guess(self, states: torch.Tensor) -> torch.Tensor:
        """[N] int64 the likeliest token at the place of each."""


class BlockDrafts(DraftPasses):
    """A `DraftModel`."""

    reads_states = True
    is_lookup = False

    def __init__(
        self,
        head: BlockHead,
        *,
        num_noised: int,
        mask_token_id: int,
        most_drafted: int,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """num_noised: tokens of the head's blocks, the first of which is none of noise.
        most_drafted: tokens of the largest step with drafts; no more are made for the rows of a
        step than fit in one."""
        queries = range(min(num_noised, head.attention.max_queries), 0, -1)
        self._queries = next(count for count in queries if num_noised % count == 0)
        super().__init__(
            head.attention,
            max_rows=max_rows * num_noised // self._queries,
            max_tokens=max_tokens,
            block_size=block_size,
            device=device,
        )
        self.head = head
        self.kept_layers = head.kept_layers
        self.num_ahead = self._num_noised = num_noised
        self._most_drafted = most_drafted
        self._places = torch.arange(num_noised, device=device)
        self._noise = torch.full((num_noised,), mask_token_id, device=device)

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
        num_drafts = min(num_drafts, self._most_drafted // len(slots) - 1)
        # A draft that did not stay is no context, and its place is one of the block.
        stays = batch.positions < rows.num_computed[self.slot_of_tokens(batch)]
        of_context = torch.stack([group.slot_mapping for group in batch.metadata]) * stays
        if num_drafts <= 0:
            metadata = by_group(batch.metadata[0], rows.block_tables[:, slots], of_context)
            ctx = ForwardContext(metadata, kv_caches)
            self.head.store(list(states.kept), batch.positions, ctx)
            self.count(slots, 0, draws, rows)
            return
        begins = rows.num_computed[slots]
        at = begins[:, None] + self._places  # [B, num_noised]
        metadata = self._blocks(slots, at, draws, rows, of_context, batch.metadata[0].max_seq_len)
        positions = torch.cat((batch.positions, at.flatten()))
        longest = rows.token_ids.shape[1]
        newest = rows.token_ids[slots, begins.clamp(max=longest - 1)].long()
        ids = torch.where(self._places == 0, newest[:, None], self._noise).flatten()
        first = self._tokens[: len(slots)] * self._num_noised
        wanted = (first[:, None] + self._places[1 : 1 + num_drafts]).flatten()
        ctx = ForwardContext(metadata, kv_caches, wanted)
        made = self.head(list(states.kept), ids, positions, ctx)
        self.write_all(slots, self.head.guess(made).view(len(slots), -1), draws, rows)
        self.count(slots, num_drafts, draws, rows)

    def _blocks(
        self,
        slots: torch.Tensor,  # [B] int64
        at: torch.Tensor,  # [B, num_noised] int64: the positions of their blocks
        draws: torch.Tensor,  # [B] bool: others write to the null block
        rows: DraftedRows,
        of_context: torch.Tensor,  # [groups, T] int64: slots of the step's tokens
        max_seq_len: int,
    ) -> tuple[AttentionMetadata, ...]:
        """The metadata of a pass over a block of each row, by group, behind the tokens of a step;
        attention is prepared for it."""
        size, longest, queries = self._block_size, rows.token_ids.shape[1], self._queries
        columns = (at // size).clamp_(max=rows.block_tables.shape[2] - 1)
        blocks = rows.block_tables[:, slots[:, None], columns].long()  # [groups, B, num_noised]
        is_there = ((blocks != 0).all(dim=0) & (at < longest)).cumprod(dim=1) * draws[:, None]
        of_blocks = (blocks * is_there) * size + at % size
        seq_lens = (at[:, 0] + is_there.sum(dim=1)) * is_there[:, 0]
        most = min(max_seq_len + self._num_noised, longest)
        parts = self._num_noised // queries
        tables = rows.block_tables[:, slots, : -(-most // size)].repeat_interleave(parts, dim=1)
        num_rows, num_tokens = len(slots) * parts, len(slots) * self._num_noised
        seq_lens = seq_lens.repeat_interleave(parts)
        ends = None
        if queries > 1:
            ends = (seq_lens - 1).clamp_(min=0).repeat_interleave(queries)
        metadata = AttentionMetadata(
            query_start_loc=self._starts[: num_rows + 1] * queries,
            seq_lens=seq_lens.int(),
            block_table=tables[0],
            slot_mapping=of_context[0],
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_decodes=num_rows if queries == 1 else 0,
            max_query_len=queries,
            max_seq_len=most,
            block_size=size,
            positions=ends,
        )
        places = torch.cat((of_context, of_blocks.flatten(1)), dim=1)
        of_groups = by_group(metadata, tables, places)
        self._attention.prepare(of_groups)
        return of_groups
