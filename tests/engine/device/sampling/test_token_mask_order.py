"""A grammar's mask in the sampler: first of all operations, and unseen by log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from termgen.engine.device.sampling.metadata import SamplingMetadata, TokenMasks
from termgen.engine.device.sampling.sampler import Sampler

ROWS, VOCAB = 6, 67


def masks_for(allowed: list[set[int] | None]) -> TokenMasks:
    """Slots in another order than rows; None for a row without a grammar."""
    slots = torch.tensor([5, 1, 7, 0, 3, 2])
    bits = torch.zeros(9, 3, dtype=torch.int32)
    has_grammar = torch.zeros(9, dtype=torch.bool)
    for slot, tokens in zip(slots.tolist(), allowed, strict=True):
        has_grammar[slot] = tokens is not None
        for token in tokens or ():
            word = int(bits[slot, token // 32]) & 0xFFFFFFFF | 1 << token % 32
            bits[slot, token // 32] = word - (word >> 31 << 32)
    return TokenMasks(slots, has_grammar, bits)


def test_only_what_the_mask_allows_is_drawn_and_cuts_count_only_that(
    random_logits: Callable[..., torch.Tensor], make_meta: Callable[..., SamplingMetadata]
) -> None:
    logits = random_logits(ROWS, VOCAB, scale=2.0, seed=3)
    allowed: list[set[int] | None] = [{0, 31, 63, 66}, None, {5}, {64, 65}, None, {32, 33}]
    before = logits.clone()
    expected = []
    for row, tokens in zip(logits, allowed, strict=True):
        expected.append(max(tokens or range(VOCAB), key=lambda t: float(row[t])))
    masks = masks_for(allowed)
    greedy = replace(make_meta(ROWS, temperature=0.0), token_masks=masks)
    assert Sampler()(logits, greedy).token_ids.tolist() == expected
    # Top-k leaves only the best allowed token: without the mask it would be a different one.
    best = replace(make_meta(ROWS, temperature=1.3, top_k=1, max_logprobs=2), token_masks=masks)
    output = Sampler()(logits, best)
    assert output.token_ids.tolist() == expected
    assert torch.equal(logits, before)
    assert output.logprobs is not None
    raw = logits.log_softmax(-1)
    chosen = raw.gather(1, output.token_ids[:, None])[:, 0]
    torch.testing.assert_close(output.logprobs[1][:, 0], chosen)
    assert torch.equal(output.logprobs[0][:, 1].long(), raw.argmax(-1))
