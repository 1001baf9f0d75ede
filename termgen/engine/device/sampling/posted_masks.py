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

FORCED_SHIFT = 32
MASKED = (1 << FORCED_SHIFT) - 1
NOWHERE = 1 << 40
"""A position that no row reaches."""


class AwaitingRows(Protocol):
    """What a wait reads of every slot. R slots."""

    total_len: torch.Tensor  # [R] int64
    num_computed: torch.Tensor  # [R] int64
    finished: torch.Tensor  # [R] bool
    edit_kinds: torch.Tensor  # [R] int64, bit HAS_GRAMMAR
    num_drafts: torch.Tensor  # [R] int64
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
        sizes = {
            "positions": ((rows,), torch.int64),
            "forced": ((rows, MOST_FORCED), torch.int32),
            "bits": ((rows, -(-vocab_size // 32)), torch.int32),
        }
        self._host = {name: torch.zeros(size, dtype=kind) for name, (size, kind) in sizes.items()}
        self._host["positions"].fill_(NO_MASK)
        if is_pinned:
            self._host = {name: tensor.pin_memory() for name, tensor in self._host.items()}
        self._host_positions, self._host_forced, self._host_bits = (
            self._host[name].numpy() for name in sizes
        )
        seen = self._host
        if not self.is_awaited:
            seen = {name: tensor.to(device, copy=True) for name, tensor in self._host.items()}
        self._seen = seen
        """What steps read: the host's memory, or what `upload` has copied of it."""
        self.positions = seen["positions"]
        """[R] index in the row's tokens of the token that its mask is for, and above FORCED_SHIFT
        the number of tokens that are forced before it: one word, so that a step sees both or
        neither. Or NO_MASK or WITHHELD."""
        self.forced = seen["forced"]
        """[R, MOST_FORCED] those tokens."""
        self.bits = seen["bits"]
        """[R, W]: a bit for each token that a row with a grammar may sample next."""
        self.given_up = torch.full((rows,), NO_MASK, dtype=torch.int64, device=device)
        """[R] position for which a kernel has waited in vain: the next step does not wait again."""
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
        counts = np.zeros(len(slots), np.int64)
        if forced is not None:
            counts[:] = [len(tokens) for tokens in forced]
            for slot, tokens in zip(slots.tolist(), forced, strict=True):
                self._host_forced[slot, : len(tokens)] = tokens
        with self._news:  # which also orders the stores: the masks come first
            self._host_positions[slots] = positions + counts + (counts << FORCED_SHIFT)
            self._news.notify_all()

    def withhold(self, slots: IntArray) -> None:
        """See `MaskReceiver.withhold_masks`."""
        with self._news:
            self._host_positions[slots] = WITHHELD
            self._news.notify_all()

    @torch.inference_mode()
    def take_forced(self, slots: IntArray, num_places: IntArray, rows: DraftedRows) -> None:
        """Make the forced tokens behind those of these slots [B] their drafts: as many as they have
        places [B] for, and none where what is posted now is for other places."""
        with self._news:
            posted = self._host_positions[slots]
        num_forced = posted >> FORCED_SHIFT
        begins = np.where(posted >= 0, (posted & MASKED) - num_forced, NOWHERE)
        facts = np.stack((slots, begins, num_forced, num_places)).astype(np.int64)
        known = np.concatenate((facts.ravel(), self._host_forced[slots].astype(np.int64).ravel()))
        uploaded = torch.from_numpy(known)
        if self.device.type != "cpu":
            uploaded = uploaded.pin_memory().to(self.device, non_blocking=True)
        where, begin, count, places = uploaded[: facts.size].view(4, -1)
        forced = uploaded[facts.size :].view(-1, MOST_FORCED)
        length = rows.total_len[where]
        first = length - begin
        num_drafts = torch.minimum(count - first, places).clamp_(min=0) * (first >= 0)
        rows.num_drafts[where] = num_drafts
        columns = torch.arange(MOST_FORCED, device=self.device)
        # Behind its drafts a row repeats the last: two writes to one place then write the same.
        last = (num_drafts - 1).clamp_(min=0)[:, None]
        columns = torch.minimum(columns, last)
        drafts = forced.gather(1, (first[:, None] + columns).clamp_(0, MOST_FORCED - 1))
        targets = (length[:, None] + columns).clamp_(max=rows.token_ids.shape[1] - 1)
        old = rows.token_ids[where[:, None], targets]
        drafts = torch.where(num_drafts[:, None] > 0, drafts.to(old.dtype), old)
        rows.token_ids[where[:, None], targets] = drafts

    def of(
        self, slots: torch.Tensor, edit_kinds: torch.Tensor, positions: torch.Tensor
    ) -> TokenMasks:
        """For the torch sampler. slots: [B] int64; positions: [B] int64 of the tokens to sample."""
        bits = self.bits.to(self.device)
        is_bound = edit_kinds & HAS_GRAMMAR > 0
        posted, forced = (tensor.to(self.device)[slots] for tensor in (self.positions, self.forced))
        num_forced = posted >> FORCED_SHIFT  # negative where nothing is posted
        places = positions - ((posted & MASKED) - num_forced)
        is_forced = (places >= 0) & (places < num_forced)
        tokens = forced.gather(1, places.clamp(0, MOST_FORCED - 1)[:, None])[:, 0]
        return TokenMasks(slots, is_bound, bits, torch.where(is_forced, tokens, -1))

    def upload(self, slots: IntArray) -> None:
        """Copy what is posted for these slots to a device whose steps do not wait for it."""
        where = torch.from_numpy(slots.astype(np.int64))
        copies = {name: tensor[where] for name, tensor in self._host.items()}
        if self.device.type != "cpu":
            where = where.pin_memory().to(self.device, non_blocking=True)
        for name, tensor in copies.items():
            if self.device.type != "cpu":
                tensor = tensor.pin_memory().to(self.device, non_blocking=True)
            self._seen[name].index_copy_(0, where, tensor)

    def wait_on_host(
        self,
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
        state: AwaitingRows,
        *,
        is_even: bool = False,
    ) -> torch.Tensor:  # [B] int64
        """Wait, on a CPU, for the masks of the rows that sample. Returns `num_tokens`, less 1 for
        rows whose mask is late: short of their newest token, they sample nothing. is_even: tokens
        are places for drafts, which a row may not all have; of a row that is late, none is left."""
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
        if is_even:
            last = first + torch.minimum(state.num_drafts[slots], num_tokens - 1).numpy()[rows]
        deadline = time.perf_counter() + patience_s
        with self._news:
            while True:
                posted = self._host_positions[places]
                masked = posted & MASKED
                is_there = (masked - (posted >> FORCED_SHIFT) <= first) & (last <= masked)
                is_there &= posted >= 0
                left_s = deadline - time.perf_counter()
                if left_s <= 0 or not (~is_there & (posted != WITHHELD)).any():
                    break
                self._news.wait(left_s)
        late = torch.zeros_like(num_tokens)
        late[rows] = torch.from_numpy((~is_there).astype(np.int64))
        return num_tokens * (1 - late) if is_even else num_tokens - late
