"""Repetition, frequency and presence penalties on a whole batch of logits."""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    *,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
) -> torch.Tensor:
    """Penalise ids that were seen; a new tensor. Rows with neutral values come out unchanged.

    logits, prompt_mask, output_counts [B, V]; the penalties [B]. Repetition looks at prompt and
    output and scales towards less likely (it divides a positive logit and multiplies a negative
    one, as transformers does); frequency and presence then look at the output alone and subtract,
    as OpenAI documents them.
    """
    generated = output_counts > 0
    repetition = repetition_penalty.unsqueeze(1)
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    penalised = torch.where(prompt_mask | generated, scaled, logits)
    penalised -= frequency_penalty.unsqueeze(1) * output_counts
    penalised -= presence_penalty.unsqueeze(1) * generated
    return penalised
