"""Changes to single logits before anything else is done: allowed ids, a bias, bad words.

The runner gathers `LogitEdits` from its tables for a step in which some row has any; rows that have
none come out unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NOTHING = -1
"""Stands for no id, in tables and in the tokens they are compared with."""


class LogitEdits(NamedTuple):
    """Row `i` belongs to row `i` of the logits. B rows, vocabulary of V."""

    bias_ids: torch.Tensor
    """[B, N] int32: ids to raise or lower, each once; the rest is id 0 with a bias of 0."""
    biases: torch.Tensor
    """[B, N] float32"""
    allowed_bits: torch.Tensor
    """[B, ceil(V / 8)] uint8: bit `i % 8` of byte `i // 8` says whether id i may be drawn."""
    bad_words: torch.Tensor
    """[B, W, L] int32: token sequences that must not be completed, at the right end of L places
    that `NOTHING` fills up."""
    recent: torch.Tensor
    """[B, L - 1] int32: the tokens generated last, the newest at the right end; `NOTHING` where
    none was generated."""


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """logits [B, V] float32; a new tensor.

    Bias and bad words are one addition each: of 0 or minus infinity where several entries name one
    id, so that their order does not matter.
    """
    logits = logits.masked_fill(~_unpack(edits.allowed_bits, logits.shape[1]), -torch.inf)
    logits.scatter_add_(1, edits.bias_ids.long(), edits.biases)
    last = edits.bad_words[:, :, -1].long()  # [B, W]
    before = edits.bad_words[:, :, :-1]  # [B, W, L - 1]
    matches = (before == NOTHING) | (before == edits.recent.unsqueeze(1))
    forbidden = matches.all(dim=-1) & (last != NOTHING)
    return logits.scatter_add_(
        1,
        last.clamp(min=0),
        torch.zeros_like(last, dtype=logits.dtype).masked_fill_(forbidden, -torch.inf),
    )


def _unpack(bits: torch.Tensor, size: int) -> torch.Tensor:
    """[B, ceil(size / 8)] uint8 -> [B, size] bool, the lowest bit of a byte first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(2) >> places) & 1).bool().flatten(1)[:, :size]
