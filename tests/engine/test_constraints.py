"""Requests under a grammar in the loop: when they join steps, how they end, who waits for whom."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar, FakeMatcher

from termgen.engine.request import FinishReason


def rows_by_step(driver: ConstrainedDriver, slot: int) -> list[bool]:
    return [slot in plan.slots for plan in driver.executor.plans]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_constrained_and_free_requests_say_what_each_says_alone(depth: int) -> None:
    driver = ConstrainedDriver(depth=depth)
    for i in range(3):
        driver.constrain(f"c{i}", [3, i], FakeGrammar(7 + i, modulus=2 + i), max_tokens=30)
        driver.submit(f"f{i}", [5, i], max_tokens=12)
    driver.run()
    driver.assert_reference()
    driver.assert_drained()
    reasons = {b.request.request_id: b.reason for b in driver.bearers}
    assert {reasons[f"c{i}"] for i in range(3)} == {FinishReason.STOP}
    assert {reasons[f"f{i}"] for i in range(3)} == {FinishReason.LENGTH}


def test_two_steps_ahead_a_constrained_row_joins_every_other_step_and_others_each() -> None:
    driver = ConstrainedDriver(depth=2)
    driver.submit("free", [5, 6], max_tokens=20)
    driver.constrain("bound", [3, 4], FakeGrammar(8), max_tokens=20)
    driver.run()
    driver.assert_reference()
    free, bound = (b.residencies[0][0] for b in driver.bearers)
    assert rows_by_step(driver, free) == [True] * 20
    assert rows_by_step(driver, bound)[:16] == [True, False] * 8
    assert driver.executor.most_in_flight == 2
    assert driver.executor.landed_at == [0, 0, *range(1, 19)], "somebody waited for somebody"


def test_alone_a_constrained_row_runs_one_step_at_a_time() -> None:
    driver = ConstrainedDriver(depth=4, run_ahead_ms=50.0)
    driver.constrain("bound", [3, 4], FakeGrammar(8), max_tokens=20)
    driver.run()
    driver.assert_reference()
    assert driver.executor.most_in_flight == 1 and len(driver.executor.plans) == 8


def test_beside_a_run_ahead_a_constrained_row_still_joins_every_other_step() -> None:
    driver = ConstrainedDriver(depth=2, run_ahead_ms=20.0)
    driver.submit("free", [5, 6], max_tokens=90)
    bound = driver.constrain("bound", [3, 4], FakeGrammar(100), max_tokens=40)
    while bound.ending is None:
        driver.step()
    assert len(driver.bearers[0].tokens) <= 2 * 40, "two steps in flight, not as many as last 20 ms"
    assert driver.executor.most_in_flight == 2
    driver.run()
    driver.assert_reference()
    assert driver.executor.most_in_flight > 2, "alone again, the free row runs ahead"


def test_a_prompt_in_chunks_needs_a_mask_only_for_its_last() -> None:
    driver = ConstrainedDriver(depth=1, max_num_batched_tokens=8, max_num_seqs=2)
    driver.constrain("bound", list(range(20)), FakeGrammar(3), max_tokens=20)
    driver.run()
    driver.assert_reference()
    assert [plan.masks is not None for plan in driver.executor.plans] == [False] * 2 + [True] * 3


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_goes_on_where_the_grammar_was(depth: int) -> None:
    driver = ConstrainedDriver(depth=depth, num_blocks=12, block_size=2)
    for i in range(4):
        driver.constrain(f"c{i}", [3, i], FakeGrammar(9), max_tokens=12)
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0
    driver.assert_reference()
    driver.assert_drained()


def test_a_token_that_the_grammar_refuses_ends_its_request_alone() -> None:
    class Refusing(FakeMatcher):
        def accept(self, token_id: int) -> bool:
            return super().accept(token_id) and len(self.tokens) < 3

    class Treacherous(FakeGrammar):
        """Its masks allow what it then refuses, as when other parameters leave nothing."""

        def start(self, *, ends_at_eos: bool) -> FakeMatcher:
            return Refusing(self)

    driver = ConstrainedDriver(depth=2)
    bad = driver.constrain("bad", [3, 4], Treacherous(9), max_tokens=20)
    good = driver.constrain("good", [3, 5], FakeGrammar(6), max_tokens=20)
    free = driver.submit("free", [5, 6], max_tokens=9)
    driver.run()
    assert bad.reason is FinishReason.ERROR and bad.ending is not None and len(bad.tokens) == 3
    assert "too complex to be followed" in str(bad.ending.error)
    driver.assert_reference(good, free)
    assert driver.scheduler.kv.pool.num_used == 0


def test_stop_tokens_and_limits_end_before_the_grammar_does() -> None:
    driver = ConstrainedDriver(depth=2)
    short = driver.constrain("short", [3, 4], FakeGrammar(9), max_tokens=4)
    answer = driver.reference(driver.constrain("again", [3, 4], FakeGrammar(9), max_tokens=9))
    stop = driver.constrain(
        "stop", [3, 4], FakeGrammar(9), max_tokens=9, stop_token_ids=(answer[5],)
    )
    minimum = driver.constrain("minimum", [3, 4], FakeGrammar(3), max_tokens=9, min_tokens=7)
    driver.run()
    assert short.reason is FinishReason.LENGTH and short.tokens == answer[:4]
    assert stop.reason is FinishReason.STOP and stop.tokens == answer[: answer.index(answer[5]) + 1]
    assert stop.ending is not None and stop.ending.stop_token_id == answer[5]
    # Nothing can follow, so a minimum cannot be kept.
    assert minimum.reason is FinishReason.STOP and minimum.tokens == answer[:3]


def test_a_plan_with_masks_can_be_sent_elsewhere() -> None:
    driver = ConstrainedDriver(depth=1)
    driver.constrain("bound", [3, 4], FakeGrammar(2), max_tokens=20)
    driver.run()
    plan = driver.executor.plans[-1]
    assert plan.masks is not None
    copy = pickle.loads(pickle.dumps(plan)).masks
    assert np.array_equal(copy.bits, plan.masks.bits) and plan.masks.bits.any()
    assert np.array_equal(copy.rows, plan.masks.rows)


@pytest.mark.parametrize("first", range(0, 80, 8), ids=lambda seed: f"seed-{seed}")
def test_random_traffic_gives_what_each_request_gives_alone(first: int) -> None:
    for seed in range(first, first + 8):
        print(f"seed={seed}")
        run_random_traffic(seed)


def run_random_traffic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 2, 4]))
    driver = ConstrainedDriver(
        depth=1 + seed % 5,
        stops=bool(rng.random() < 0.7),
        num_blocks=-(-36 // block_size) + 1 + int(rng.choice([0, 3, 40])),
        block_size=block_size,
        max_num_seqs=int(rng.integers(1, 6)),
        max_model_len=36,
        max_num_batched_tokens=int(rng.choice([8, 40])),
        run_ahead_ms=float(rng.choice([0.0, 20.0])),
    )
    aborted = set()
    for i in range(14):
        prompt = rng.integers(0, 40, int(rng.integers(1, 20))).tolist()
        options: dict[str, object] = {
            "max_tokens": int(rng.integers(1, 16)),
            "stop_token_ids": tuple(rng.choice(40, int(rng.choice([0, 2])), False).tolist()),
            "ignore_eos": bool(rng.random() < 0.3),
        }
        if rng.random() < 0.6:
            grammar = FakeGrammar(int(rng.integers(1, 12)), modulus=int(rng.integers(1, 9)))
            driver.constrain(str(i), prompt, grammar, **options)
        else:
            driver.submit(str(i), prompt, **options)
        for _ in range(int(rng.integers(0, 5))):
            driver.step()
        if rng.random() < 0.1:
            aborted.add(str(i))
            driver.abort(str(i))
    driver.run()
    driver.assert_drained()
    driver.assert_reference(*(b for b in driver.bearers if b.reason is not FinishReason.ABORT))
    assert Counter(b.reason for b in driver.bearers)[FinishReason.ERROR] == 0
