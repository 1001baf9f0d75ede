"""Penalise the tokens that a request has already."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Penalties(NamedTuple):
    """Columns of the parameters, one for each row `part="penalty"` of `sampling_params`: of a
    step's rows, or of every slot. All float32."""

    repetition_penalty: torch.Tensor
    """1 is off. Looks at prompt and output."""
    presence_penalty: torch.Tensor
    """0 is off. Looks at output only."""
    frequency_penalty: torch.Tensor
    """0 is off. Looks at output only."""

    def of(self, rows: torch.Tensor) -> Penalties:
        return Penalties(*(column[rows] for column in self))


def apply_penalties(
    logits: torch.Tensor,
    penalties: Penalties,
    *,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
) -> torch.Tensor:
    """Penalise ids that were seen; a new tensor. Rows with neutral values come out unchanged.

    logits, prompt_mask, output_counts [B, V]; the penalties [B]. Repetition looks at prompt and
    output and scales towards less likely (it divides a positive logit and multiplies a negative
    one, as transformers does); frequency and presence then look at the output alone and subtract,
    as OpenAI documents them.
    """
    generated = output_counts > 0
    repetition = penalties.repetition_penalty.unsqueeze(1)
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    penalised = torch.where(prompt_mask | generated, scaled, logits)
    penalised -= penalties.frequency_penalty.unsqueeze(1) * output_counts
    penalised -= penalties.presence_penalty.unsqueeze(1) * generated
    return penalised
