"""Requests that end, come back or wait while steps run ahead of what the host knows.

The loop over a scripted device, see core_harness.py; test_async_cases.py says which case is where.
"""

from __future__ import annotations

import pytest
from core_harness import CoreDriver, residencies
from scheduler_harness import (
    Driver,
    all_different,
    make_request,
    make_scheduler,
    prompt_with_output,
    prompts,
)
from scripted_device import NAN

from termgen.errors import CorruptedLogitsError
from termgen.vocabulary.request import FinishReason


@pytest.mark.parametrize("depth", [3, 8])
def test_a_name_used_again_while_its_last_bearer_is_in_flight_gets_its_own_tokens(
    depth: int,
) -> None:
    driver = CoreDriver(depth=depth)
    old = driver.submit("a", [3, 4, 5], max_tokens=60)
    other = driver.submit("other", [6, 7], max_tokens=30)
    for _ in range(5):
        driver.step()
    driver.abort("a")
    driver.step()
    assert old.reason is FinishReason.ABORT
    rows = [row for plan in driver.executor.in_flight for row in residencies(plan)]
    assert old.residencies[0] in rows, "steps of the old bearer have yet to land"
    new = driver.submit("a", [9, 9, 9, 9], max_tokens=8)
    driver.run()
    driver.assert_reference(new, other)
    assert old.tokens == driver.reference(old)[: len(old.tokens)]
    driver.assert_drained()


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_the_models_context_ends_requests_that_run_ahead(depth: int) -> None:
    """No position past the context is ever computed, and the last token's never is."""
    driver = CoreDriver(depth=depth, max_model_len=24)
    made = [
        driver.submit(f"r{n}", list(range(n)), max_tokens=limit)
        for n, limit in ((1, None), (20, None), (22, 2), (23, None), (12, 12))
    ]
    driver.run()
    for bearer in made:
        num_prompt = len(bearer.request.prompt_token_ids)
        assert bearer.reason is FinishReason.LENGTH
        assert len(bearer.tokens) == 24 - num_prompt
        assert driver.computed(bearer) == [23 - bearer.num_cached_tokens]
    assert max(int((p.num_computed + p.num_tokens).max()) for p in driver.executor.plans) == 23
    driver.assert_reference()
    driver.assert_drained()


