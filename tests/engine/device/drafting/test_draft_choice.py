"""Why a step has as many drafts as it has, as the device reports it with the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_device_drafter import LOOKUP, NO_STATE, SLOTS, plan_of, run
from test_payoff import FLAT, STEEP, payoff

from termgen.config import EngineConfig
from termgen.engine.device.drafting.on_device import DeviceDrafter
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import DraftChoice, DraftReason, StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

FOUR = SLOTS * 0 + 4


def chosen_by(chance: float, more_ns: int) -> DraftChoice:
    """The last choice of a made-up device, see `run`."""
    drafter = DeviceDrafter(LOOKUP, 4, num_slots=4)
    run(drafter, 401, chance, more_ns)
    assert drafter.choice is not None
    return drafter.choice


def test_a_device_reports_what_pays_and_by_how_much() -> None:
    choice = chosen_by(0.9, 10)
    assert (choice.num_drafts, choice.most, choice.compared) == (4, 4, 4)
    assert choice.why is DraftReason.BEST
    # Four tokens in 1000 ns without drafts; with them a step of 20 tokens takes 1160.
    tokens = 4 * sum(0.9**i for i in range(5))
    assert choice.rate_without == pytest.approx(4 / 1000e-9, rel=0.01)
    assert choice.rate == pytest.approx(tokens / 1160e-9, rel=0.15)
    assert choice.gain == pytest.approx(choice.rate / choice.rate_without)
    assert choice.kept_share == pytest.approx((tokens - 4) / 16, rel=0.25)
    assert str(choice).startswith(f"drafts 4 of 4: {choice.gain:.2f}x of none expected, at ")


def test_a_device_reports_that_none_pays() -> None:
    choice = chosen_by(0.9, 1000)
    assert (choice.num_drafts, choice.why) == (0, DraftReason.NO_GAIN)
    assert choice.compared in (2, 4) and 0 < choice.gain < 1 and choice.rate_without > 0
    slower = round(100 * (1 - choice.gain))
    expected = f"drafts 0 of 4: {choice.compared} would be {slower}% slower at "
    assert str(choice).startswith(expected)


def test_sizes_that_were_not_measured_are_tried_first() -> None:
    drafter = DeviceDrafter(LOOKUP, 4, num_slots=4)
    untried = []
    for _ in range(40):
        run(drafter, 1, 0.9, 10)
        assert drafter.choice is not None
        untried.append((drafter.choice.num_drafts, drafter.choice.why is DraftReason.UNTRIED))
    assert untried[0] == (0, True) and (4, True) in untried and untried[-1] == (4, False)
    assert all(why for _, why in untried[: untried.index((4, True)) + 1])


def test_a_step_that_can_have_none_says_so() -> None:
    drafter = DeviceDrafter(LOOKUP, 4, num_slots=4)
    run(drafter, 200, 0.9, 10)
    assert drafter.places(plan_of(FOUR)._replace(slots=SLOTS + 0), NO_STATE, []).tolist() == [0] * 4
    assert str(drafter.choice) == "drafts 0 of 4: no CUDA graph for such a step"
    plan = plan_of(FOUR)._replace(slots=SLOTS + 0, num_decode_rows=3)
    drafter.places(plan, NO_STATE, [])
    assert str(drafter.choice) == "drafts 0 of 4: not in steps with prompts"
    plan = plan_of(FOUR)
    assert drafter.places(plan, NO_STATE, [2, 4]).tolist() == [4] * 4
    drafter.places(plan, NO_STATE, [2])
    assert drafter.choice is not None and drafter.choice.why is DraftReason.NO_RECORDING


def explained(made: Any, found: list[int]) -> DraftChoice:
    slots, kinds = np.arange(len(found), dtype=np.int32), np.zeros(len(found), np.int64)
    offer = (slots, np.asarray(found), kinds, len(found))
    choice: DraftChoice = made.explain(*offer, made.choose(*offer), 8)
    return choice


def test_a_cpu_reports_the_same_of_rows_with_drafts_of_their_own() -> None:
    choice = explained(payoff(FLAT, {0: (8, 8)}), [8])
    assert (choice.num_drafts, choice.compared, choice.why) == (8, 8, DraftReason.BEST)
    share = payoff(FLAT, {0: (8, 8)}).share_right(np.zeros(1, np.int32), np.zeros(1, np.int64))[0]
    tokens = sum(share**i for i in range(9))
    assert choice.gain == pytest.approx(tokens / 14.0 * 10.0)
    assert choice.rate_without == pytest.approx(100.0)
    assert choice.kept_share == pytest.approx((tokens - 1) / 8)
    choice = explained(payoff(STEEP, {0: (8, 8)}), [8])
    assert (choice.num_drafts, choice.compared, choice.why) == (0, 1, DraftReason.NO_GAIN)
    assert choice.gain == pytest.approx((1 + share) / 2)
    assert explained(payoff(FLAT), [0]).why is DraftReason.NONE_FOUND
    assert explained(payoff({1: 10.0}, {0: (8, 8)}), [8]) == (8, 8, DraftReason.UNTRIED, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (97.0, "2 would be 3% slower at 12% kept"),
        (102.0, "2 would be only 2% faster at 12% kept"),
        (100.1, "2 would be no faster at 12% kept"),
        (99.9, "2 would be no faster at 12% kept"),
    ],
)
def test_words_for_drafts_that_do_not_pay(rate: float, words: str) -> None:
    choice = DraftChoice(0, 7, DraftReason.NO_GAIN, 2, rate, 100.0, 0.12)
    assert str(choice) == f"drafts 0 of 7: {words}"


def test_a_step_with_fewer_than_chosen_does_not_claim_them() -> None:
    choice = DraftChoice(4, 7, DraftReason.BEST, 4, 162.0, 100.0, 0.61)
    assert choice.as_ran(4) is choice
    assert str(choice) == "drafts 4 of 7: 1.62x of none expected, at 61% kept"
    assert str(choice.as_ran(2)) == "drafts 2 of 7: no more were found, or had room"
    assert str(choice.as_ran(0)) == "drafts 0 of 7: no guess was found, or had room"
    assert choice.as_ran(2).gain == 0.0


@pytest.mark.parametrize("is_async", [False, True])
def test_every_step_of_an_engine_reports_the_drafts_that_it_had(
    tiny_model_dir: Callable[..., Path], is_async: bool
) -> None:
    """On a CPU, with drafts from the text; tiny models repeat themselves."""
    options: dict[str, Any] = {"speculative_config": "ngram", "async_scheduling": is_async}
    folder = tiny_model_dir("llama")
    engine = SyncEngine(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **options
        )
    )
    ring = engine.core._publisher._bus.subscribe()
    for i in range(3):
        prompt = tuple(range(10 + i, 30 + i)) * 2
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params)
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.shutdown()
    records = [event for event in ring.drain() if isinstance(event, StepRecord)]
    drafted, reasons = 0, set()
    for record in records:
        choice = record.draft_choice
        had_some = record.num_draft_tokens > drafted
        drafted = record.num_draft_tokens
        assert had_some == (choice is not None and choice.num_drafts > 0), record.step_id
        if choice is None:
            continue
        reasons.add(choice.why)
        assert choice.most == 8 and 0 <= choice.num_drafts <= 8
        assert (choice.compared > 0) == (choice.why in (DraftReason.BEST, DraftReason.NO_GAIN))
        assert not choice.compared or (choice.rate > 0 and 0 < choice.kept_share <= 1)
    assert records[0].draft_choice is None, "the step of the prompts had no place for drafts"
    assert drafted > 0 and {DraftReason.BEST, DraftReason.UNTRIED} & reasons
