"""Sampling in a few kernels, for steps that ask for no more than temperature, cuts and grammars.

The fast path of `sampling.sampler`: skip it on a first reading. Draws what `Sampler` draws, up to
rounding. Imports triton: the runner imports this module only on a device whose kernels it can use.
Penalties, `min_tokens` and log-probabilities stay with `Sampler`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from termgen.engine.device.kernels.sampling.edit_logits import mask_tokens_
from termgen.engine.device.kernels.sampling.sample import SampleWorkspace, sample
from termgen.engine.device.kernels.sampling.top_k_top_p import CutWorkspace, cut_threshold
from termgen.engine.device.sampling.gumbel import Stream
from termgen.vocabulary.step import SamplingNeeds


class SlotParams(Protocol):
    """Sampling parameters of every slot; the kernels read those of a row's slot themselves."""

    num_computed: torch.Tensor  # [R] int64
    temperature: torch.Tensor  # [R] float32
    top_k: torch.Tensor  # [R] int32
    top_p: torch.Tensor  # [R] float32
    min_p: torch.Tensor  # [R] float32
    seeds: torch.Tensor  # [R] int64
    has_grammar: torch.Tensor  # [R] bool
    host_masks: torch.Tensor  # [R, W] int32


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

    def __call__(
        self,
        logits: torch.Tensor,  # [B, V]; grammars change them in place
        slots: torch.Tensor,  # [B] int64
        num_tokens: torch.Tensor,  # [B] int64, not yet counted in num_computed
        params: SlotParams,
        needs: SamplingNeeds,
    ) -> torch.Tensor:  # [B] int64
        """needs: simple ones; edits have been made. CORRUPT_TOKEN for a row whose logits are not
        numbers."""
        if needs.grammar:
            mask_tokens_(logits, slots, has_grammar=params.has_grammar, bits=params.host_masks)
        threshold = None
        if needs.filters:
            threshold = cut_threshold(
                logits,
                slots,
                self._cut,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
            )
        return sample(
            logits,
            slots,
            num_tokens,
            self._sample,
            num_computed=params.num_computed,
            temperature=params.temperature,
            seeds=params.seeds,
            threshold=threshold,
            stream=self._stream,
            may_be_empty=needs.grammar or needs.edits,
        )