def test_a_request_resumed_before_its_old_steps_landed_gives_each_token_once() -> None:
    num_early = 0
    for num_blocks in range(9, 16):
        driver = CoreDriver(depth=8, num_blocks=num_blocks, max_num_seqs=4)
        for i, prompt in enumerate(prompts(9, 5, 11, 7, 3, 8, 6)):
            driver.submit(f"r{i}", prompt, max_tokens=(6, 12, 19)[i % 3])
        driver.run()
        plans, landed_at = driver.executor.plans, driver.executor.landed_at
        steps_of = {row: [] for bearer in driver.bearers for row in bearer.residencies}
        for plan in plans:
            for row in residencies(plan):
                steps_of[row].append(plan.step_id)
        for bearer in driver.bearers:
            for old, new in zip(bearer.residencies, bearer.residencies[1:], strict=False):
                num_early += steps_of[old][-1] >= landed_at[steps_of[new][0]]
        driver.assert_reference()
        driver.assert_drained()
    assert num_early > 0, "somebody was meant to be resumed early"


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_a_forced_preemption_drops_exactly_the_tokens_in_flight(depth: int) -> None:
    """A failed step preempts every request that was not in it; landed tokens stay, once."""
    driver = CoreDriver(depth=depth, max_num_seqs=2, max_num_batched_tokens=8)
    fails = driver.submit("fails", [5] * 16, max_tokens=2)
    driver.executor.fail_steps.add(1)
    bystander = driver.submit("bystander", [6] * 3, max_tokens=12)
    driver.run()
    assert fails.reason is FinishReason.ERROR and fails.tokens == []
    first, again = driver.computed(bystander)
    # It started in step 2, and depth - 2 more were planned before step 1 was seen to fail.
    assert first == 3 + depth - 2
    assert again == 3 + 11
    driver.assert_reference(bystander)
    driver.assert_drained()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_a_cache_reset_with_steps_in_flight_drops_nothing(depth: int, force: bool) -> None:
    """A forced reset lets them land first, so preempted requests have nothing in flight."""
    driver = CoreDriver(depth=depth)
    first = driver.submit("first", [5] * 9, max_tokens=20)
    for _ in range(4):
        driver.step()
    landed, ahead = len(first.tokens), len(driver.executor.in_flight)
    asked = driver.core.call(lambda: driver.core.control.reset_prefix_cache(force))
    driver.run()
    assert asked.result(0).result(0) is force, "else its own blocks stay, and it says so"
    if force:
        assert driver.computed(first) == [9 + landed + ahead - 1, 9 + 19]
    else:
        assert driver.computed(first) == [9 + 19]
    assert driver.scheduler.stats.num_preemptions == force
    driver.assert_reference()
    driver.assert_drained()


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_a_request_preempted_with_its_last_token_in_flight_ends_once(depth: int) -> None:
    num_hit = 0
    for max_tokens in range(2, 20):
        driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3), depth=depth)
        lengths = prompts(12, 11, 11)
        for i, (prompt, limit) in enumerate(zip(lengths, (16, 16, max_tokens), strict=True)):
            driver.add(make_request(f"r{i}", prompt, max_tokens=limit))
        table = driver.scheduler.slots
        while driver.scheduler.has_requests or driver.in_flight:
            running = [r for r in table.requests if r is not None]
            known = table.num_tokens + table.num_pending
            last = [r for r in running if known[r.slot] == r.max_total_tokens]
            before = [r.num_preemptions for r in last]
            driver.step()
            num_hit += sum(r.num_preemptions > n for r, n in zip(last, before, strict=True))
        assert set(driver.reasons.values()) == {FinishReason.LENGTH}
        assert driver.scheduler.stats.num_finished == 3
        driver.assert_reference()
        driver.assert_drained()
    assert num_hit > 0, "somebody was meant to be preempted with its last token in flight"


def test_a_block_is_published_only_when_its_last_token_has_landed() -> None:
    driver = Driver(make_scheduler(block_size=4), depth=2)
    (prompt,) = prompts(7)
    driver.add(make_request("x", prompt, max_tokens=9))
    driver.launch()
    slot = driver.records["x"].slot
    registered = driver.scheduler.kv.num_registered
    driver.launch()  # computes position 7, the last of the second block, whose token is in flight
    assert driver.scheduler.slots.num_computed[slot] == 8 and registered[slot] == 1
    driver.land()
    assert registered[slot] == 1, "the next plan publishes it"
    driver.launch()
    assert registered[slot] == 2
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("depth", [2, 8])
def test_a_finished_request_takes_no_token_more_from_a_device_that_runs_on(depth: int) -> None:
    """Nothing raises either: rows of an ended residency are dropped by their epoch."""
    prompt, output = prompt_with_output(all_different)
    driver = CoreDriver(depth=depth, stops=False)
    ends = driver.submit("ends", prompt, max_tokens=12, stop_token_ids=(output[3],))
    stays = driver.submit("stays", [4, 4], max_tokens=30)
    driver.run()
    assert ends.tokens == output[:4] and ends.reason is FinishReason.STOP
    assert driver.computed(ends)[0] == len(prompt) + 3 + depth - 1, "it ran on for nothing"
    driver.assert_reference(stays)
    driver.assert_drained()


