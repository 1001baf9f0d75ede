"""Budget, chunks, admission, order, and the contents of a plan.

Over a scripted device, see scheduler_harness.py.
"""

from __future__ import annotations

import itertools

import pytest
from scheduler_harness import (
    Driver,
    drive,
    make_request,
    make_scheduler,
    prompts,
)

from termgen.errors import RequestError
from termgen.vocabulary.request import Request
from termgen.vocabulary.step import StepPlan


def test_three_prefills_share_the_budget_in_chunks() -> None:
    driver = Driver(
        make_scheduler(
            threshold=400, max_num_batched_tokens=1024, block_size=16, max_model_len=1000
        )
    )
    driver.add(*(make_request(f"r{i}", p, max_tokens=2) for i, p in enumerate(prompts(*[800] * 3))))
    steps = [driver.scheduled(plan) for plan in iter(driver.step, None)]
    assert steps == [
        {"r0": 400, "r1": 400, "r2": 224},
        {"r0": 400, "r1": 400, "r2": 224},
        {"r0": 1, "r1": 1, "r2": 352},
        {"r2": 1},
    ]
    driver.assert_reference()
    driver.assert_drained()


def test_running_requests_are_served_before_waiting_ones() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=10))
    first, second = prompts(25, 25)
    driver.add(make_request("a", first, max_tokens=3), make_request("b", second, max_tokens=3))
    steps = [driver.scheduled(plan) for plan in iter(driver.step, None)]
    assert steps[:4] == [{"a": 10}, {"a": 10}, {"a": 5, "b": 5}, {"a": 1, "b": 9}]
    driver.assert_reference()


def test_no_more_requests_run_than_there_are_slots() -> None:
    driver = Driver(make_scheduler(max_num_seqs=2))
    driver.add(*(make_request(f"r{i}", p, max_tokens=4) for i, p in enumerate(prompts(3, 4, 5))))
    driver.step()
    assert driver.scheduler.num_running == 2 and len(driver.scheduler.waiting) == 1
    driver.run()
    driver.assert_reference()


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    driver = Driver(make_scheduler(num_blocks=11, max_num_batched_tokens=8))
    running, long = prompts(24, 20)
    driver.add(make_request("running", running, max_tokens=8))
    driver.step()
    driver.add(make_request("long", long, max_tokens=4))
    steps = [driver.scheduled(plan) for plan in itertools.islice(iter(driver.step, None), 10)]
    # A chunk of 7 tokens would fit the budget and the blocks; the whole prompt does not.
    assert steps[:3] == [{"running": 8}, {"running": 8}, {"running": 1}]
    assert steps[8:] == [{"running": 1}, {"long": 8}]
    driver.run()
    driver.assert_reference()


def test_a_prompt_that_does_not_fit_is_not_overtaken() -> None:
    driver = Driver(make_scheduler(num_blocks=11))
    running, long, short = prompts(24, 20, 2)
    driver.add(make_request("running", running, max_tokens=8))
    driver.step()
    driver.add(make_request("long", long, max_tokens=4), make_request("short", short))
    driver.step()
    assert [r.request_id for r in driver.scheduler.waiting] == ["long", "short"]
    driver.run()
    driver.assert_reference()


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    scheduler = make_scheduler(num_blocks=11)  # 40 tokens
    for length, max_tokens in ((41, 1), (5, 37), (1, 100)):
        with pytest.raises(RequestError, match="holds only 40") as caught:
            scheduler.add_request(make_request("x", [1] * length, max_tokens=max_tokens))
        assert caught.value.param == "max_tokens"
        assert not scheduler.has_requests and not len(scheduler.waiting)


def test_the_largest_request_that_fits_runs_to_its_end() -> None:
    (prompt,) = prompts(20)
    driver = drive(make_scheduler(num_blocks=11), [make_request("x", prompt, max_tokens=21)])
    assert driver.scheduler.stats.num_preemptions == 0


def test_an_id_in_use_is_refused_and_may_be_used_again_later() -> None:
    driver = Driver(make_scheduler(), depth=3)
    driver.add(make_request("x", [1, 2, 3], max_tokens=30))
    with pytest.raises(RequestError, match="already in use"):
        driver.scheduler.add_request(make_request("x", [1]))
    for _ in range(4):
        driver.step()
    driver.abort("x")
    assert driver.in_flight, "results of the first x are still on their way"
    driver.add(make_request("x", [4, 5, 6], max_tokens=5))
    driver.run()
    driver.assert_reference()


def test_priority_runs_low_values_first_and_breaks_ties_by_arrival() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1, policy="priority"))
    order = [("late", 0, 9), ("low", 5, 1), ("early", 0, 2), ("urgent", -1, 10), ("b", 5, 1)]
    for name, priority, arrival in order:
        driver.add(
            make_request(name, [1, 2, 3], max_tokens=2, priority=priority, arrival_ns=arrival)
        )
    driver.run()
    ran = [name for plan in driver.plans if plan.added for name in driver.scheduled(plan)]
    assert ran == ["urgent", "early", "late", "b", "low"]


