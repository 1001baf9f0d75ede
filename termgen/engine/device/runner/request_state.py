"""Permanent rows of per-request state on the device, indexed by slot.

Rows change only through operations on the one compute stream, so their order is the stream's
order: a step launched later sees what every earlier step wrote, and the host need not wait.
Row `max_num_seqs` belongs to no request; padded batch rows point to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import numpy as np
import torch

from termgen.engine.device.drafting.acceptance import Samples, count_drafts
from termgen.engine.device.kernels import why_unusable
from termgen.engine.device.sampling.logit_edits import LogitEditTables, edit_logits
from termgen.engine.device.sampling.logprobs import LogprobTensors
from termgen.engine.device.sampling.metadata import (
    COUNT_MASK,
    HAS_EDITS,
    HAS_GRAMMAR,
    HAS_PENALTIES,
    PROMPT_BIT,
    SamplingMetadata,
)
from termgen.engine.device.sampling.penalties import Penalties
from termgen.engine.device.sampling.posted_masks import PostedMasks
from termgen.engine.device.sampling.token_ring import TokenRing
from termgen.engine.device.sampling.top_k_top_p import Cuts
from termgen.vocabulary.sampling_params import (
    COLUMNS,
    CUTS,
    MAX_STOP_TOKEN_IDS,
    PENALTIES,
    TABLE,
)
from termgen.vocabulary.step import AddedRow, SamplingNeeds, StepPlan

REALS = tuple(name for name, row in COLUMNS.items() if row.column == "float32")
COUNTS = tuple(name for name, row in COLUMNS.items() if row.column == "int32")
"""Columns of sampling parameters that are uploaded together."""
_TEMPERATURE = REALS.index("temperature")
_reals_of = attrgetter(*REALS)


class RequestState:
    """The device's state of every slot. R = max_num_seqs + 1 rows."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_blocks: int,
        num_groups: int = 1,
        is_recurrent: bool = False,
        num_replayed: int = 0,
        looks_ahead: bool = False,
        vocab_size: int,
        num_eos_ids: int,
        device: torch.device,
    ) -> None:
        """is_recurrent: no token may be computed twice, as states would take it up twice.
        num_replayed: slots of recurrent states whose rows have drafts; 0: without drafts.
        looks_ahead: a drafter may look at blocks that a row has not got yet."""
        self._looks_ahead = looks_ahead
        rows = max_num_seqs + 1
        self.device = device
        self.vocab_size = vocab_size
        self.pad_row = max_num_seqs
        self.fused = not why_unusable(device)
        """True if one kernel does the work of many torch operations."""

        def columns(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
            """Columns that are written together, as a matrix and as single columns, each aligned
            for 16-byte reads."""
            matrix = torch.zeros((count, -(-rows // 16) * 16), dtype=dtype, device=device)
            return matrix, list(matrix[:, :rows])

        self.token_ids = torch.zeros((rows, max_model_len), dtype=torch.int32, device=device)
        tables = (num_groups, rows, max_blocks)
        self.block_tables = torch.zeros(tables, dtype=torch.int32, device=device)
        """One for each group of layers."""
        self._integers, integers = columns(8, torch.int64)
        self.total_len, self.num_computed, self.prompt_len, *integers = integers
        """Known tokens (sampled ones included), tokens with KV, prompt tokens."""
        self.limit, self.min_total, self.seeds, self.num_logprobs, self.edit_kinds = integers
        """Maximum tokens; prompt + min_tokens, below which stop ids are suppressed; seeds; most
        likely tokens to report, -1 for nothing at all; bits of what changes the logits."""
        self.num_logprobs.fill_(-1)
        self._reals, reals = columns(len(REALS), torch.float32)
        _, counts = columns(len(COUNTS), torch.int32)
        self.params = dict(zip((*REALS, *COUNTS), (*reals, *counts), strict=True))
        """Columns of the table of sampling parameters, by name."""
        for name, column in self.params.items():
            column.fill_(TABLE[name].default)
        self.temperature = self.params["temperature"].zero_()
        """0 in rows of no request, which are the cheapest so."""
        self.cuts = Cuts(**{name: self.params[name] for name in CUTS})
        self.penalties = Penalties(**{name: self.params[name] for name in PENALTIES})
        self.finished = torch.ones(rows, dtype=torch.bool, device=device)
        """Stopped or released: such a row writes to the null block and samples nothing."""
        stop_columns = MAX_STOP_TOKEN_IDS + num_eos_ids
        self.stop_ids = torch.full((rows, stop_columns), -1, dtype=torch.int64, device=device)
        self.masks = PostedMasks(
            rows, vocab_size, device, by_kernels=self.fused, may_be_late=not is_recurrent
        )
        self.token_counts = zeros_if_used((rows, vocab_size), device)
        """[R, V] int32 tokens of requests with penalties; see `metadata`."""
        self.edits = LogitEditTables(rows, vocab_size, device)
        """Logit biases, allowed ids and bad words."""
        self.num_drafts = torch.zeros(rows, dtype=torch.int64, device=device)
        """Guesses of a drafter, in `token_ids` behind a row's own tokens."""
        self.num_taken_up = torch.zeros(num_replayed, dtype=torch.int64, device=device)
        """Tokens that the recurrent state in each slot has taken up, copies of states included. The
        row's `num_computed` is this, and those that are pending."""

    def update(self, plan: StepPlan) -> None:
        """Update the rows to a plan: release, add, append blocks, in that order."""
        if plan.released_slots:
            # Assigning through an index would copy the value from the host, and that copy waits
            # for every step in flight.
            released = self.upload(np.asarray(plan.released_slots, np.int64))
            self.finished.index_fill_(0, released, True)
        if plan.added:
            self._add(plan.added)
        if len(plan.block_ids):
            # One index into all tables: half the host's time of an index for slots and one more.
            _, num_rows, width = self.block_tables.shape
            rows = plan.block_slots.astype(np.int64)
            if plan.block_groups is not None:
                rows += plan.block_groups * num_rows
            places = rows * width + plan.block_positions
            both = self.upload(np.concatenate((places.view(np.int32), plan.block_ids)))
            where, blocks = both[: 2 * len(places)].view(torch.int64), both[2 * len(places) :]
            self.block_tables.view(-1).index_copy_(0, where, blocks)

    def await_masks(
        self, slots: torch.Tensor, num_tokens: torch.Tensor, *, is_even: bool = False
    ) -> torch.Tensor:
        """Wait for the masks of a step's rows; see `PostedMasks.wait_on_host`."""
        if not self.masks.is_awaited:
            return num_tokens
        if self.device.type == "cpu":
            return self.masks.wait_on_host(slots, num_tokens, self, is_even=is_even)
        from termgen.engine.device.kernels.sampling.await_masks import await_masks

        return await_masks(slots, num_tokens, self, is_even=is_even)

    def sampling_metadata(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64, up to where a row draws, not yet in num_computed
        needs: SamplingNeeds,
        samples: Samples | None = None,
    ) -> SamplingMetadata:
        """Inputs of the torch sampler, for steps that kernels do not sample. samples: of a step
        with drafts, whose rows draw at several places, as if each were several rows."""
        output_counts = prompt_mask = None
        if needs.penalties:
            packed = self.token_counts[slots]
            if samples is not None:
                count_drafts(packed, slots, samples, self)
            output_counts, prompt_mask = packed & COUNT_MASK, packed < 0
        positions = self.num_computed[slots] + num_tokens
        suppress_stop = positions < self.min_total[slots]
        return SamplingMetadata(
            temperature=self.temperature[slots],
            cuts=self.cuts.of(slots) if needs.filters else None,
            seeds=self.seeds[slots],
            positions=positions,
            penalties=self.penalties.of(slots) if needs.penalties else None,
            output_counts=output_counts,
            prompt_mask=prompt_mask,
            stop_token_ids=self.stop_ids[slots],
            suppress_stop=suppress_stop,
            needs=needs,
            edit=partial(self._edit_logits, slots, positions) if needs.edits else None,
            token_masks=self.masks.of(slots, self.edit_kinds, positions) if needs.grammar else None,
            may_hide=suppress_stop | (self.edit_kinds[slots] & HAS_EDITS > 0),
        )

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """Copy a host array to the device without waiting."""
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _add(self, added: Sequence[AddedRow]) -> None:
        """Add rows with few copies in all, as each costs the host as much as a kernel launch."""
        params = [row.params for row in added]
        integers = [
            [row.slot for row in added],
            [len(row.token_ids) + row.is_pooled for row in added],
            [row.num_computed_tokens for row in added],
            [row.num_prompt_tokens for row in added],
            [row.max_total_tokens for row in added],
            [row.num_prompt_tokens + row.params.min_tokens for row in added],
            [row.seed for row in added],
            [-1 if p.logprobs is None else p.logprobs for p in params],
            [_edit_kinds(row) for row in added],
            *(list(map(attrgetter(name), params)) for name in COUNTS),
        ]
        reals = [*zip(*map(_reals_of, params), strict=True)]
        reals[_TEMPERATURE] = tuple(0.0 if p.is_greedy else p.temperature for p in params)
        stops = np.full((self.stop_ids.shape[1], len(added)), -1, np.int64)
        for i, row in enumerate(added):
            stops[: len(row.stop_token_ids), i] = row.stop_token_ids
        uploaded = self.upload(np.concatenate((np.asarray(integers, np.int64), stops)))
        slots, first_count = uploaded[0], len(integers) - len(COUNTS)
        self._integers.index_copy_(1, slots, uploaded[1:first_count])
        for i, name in enumerate(COUNTS, first_count):
            self.params[name].index_copy_(0, slots, uploaded[i].int())
        self._reals.index_copy_(1, slots, self.upload(np.asarray(reals, np.float32)))
        self.stop_ids.index_copy_(0, slots, uploaded[len(integers) :].T)
        self.finished.index_fill_(0, slots, False)
        self.num_drafts.index_fill_(0, slots, 0)
        if len(self.num_taken_up):
            self.num_taken_up.index_copy_(0, slots, self.num_computed[slots])
        if self._looks_ahead:  # where the blocks of its slot's last request were
            self.block_tables.index_fill_(1, slots, 0)
        self._write_tokens(added)
        for row in added:
            if row.params.has_penalties:
                self._count_tokens(row)
            self.edits.take_over(row)

    def _write_tokens(self, added: Sequence[AddedRow]) -> None:
        width = self.token_ids.shape[1]
        places = [np.arange(len(row.token_ids)) + row.slot * width for row in added]
        tokens = np.concatenate([row.token_ids for row in added]).astype(np.int32, copy=False)
        self.token_ids.view(-1).index_copy_(
            0, self.upload(np.concatenate(places)), self.upload(tokens)
        )

    def _edit_logits(
        self, slots: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """New logits [B, V] float32, where rows have edits; slots and positions [B] int64."""
        prompt_len = self.prompt_len[slots]
        edits = self.edits.gather(slots, positions, prompt_len, token_ids=self.token_ids)
        return edit_logits(logits, edits)

    def _count_tokens(self, row: AddedRow) -> None:
        """Count the tokens of a row that has just been written."""
        tokens = self.token_ids[row.slot, : len(row.token_ids)].long()
        prompt, output = tokens[: row.num_prompt_tokens], tokens[row.num_prompt_tokens :]
        counts = self.token_counts[row.slot].zero_().index_fill_(0, prompt, PROMPT_BIT)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def append_sampled(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64
        sampled: torch.Tensor,  # [B] int64
        ring: TokenRing | None = None,
        *,
        logprobs: LogprobTensors | None = None,
        has_penalties: bool = True,
    ) -> torch.Tensor:  # [B] int32
        """Store a step's samples and count its tokens as computed. has_penalties: some row may have
        any. logprobs: to be pushed to the ring with the tokens.

        Returns the tokens, and pushes them to the ring: -1 for a row whose sample does not count,
        because it has not computed its newest token yet or was finished before. A row that sampled
        CORRUPT_TOKEN is finished, and that is what it returns.
        """
        if self.fused:
            assert ring is None or logprobs is None, "kernels write them where they belong"
            return self._append_fused(slots, num_tokens, sampled, ring, has_penalties)
        total = self.total_len[slots]
        computed = self.num_computed[slots] + num_tokens
        takes = (computed >= total) & ~self.finished[slots]
        where = total.clamp(max=self.token_ids.shape[1] - 1)
        old = self.token_ids[slots, where]
        # A corrupt row ends here; the steps that run it on read an id that exists.
        is_corrupt = sampled < 0
        known = sampled.clamp(min=0)
        self.token_ids[slots, where] = torch.where(takes, known.to(torch.int32), old)
        total = total + takes
        stopped = (self.stop_ids[slots] == sampled[:, None]).any(dim=1)
        stopped = (stopped & (total > self.min_total[slots])) | (total >= self.limit[slots])
        stopped |= is_corrupt
        self.finished[slots] |= takes & stopped
        self.total_len[slots] = total
        self.num_computed[slots] = computed
        if has_penalties:
            counts = takes & ~is_corrupt & (self.edit_kinds[slots] & HAS_PENALTIES > 0)
            self.token_counts.index_put_((slots, known), counts.to(torch.int32), accumulate=True)
        tokens = torch.where(takes, sampled, -1).to(torch.int32)
        if ring is not None:
            ring.push(tokens, logprobs)
        return tokens

    def _append_fused(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        sampled: torch.Tensor,
        ring: TokenRing | None,
        has_penalties: bool,
    ) -> torch.Tensor:
        """Fast path, skip on a first reading: the same in one kernel."""
        from termgen.engine.device.kernels.rows.step_ends import append_sampled

        return append_sampled(
            slots,
            num_tokens,
            sampled,
            token_ids=self.token_ids,
            total_len=self.total_len,
            num_computed=self.num_computed,
            min_total=self.min_total,
            limit=self.limit,
            finished=self.finished,
            stop_ids=self.stop_ids,
            edit_kinds=self.edit_kinds if has_penalties else None,
            token_counts=self.token_counts,
            ring=ring,
        )


def zeros_if_used(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 zeros that take a CPU's memory only where they are written to."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.int32, device=device)
    return torch.from_numpy(np.zeros(shape, np.int32))


def _edit_kinds(row: AddedRow) -> int:
    """Bits of what changes a row's logits."""
    kinds = HAS_PENALTIES * row.params.has_penalties | HAS_EDITS * row.params.edits_logits
    return kinds | HAS_GRAMMAR * row.has_grammar
