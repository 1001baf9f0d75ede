"""Permanent rows of per-request state on the device, indexed by slot.

Rows change only through operations on the one compute stream, so their order is the stream's
order: a step launched later sees what every earlier step wrote, and the host need not wait.
Row `max_num_seqs` belongs to nobody; padded batch rows point to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from termgen.engine.kernels import why_unusable
from termgen.engine.runner.token_ring import TokenRing
from termgen.engine.sampling_params import MAX_STOP_TOKEN_IDS
from termgen.engine.step import AddedRow, StepPlan


class RequestState:
    """The device's truth about every slot. R = max_num_seqs + 1 rows."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_blocks: int,
        vocab_size: int,
        num_eos_ids: int,
        device: torch.device,
    ) -> None:
        rows = max_num_seqs + 1
        self.device = device
        self.vocab_size = vocab_size
        self.pad_row = max_num_seqs
        self.fused = not why_unusable(device)
        """Whether one kernel does the work of many torch operations."""

        def column(dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        self.token_ids = torch.zeros((rows, max_model_len), dtype=torch.int32, device=device)
        self.block_table = torch.zeros((rows, max_blocks), dtype=torch.int32, device=device)
        self.total_len = column(torch.int64)
        """Known tokens, sampled ones included."""
        self.num_computed = column(torch.int64)
        self.prompt_len = column(torch.int64)
        self.limit = column(torch.int64)
        self.min_total = column(torch.int64)
        """prompt + min_tokens: below it stop ids are suppressed."""
        self.finished = column(torch.bool, True)
        """Stopped or released: computes into the null block and samples nothing."""
        self.temperature = column(torch.float32)
        self.top_k = column(torch.int32)
        self.top_p = column(torch.float32, 1.0)
        self.min_p = column(torch.float32)
        self.seeds = column(torch.int64)
        self.repetition_penalty = column(torch.float32, 1.0)
        self.presence_penalty = column(torch.float32)
        self.frequency_penalty = column(torch.float32)
        stop_columns = MAX_STOP_TOKEN_IDS + num_eos_ids
        self.stop_ids = torch.full((rows, stop_columns), -1, dtype=torch.int64, device=device)
        self.has_grammar = column(torch.bool)
        self.token_masks = torch.zeros(
            (rows, -(-vocab_size // 32)), dtype=torch.int32, device=device
        )
        """[R, W]: a bit for each token that a row with a grammar may sample next."""
        self.output_counts: torch.Tensor | None = None  # [R, V] int32, once a penalty is asked for
        self.prompt_mask: torch.Tensor | None = None  # [R, V] bool, likewise

    def update(self, plan: StepPlan) -> None:
        """Bring rows up to a plan: release, add, append blocks, in that order."""
        if plan.released_slots:
            self.finished[self._indices(plan.released_slots)] = True
        if plan.added:
            self._add(plan.added)
        if len(plan.block_ids):
            where = (self.upload(plan.block_slots).long(), self.upload(plan.block_positions).long())
            self.block_table.index_put_(where, self.upload(plan.block_ids))

    def set_masks(self, plan: StepPlan) -> None:
        """Wait for the masks of a plan's rows, and put them where sampling reads them."""
        if plan.masks is not None:
            bits = plan.masks.bits()[:, : self.token_masks.shape[1]]  # no bits of unknown tokens
            slots = self._indices(plan.slots[plan.masks.rows].tolist())
            self.token_masks.index_copy_(0, slots, self.upload(np.ascontiguousarray(bits)))

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """Host array to device without waiting."""
        tensor = torch.from_numpy(values)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _indices(self, slots: Sequence[int]) -> torch.Tensor:
        return self.upload(np.asarray(slots, np.int64))

    def _add(self, added: Sequence[AddedRow]) -> None:
        slots = self._indices([row.slot for row in added])

        def write(column: torch.Tensor, values: list[float] | list[int] | list[bool]) -> None:
            host = np.asarray(values)
            column[slots] = self.upload(host).to(column.dtype)

        params = [row.params for row in added]
        write(self.total_len, [len(row.token_ids) for row in added])
        write(self.num_computed, [row.num_computed_tokens for row in added])
        write(self.prompt_len, [row.num_prompt_tokens for row in added])
        write(self.limit, [row.max_total_tokens for row in added])
        write(self.min_total, [row.num_prompt_tokens + row.params.min_tokens for row in added])
        write(self.finished, [False] * len(added))
        write(self.has_grammar, [row.has_grammar for row in added])
        write(self.temperature, [0.0 if p.is_greedy else p.temperature for p in params])
        write(self.top_k, [p.top_k for p in params])
        write(self.top_p, [p.top_p for p in params])
        write(self.min_p, [p.min_p for p in params])
        write(self.seeds, [row.seed for row in added])
        write(self.repetition_penalty, [p.repetition_penalty for p in params])
        write(self.presence_penalty, [p.presence_penalty for p in params])
        write(self.frequency_penalty, [p.frequency_penalty for p in params])
        stops = np.full((len(added), self.stop_ids.shape[1]), -1, np.int64)
        for i, row in enumerate(added):
            stops[i, : len(row.stop_token_ids)] = row.stop_token_ids
            self.token_ids[row.slot, : len(row.token_ids)] = self.upload(row.token_ids)
        self.stop_ids[slots] = self.upload(stops)
        if self.output_counts is None and any(p.has_penalties for p in params):
            self.make_penalty_tables()
        for row in added:
            if row.params.has_penalties:
                self._count_tokens(row)

    def make_penalty_tables(self) -> None:
        # Gigabytes for a large vocabulary and many slots, so only once somebody asks.
        shape = (len(self.total_len), self.vocab_size)
        self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)

    def drop_penalty_tables(self) -> None:
        self.output_counts = self.prompt_mask = None

    def _count_tokens(self, row: AddedRow) -> None:
        assert self.output_counts is not None and self.prompt_mask is not None
        tokens = self.upload(row.token_ids).long()
        prompt, output = tokens[: row.num_prompt_tokens], tokens[row.num_prompt_tokens :]
        self.prompt_mask[row.slot] = False
        self.prompt_mask[row.slot, prompt] = True
        counts = self.output_counts[row.slot]
        counts.zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def append_sampled(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64
        sampled: torch.Tensor,  # [B] int64
        ring: TokenRing | None = None,
    ) -> torch.Tensor:  # [B] int32
        """Take in a step's samples and count its tokens as computed.

        Returns the tokens, and pushes them to the ring: -1 for a row whose sample does not count,
        because it has not computed its newest token yet or was finished before. Steps with a ring
        hold no row with penalties, so nothing is counted for them.
        """
        if self.fused:
            return self._append_fused(slots, num_tokens, sampled, ring)
        total = self.total_len[slots]
        computed = self.num_computed[slots] + num_tokens
        takes = (computed >= total) & ~self.finished[slots]
        where = total.clamp(max=self.token_ids.shape[1] - 1)
        old = self.token_ids[slots, where]
        self.token_ids[slots, where] = torch.where(takes, sampled.to(torch.int32), old)
        total = total + takes
        stopped = (self.stop_ids[slots] == sampled[:, None]).any(dim=1)
        stopped = (stopped & (total > self.min_total[slots])) | (total >= self.limit[slots])
        self.finished[slots] |= takes & stopped
        self.total_len[slots] = total
        self.num_computed[slots] = computed
        if self.output_counts is not None and ring is None:
            self.output_counts.index_put_((slots, sampled), takes.to(torch.int32), accumulate=True)
        tokens = torch.where(takes, sampled, -1).to(torch.int32)
        if ring is not None:
            ring.push(tokens)
        return tokens

    def _append_fused(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor,
        sampled: torch.Tensor,
        ring: TokenRing | None,
    ) -> torch.Tensor:
        from termgen.engine.kernels.update_state import append_sampled

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
            output_counts=self.output_counts if ring is None else None,
            ring=ring,
        )
