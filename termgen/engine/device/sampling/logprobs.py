"""Log-probabilities and ranks of the drawn tokens, from the logits as the model made them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LogprobTensors(NamedTuple):
    """Device form of `StepLogprobs`: column 0 is the drawn token, then the likeliest in order, of
    equally likely ones the lower id first."""

    token_ids: torch.Tensor
    """[B, 1 + K] int32"""
    logprobs: torch.Tensor
    """[B, 1 + K] float32, natural log"""
    ranks: torch.Tensor
    """[B] int32: 1 + the number of strictly likelier tokens"""


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, max_logprobs: int
) -> LogprobTensors:
    """logits [B, V] before any processor, token_ids [B] int64.

    The softmax is never formed: the logarithm of its denominator is enough for the chosen ids. A
    vocabulary smaller than `max_logprobs` gives fewer columns.
    """
    logits = logits.float()
    ids = token_ids.unsqueeze(1)
    chosen = logits.gather(1, ids)
    ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
    values = chosen
    if max_logprobs > 0:
        likeliest = _likeliest(logits, min(max_logprobs, logits.shape[-1]))
        ids = torch.cat((ids, likeliest), dim=1)
        values = logits.gather(1, ids)
    logprobs = values - logits.logsumexp(dim=-1, keepdim=True)
    return LogprobTensors(ids.to(torch.int32), logprobs, ranks)


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count] int64 ids. `topk` alone may take any of equal logits, and gives them in any order:
    of half-precision logits many are equal."""
    if logits.device.type != "cpu":
        return _likeliest_of_equals(logits, count)
    # Equal logits are rare in float32: their rows alone are worth the time.
    top = logits.topk(min(count + 1, logits.shape[1]), dim=1)
    rows = (top.values[:, 1:] == top.values[:, :-1]).any(dim=1).nonzero()[:, 0]
    ids = top.indices[:, :count]
    ids[rows] = _likeliest_of_equals(logits[rows], count)
    return ids


def _likeliest_of_equals(logits: torch.Tensor, count: int) -> torch.Tensor:
    bits = torch.where(logits == 0.0, 0.0, logits).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32  # sorts as the floats do
    return (key - torch.arange(logits.shape[1], device=logits.device)).topk(count, dim=1).indices
