"""Prompts beside requests that generate: how many of their tokens a step computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scheduler_harness import Driver, make_request, make_scheduler, prompts

from termgen.engine.schedule.prompt_pace import PromptShare
from termgen.engine.schedule.slot_table import SlotTable
from termgen.vocabulary.request import IntArray
from termgen.vocabulary.step import StepPlan, StepResult

STEP_NS = 1000
"""Time of a step without prompts."""


def linear(token_ns: int, fixed_ns: int = 0) -> Callable[[StepPlan], int]:
    """Times of a device on which prompts add a fixed time and a time for each token."""

    def step_ns(plan: StepPlan) -> int:
        num_tokens = plan.total_tokens - plan.num_decode_rows
        return STEP_NS + bool(num_tokens) * fixed_ns + num_tokens * token_ns

    return step_ns


def make_driver(
    step_ns: Callable[[StepPlan], int], *, adaptive: bool = True, max_num_seqs: int = 32
) -> Driver:
    scheduler = make_scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2000,
        num_blocks=10_000,
        adaptive=adaptive,
        caching=False,
    )
    return Driver(scheduler, step_ns=step_ns)


def chunks(driver: Driver, name: str) -> list[int]:
    """Tokens of a prompt's steps, from now to its first token."""
    found: list[int] = []
    while not driver.outputs[name]:
        plan = driver.step()
        assert plan is not None
        count = driver.scheduled(plan).get(name, 0)
        found += [count] if count else []
    return found


def generate(driver: Driver, num_steps: int = 4) -> None:
    """Let a request generate, and another come beside it, so that the times of steps without
    prompts and of prompts of two sizes are known."""
    first, second = prompts(100, 40)
    driver.add(make_request("first", first, max_tokens=150))
    for _ in range(num_steps):
        driver.step()
    driver.add(make_request("second", second, max_tokens=1))
    for _ in range(2):
        driver.step()


def test_a_long_prompt_takes_the_time_of_two_steps_of_the_others() -> None:
    driver = make_driver(linear(token_ns=10))
    generate(driver)
    driver.add(make_request("long", prompts(7, 950)[1], max_tokens=4))
    assert chunks(driver, "long") == [200, 200, 200, 200, 150]
    driver.run()
    driver.assert_reference()


def test_the_rest_of_a_prompt_makes_no_step_of_its_own() -> None:
    driver = make_driver(linear(token_ns=10))
    generate(driver)
    driver.add(make_request("long", prompts(7, 290)[1], max_tokens=4))
    assert chunks(driver, "long") == [290]
    driver.add(make_request("longer", prompts(7, 8, 301)[2], max_tokens=4))
    assert chunks(driver, "longer") == [200, 101]


@pytest.mark.parametrize("adaptive", [False, True])
def test_alone_a_prompt_is_read_at_once(adaptive: bool) -> None:
    driver = make_driver(linear(token_ns=10), adaptive=adaptive)
    generate(driver)
    if adaptive:
        driver.abort("first")
    driver.add(make_request("long", prompts(7, 1500)[1], max_tokens=4))
    assert chunks(driver, "long") == [1500]


def test_a_burst_is_read_in_steps_as_long_as_its_requests_would_wait_for() -> None:
    driver = make_driver(linear(token_ns=10))
    generate(driver)
    names = [f"r{i}" for i in range(16)]
    burst = prompts(*[90] * 17)[1:]
    driver.add(*(make_request(n, p, max_tokens=50) for n, p in zip(names, burst, strict=True)))
    plan = driver.step()
    assert plan is not None
    # Their 1440 tokens take 14.4 times as long as a step without prompts, and 16 requests wait.
    assert driver.scheduled(plan) == {"first": 1} | dict.fromkeys(names, 90)
    driver.run()
    driver.assert_reference()


def test_requests_that_wait_for_a_slot_hurry_no_prompt() -> None:
    driver = make_driver(linear(token_ns=10), max_num_seqs=2)
    generate(driver)
    long, *others = prompts(7, 950, *[20] * 10)[1:]
    driver.add(make_request("long", long, max_tokens=4))
    driver.add(*(make_request(f"r{i}", p, max_tokens=2) for i, p in enumerate(others)))
    assert chunks(driver, "long") == [200, 200, 200, 200, 150]
    driver.run()
    driver.assert_reference()


def test_a_device_whose_every_prompt_costs_much_gets_few_of_them() -> None:
    """Without CUDA graphs a step with prompts takes long, whatever their length."""
    driver = make_driver(linear(token_ns=1, fixed_ns=50_000))
    generate(driver)
    sizes = (300, 700, 500, 400, 1900, 600, 1200)
    for index, prompt in enumerate(prompts(7, *sizes)[1:]):
        driver.add(make_request(f"r{index}", prompt, max_tokens=30))
        found = chunks(driver, f"r{index}")
        if index >= 2:  # two sizes tell the fixed time from that of the tokens
            assert found == [sizes[index]]


def test_the_share_follows_the_device() -> None:
    token_ns = 10
    driver = make_driver(lambda plan: linear(token_ns)(plan))
    generate(driver)
    driver.add(make_request("a", prompts(7, 1000)[1], max_tokens=40))
    assert chunks(driver, "a") == [200] * 5
    token_ns = 40  # others use the device now
    for index in range(12):
        driver.add(make_request(f"b{index}", prompts(*range(7, 8 + index), 400)[-1], max_tokens=40))
        found = chunks(driver, f"b{index}")
    assert max(found) in range(45, 61), found


def test_without_times_prompts_are_not_cut() -> None:
    driver = make_driver(lambda plan: 0)
    generate(driver)
    driver.add(make_request("long", prompts(7, 1900)[1], max_tokens=4))
    assert chunks(driver, "long") == [1900]


def test_a_step_with_constrained_rows_is_not_measured() -> None:
    """It may have waited for their masks."""
    driver = make_driver(linear(token_ns=10))
    generate(driver)
    plan = driver.step()
    assert plan is not None and plan.is_decode
    pace = driver.scheduler._pace
    assert pace is not None
    none: IntArray = np.zeros(0, np.int32)
    waited = StepResult(plan.step_id, none, none, None, 0, STEP_NS * 1000)
    for _ in range(20):
        pace.landed(plan._replace(constrained=plan.slots), waited)
    assert pace.divide([950], 2000) == [200]


def test_a_row_held_back_generates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that waits for its mask wants its next token as much as the others."""
    driver = make_driver(linear(token_ns=10))
    generate(driver)
    slot = driver.records["first"].slot

    def hold_back(table: SlotTable, running: IntArray, want: IntArray, *, is_busy: bool) -> None:
        want[running == slot] = 0

    monkeypatch.setattr(driver.scheduler.constraints, "hold_back", hold_back)
    driver.add(make_request("long", prompts(7, 950)[1], max_tokens=4))
    assert chunks(driver, "long") == [200, 200, 200, 200, 150]


def test_a_share_is_used_up() -> None:
    share = PromptShare(100)
    assert [share.take(n, 1000) for n in (60, 30, 40, 1)] == [60, 30, 40, 0]
    share = PromptShare(100)
    assert [share.take(n, 1000) for n in (60, 200, 1)] == [60, 40, 0]
    share = PromptShare(100)
    assert [share.take(n, 50) for n in (60, 200)] == [50, 50]
