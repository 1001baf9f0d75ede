"""The sampling kernels together against `Sampler`: every mix of features, padded rows, faults."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sampling_rows import NEEDS, batch_of, fill, make_state, plan_of, post_mask, random_row
from triton_device import DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.sampling.fused import FusedSampler  # noqa: E402
from termgen.engine.device.sampling.logprobs import gather_logprobs  # noqa: E402
from termgen.engine.device.sampling.sampler import Sampler  # noqa: E402
from termgen.engine.device.sampling.token_ring import TokenRing  # noqa: E402
from termgen.vocabulary.step import CORRUPT_TOKEN, SamplingNeeds  # noqa: E402

devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
INF, NAN = float("inf"), float("nan")


@devices_and_dtypes
@pytest.mark.parametrize("vocab", [90, 3001])
def test_draws_are_those_of_the_sampler(device: str, dtype: torch.dtype, vocab: int) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    state = make_state(20, vocab, device)
    kernels = FusedSampler(max_rows=20, vocab_size=vocab, device=torch.device(device))
    ring = TokenRing(3, 20, torch.device(device), num_logprobs=20)
    for step in range(3):
        fill(rng, state, vocab)
        slots, counts = batch_of(rng, state, 15, 3)
        logits = normal(18, vocab, dtype=dtype, device=device, seed=seed + step, scale=4.0)
        for row in range(0, 15, 5):  # a whole row, or one logit among others
            logits[row, rng.randrange(vocab)] = rng.choice([NAN, INF, -INF])
        logits[7] = -INF
        before = logits.clone()
        expected = Sampler()(logits.float(), state.sampling_metadata(slots, counts, NEEDS))
        row = int(ring.index)
        drawn, kept = kernels(logits, slots, counts, state, NEEDS, ring)
        assert kept is None and torch.equal(drawn, expected.token_ids)
        assert torch.equal(logits.nan_to_num(nan=0.5), before.nan_to_num(nan=0.5))
        assert expected.logprobs is not None
        alone, returned = kernels(logits, slots, counts, state, NEEDS)
        assert returned is not None and torch.equal(alone, drawn)
        for i, wanted in enumerate(state.num_logprobs[slots].tolist()):
            if wanted < 0 or drawn[i] == CORRUPT_TOKEN:
                continue
            for found in (tuple(t[row] for t in ring.logprobs), tuple(returned)):
                assert torch.equal(
                    found[0][i, : 1 + wanted], expected.logprobs.token_ids[i, : 1 + wanted]
                )
                torch.testing.assert_close(
                    found[1][i, : 1 + wanted],
                    expected.logprobs.logprobs[i, : 1 + wanted],
                    rtol=2e-6,
                    atol=2e-5,
                    equal_nan=True,
                )
                assert found[2][i] == expected.logprobs.ranks[i]
        ring.push(drawn.to(torch.int32))


@devices_and_dtypes
def test_a_row_gets_the_same_token_among_plain_rows(device: str, dtype: torch.dtype) -> None:
    """The kernels of a plain step and of any other draw alike."""
    rng, vocab = random.Random(3), 2500
    state = make_state(8, vocab, device)
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.9}]
    state.update(plan_of([random_row(rng, i, vocab, **kinds[i % 2]) for i in range(6)]))
    kernels = FusedSampler(max_rows=8, vocab_size=vocab, device=torch.device(device))
    slots, counts = batch_of(rng, state, 6, 1)
    logits = normal(7, vocab, dtype=dtype, device=device, seed=1, scale=3.0)
    kernels.edited.fill_(NAN)
    plain, _ = kernels(logits, slots, counts, state, SamplingNeeds())
    among, _ = kernels(logits, slots, counts, state, NEEDS)
    assert torch.equal(plain, among)
    assert kernels.edited.isnan().all(), "no row was edited"


@devices_and_dtypes
def test_corrupt_rows_are_found_by_the_logits_of_the_model(device: str, dtype: torch.dtype) -> None:
    """An empty row is a fault, unless the row itself hides tokens; and so is what is no number."""
    rng, vocab = random.Random(4), 300
    state = make_state(8, vocab, device)
    rows = [
        random_row(rng, 0, vocab, temperature=0.0),
        random_row(rng, 1, vocab, temperature=0.0, repetition_penalty=2e-38),
        random_row(rng, 2, vocab, temperature=0.0, allowed_token_ids=(5,)),
        random_row(rng, 3, vocab, temperature=0.0, min_tokens=50),
        random_row(rng, 4, vocab, temperature=1.0, frequency_penalty=1.0),
        random_row(rng, 5, vocab, temperature=1.0, logprobs=3),
    ]
    state.update(plan_of(rows))
    kernels = FusedSampler(max_rows=8, vocab_size=vocab, device=torch.device(device))
    slots, counts = torch.arange(6, device=device), torch.ones(6, dtype=torch.int64, device=device)
    logits = torch.full((6, vocab), -INF, dtype=dtype, device=device)
    logits[1] = 1.0
    logits[1, state.token_ids[1, 0]] = 100.0  # finite, and infinite once it is penalised
    logits[4, 7], logits[5, 9] = NAN, INF
    expected = Sampler()(logits.float(), state.sampling_metadata(slots, counts, NEEDS)).token_ids
    drawn, _ = kernels(logits, slots, counts, state, NEEDS)
    assert torch.equal(drawn, expected)
    assert kernels.edited[1].isinf().any()
    corrupt = (drawn == CORRUPT_TOKEN).tolist()
    assert corrupt == [True, False, False, False, True, True]


@devices_and_dtypes
def test_a_grammar_hides_tokens_but_not_their_log_probabilities(
    device: str, dtype: torch.dtype
) -> None:
    rng, vocab = random.Random(5), 200
    state = make_state(6, vocab, device)
    rows = [random_row(rng, i, vocab, temperature=0.0, logprobs=2) for i in (0, 1)]
    rows[1] = replace(rows[1], has_grammar=True)
    state.update(plan_of(rows))
    post_mask(state, rows[1], [68])
    kernels = FusedSampler(max_rows=6, vocab_size=vocab, device=torch.device(device))
    slots, counts = torch.arange(2, device=device), torch.ones(2, dtype=torch.int64, device=device)
    logits = normal(2, vocab, dtype=dtype, device=device, seed=8)
    raw = logits.clone()
    expected = Sampler()(raw.float(), state.sampling_metadata(slots, counts, NEEDS)).token_ids
    drawn, logprobs = kernels(logits, slots, counts, state, NEEDS)
    assert torch.equal(logits, raw), "they are only read"
    assert torch.equal(drawn, expected) and int(drawn[1]) == 68
    assert logprobs is not None
    own = gather_logprobs(raw, drawn, 2)
    assert torch.equal(logprobs.token_ids[:, :3], own.token_ids)
    torch.testing.assert_close(logprobs.logprobs[:, :3], own.logprobs, rtol=2e-6, atol=2e-5)
