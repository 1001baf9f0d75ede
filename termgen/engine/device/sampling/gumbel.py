"""Draw one token per row by Gumbel-max.

The argmax of logits plus standard Gumbel noise is a draw from their softmax. A row without noise
is therefore greedy, and both kinds share every operation. The noise at a vocabulary index depends
only on (seed, position, stream, index), never on which other indices survived a cut.
"""

from __future__ import annotations

import torch

from termgen.engine.device.sampling.random import (
    Stream,
    gumbel_from_bits,
    random_bits,
    random_bits_at,
)
from termgen.vocabulary.step import CORRUPT_TOKEN

# Noise for single indices costs about four times as much per index as noise for a whole row.
_SPARSE_SHARE = 1 / 8


def gumbel_argmax(
    logits: torch.Tensor,
    *,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
    stream: Stream,
    threshold: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, V] float32 logits -> [B] int64 ids.

    `greedy` [B] bool marks rows that get no noise; `threshold` [B, 1] drops the logits below it.
    -inf is drawn only from a row that holds nothing else. A NaN wins its row, else +inf does:
    `mark_corrupt` finds such rows by the logit that was drawn.
    """
    if threshold is not None:
        dropped = logits < threshold
        if logits.device.type == "cpu":
            survivors = ~dropped
            if int(survivors.count_nonzero()) < logits.numel() * _SPARSE_SHARE:
                return _argmax_of_few(logits, survivors, seeds, positions, greedy, stream)
        logits = logits.masked_fill(dropped, -torch.inf)
    bits = random_bits(seeds, positions, stream=stream, vocab_size=logits.shape[-1])
    noise = gumbel_from_bits(bits).masked_fill_(greedy.unsqueeze(1), 0.0)
    return noise.add_(logits).argmax(dim=-1)


def mark_corrupt(
    token_ids: torch.Tensor, logits: torch.Tensor, *, may_be_empty: bool
) -> torch.Tensor:
    """The drawn ids [B], with CORRUPT_TOKEN in the rows whose logits [B, V] are not numbers.

    A NaN or +inf wins its row, so the drawn logit tells. A row of nothing but -inf is corrupt too,
    unless masks may have left it nothing to draw (may_be_empty).
    """
    drawn = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    is_corrupt = drawn.isnan() | (drawn == torch.inf) if may_be_empty else ~drawn.isfinite()
    return token_ids.masked_fill(is_corrupt, CORRUPT_TOKEN)


def _argmax_of_few(
    logits: torch.Tensor,
    survivors: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor,
    stream: Stream,
) -> torch.Tensor:
    """Fast path, skip on a first reading: the same draw with noise for the survivors [B, V] alone.

    CPU only: how many there are is a host value. Every row has at least one.
    """
    rows, ids = survivors.nonzero(as_tuple=True)  # [N] each, row after row
    bits = random_bits_at(seeds[rows], positions[rows], ids, stream=stream)
    noise = gumbel_from_bits(bits).masked_fill_(greedy[rows], 0.0)
    counts = rows.bincount(minlength=len(logits))
    starts = counts.cumsum(0) - counts
    columns = torch.arange(len(ids)) - starts[rows]
    scores = logits.new_full((len(logits), int(counts.max())), -torch.inf)
    scores[rows, columns] = noise.add_(logits[rows, ids])
    return ids[starts + scores.argmax(dim=-1)]