def test_fcfs_ignores_priority() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(
        make_request("a", [1], max_tokens=1, priority=9), make_request("b", [1], max_tokens=1)
    )
    driver.run()
    assert list(driver.reasons) == ["a", "b"]


def test_rows_with_one_token_come_first_in_scheduling_order() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=20))
    a, b, c, d = prompts(4, 18, 1, 9)
    driver.add(make_request("a", a), make_request("b", b), make_request("c", c))
    driver.step()
    driver.add(make_request("d", d))
    plan = driver.step()
    assert plan is not None
    assert list(driver.scheduled(plan).items()) == [("a", 1), ("c", 1), ("b", 2), ("d", 9)]
    assert plan.num_tokens.tolist() == [1, 1, 2, 9]
    assert plan.num_computed.tolist() == [4, 0, 16, 0]
    driver.run()
    driver.assert_reference()


def test_a_plan_says_what_its_rows_need() -> None:
    def plan_of(request: Request) -> StepPlan:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("plain", [9, 9], temperature=0.0))
        scheduler.add_request(request)
        plan = scheduler.schedule()
        assert plan is not None and plan.num_rows == 2
        return plan

    def needs(**params: object) -> set[str]:
        plan = plan_of(make_request("x", [1], **{"temperature": 0.0, **params}))  # type: ignore[arg-type]
        return {name for name, value in plan.sampling._asdict().items() if value is True}

    assert needs() == {"all_greedy"}
    assert needs(temperature=0.5) == set()
    greedy = {"all_greedy"}
    assert needs(top_k=3) == needs(top_p=0.5) == needs(min_p=0.1) == {"filters", *greedy}
    assert needs(presence_penalty=0.1) == {"penalties", *greedy}
    assert needs(repetition_penalty=1.1) == needs(frequency_penalty=1.0) == {"penalties", *greedy}
    assert needs(min_tokens=2) == {"min_tokens", *greedy}
    assert needs(logit_bias={3: 1.0}) == {"edits", *greedy}
    assert plan_of(make_request("x", [1], logprobs=0)).sampling.max_logprobs == 0
    assert plan_of(make_request("x", [1], logprobs=5)).sampling.max_logprobs == 5
    later_row = plan_of(make_request("x", [1] * 3, logprobs=5))
    assert later_row.sampling.max_logprobs == 5, "not the first row"
    assert plan_of(make_request("x", [1])).sampling.max_logprobs is None


def test_added_rows_carry_the_request() -> None:
    scheduler = make_scheduler()
    request = make_request("x", [5, 6, 7], max_tokens=9, stop=(8, 2), eos=(4,))
    request.seed = 77
    scheduler.add_request(request)
    plan = scheduler.schedule()
    assert plan is not None
    (row,) = plan.added
    assert row.token_ids.tolist() == [5, 6, 7] and row.num_prompt_tokens == 3
    assert row.max_total_tokens == 12 and row.stop_token_ids == (2, 4, 8)
    assert row.params is request.params and row.seed == 77 and row.num_computed_tokens == 0
    (started,) = scheduler.started
    assert (started.request_id, started.slot, started.epoch) == ("x", row.slot, row.epoch)


def test_released_slots_are_named_once_and_before_they_are_taken_again() -> None:
    driver = Driver(make_scheduler(max_num_seqs=2), depth=2)
    driver.add(*(make_request(f"r{i}", [i, 1, 2], max_tokens=3) for i in range(6)))
    driver.run()
    released = [slot for plan in driver.plans for slot in plan.released_slots]
    added = [row.slot for plan in driver.plans for row in plan.added]
    assert len(added) == 6 and len(released) == 4, "the last two had no later plan to be told by"
    driver.assert_reference()


def test_there_is_no_plan_without_work() -> None:
    driver = Driver(make_scheduler(), depth=2)
    assert driver.launch() is None
    driver.add(make_request("x", [1, 2], max_tokens=1))
    assert driver.launch() is not None
    assert driver.launch() is None, "its only token is in flight"
    driver.land()
    assert driver.launch() is None and not driver.scheduler.has_requests
    assert [plan.step_id for plan in driver.plans] == [0]


def test_counters() -> None:
    (prompt,) = prompts(14)
    driver = drive(
        make_scheduler(max_num_batched_tokens=8),
        [make_request("a", prompt, max_tokens=5), make_request("b", prompt, max_tokens=4)],
    )
    stats = driver.scheduler.stats
    assert stats.generation_tokens == 9 and stats.num_finished == 2
    cached = driver.records["b"].num_cached_tokens
    assert stats.prompt_tokens == 28 - cached
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (28, cached)