@pytest.mark.parametrize("depth", [2, 8])
def test_the_engine_has_work_until_every_step_in_flight_has_landed(depth: int) -> None:
    driver = CoreDriver(depth=depth)
    alone = driver.submit("alone", [3, 4, 5], max_tokens=60)
    driver.step()
    assert len(driver.executor.in_flight) == depth - 1
    driver.abort("alone")
    driver.step()
    assert alone.reason is FinishReason.ABORT and not driver.scheduler.has_requests
    while driver.executor.in_flight:
        assert driver.core.has_work
        driver.step()
    assert not driver.core.has_work
    driver.assert_drained()


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_endings_without_a_next_step_are_delivered_and_free_everything(depth: int) -> None:
    """The device learns of the released row with the next plan, before the row is reused."""
    driver = CoreDriver(depth=depth, max_num_seqs=1)
    aborted = driver.submit("aborted", [3, 4, 5], max_tokens=60)
    waits = driver.submit("waits", [3, 4], max_tokens=60)
    driver.step()
    driver.abort("waits")
    driver.abort("aborted")
    driver.run()
    assert aborted.reason is waits.reason is FinishReason.ABORT
    driver.assert_drained()
    num_plans = len(driver.executor.plans)
    assert driver.executor.device.rows[0] is not None
    later = driver.submit("later", [8, 9], max_tokens=3)
    driver.run()
    plan = driver.executor.plans[num_plans]
    assert plan.released_slots == (0,) and [row.slot for row in plan.added] == [0]
    driver.assert_reference(later)
    driver.assert_drained()


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_seats_of_ended_requests_in_flight_come_back_to_those_who_wait(depth: int) -> None:
    """The fence holds back all slots and no request runs: the next in the queue is still
    admitted."""
    driver = CoreDriver(depth=depth, max_num_seqs=2)
    for i in range(12):
        driver.submit(f"r{i}", [i, 1, 2], max_tokens=40)
    for i in range(0, 12, 2):
        while not all(b.residencies for b in driver.bearers[i : i + 2]):
            driver.step()
        driver.abort(f"r{i}")
        driver.abort(f"r{i + 1}")
        driver.step()
        assert driver.scheduler.num_running <= 2
    last = driver.submit("last", [7], max_tokens=5)
    driver.run()
    assert {b.reason for b in driver.bearers[:-1]} == {FinishReason.ABORT}
    assert all(bearer.residencies for bearer in driver.bearers), "everybody had a seat"
    driver.assert_reference(last)
    driver.assert_drained()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_request_whose_logits_are_nan_ends_alone_and_leaves_nothing_to_find(depth: int) -> None:
    driver = CoreDriver(depth=depth, max_num_batched_tokens=16)
    device = driver.executor.device
    prompt = list(range(20))
    spoilt = driver.submit("spoilt", prompt, max_tokens=40, ignore_eos=True)
    others = [driver.submit(str(i), [i, 3, 4], max_tokens=30, ignore_eos=True) for i in range(3)]
    while len(spoilt.tokens) < 9:
        driver.step()
    slot = spoilt.residencies[-1][0]
    place = device.slot_mapping(slot, 2, 3)
    device.kv_tokens[place] = NAN  # in a block of its prompt, which other requests could find
    num_told = len(spoilt.tokens)
    driver.run()
    assert spoilt.reason is FinishReason.ERROR and spoilt.ending is not None
    assert isinstance(spoilt.ending.error, CorruptedLogitsError)
    assert spoilt.ending.error.code == "corrupted_logits"
    assert spoilt.tokens == driver.reference(spoilt)[: len(spoilt.tokens)]
    assert num_told <= len(spoilt.tokens) <= num_told + depth
    driver.assert_reference(*others)
    assert driver.scheduler.stats.num_corrupted == 1
    again = driver.submit("again", [*prompt, *spoilt.tokens], max_tokens=5, ignore_eos=True)
    driver.run()
    driver.assert_reference(again)
    assert again.num_cached_tokens == 0
    driver.assert_drained()


@pytest.mark.parametrize("depth", [2, 5])
def test_what_a_step_in_flight_finds_nan_is_not_found_after_an_abort(depth: int) -> None:
    """The request has ended when the step lands; the fence still holds its blocks for it."""
    driver = CoreDriver(depth=depth)
    device = driver.executor.device
    prompt = list(range(20))
    spoilt = driver.submit("spoilt", prompt, max_tokens=40, ignore_eos=True)
    while len(spoilt.tokens) < 3:
        driver.step()
    device.kv_tokens[device.slot_mapping(spoilt.residencies[-1][0], 2, 3)] = NAN
    driver.abort("spoilt")
    driver.run()
    assert spoilt.reason is FinishReason.ABORT
    again = driver.submit("again", prompt, max_tokens=5, ignore_eos=True)
    driver.run()
    driver.assert_reference(again)
