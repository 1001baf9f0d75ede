"""Cut the tail of a distribution: min-p, then top-k, then top-p.

All three keep a set of the largest logits, so together they are one threshold per row: a token
stays if its logit is not below it. The most likely token always stays. Ties at a cut are all kept:
which of two equal logits a sort puts first differs between devices, and a draw must not.

The reference sorts every row once and never waits for the device. The CPU form gives the same
thresholds; it may look at values on the host, so it skips what nobody asks for and sorts only as
many of the largest logits as it takes.
"""

from __future__ import annotations

import torch

_FIRST_CANDIDATES = 256
_CANDIDATE_GROWTH = 8


def cut_threshold(
    logits: torch.Tensor, *, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """[B, 1] smallest logit to keep in each row of logits [B, V]; parameters [B].

    min_p drops what is less probable than `min_p` times the most probable token (0: nothing).
    top_k keeps the k largest of the rest (0: all). top_p keeps of those, renormalised, the smallest
    set of most probable tokens with a mass of at least `top_p` (1: all).
    """
    if logits.device.type == "cpu":
        return cut_threshold_cpu(logits, min_p=min_p, top_k=top_k, top_p=top_p)
    return cut_threshold_reference(logits, min_p=min_p, top_k=top_k, top_p=top_p)


def cut_threshold_reference(
    logits: torch.Tensor, *, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    values = logits.sort(dim=-1, descending=True).values
    threshold = values[:, :1] + min_p.log().unsqueeze(1)
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    threshold = torch.maximum(threshold, values.gather(1, last.unsqueeze(1)))
    values = values.masked_fill(values < threshold, -torch.inf)
    log_total = values.logsumexp(dim=-1, keepdim=True)
    return torch.maximum(threshold, _top_p_threshold(values, log_total, top_p.unsqueeze(1)))


def cut_threshold_cpu(
    logits: torch.Tensor, *, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    threshold = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
    rows = ((top_k > 0) & (top_k < logits.shape[-1])).nonzero().squeeze(1)
    if len(rows):
        last = top_k[rows].long().unsqueeze(1) - 1
        values = _take(logits, rows).topk(int(last.max()) + 1, dim=-1).values
        threshold[rows] = torch.maximum(threshold[rows], values.gather(1, last))
    rows = (top_p < 1.0).nonzero().squeeze(1)
    if len(rows):
        kept = _take(logits, rows)
        kept = kept.masked_fill(kept < threshold[rows], -torch.inf)
        nucleus = _grow_nucleus(kept, top_p[rows].unsqueeze(1))
        threshold[rows] = torch.maximum(threshold[rows], nucleus)
    return threshold


def _take(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _grow_nucleus(logits: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Top-p threshold [B, 1] from as few of the largest logits as hold the mass in every row."""
    vocab_size = logits.shape[-1]
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    num_candidates = min(_FIRST_CANDIDATES, vocab_size)
    while True:
        values = logits.topk(num_candidates, dim=-1).values
        mass = (values - log_total).exp().sum(dim=-1, keepdim=True)
        if num_candidates == vocab_size or bool((mass >= limit).all()):
            return _top_p_threshold(values, log_total, limit)
        num_candidates = min(num_candidates * _CANDIDATE_GROWTH, vocab_size)


def _top_p_threshold(
    values: torch.Tensor, log_total: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """values [B, K]: the K largest logits, best first, holding a mass of `limit` [B, 1] or all."""
    probs = (values - log_total).exp()
    mass_before = probs.cumsum(dim=-1) - probs
    kept = values.masked_fill(mass_before >= limit, torch.inf)  # limit > 0, so the first stays
    return kept.amin(dim=-1, keepdim=True).masked_fill_(limit >= 1.0, -torch.inf)
