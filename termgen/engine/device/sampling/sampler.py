"""Samples a step's tokens from its logits, on the device, without waiting for it.

Owns the order of operations, which is part of the output and pinned by a test:

    grammar mask -> logit edits -> stop mask (min_tokens) -> penalties -> temperature -> cuts of
    the tail, as `top_k_top_p` orders them -> Gumbel-max

Log-probabilities are taken from the logits as they came. The runner calls this once per step with
one row per token to draw; the host half never sees it. What no row of a step asks for is skipped
whole, as `needs` of the metadata says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from termgen.engine.device.sampling.gumbel import Stream, gumbel_argmax, mark_corrupt
from termgen.engine.device.sampling.logprobs import LogprobTensors, gather_logprobs
from termgen.engine.device.sampling.metadata import SamplingMetadata, mask_tokens
from termgen.engine.device.sampling.penalties import apply_penalties
from termgen.engine.device.sampling.top_k_top_p import cut_threshold
from termgen.vocabulary.sampling_params import GREEDY_EPSILON

PART_LOGITS = 2**19
"""On a CPU, rows are drawn in parts of about so many logits: noise takes several times the memory
of the logits for a moment, parts of it stay in the processor's cache, and what the C library keeps
of them for later does not depend on how many requests run."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tensors of one step, still on the device."""

    token_ids: torch.Tensor
    """[B] int64; CORRUPT_TOKEN for a row whose logits are not numbers."""
    logprobs: LogprobTensors | None


class Sampler:
    """Draws one token per row of logits. Holds no state but the random stream it draws from."""

    def __init__(self, stream: Stream = Stream.TARGET) -> None:
        self._stream = stream

    def __call__(self, logits: torch.Tensor, meta: SamplingMetadata) -> SamplerOutput:
        """logits [B, V] float32; they are only read."""
        assert logits.dtype == torch.float32 and logits.dim() == 2, (logits.dtype, logits.shape)
        drawn = self._draw(process_logits(logits, meta), meta)
        # Judged by the model's own logits: a tiny repetition penalty makes infinities of its own.
        token_ids = mark_corrupt(drawn, logits, may_be_empty=_may_be_empty(meta))
        if meta.needs.max_logprobs is None:
            return SamplerOutput(token_ids, None)
        return SamplerOutput(token_ids, gather_logprobs(logits, drawn, meta.needs.max_logprobs))

    def _draw(self, logits: torch.Tensor, meta: SamplingMetadata) -> torch.Tensor:
        if meta.needs.all_greedy:
            return logits.argmax(dim=-1)
        if logits.device.type != "cpu":
            return self._draw_rows(logits, meta, slice(None))
        rows = max(1, PART_LOGITS // logits.shape[1])
        parts = [slice(first, first + rows) for first in range(0, max(1, len(logits)), rows)]
        return torch.cat([self._draw_rows(logits, meta, part) for part in parts])

    def _draw_rows(self, logits: torch.Tensor, meta: SamplingMetadata, rows: slice) -> torch.Tensor:
        logits, temperature = logits[rows], meta.temperature[rows]
        greedy = temperature < GREEDY_EPSILON
        logits = logits / temperature.masked_fill(greedy, 1.0).unsqueeze(1)
        threshold = None
        if meta.needs.filters:
            assert meta.cuts is not None
            threshold = cut_threshold(logits, meta.cuts.of(rows))
        return gumbel_argmax(
            logits,
            seeds=meta.seeds[rows],
            positions=meta.positions[rows],
            greedy=greedy,
            stream=self._stream,
            threshold=threshold,
        )


def _may_be_empty(meta: SamplingMetadata) -> torch.Tensor | bool:
    """True for the rows in which masks may have hidden every token."""
    hidden = False if meta.may_hide is None else meta.may_hide
    if meta.token_masks is None:
        return hidden
    return meta.token_masks.has_grammar[meta.token_masks.slots] | hidden


def process_logits(logits: torch.Tensor, meta: SamplingMetadata) -> torch.Tensor:
    """Edits that change the argmax too, so that greedy rows need them."""
    if meta.token_masks is not None:
        logits = mask_tokens(logits, meta.token_masks)
    if meta.edit is not None:
        logits = meta.edit(logits)
    if meta.needs.min_tokens:
        logits = mask_stop_tokens(logits, meta.stop_token_ids, meta.suppress_stop)
    if meta.needs.penalties:
        assert meta.prompt_mask is not None and meta.output_counts is not None
        assert meta.penalties is not None
        logits = apply_penalties(
            logits,
            meta.penalties,
            prompt_mask=meta.prompt_mask,
            output_counts=meta.output_counts,
        )
    return logits


def mask_stop_tokens(
    logits: torch.Tensor, stop_token_ids: torch.Tensor, suppress: torch.Tensor
) -> torch.Tensor:
    """-inf at the stop ids of the rows that suppress them; a new tensor.

    logits [B, V], stop_token_ids [B, K] int64 padded with -1, suppress [B] bool.
    """
    if stop_token_ids.shape[1] == 0:
        return logits
    largest = stop_token_ids.amax(dim=1, keepdim=True)
    # Padding repeats a real id of its row: then two writes to one place always write the same.
    ids = torch.where(stop_token_ids < 0, largest.clamp(min=0), stop_token_ids)
    masked = suppress.unsqueeze(1) & (largest >= 0)  # [B, 1]
    values = logits.gather(1, ids).masked_fill(masked, -torch.inf)
    return logits.scatter(1, ids, values)
