"""Logit edits and grammar masks in kernels against the sampler's torch code."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sampling_rows import NEEDS, batch_of, fill, make_state, plan_of, post_mask, random_row
from triton_device import DEVICES_AND_DTYPES, normal, poison, require_triton

require_triton()

from termgen.engine.device.kernels.sampling.edit_logits import edit_logits  # noqa: E402
from termgen.engine.device.sampling.sampler import process_logits  # noqa: E402

devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
INF, NAN = float("inf"), float("nan")


@devices_and_dtypes
@pytest.mark.parametrize("vocab", [67, 2048, 5001])
def test_rows_are_edited_as_by_the_sampler(device: str, dtype: torch.dtype, vocab: int) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    state = make_state(14, vocab, device)
    num_edited = 0
    for _ in range(3):
        fill(rng, state, vocab)  # the slots' last owners leave nothing behind
        slots, counts = batch_of(rng, state, 10, 2)
        wide = normal(12, vocab + 9, dtype=dtype, device=device, seed=rng.randrange(10**6), scale=9)
        logits = wide[:, :vocab]  # rows apart
        for row in range(12):
            for value in rng.sample([INF, -INF, NAN, 0.0, -0.0], 2):
                logits[row, rng.randrange(vocab)] = value
        before = logits.clone()
        out = poison(13, vocab, dtype=torch.float32, device=device).fill_(777.0)
        edit_logits(logits, slots, state, out)
        expected = process_logits(logits.float(), state.sampling_metadata(slots, counts, NEEDS))
        early = state.total_len[slots] < state.min_total[slots]
        is_edited = early | (state.edit_kinds[slots] != 0)
        num_edited += int(is_edited.sum())
        got = out[:12][is_edited]
        assert torch.equal(got.isnan(), expected[is_edited].isnan())
        assert torch.equal(got.nan_to_num(nan=0.5), expected[is_edited].nan_to_num(nan=0.5))
        assert (out[:12][~is_edited] == 777.0).all() and (out[12] == 777.0).all()
        assert not is_edited[10:].any(), "padded rows"
        unedited = expected[~is_edited]
        assert torch.equal(unedited.nan_to_num(), logits[~is_edited].float().nan_to_num())
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "they are only read"
    assert num_edited > 10


@devices_and_dtypes
def test_products_are_rounded_before_they_are_subtracted(device: str, dtype: torch.dtype) -> None:
    """A fused multiply-add would round once, and draw another token now and then."""
    rng, vocab = random.Random(5), 4001
    state = make_state(4, vocab, device)
    row = random_row(rng, 0, vocab, frequency_penalty=0.3, presence_penalty=-0.7)
    state.update(plan_of([row]))
    state.token_counts[0] = torch.randint(
        0, 1000, (vocab,), generator=torch.Generator().manual_seed(3), dtype=torch.int32
    )
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    logits = normal(1, vocab, dtype=dtype, device=device, seed=2, scale=9)
    out = poison(1, vocab, dtype=torch.float32, device=device)
    edit_logits(logits, slots, state, out)
    meta = state.sampling_metadata(slots, torch.ones_like(slots), NEEDS)
    assert torch.equal(out, process_logits(logits.float(), meta))


@devices_and_dtypes
@pytest.mark.parametrize("vocab", [31, 2049, 5001])
def test_rows_with_a_grammar_keep_only_what_their_mask_allows(
    device: str, dtype: torch.dtype, vocab: int
) -> None:
    rng = random.Random(vocab)
    state = make_state(6, vocab, device)
    rows = [
        replace(random_row(rng, i, vocab, temperature=0.0), has_grammar=i < 2) for i in (0, 1, 2)
    ]
    state.update(plan_of(rows))
    allowed = [{0, vocab - 1}, set(rng.sample(range(vocab), vocab // 2))]
    for row, tokens in zip(rows, allowed, strict=False):
        post_mask(state, row, sorted(tokens))
    slots = torch.tensor([1, 0, 2], device=device)
    logits = normal(3, vocab, dtype=dtype, device=device, seed=3)
    out = poison(3, vocab, dtype=torch.float32, device=device).fill_(777.0)
    edit_logits(logits, slots, state, out)
    for i, tokens in enumerate(reversed(allowed)):
        value = logits[i].float().cpu()
        hidden = torch.tensor([token not in tokens for token in range(vocab)])
        assert torch.equal(out[i].cpu(), value.masked_fill(hidden, -INF))
    is_early = state.total_len[2] < state.min_total[2]
    assert is_early or (out[2] == 777.0).all()
