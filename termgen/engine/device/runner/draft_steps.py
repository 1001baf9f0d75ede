"""The two ends of a step whose rows have drafts, as a recording has it: as many tokens of each row,
and as many samples.

Skip on a first reading: a step that is not recorded has its rows' tokens side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from termgen.engine.device.drafting.acceptance import Samples
from termgen.engine.device.drafting.base import Drafter, TargetStates
from termgen.engine.device.recurrent.replay import take_up
from termgen.engine.device.runner.dispatch import MOST_DRAFTED_TOKENS, BatchDescriptor, variant_of
from termgen.engine.device.runner.input_batch import InputBatch, InputBuffers
from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling.token_ring import TokenRing
from termgen.vocabulary.step import SamplingNeeds, StepPlan
from termgen.vocabulary.token_mask import MOST_FORCED

if TYPE_CHECKING:
    from termgen.engine.device.kernels.sampling.fused import FusedSampler
    from termgen.engine.device.runner.cuda_graphs import FullGraphs


class DraftSteps:
    """A runner's drafter, and what the steps of its kind are.

    Where the host sees how many drafts a row has, a step computes just them. Else the step is even:
    each of its rows has places for as many.
    """

    def __init__(
        self, drafter: Drafter, max_num_batched_tokens: int, *, is_recurrent: bool = False
    ) -> None:
        """is_recurrent: a state can go back over no more tokens than the drafter guesses."""
        self.drafter = drafter
        is_fixed = is_recurrent or bool(drafter.lengths)
        self.most_forced = drafter.num_tokens if is_fixed else MOST_FORCED
        """Tokens that a grammar forces, of a row in a step, at most."""
        if is_recurrent and drafter.lengths:
            self.most_forced = 0  # such steps of a GPU have not been checked with them
        self.is_idle = False
        """True if no drafts are made behind the step that is launched."""
        self.most_even_tokens = 0
        """Tokens of the largest step that is even; 0 if none is."""
        if drafter.lengths:
            self.most_even_tokens = min(MOST_DRAFTED_TOKENS, max_num_batched_tokens)

    @property
    def reads_states(self) -> bool:
        """True if the drafter's model reads `TargetStates` of every token."""
        return self.drafter.model is not None and self.drafter.model.reads_states

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """See `ForwardContext`."""
        return () if self.drafter.model is None else self.drafter.model.kept_layers

    def states(self, normed: torch.Tensor, kept: list[torch.Tensor]) -> TargetStates:
        """What the drafter's model reads of a pass. A rehearsal runs fewer layers, and any states
        do for those that it leaves out."""
        missing = len(self.kept_layers) - len(kept)
        return TargetStates(normed, [*kept, *[normed] * missing])

    def most_samples(self, num_rows: int) -> int:
        """Samples of the largest step."""
        if self.most_even_tokens:
            return max(num_rows, self.most_even_tokens)
        return num_rows * (1 + max(self.drafter.num_tokens, self.most_forced))

    def is_even(self, plan: StepPlan) -> bool:
        return bool(self.most_even_tokens and plan.num_drafts)

    def cut(self, plan: StepPlan, state: RequestState, graphs: FullGraphs) -> StepPlan:
        """The plan with the drafts that its rows are to compute."""
        if plan.constrained is not None and self.most_forced:
            places = plan.num_draft_tokens[plan.constrained]
            rows = plan.constrained[places > 0]
            state.masks.take_forced(plan.slots[rows], places[places > 0], state)
        lengths: Sequence[int] = ()
        if self.most_even_tokens and plan.is_decode:
            most = self.most_even_tokens // plan.num_rows - 1
            fitting = [k for k in self.drafter.lengths if k <= most]
            lengths = graphs.draft_lengths(plan, fitting)
        plan = plan.with_drafts(self.drafter.places(plan, state, lengths))
        self.is_idle = self.drafter.is_idle and plan.is_decode
        return plan

    def draft(
        self,
        batch: InputBatch,
        states: TargetStates,
        kv_caches: list[torch.Tensor],
        state: RequestState,
        *,
        is_idle: bool,
    ) -> None:
        """Run the drafter's model, if it has one, behind a step whose rows have their tokens.
        is_idle: it makes no drafts."""
        if self.drafter.model is not None:
            num_drafts = 0 if is_idle else self.drafter.num_wanted
            self.drafter.model.draft(batch, states, kv_caches, state, num_drafts)


