"""Requests whose output is not read give way to those that wait, and lose no token."""

from __future__ import annotations

import random
import time

import pytest
from constrained_harness import ConstrainedDriver, FakeGrammar
from scheduler_harness import DEPTHS, Driver, make_request, make_scheduler

PROMPT = [5, 6, 7, 8, 9]


def steps_until(driver: Driver, request_id: str, most: int = 100) -> int:
    """Steps until a request has ended."""
    for taken in range(most):
        if request_id in driver.reasons:
            return taken
        driver.step()
    raise AssertionError(f"{request_id} has not ended after {most} steps")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_unread_rows_give_way_to_a_request_that_waits(depth: int, policy: str) -> None:
    driver = Driver(make_scheduler(max_num_seqs=2, policy=policy), depth=depth, stops=False)
    driver.add(*(make_request(name, PROMPT, max_tokens=200, arrival_ns=1) for name in "ab"))
    for _ in range(10):
        driver.step()
    driver.scheduler.set_unread(["a", "b", "unknown"], True)
    for _ in range(5):
        driver.step()
    assert driver.scheduler.stats.num_preemptions == 0, "while no other request waits, they run on"
    driver.add(make_request("short", PROMPT, max_tokens=2, arrival_ns=2))
    assert steps_until(driver, "short") <= 3 + 3 * depth
    assert driver.scheduler.stats.num_preemptions == 1, "one row is enough for one request"
    assert driver.records["b"].num_preemptions == 1, "the newest gives way"
    driver.run()
    driver.assert_drained()
    driver.assert_reference()


def test_waiting_requests_are_overtaken_while_their_output_is_not_read() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1), stops=False)
    driver.add(*(make_request(name, PROMPT, max_tokens=30) for name in "abc"))
    driver.step()
    driver.scheduler.set_unread(["a", "b"], True)
    steps_until(driver, "c")
    assert "a" not in driver.reasons and "b" not in driver.reasons
    driver.scheduler.set_unread(["b"], False)
    steps_until(driver, "b")
    assert "a" not in driver.reasons, "b is read again, so a gives way to it"
    driver.run()
    driver.assert_drained()
    driver.assert_reference()


def test_unread_rows_give_their_blocks() -> None:
    # 12 blocks of 4 tokens: the two hold nearly all of them, slots are free.
    driver = Driver(make_scheduler(num_blocks=12, max_num_seqs=4, caching=False), stops=False)
    driver.add(*(make_request(name, PROMPT, max_tokens=18) for name in "ab"))
    for _ in range(11):
        driver.step()
    driver.add(make_request("large", [*range(5, 33)], max_tokens=2))
    driver.step()
    assert driver.scheduler.num_running == 2, "it does not fit beside them"
    driver.scheduler.set_unread(["a", "b"], True)
    assert steps_until(driver, "large") <= 8
    assert "a" not in driver.reasons and "b" not in driver.reasons
    driver.run()
    driver.assert_drained()
    driver.assert_reference()


def test_a_pause_leaves_unread_rows_their_slots() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1), stops=False)
    driver.add(make_request("a", PROMPT, max_tokens=20), make_request("b", PROMPT, max_tokens=2))
    driver.step()
    driver.scheduler.set_unread(["a"], True)
    driver.scheduler.admits_new = False
    for _ in range(5):
        driver.step()
    assert driver.scheduler.stats.num_preemptions == 0 and not driver.outputs["b"]
    driver.scheduler.admits_new = True
    assert steps_until(driver, "b") <= 6
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_readers_that_come_and_go_change_no_token(depth: int, policy: str) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=3, policy=policy)
    driver = Driver(scheduler, depth=depth)
    names = [f"r{i}" for i in range(25)]
    for i, name in enumerate(names):
        prompt = [rng.randrange(5, 40) for _ in range(rng.randrange(1, 30))]
        request = make_request(
            name, prompt, max_tokens=rng.randrange(1, 40), arrival_ns=i, priority=rng.randrange(3)
        )
        driver.add(request)
        for _ in range(rng.randrange(6)):
            some = rng.sample(names, 4)
            scheduler.set_unread(some, rng.random() < 0.6)
            driver.step()
    driver.run()
    driver.assert_drained()
    driver.assert_reference()
    assert not scheduler.unread, "what has ended is forgotten"


def test_an_unread_row_gives_way_only_to_a_request_that_can_run() -> None:
    driver = ConstrainedDriver(depth=1, max_num_seqs=1)
    free = driver.submit("free", [5, 6], max_tokens=40)
    for _ in range(5):
        driver.step()
    scheduler = driver.core.scheduler
    scheduler.set_unread(["free"], True)
    grammar = FakeGrammar(6)
    grammar.may_fill.clear()
    bound = driver.constrain("bound", [3, 4], grammar, max_tokens=20)
    for _ in range(10):
        driver.step()
    assert scheduler.stats.num_preemptions == 0 and free.ending is None and not bound.tokens
    grammar.may_fill.set()
    state = scheduler.requests["bound"].grammar
    assert state is not None
    while not state.is_ready:  # another thread fills the mask
        time.sleep(0.001)
    driver.run()
    assert scheduler.stats.num_preemptions == 1
    driver.assert_reference()
    driver.assert_drained()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_urgent_unread_row_takes_no_blocks_from_one_that_is_read(policy: str) -> None:
    """Both fit alone and not together; the urgent one is admitted into the other's growth."""
    scheduler = make_scheduler(
        num_blocks=5, block_size=8, max_num_seqs=3, policy=policy, caching=False
    )
    driver = Driver(scheduler, stops=False)
    prompts = ([*range(5, 18)], [*range(4, 17)])
    driver.add(make_request("urgent", prompts[0], max_tokens=19, priority=0, arrival_ns=1))
    driver.add(make_request("other", prompts[1], max_tokens=19, priority=2, arrival_ns=2))
    driver.scheduler.set_unread(["urgent"], True)
    assert steps_until(driver, "other") <= 30
    assert "urgent" not in driver.reasons and driver.records["other"].num_preemptions == 0
    driver.run()
    driver.assert_drained()
    driver.assert_reference()
