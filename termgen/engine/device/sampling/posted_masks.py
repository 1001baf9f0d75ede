"""Masks that the host posts while a step runs, and the step's wait for them.

The masks lie in memory that both see: on a CPU any, on a GPU pinned memory of the host, which
kernels read. A posted mask names the position of the token that it is for, and of those before it
that are forced. A step that is about to sample a row compares these with the row's own length, and
waits while that is none of them, for a limited time: a row whose mask is late samples nothing. On a
GPU a kernel waits (`kernels.sampling.await_masks`), so the host may be anywhere meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from termgen.engine.device.sampling.metadata import HAS_GRAMMAR, TokenMasks
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.token_mask import (
    IDLE_PATIENCE_S,
    MOST_FORCED,
    NO_MASK,
    PATIENCE_S,
    WITHHELD,
)


class AwaitingRows(Protocol):
    """What a wait reads of every slot. R slots."""

    total_len: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    edit_kinds: torch.Tensor  # [R] int64, bit HAS_GRAMMAR
    masks: PostedMasks


class DraftedRows(Protocol):
    """What forced tokens are written to. R slots."""

    token_ids: torch.Tensor  # [R, max_model_len] int32
    total_len: torch.Tensor  # [R] int64
    num_drafts: torch.Tensor  # [R] int64


class PostedMasks:
    """The newest mask of each of R slots, for a vocabulary of V tokens in W words of 32."""

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device,
        *,
        by_kernels: bool,
        may_be_late: bool = True,
    ) -> None:
        """by_kernels: kernels sample, not torch. may_be_late: a row may compute its newest token
        again, for lack of its mask."""
        self.device = device
        is_pinned = by_kernels and may_be_late and device.type == "cuda"
        self.is_awaited = is_pinned or (may_be_late and device.type == "cpu")
        """Steps wait for masks. Else masks must be there when a step is launched."""
        shape = (rows, -(-vocab_size // 32))
        bits = torch.zeros(shape, dtype=torch.int32)
        self.positions = torch.full((rows,), NO_MASK, dtype=torch.int64)
        """[R] index in the row's tokens of the token that its mask is for; NO_MASK or WITHHELD."""
        if is_pinned:
            bits, self.positions = bits.pin_memory(), self.positions.pin_memory()
        self.num_forced = torch.zeros(rows, dtype=torch.int64)
        """[R] tokens that are forced before the one that the mask is for."""
        self.forced = torch.zeros((rows, MOST_FORCED), dtype=torch.int32)
        """[R, MOST_FORCED] those tokens."""
        if is_pinned:
            self.num_forced, self.forced = self.num_forced.pin_memory(), self.forced.pin_memory()
        self._host_bits, self._host_positions = bits.numpy(), self.positions.numpy()
        self._host_num_forced, self._host_forced = self.num_forced.numpy(), self.forced.numpy()
        self.given_up = torch.full((rows,), NO_MASK, dtype=torch.int64, device=device)
        """[R] position for which a kernel has waited in vain: the next step does not wait again."""
        if not self.is_awaited:
            bits = torch.zeros(shape, dtype=torch.int32, device=device)
        self.bits = bits
        """[R, W]: a bit for each token that a row with a grammar may sample next, in memory that
        steps read."""
        self._news = threading.Condition()

    def post(
        self,
        slots: IntArray,
        positions: IntArray,
        bits: IntArray,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `MaskReceiver.post_masks`."""
        self._host_bits[slots] = bits[:, : self._host_bits.shape[1]]  # no unknown tokens
        counts = np.zeros_like(positions)
        if forced is not None:
            counts[:] = [len(tokens) for tokens in forced]
            for slot, tokens in zip(slots.tolist(), forced, strict=True):
                self._host_forced[slot, : len(tokens)] = tokens
        with self._news:  # which also orders the stores: the masks come first
            # No step in flight wants a position of the old ones, whatever their number.
            self._host_positions[slots] = NO_MASK
            self._host_num_forced[slots] = counts
            self._host_positions[slots] = positions + counts
            self._news.notify_all()

    def withhold(self, slots: IntArray) -> None:
        """See `MaskReceiver.withhold_masks`."""
        with self._news:
            self._host_positions[slots] = WITHHELD
            self._news.notify_all()

    def take_forced(self, slots: IntArray, num_places: IntArray, rows: DraftedRows) -> None:
        """Make the forced tokens behind those of these slots [B] their drafts, on a CPU: as many as
        they have places [B] for."""
        with self._news:
            posted, num_forced = self._host_positions[slots], self._host_num_forced[slots]
        lengths = rows.total_len.numpy()[slots]
        firsts = lengths - (posted - num_forced)
        counts = np.clip(num_forced - firsts, 0, num_places) * ((posted >= 0) & (firsts >= 0))
        rows.num_drafts.numpy()[slots] = counts
        ids = rows.token_ids.numpy()
        for slot, length, first, count in zip(slots, lengths, firsts, counts, strict=True):
            ids[slot, length : length + count] = self._host_forced[slot, first : first + count]

    def of(
        self, slots: torch.Tensor, edit_kinds: torch.Tensor, positions: torch.Tensor
    ) -> TokenMasks:
        """For the torch sampler. slots: [B] int64; positions: [B] int64 of the tokens to sample."""
        bits = self.bits.to(self.device)
        is_bound = edit_kinds & HAS_GRAMMAR > 0
        posted, num_forced, forced = (
            tensor[slots.to(tensor.device)].to(self.device)
            for tensor in (self.positions, self.num_forced, self.forced)
        )
        places = positions - (posted - num_forced)
        is_forced = (posted >= 0) & (places >= 0) & (places < num_forced)
        tokens = forced.gather(1, places.clamp(0, MOST_FORCED - 1)[:, None])[:, 0]
        return TokenMasks(slots, is_bound, bits, torch.where(is_forced, tokens, -1))

    def upload(self, slots: IntArray) -> None:
        """Copy the masks of these slots to a device whose steps do not wait for them."""
        where, bits = map(torch.from_numpy, (slots.astype(np.int64), self._host_bits[slots]))
        if self.device.type != "cpu":
            where, bits = (
                tensor.pin_memory().to(self.device, non_blocking=True) for tensor in (where, bits)
            )
        self.bits.index_copy_(0, where, bits)

    def wait_on_host(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
        state: AwaitingRows,
    ) -> torch.Tensor:  # [B] int64
        """Wait, on a CPU, for the masks of the rows that sample. Returns `num_tokens`, less 1 for
        rows whose mask is late: short of their newest token, they sample nothing."""
        total_len = state.total_len[slots]
        is_running = ~state.finished[slots]
        is_bound = (state.edit_kinds[slots] & HAS_GRAMMAR) > 0
        samples = is_running & (state.num_computed[slots] + num_tokens >= total_len)
        rows = (samples & is_bound).nonzero()[:, 0].numpy()
        if not len(rows):
            return num_tokens
        is_alone = not bool((is_running & ~is_bound).any())
        patience_s = IDLE_PATIENCE_S if is_alone else PATIENCE_S
        first, places = total_len.numpy()[rows], slots.numpy()[rows]
        # Drafts, which are forced, are counted already: the last sample is behind them.
        last = (state.num_computed[slots] + num_tokens).numpy()[rows]
        deadline = time.perf_counter() + patience_s
        with self._news:
            while True:
                posted = self._host_positions[places]
                is_there = (posted >= last) & (posted - self._host_num_forced[places] <= first)
                left_s = deadline - time.perf_counter()
                if left_s <= 0 or not (~is_there & (posted != WITHHELD)).any():
                    break
                self._news.wait(left_s)
        late = torch.zeros_like(num_tokens)
        late[rows] = torch.from_numpy((~is_there).astype(np.int64))
        return num_tokens - late
