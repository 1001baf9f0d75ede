"""Sampling in a few kernels: edits, cuts, the draw, log-probabilities.

The fast path of `sampling.sampler`: skip it on a first reading. Draws what `Sampler` draws: edited
logits are its bit for bit, noise and the mass of top-p are its up to rounding. Imports triton: the
runner imports this module only on a device whose kernels it can use.

A step in which some row asks for more than a temperature launches every kernel. What a row asks for
is device memory, and a kernel that has nothing to do for a row ends there at once; so one recorded
graph serves all such steps.
"""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.engine.device.kernels.sampling.edit_logits import EditedSlots, edit_logits
from termgen.engine.device.kernels.sampling.logprobs import LogprobWorkspace, gather_logprobs
from termgen.engine.device.kernels.sampling.sample import SampleWorkspace, sample
from termgen.engine.device.kernels.sampling.top_k_top_p import CutWorkspace, cut_threshold
from termgen.engine.device.sampling.gumbel import Stream
from termgen.engine.device.sampling.logprobs import LogprobTensors
from termgen.engine.device.sampling.token_ring import TokenRing
from termgen.engine.device.sampling.top_k_top_p import Cuts
from termgen.vocabulary.sampling_params import MAX_LOGPROBS
from termgen.vocabulary.step import SamplingNeeds


class SlotParams(EditedSlots, Protocol):
    """Sampling parameters of every slot; the kernels read those of a row's slot themselves."""

    num_computed: torch.Tensor  # [R] int64
    temperature: torch.Tensor  # [R] float32
    cuts: Cuts  # [R]
    seeds: torch.Tensor  # [R] int64
    num_logprobs: torch.Tensor  # [R] int64, -1 for none


class FusedSampler:
    """Draws one token per row of logits; one step at a time may use it."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        stream: Stream = Stream.TARGET,
    ) -> None:
        self._stream = stream
        self._sample = SampleWorkspace(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self._cut = CutWorkspace(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self._logprobs = LogprobWorkspace(max_rows=max_rows, vocab_size=vocab_size, device=device)
        self.edited = torch.zeros((max_rows, vocab_size), dtype=torch.float32, device=device)
        """Logits of the rows that are edited, at the places of their batch rows."""

    def __call__(
        self,
        logits: torch.Tensor,  # [B * num_samples, V]
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
        params: SlotParams,
        needs: SamplingNeeds,
        ring: TokenRing | None = None,
        *,
        num_samples: int = 1,
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Tokens [B * num_samples] int64, CORRUPT_TOKEN for a row whose logits are not numbers.
        Log-probabilities are written to the ring's next row or, without a ring, returned.
        num_samples: see `edit_logits`."""
        edits = edited = threshold = None
        if not needs.is_plain:
            edits, edited = params, self.edited
            edit_logits(logits, slots, params, edited, num_samples=num_samples)
            threshold = cut_threshold(
                logits,
                slots,
                self._cut,
                params.cuts,
                temperature=params.temperature,
                edited=edited,
                edits=edits,
                num_samples=num_samples,
            )
        token_ids = sample(
            logits,
            slots,
            num_tokens,
            self._sample,
            num_computed=params.num_computed,
            temperature=params.temperature,
            seeds=params.seeds,
            threshold=threshold,
            edited=edited,
            edits=edits,
            num_samples=num_samples,
            stream=self._stream,
        )
        if needs.max_logprobs is None:
            return token_ids, None
        if ring is None:
            assert num_samples == 1, "samples of drafts go to the ring"
            return token_ids, self._gather(
                logits, slots, token_ids, params.num_logprobs, needs.max_logprobs
            )
        gather_logprobs(
            logits,
            slots,
            token_ids,
            params.num_logprobs,
            self._logprobs,
            out=ring.logprobs,
            index=ring.index,
            num_samples=num_samples,
        )
        return token_ids, None

    def gather_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, max_logprobs: int
    ) -> LogprobTensors:
        """`sampling.logprobs.gather_logprobs` of as many rows as a step may have."""
        slots = torch.zeros_like(token_ids)
        wanted = torch.full((1,), max_logprobs, dtype=torch.int64, device=logits.device)
        return self._gather(logits, slots, token_ids, wanted, max_logprobs)

    def _gather(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        token_ids: torch.Tensor,
        num_logprobs: torch.Tensor,
        most: int,
    ) -> LogprobTensors:
        num_rows, vocab_size = logits.shape
        shape = (1, num_rows, 1 + min(MAX_LOGPROBS, vocab_size))
        out = LogprobTensors(
            torch.zeros(shape, dtype=torch.int32, device=logits.device),
            torch.zeros(shape, dtype=torch.float32, device=logits.device),
            torch.zeros(shape[:2], dtype=torch.int32, device=logits.device),
        )
        gather_logprobs(logits, slots, token_ids, num_logprobs, self._logprobs, out=out)
        ids, values, ranks = (t[0] for t in out)
        return LogprobTensors(ids[:, : 1 + most], values[:, : 1 + most], ranks)
