"""Cuts and penalties against transformers' processors, and the CPU forms against the references."""

from __future__ import annotations

import random

import pytest
import torch
from sampling_columns import make_cuts
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from termgen.engine.device.sampling.penalties import Penalties, apply_penalties
from termgen.engine.device.sampling.sampler import mask_stop_tokens
from termgen.engine.device.sampling.top_k_top_p import (
    cut_threshold,
    cut_threshold_cpu,
    cut_threshold_reference,
)

VOCAB = 1009


def cut(logits: torch.Tensor, form=cut_threshold, **cuts) -> torch.Tensor:
    threshold = form(logits, make_cuts(len(logits), **cuts))
    assert threshold.shape == (len(logits), 1)
    return logits.masked_fill(logits < threshold, -torch.inf)


FORMS = pytest.mark.parametrize("form", [cut_threshold_cpu, cut_threshold_reference])


@FORMS
@pytest.mark.parametrize("top_k", [1, 2, 50, 300, VOCAB, 2**31 - 1])
def test_top_k_equals_transformers(random_logits, form, top_k: int) -> None:
    logits = random_logits(20, VOCAB)
    assert torch.equal(cut(logits, form, top_k=top_k), TopKLogitsWarper(top_k)(None, logits))


@FORMS
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
def test_top_p_equals_transformers(random_logits, form, top_p: float, scale: float) -> None:
    logits = random_logits(20, VOCAB, scale=scale)
    ours = cut(logits, form, top_p=top_p)
    theirs = TopPLogitsWarper(top_p)(None, logits)
    assert_equal_but_for_rounding(ours, theirs, logits, top_p)
    assert (ours > -torch.inf).any(dim=-1).all()


def assert_equal_but_for_rounding(ours, theirs, logits, top_p: float) -> None:
    """Sums in another order may disagree on a token only if the mass before it is `top_p`."""
    probs = logits.double().softmax(-1)
    for row, index in (ours != theirs).nonzero().tolist():
        before = probs[row][logits[row] > logits[row, index]].sum()
        assert abs(float(before) - top_p) < 1e-6, (row, index)


@FORMS
@pytest.mark.parametrize("top_p", [0.0, 1e-45, 2.0**-126])
def test_the_likeliest_stays_however_small_top_p_is(random_logits, form, top_p: float) -> None:
    logits = random_logits(20, VOCAB)
    others = {"top_k": [40] * 10 + [0] * 10, "min_p": [0.0, 0.1] * 10}
    rows = [top_p] * 15 + [1.0] * 5
    kept = cut(logits, form, top_p=rows, **others) > -torch.inf
    assert torch.equal(kept[:15].nonzero()[:, 1], logits[:15].argmax(dim=-1))
    untouched = cut(logits[15:], form, **{name: values[15:] for name, values in others.items()})
    assert torch.equal(kept[15:], untouched > -torch.inf)


@FORMS
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(form) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = {p: int((cut(logits, form, top_p=p) > -torch.inf).sum()) for p in (0.4, 0.6, 0.81, 0.99)}
    assert kept == {0.4: 1, 0.6: 2, 0.81: 3, 0.99: 4}


@FORMS
@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_equals_transformers(random_logits, form, min_p: float) -> None:
    logits = random_logits(50, VOCAB)
    ours, theirs = cut(logits, form, min_p=min_p), MinPLogitsWarper(min_p)(None, logits)
    relative = (logits - logits.amax(dim=-1, keepdim=True)).double().exp()
    for row, index in (ours != theirs).nonzero().tolist():
        assert float(relative[row, index]) == pytest.approx(min_p, rel=1e-5), (row, index)


@FORMS
def test_the_cuts_compose_in_order(random_logits, form) -> None:
    """min-p, then top-k, then top-p on the rest, renormalised."""
    logits = random_logits(200, VOCAB, scale=1.5, seed=61)  # fixed: no rounding at min-p
    before_top_p = TopKLogitsWarper(40)(None, MinPLogitsWarper(0.02)(None, logits))
    expected = TopPLogitsWarper(0.7)(None, before_top_p)
    ours = cut(logits, form, min_p=0.02, top_k=40, top_p=0.7)
    assert_equal_but_for_rounding(ours, expected, before_top_p, 0.7)
    not_renormalised = TopKLogitsWarper(40)(None, TopPLogitsWarper(0.7)(None, logits))
    assert ((ours > -torch.inf) != (not_renormalised > -torch.inf)).any(dim=-1).sum() > 20


@FORMS
def test_rows_are_cut_by_their_own_parameters(random_logits, form) -> None:
    logits = random_logits(60, VOCAB, scale=2.0)
    rng = random.Random(60)
    min_p = [rng.choice([0.0, 0.0, 0.03]) for _ in range(60)]
    top_k = [rng.choice([0, 0, 1, 30, 700]) for _ in range(60)]
    top_p = [rng.choice([1.0, 1.0, 0.3, 0.9]) for _ in range(60)]
    together = cut(logits, form, min_p=min_p, top_k=top_k, top_p=top_p)
    for i in range(60):
        row = logits[i : i + 1]
        alone = cut(row, form, min_p=min_p[i], top_k=top_k[i], top_p=top_p[i])
        assert torch.equal(together[i : i + 1], alone), i
        if min_p[i] == 0.0 and top_k[i] == 0 and top_p[i] == 1.0:
            assert torch.equal(alone, row)


