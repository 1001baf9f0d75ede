"""Logit edits and grammar masks in kernels against the sampler's torch code."""

from __future__ import annotations

import random

import pytest
import torch
from sampling_rows import NEEDS, batch_of, fill, make_state, plan_of, random_row
from triton_device import DEVICES_AND_DTYPES, normal, poison, require_triton

require_triton()

from termgen.engine.device.kernels.sampling.edit_logits import (  # noqa: E402
    edit_logits,
    mask_tokens_,
    mask_tokens_reference,
)
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


def mask_case(vocab_size: int, num_slots: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots that have a grammar [R], random bits [R, W])."""
    generator = torch.Generator().manual_seed(vocab_size)
    words = -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31, (num_slots, words), generator=generator)
    has_grammar = torch.rand(num_slots, generator=generator) < 0.5
    has_grammar[:2] = torch.tensor([True, False])
    return has_grammar.to(device), bits.to(device, torch.int32)


@devices_and_dtypes
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 31), (3, 2049), (9, 5001), (2, 49152)])
def test_rows_with_a_grammar_keep_only_what_their_mask_allows(
    device: str, dtype: torch.dtype, num_rows: int, vocab_size: int
) -> None:
    has_grammar, bits = mask_case(vocab_size, 12, device)
    slots = torch.tensor([0, 5, 1, 7, 11, 2, 9, 3, 4][:num_rows], device=device)
    wide = normal(num_rows, vocab_size + 24, dtype=dtype, device=device, seed=3)
    logits = wide[:, :vocab_size]
    before, beyond = logits.clone(), wide[:, vocab_size:].clone()
    expected = mask_tokens_reference(logits, slots, has_grammar=has_grammar, bits=bits)
    assert torch.equal(logits, before), "the reference only reads"
    mask_tokens_(logits, slots, has_grammar=has_grammar, bits=bits)
    assert torch.equal(logits, expected)
    assert torch.equal(wide[:, vocab_size:], beyond)
    for row, slot in enumerate(slots.tolist()):
        mask = bits[slot].tolist()
        for token in {*range(min(40, vocab_size)), vocab_size - 1}:
            allowed = not has_grammar[slot] or (mask[token // 32] >> token % 32) & 1
            value = before[row, token] if allowed else torch.tensor(-INF)
            assert logits[row, token].item() == value.item(), (slot, token)


def test_no_rows_to_mask() -> None:
    has_grammar, bits = mask_case(40, 3, "cpu")
    slots = torch.zeros(0, dtype=torch.int64)
    mask_tokens_(torch.zeros(0, 40), slots, has_grammar=has_grammar, bits=bits)
