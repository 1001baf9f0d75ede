"""Requests under a grammar in the loop: when they join steps, how they end, and what waits."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar, FakeMatcher, make_late

from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.request import FinishReason, Request


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


def test_a_constrained_row_joins_every_step_two_of_which_are_in_flight() -> None:
    driver = ConstrainedDriver(depth=2)
    driver.submit("free", [5, 6], max_tokens=20)
    driver.constrain("bound", [3, 4], FakeGrammar(8), max_tokens=20)
    driver.run()
    driver.assert_reference()
    free, bound = (b.residencies[0][0] for b in driver.bearers)
    assert rows_by_step(driver, free) == [True] * 20
    # Its last token reveals the end, when the next step is already in flight.
    assert rows_by_step(driver, bound) == [True] * 9 + [False] * 11
    assert driver.executor.most_in_flight == 2
    assert driver.executor.landed_at == [0, 0, *range(1, 19)], "a step waited for another one"


def test_alone_a_constrained_row_is_never_more_than_a_step_ahead() -> None:
    driver = ConstrainedDriver(depth=4, run_ahead_ms=50.0)
    driver.constrain("bound", [3, 4], FakeGrammar(8), max_tokens=20)
    driver.run()
    driver.assert_reference()
    assert driver.executor.most_in_flight == 2 and len(driver.executor.plans) == 8 + 1


def test_beside_a_run_ahead_a_constrained_row_still_joins_every_step() -> None:
    driver = ConstrainedDriver(depth=2, run_ahead_ms=20.0)
    driver.submit("free", [5, 6], max_tokens=90)
    bound = driver.constrain("bound", [3, 4], FakeGrammar(100), max_tokens=40)
    while bound.ending is None:
        driver.step()
    assert len(driver.bearers[0].tokens) <= 40 + 1, "two steps in flight, not as many as last 20 ms"
    assert driver.executor.most_in_flight == 2
    driver.run()
    driver.assert_reference()
    assert driver.executor.most_in_flight > 2, "alone again, the free row runs ahead"


def test_a_prompt_in_chunks_needs_a_mask_only_for_its_last() -> None:
    driver = ConstrainedDriver(depth=1, max_num_batched_tokens=8, max_num_seqs=2)
    driver.constrain("bound", list(range(20)), FakeGrammar(3), max_tokens=20)
    driver.run()
    driver.assert_reference()
    are_constrained = [plan.constrained is not None for plan in driver.executor.plans]
    assert are_constrained == [False] * 2 + [True] * 3


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
        """Its masks allow a token that it then refuses, as when other parameters leave none."""

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
    # No token can follow, so a minimum cannot be kept.
    assert minimum.reason is FinishReason.STOP and minimum.tokens == answer[:3]


def test_a_plan_with_constrained_rows_can_be_sent_elsewhere() -> None:
    driver = ConstrainedDriver(depth=1)
    driver.constrain("bound", [3, 4], FakeGrammar(2), max_tokens=20)
    driver.run()
    copy = pickle.loads(pickle.dumps(driver.executor.plans[-1]))
    assert copy.constrained.tolist() == [0] and copy.sampling.grammar


@pytest.mark.parametrize("first", range(0, 80, 8), ids=lambda seed: f"seed-{seed}")
def test_random_traffic_gives_what_each_request_gives_alone(first: int) -> None:
    for seed in range(first, first + 8):
        print(f"seed={seed}")
        run_random_traffic(seed)


def test_so_it_does_where_masks_are_late_at_random() -> None:
    num_late = 0
    for seed in range(1000, 1060):
        print(f"seed={seed}")
        num_late += run_random_traffic(seed, on_time=0.7)
    assert num_late > 100, "hardly any mask was late"


@pytest.mark.parametrize("depth", [2, 4])
def test_what_a_late_mask_costs_is_counted_as_wasted(depth: int) -> None:
    driver = ConstrainedDriver(depth=depth)
    make_late(driver.core, 1, 0.5)
    free = driver.submit("free", [5, 6], max_tokens=30)
    bound = driver.constrain("bound", [3, 4, 5], FakeGrammar(30), max_tokens=20)
    driver.run()
    driver.assert_reference()
    useful = sum(2 + len(b.tokens) - 1 for b in (free, bound)) + 1
    total = sum(plan.total_tokens for plan in driver.executor.plans)
    stats = driver.scheduler.stats
    assert stats.wasted_tokens == total - useful == stats.num_late_masks > 3


def run_random_traffic(seed: int, *, on_time: float = 1.0) -> int:
    """Returns the number of late masks."""
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
    if on_time < 1.0:
        make_late(driver.core, seed, on_time)
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
    return driver.scheduler.stats.num_late_masks


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_those_that_wait_for_masks_are_looked_at_once_and_not_in_every_step(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ConstrainedDriver(depth=2, policy=policy, max_num_seqs=4)
    slow = FakeGrammar(3)
    slow.may_fill.clear()
    constraints = driver.scheduler.constraints
    constraints.patience_s = constraints.idle_patience_s = 0.0
    looks = 0
    is_ready = constraints.is_ready

    def counted(request: Request) -> bool:
        nonlocal looks
        looks += 1
        return is_ready(request)

    monkeypatch.setattr(constraints, "is_ready", counted)
    driver.submit("free", [5, 6], max_tokens=60)
    for i in range(200):
        driver.constrain(f"c{i}", [3, i], slow, max_tokens=8)
    while driver.bearers[0].ending is None:
        driver.step()
        check_scheduler(driver.scheduler)
    assert looks <= 1 + 200 and driver.scheduler.waiting.num_aside == 200
    driver.abort("c7")
    constraints.patience_s = constraints.idle_patience_s = 10.0
    slow.may_fill.set()
    driver.run()
    driver.assert_reference(*(b for b in driver.bearers if b.request.request_id != "c7"))
    driver.assert_drained()
    assert driver.scheduler.waiting.num_aside == 0 == len(constraints._aside)