@FORMS
def test_ties_at_the_cut_are_kept(form) -> None:
    logits = torch.zeros(2, 900)
    logits[0, 500:] = -1.0
    logits[1, 7] = 5.0
    assert int((cut(logits, form, top_k=3)[0] > -torch.inf).sum()) == 500
    assert torch.equal(cut(logits, form, top_k=1)[1].isfinite().nonzero(), torch.tensor([[7]]))
    both = cut(logits, form, top_k=3, top_p=0.4)
    assert int((both[0] > -torch.inf).sum()) == 500  # equal logits stay or go together


def test_cpu_form_equals_the_reference_on_coarse_logits(random_logits) -> None:
    """bfloat16 logits tie often, and flat rows make the candidates grow."""
    for scale in (0.0, 0.02, 1.0, 4.0, 30.0):
        logits = random_logits(40, 5003, scale=scale).bfloat16().float()
        logits[:, 11] = -torch.inf
        rng = random.Random(int(scale * 100))
        parameters = {
            "min_p": [rng.choice([0.0, 0.1]) for _ in range(40)],
            "top_k": [rng.choice([0, 1, 20, 260, 4000]) for _ in range(40)],
            "top_p": [rng.choice([1.0, 0.2, 0.9, 0.9999]) for _ in range(40)],
        }
        cpu = cut(logits, cut_threshold_cpu, **parameters)
        reference = cut(logits, cut_threshold_reference, **parameters)
        before_top_p = cut(
            logits, cut_threshold_reference, min_p=parameters["min_p"], top_k=parameters["top_k"]
        )
        probs = before_top_p.double().softmax(-1)
        for row in (cpu != reference).any(dim=-1).nonzero().squeeze(1).tolist():
            # Sums in another order: a difference is allowed only where the smaller set just about
            # has the mass.
            mass = min(probs[row][kept[row] > -torch.inf].sum() for kept in (cpu, reference))
            assert float(mass) == pytest.approx(parameters["top_p"][row], abs=1e-5), row


@FORMS
def test_lost_rows_stay_harmless(form) -> None:
    logits = torch.randn(4, 500)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    clean = logits[3:].clone()
    result = cut(logits, form, min_p=0.1, top_k=20, top_p=0.9)
    assert float(result[2, 3]) == torch.inf
    assert torch.equal(result[3:], cut(clean, form, min_p=0.1, top_k=20, top_p=0.9))


def seen_tensors(prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, torch.Tensor]:
    prompt_mask = torch.zeros(len(prompts), VOCAB, dtype=torch.bool)
    output_counts = torch.zeros(len(prompts), VOCAB, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        prompt_mask[row, prompt] = True
        for token in output:
            output_counts[row, token] += 1
    return {"prompt_mask": prompt_mask, "output_counts": output_counts}


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty_equals_transformers(random_logits, penalty: float) -> None:
    logits = random_logits(5, VOCAB)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(5)]
    outputs = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(5)]
    ours = apply_penalties(
        logits,
        Penalties(torch.full((5,), penalty), torch.zeros(5), torch.zeros(5)),
        **seen_tensors(prompts, outputs),
    )
    history = torch.tensor([p + o for p, o in zip(prompts, outputs, strict=True)])
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(penalty)(history, logits))


def test_frequency_and_presence_look_at_the_output_alone(random_logits) -> None:
    logits = random_logits(3, VOCAB)
    seen = seen_tensors([[1, 2, 3]] * 3, [[3, 4, 4, 4], [3, 4, 4, 4], []])
    ours = apply_penalties(
        logits,
        Penalties(
            repetition_penalty=torch.tensor([1.0, 2.0, 1.0]),
            presence_penalty=torch.tensor([0.25, -1.0, 2.0]),
            frequency_penalty=torch.tensor([0.5, 0.5, 0.5]),
        ),
        **seen,
    )
    expected = logits.clone()
    for token in (1, 2, 3, 4):  # repetition comes first
        value = expected[1, token]
        expected[1, token] = value * 2.0 if value < 0 else value / 2.0
    for row, presence in ((0, 0.25), (1, -1.0)):
        expected[row, 3] -= 0.5 * 1
        expected[row, 4] -= 0.5 * 3
        expected[row, [3, 4]] -= presence
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[2], logits[2])


def test_neutral_penalties_change_no_bit(random_logits) -> None:
    logits = random_logits(2, VOCAB)
    logits[0, 5] = -torch.inf
    ones, zeros = torch.ones(2), torch.zeros(2)
    ours = apply_penalties(
        logits,
        Penalties(ones, zeros, zeros),
        **seen_tensors([[5, 6]] * 2, [[5, 7, 7]] * 2),
    )
    assert torch.equal(ours, logits)


def test_stop_mask(random_logits) -> None:
    logits = random_logits(5, VOCAB)
    stop = torch.tensor([[0, 9, -1, -1], [0, 9, -1, -1], [-1] * 4, [3, -1, 3, 8], [2, 4, 6, 8]])
    suppress = torch.tensor([True, False, True, True, True])
    before = logits.clone()
    masked = mask_stop_tokens(logits, stop, suppress)
    assert torch.equal(logits, before)
    expected = before.clone()
    expected[0, [0, 9]] = expected[3, [3, 8]] = expected[4, [2, 4, 6, 8]] = -torch.inf
    assert torch.equal(masked, expected)
    assert torch.equal(mask_stop_tokens(logits, stop[:, :0], suppress), before)


@FORMS
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, [True, False, False, False]), (0.6, [True, True, True, False])]
)
def test_a_mass_reached_exactly_is_enough_and_equals_stay_together(
    form, top_p: float, kept: list[bool]
) -> None:
    """The smallest set whose mass is at least top_p; of two equals neither is preferred."""
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    assert (cut(logits, form, top_p=top_p) > -torch.inf).tolist() == [kept]
