"""Cut the tail of a distribution: top-n-sigma and min-p, then top-k, then top-p.

All of them keep a set of the largest logits, so together they are one threshold per row: a token
stays if its logit is not below it. The most likely token always stays. Ties at a cut are all kept:
which of two equal logits a sort puts first differs between devices, and a draw must not.

The reference sorts every row once and never waits for the device. The CPU form gives the same
thresholds; it may look at values on the host, so it skips what no row asks for and sorts only as
many of the largest logits as it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_FIRST_SORTED = 256
_ROOM_FOR_TIES = 32
_GROWTH = 8


class Cuts(NamedTuple):
    """Columns of the parameters, one for each row `part="cut"` of `sampling_params`: of a step's
    rows, or of every slot."""

    top_n_sigma: torch.Tensor
    """float32: drop what is more than this many standard deviations of the logits below the largest
    (0: nothing). As `llama_sampler_top_n_sigma_apply` of llama.cpp (src/llama-sampling.cpp) has it:
    the deviation is that of the whole population, tokens of -inf aside, before any other cut.
    llama.cpp takes it before it divides by the temperature, which scales both sides alike."""
    min_p: torch.Tensor
    """float32 in [0, 1]: drop what is less probable than this times the most probable token (0:
    nothing)."""
    top_k: torch.Tensor
    """int32: keep this many largest of the rest (0: all)."""
    top_p: torch.Tensor
    """float32 in (0, 1]: keep of those, renormalised, the smallest set of most probable tokens with
    a mass of at least this (1: all)."""

    def of(self, rows: torch.Tensor | slice) -> Cuts:
        return Cuts(*(column[rows] for column in self))


def cut_threshold(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """[B, 1] smallest logit to keep in each row of logits [B, V]; cuts [B]."""
    form = cut_threshold_cpu if logits.device.type == "cpu" else cut_threshold_reference
    return form(logits, cuts)


def cut_threshold_reference(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    min_p, top_k, top_p = cuts.min_p, cuts.top_k, cuts.top_p
    vocab_size = logits.shape[-1]
    values = logits.sort(dim=-1, descending=True).values
    threshold = torch.maximum(
        values[:, :1] + min_p.log().unsqueeze(1),
        _sigma_threshold(logits, values[:, :1], cuts.top_n_sigma),
    )
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    threshold = torch.maximum(threshold, values.gather(1, last.unsqueeze(1)))
    values = values.masked_fill(values < threshold, -torch.inf)
    mass = _mass(values, values[:, :1])
    return torch.maximum(threshold, _top_p_threshold(values, mass, top_p.unsqueeze(1)))


def cut_threshold_cpu(logits: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Fast path, skip on a first reading: the same thresholds without sorting every row."""
    min_p, top_k, top_p = cuts.min_p, cuts.top_k, cuts.top_p
    largest = logits.amax(dim=-1, keepdim=True)
    threshold = largest + min_p.log().unsqueeze(1)
    rows = (cuts.top_n_sigma > 0).nonzero().squeeze(1)
    if len(rows):
        limit = _sigma_threshold(logits[rows], largest[rows], cuts.top_n_sigma[rows])
        threshold[rows] = torch.maximum(threshold[rows], limit)
    limited = ((top_k > 0) & (top_k < logits.shape[-1])) | (top_p < 1.0)
    rows = limited.nonzero().squeeze(1)
    if len(rows) == len(logits):
        return _cut_rows(logits, threshold, top_k, top_p.unsqueeze(1))
    if len(rows):
        limit = top_p[rows].unsqueeze(1)
        threshold[rows] = _cut_rows(logits[rows], threshold[rows], top_k[rows], limit)
    return threshold


def _cut_rows(
    logits: torch.Tensor, threshold: torch.Tensor, top_k: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """Raise `threshold` [R, 1] by top-k and top-p, from as few of the largest logits as do."""
    vocab_size = logits.shape[-1]
    num_sorted = min(vocab_size, max(_FIRST_SORTED, int(top_k.max()) + _ROOM_FOR_TIES))
    values = logits.topk(num_sorted, dim=-1).values
    last = torch.where(top_k > 0, top_k, vocab_size).long().unsqueeze(1) - 1
    kth = values.gather(1, last.clamp(max=num_sorted - 1))
    threshold = torch.maximum(threshold, kth.masked_fill_(last >= num_sorted, -torch.inf))
    if bool((limit >= 1.0).all()):
        return threshold
    total = _mass_above(logits, values, threshold)
    while num_sorted < vocab_size:
        # Enough, if the mass is reached or if the next value is dropped already.
        enough = _mass(values, values[:, :1]) >= limit * total
        if bool((enough | (values[:, -1:] < threshold)).all()):
            break
        num_sorted = min(vocab_size, num_sorted * _GROWTH)
        values = logits.topk(num_sorted, dim=-1).values
    values = values.masked_fill(values < threshold, -torch.inf)
    return torch.maximum(threshold, _top_p_threshold(values, total, limit))


def _sigma_threshold(
    logits: torch.Tensor, largest: torch.Tensor, top_n_sigma: torch.Tensor
) -> torch.Tensor:
    """[R, 1] the largest logit less `top_n_sigma` standard deviations, -inf where that is 0.

    In float64, so that the order of the sums leaves no trace in float32: kernels have another. A
    row whose largest logit is not finite is not cut."""
    below = logits.double() - largest.double()
    is_known = logits > -torch.inf
    below = below.masked_fill(~is_known, 0.0)
    count = is_known.sum(dim=-1, keepdim=True)
    mean = below.sum(dim=-1, keepdim=True) / count
    variance = below.square().sum(dim=-1, keepdim=True) / count - mean.square()
    n = top_n_sigma.double().unsqueeze(1)
    cut = (largest.double() - n * variance.clamp(min=0.0).sqrt()).to(logits.dtype)
    return cut.masked_fill((n <= 0.0) | ~largest.isfinite(), -torch.inf)


def _mass(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """[R, 1] unnormalised mass, the largest logit [R, 1] weighing 1.

    Not by way of log-sum-exp: rounding it loses digits of every probability.
    """
    return (logits - largest).exp_().sum(dim=-1, keepdim=True)


def _mass_above(
    logits: torch.Tensor, values: torch.Tensor, threshold: torch.Tensor
) -> torch.Tensor:
    """Mass [R, 1] of the logits not below the threshold; `values` are the largest ones."""
    if bool((values[:, -1:] < threshold).all()):  # nothing kept lies outside `values`
        logits = values
    return _mass(logits.masked_fill(logits < threshold, -torch.inf), values[:, :1])


def _top_p_threshold(
    values: torch.Tensor, total: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """values [B, K]: the K largest logits, best first; they hold `limit` [B, 1] of `total`."""
    weights = (values - values[:, :1]).exp_()
    mass_before = weights.cumsum(dim=-1) - weights
    dropped = mass_before >= limit * total
    dropped[:, 0] = False  # stays, whatever is left of `limit` in float32
    kept = values.masked_fill(dropped, torch.inf)
    return kept.amin(dim=-1, keepdim=True).masked_fill_(limit >= 1.0, -torch.inf)
