"""Log-probabilities and ranks of the drawn tokens, from the logits as the model made them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LogprobTensors(NamedTuple):
    """Device form of `StepLogprobs`: column 0 is the drawn token, then the likeliest in order."""

    token_ids: torch.Tensor
    """[B, 1 + K] int32"""
    logprobs: torch.Tensor
    """[B, 1 + K] float32, natural log"""
    ranks: torch.Tensor
    """[B] int32: 1 + the number of strictly likelier tokens"""


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, max_logprobs: int
) -> LogprobTensors:
    """logits [B, V] float32 before any processor, token_ids [B] int64.

    The softmax is never formed: the logarithm of its denominator is enough for the chosen ids. A
    vocabulary smaller than `max_logprobs` gives fewer columns.
    """
    ids = token_ids.unsqueeze(1)
    chosen = logits.gather(1, ids)
    ranks = (logits > chosen).sum(dim=-1, dtype=torch.int32) + 1
    values = chosen
    if max_logprobs > 0:
        top = logits.topk(min(max_logprobs, logits.shape[-1]), dim=-1)
        ids = torch.cat((ids, top.indices), dim=1)
        values = torch.cat((chosen, top.values), dim=1)
    logprobs = values - logits.logsumexp(dim=-1, keepdim=True)
    return LogprobTensors(ids.to(torch.int32), logprobs, ranks)