def prepare_even(
    buffers: InputBuffers,
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64: from 1 to num_queries, or 0 for a padded row
    state: RequestState,
    *,
    num_queries: int,
    max_seq_len: int,
    by_kernels: bool,
) -> InputBatch:
    """Inputs of a step with up to `num_queries` tokens of each row. by_kernels: attention can take
    `AttentionMetadata.positions`. Else the tokens in use come first, as in any step with prompts,
    and the padding behind them all."""
    if by_kernels:
        return _prepare_with_kernel(buffers, slots, num_tokens, state, num_queries, max_seq_len)
    total = slots.shape[0] * num_queries
    batch = buffers.prepare_ragged(
        slots,
        num_tokens,
        state,
        total=total,
        num_decodes=0,
        max_query_len=num_queries,
        max_seq_len=max_seq_len,
    )
    rows = buffers.arange[:total] // num_queries
    places = buffers.arange[:total] - rows * num_queries
    last = (num_tokens - 1).clamp_(min=0)[rows]
    first = (num_tokens.cumsum(0) - num_tokens)[rows]
    batch.logits_indices = (first + torch.minimum(places, last)).clamp_(max=total - 1)
    return batch


def _prepare_with_kernel(
    buffers: InputBuffers,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    state: RequestState,
    num_queries: int,
    max_seq_len: int,
) -> InputBatch:
    """Fast path: the same in one kernel, each row's tokens in places of their own."""
    from termgen.engine.device.kernels.drafting.row_ends import prepare_even as launch

    num_rows = slots.shape[0]
    total = num_rows * num_queries
    input_ids, positions = buffers.input_ids[:total], buffers.positions[:total]
    block_tables = buffers.tables(state)[:, :num_rows]
    launch(
        slots,
        num_tokens,
        state,
        num_queries=num_queries,
        block_size=buffers.block_size,
        input_ids=input_ids,
        positions=positions,
        slot_mappings=buffers.slot_mappings[:, :total],
        seq_lens=buffers.seq_lens[:num_rows],
        query_start_loc=buffers.query_start_loc[: num_rows + 1],
        block_tables=block_tables,
    )
    metadata = buffers.metadata(
        block_tables[:, :, : -(-max_seq_len // buffers.block_size)],
        num_rows=num_rows,
        num_tokens=total,
        num_decodes=0,
        max_query_len=num_queries,
        max_seq_len=max_seq_len,
        positions=positions,
    )
    recurrent = None
    if buffers.is_recurrent:
        recurrent = take_up(slots, num_tokens, state, metadata[0], is_even=True)
    return InputBatch(slots, num_tokens, input_ids, positions, None, metadata, recurrent)


def even_descriptor(plan: StepPlan) -> BatchDescriptor:
    """What a recording of just this step would be."""
    rows, drafts = plan.num_rows, int(plan.num_draft_tokens.max())
    return BatchDescriptor(rows * (1 + drafts), rows, True, variant_of(plan.sampling), drafts)


def even_samples(
    batch: InputBatch, state: RequestState, num_drafts: int
) -> tuple[torch.Tensor, Samples]:
    """Tokens of each row, drafts that are none left out, and the layout of its samples."""
    drafts = torch.minimum(state.num_drafts[batch.slots], (batch.num_tokens - 1).clamp(min=0))
    return batch.num_tokens.clamp(max=1) + drafts, Samples.even(drafts, num_drafts)


def sample_even(
    sampler: FusedSampler,
    batch: InputBatch,
    logits: torch.Tensor,  # [B * (1 + num_drafts), V]
    state: RequestState,
    needs: SamplingNeeds,
    ring: TokenRing,
    num_drafts: int,
) -> None:
    """Draw behind every draft, and keep what equals it, in a few kernels."""
    from termgen.engine.device.kernels.drafting.row_ends import keep_drawn

    slots, num_tokens, queries = batch.slots, batch.num_tokens, 1 + num_drafts
    if needs.grammar:
        num_tokens = state.await_masks(slots, num_tokens, is_even=True)
    ids, _ = sampler(logits, slots, num_tokens, state, needs, ring, num_samples=queries)
    counts = not needs.is_plain  # which compiles fewer kernels than all cases
    keep_drawn(slots, num_tokens, ids, state, num_queries=queries, has_penalties=counts, ring=ring)
