"""Keep stop tokens from being drawn before `min_tokens` are out."""

from __future__ import annotations

import torch


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
