"""What one step needs to know to draw its tokens.

The runner gathers these device tensors from its permanent per-slot rows, once per step, and hands
them to the `Sampler`. A step launches no work that its rows do not
need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from termgen.engine.device.sampling.token_mask import TokenMasks
from termgen.vocabulary.step import SamplingNeeds


@dataclass(slots=True, kw_only=True)
class SamplingMetadata:
    """Row `i` of every tensor belongs to row `i` of the logits. B rows, vocabulary of V."""

    temperature: torch.Tensor
    """[B] float32; below `GREEDY_EPSILON` the row is greedy."""
    top_k: torch.Tensor
    """[B] int32; 0 is no limit."""
    top_p: torch.Tensor
    """[B] float32 in (0, 1]; 1 is no limit."""
    min_p: torch.Tensor
    """[B] float32 in [0, 1]; 0 is no limit."""
    seeds: torch.Tensor
    """[B] int64, any bits."""
    positions: torch.Tensor
    """[B] int64: index in its sequence of the token being drawn."""
    repetition_penalty: torch.Tensor
    """[B] float32; 1 is off. Looks at prompt and output."""
    presence_penalty: torch.Tensor
    """[B] float32; 0 is off. Looks at output only."""
    frequency_penalty: torch.Tensor
    """[B] float32; 0 is off. Looks at output only."""
    output_counts: torch.Tensor | None
    """[B, V] int32: how often each id was generated so far. Given where rows need penalties."""
    prompt_mask: torch.Tensor | None
    """[B, V] bool: ids of the prompt, likewise."""
    stop_token_ids: torch.Tensor
    """[B, K] int64, padded with -1; K may be 0."""
    suppress_stop: torch.Tensor
    """[B] bool: `min_tokens` is not reached yet, so no stop id may be drawn."""
    needs: SamplingNeeds
    """Decided with the plan on the host, so that reading them costs no device sync."""
    edit: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Logits [B, V] to new ones with allowed ids, biases and bad words; None: no row has any."""
    token_masks: TokenMasks | None = None
    """Masks of the rows under a grammar, if there may be any."""
