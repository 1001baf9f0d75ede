"""Preemption: which request loses its blocks, which waits, and what is computed again, also after a
failed step.

Over a scripted device, see scheduler_harness.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import (
    DEPTHS,
    Driver,
    drive,
    make_request,
    make_scheduler,
    prompt_with_output,
    prompts,
)

from termgen.errors import StepError
from termgen.vocabulary.request import FinishReason, RequestStatus, TurnEnds


def test_fcfs_preempts_the_newest_and_puts_it_first_in_the_queue() -> None:
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3))
    driver.add(
        *(make_request(f"r{i}", p, max_tokens=16) for i, p in enumerate(prompts(12, 11, 11, 2)))
    )
    plan = driver.step()
    assert plan is not None and set(driver.scheduled(plan)) == {"r0", "r1", "r2"}
    plan = driver.step()  # r0 needs a fourth block and takes it from r2
    assert plan is not None and set(driver.scheduled(plan)) == {"r0", "r1"}
    scheduler = driver.scheduler
    assert [r.request_id for r in scheduler.waiting] == ["r2", "r3"]
    assert driver.records["r2"].status is RequestStatus.PREEMPTED
    assert driver.records["r2"].num_preemptions == scheduler.stats.num_preemptions == 1
    assert driver.records["r3"].num_preemptions == 0
    driver.run()
    driver.assert_drained()
    driver.assert_reference()


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3, policy="priority"))
    for name, priority, prompt in zip("abc", (0, 0, 9), prompts(12, 11, 11), strict=True):
        driver.add(make_request(name, prompt, priority=priority))
    driver.step()
    driver.add(make_request("tiny", [1], max_tokens=1, priority=1))
    plan = driver.step()
    scheduler = driver.scheduler
    assert [r.request_id for r in scheduler.waiting] == ["tiny", "c"]
    assert scheduler.kv.pool.num_free == 2 and scheduler.free_slots, "there would be room"
    assert plan is not None and set(driver.scheduled(plan)) == {"a", "b"}
    plan = driver.step()
    assert plan is not None and set(driver.scheduled(plan)) == {"a", "b", "tiny"}
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_continues_with_the_same_tokens(depth: int, caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=4, caching=caching)
    requests = [
        make_request(f"r{i}", p, max_tokens=24, stop=(3,), min_tokens=5)
        for i, p in enumerate(prompts(10, 11, 12, 9, 14))
    ]
    driver = drive(scheduler, requests, depth=depth)
    assert scheduler.stats.num_preemptions > 0
    resumed = [
        row
        for plan in driver.plans
        for row in plan.added
        if len(row.token_ids) > row.num_prompt_tokens
    ]
    assert resumed, "someone was preempted after it had produced tokens"


def test_a_resumed_request_finds_its_own_blocks() -> None:
    """Preempted while no request evicts its blocks, it recomputes only the last, partial block."""
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3))
    driver.add(*(make_request(f"r{i}", p, max_tokens=8) for i, p in enumerate(prompts(12, 11, 8))))
    driver.run()
    resumed = [row for plan in driver.plans for row in plan.added if row.epoch > 0]
    assert any(row.num_computed_tokens > 0 for row in resumed)
    driver.assert_reference()


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_a_preemption_with_tokens_in_flight_samples_them_again(depth: int) -> None:
    """Results of the old residency must not count; the new one gives the same tokens."""
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3), depth=depth)
    driver.add(
        *(make_request(f"r{i}", p, max_tokens=16) for i, p in enumerate(prompts(12, 11, 11)))
    )
    num_dropped = 0
    while driver.scheduler.has_requests or driver.in_flight:
        before = driver.scheduler.stats.num_preemptions
        ahead = [plan for plan, _, _ in driver.in_flight]
        driver.step()
        if driver.scheduler.stats.num_preemptions > before:
            epoch = driver.scheduler.slots.epoch
            num_dropped += sum(int((epoch[p.slots] != p.epochs).sum()) for p in ahead)
    assert num_dropped > 0
    driver.assert_reference()
    driver.assert_drained()


def test_priority_preempts_the_least_urgent_from_the_middle_of_the_batch() -> None:
    """The victim was already picked for this step: it is taken out of it again."""
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3, policy="priority"))
    first, victim, last = prompts(11, 10, 12)
    driver.add(make_request("first", first, priority=0), make_request("victim", victim, priority=7))
    driver.step()
    driver.add(make_request("last", last, priority=1))
    plan = driver.step()
    assert plan is not None and driver.scheduled(plan) == {"first": 1, "victim": 1, "last": 12}
    assert driver.scheduler.kv.pool.num_free == 0
    slots = [driver.records[name].slot for name in ("first", "victim", "last")]
    assert driver.scheduler.slots.running.tolist() == slots

    plan = driver.step()  # `first` and `last` need a block each; `victim` still has room
    assert plan is not None and set(driver.scheduled(plan)) == {"first", "last"}
    assert driver.records["victim"].status is RequestStatus.PREEMPTED
    assert driver.scheduler.slots.running.tolist() == [slots[0], slots[2]]
    driver.run()
    driver.assert_drained()
    driver.assert_reference()


def test_priority_preempts_the_newest_of_equals() -> None:
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3, policy="priority"))
    lengths = prompts(12, 11, 11)
    for name, arrival, prompt in zip("abc", (3, 9, 5), lengths, strict=True):
        driver.add(make_request(name, prompt, arrival_ns=arrival))
    driver.step()
    driver.step()
    assert [r.request_id for r in driver.scheduler.waiting] == ["b"]


def test_the_least_urgent_request_preempts_itself() -> None:
    driver = Driver(make_scheduler(num_blocks=7, max_num_seqs=2, policy="priority"))
    calm, urgent = prompts(12, 10)
    driver.add(make_request("calm", calm, priority=9, max_tokens=8))
    driver.add(make_request("urgent", urgent, priority=0, max_tokens=8))
    driver.step()
    plan = driver.step()  # calm needs a block, and no request is less urgent
    assert plan is not None and set(driver.scheduled(plan)) == {"urgent"}
    assert driver.records["calm"].num_preemptions == 1
    driver.run()
    driver.assert_reference()


def test_a_row_that_had_the_whole_step_leaves_it_to_the_others() -> None:
    """The first row's prompt is cut where its state is copied, so another joins behind it, most of
    which is cached: from then on the first one takes all tokens of each step, until it preempts
    itself."""
    scheduler = make_scheduler(
        num_blocks=32,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        policy="priority",
        windows=(None, 30),
        state_places=4,
    )
    driver = Driver(scheduler, state_places=4)
    cached, other = prompts(60, 40)
    driver.add(make_request("before", cached, max_tokens=1))
    driver.run()
    ends = TurnEnds(last=20)
    driver.add(make_request("long", other, max_tokens=1, priority=1, turn_ends=ends))
    driver.step()
    driver.step()
    driver.add(make_request("urgent", [*cached[:50], 7, 8], max_tokens=4))
    plan = driver.step()
    assert plan is not None and driver.scheduled(plan) == {"long": 4, "urgent": 4}
    plan = driver.step()
    assert plan is not None and driver.scheduled(plan) == {"long": 8}
    plan = driver.step()
    assert plan is not None and driver.scheduled(plan) == {"urgent": 8}
    assert driver.records["long"].num_preemptions == 1
    driver.run()
    driver.assert_drained()
    driver.assert_reference()


def test_the_last_free_block_goes_to_the_most_urgent() -> None:
    """Their places in the batch do not matter; the other request is not in the plan at all."""
    driver = Driver(make_scheduler(num_blocks=8, max_num_seqs=2, policy="priority"))
    calm, urgent = prompts(12, 12)
    driver.add(make_request("calm", calm[:11], priority=5, max_tokens=8))
    driver.step()  # so that it stands first in the batch
    driver.add(make_request("urgent", urgent, priority=0, max_tokens=8))
    driver.step()
    assert driver.scheduler.kv.pool.num_free == 1
    plan = driver.step()
    assert plan is not None and driver.scheduled(plan) == {"urgent": 1}
    assert plan.block_slots.tolist() == [driver.records["urgent"].slot]
    driver.run()
    driver.assert_reference()
    driver.assert_drained()


def test_nobody_is_preempted_while_there_is_room() -> None:
    requests = [
        make_request(f"r{i}", p, max_tokens=20, priority=-i)
        for i, p in enumerate(prompts(*[9] * 6))
    ]
    driver = drive(make_scheduler(policy="priority", num_blocks=60), requests, depth=2)
    assert driver.scheduler.stats.num_preemptions == 0


def test_blocks_on_their_way_back_are_waited_for_instead_of_preempting() -> None:
    driver = Driver(make_scheduler(num_blocks=7, max_num_seqs=2), depth=2)
    stay, leave = prompts(12, 11)
    driver.add(make_request("stay", stay, max_tokens=8), make_request("leave", leave, max_tokens=8))
    driver.launch()
    driver.abort("leave")
    assert driver.launch() is None, "`stay` waits for the block that `leave` gives back"
    assert driver.scheduler.stats.num_preemptions == 0
    driver.land()
    plan = driver.launch()
    assert plan is not None and driver.scheduled(plan) == {"stay": 1}
    driver.run()
    driver.assert_reference("stay")


def test_min_tokens_counts_outputs_also_after_a_preemption() -> None:
    prompt, output = prompt_with_output(lambda out: out[3] == out[7] and len(set(out[:7])) == 7)
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=2)
    (other,) = prompts(18)
    driver = Driver(scheduler)
    driver.add(make_request("other", other, max_tokens=12))
    driver.add(make_request("x", prompt, max_tokens=12, stop=[output[3]], min_tokens=5))
    driver.run()
    assert driver.records["x"].num_preemptions > 0
    assert driver.outputs["x"] == output[:8]
    driver.assert_reference()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_failed_step_ends_its_requests_and_recomputes_the_others(depth: int) -> None:
    # Budget for two of the three prefills: the third is not in the step that fails.
    driver = Driver(make_scheduler(max_num_batched_tokens=10, max_num_seqs=3), depth=depth)
    a, b, c = prompts(9, 12, 7)
    driver.add(make_request("a", a, max_tokens=9))
    for _ in range(depth + 1):
        driver.step()
    driver.add(make_request("b", b, max_tokens=9), make_request("c", c, max_tokens=9))
    plan = driver.launch(fails=True)
    assert plan is not None
    hit = set(driver.scheduled(plan))
    assert hit == {"a", "b"}
    while len(driver.in_flight) < depth:
        driver.launch()
    while driver.land() is not None:
        pass
    assert {name for name, why in driver.reasons.items() if why is FinishReason.ERROR} == hit
    assert driver.scheduler.kv.pool.num_used == 0, "nobody holds anything after a failed step"
    driver.run()
    driver.assert_reference("c")
    driver.assert_drained()


def test_requests_outside_the_failed_step_are_preempted_in_order() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=8, max_num_seqs=4))
    long, *shorts = prompts(30, 2, 3, 2)
    names = ["s0", "s1", "s2"]
    driver.add(*(make_request(n, p, max_tokens=20) for n, p in zip(names, shorts, strict=True)))
    driver.step()
    driver.step()
    # Every request runs; a plan of `long` alone fails.
    driver.add(make_request("long", long, max_tokens=2))
    plan = driver.launch(fails=True)
    assert plan is not None
    before = {name: list(driver.outputs[name]) for name in names}
    only = np.flatnonzero(plan.slots == driver.records["long"].slot)
    columns = ("slots", "epochs", "num_tokens", "num_draft_tokens", "num_computed")
    partial = plan._replace(**{name: getattr(plan, name)[only] for name in columns})
    driver.in_flight[0] = (partial, None, set())
    driver.land()
    assert driver.reasons == {"long": FinishReason.ERROR}
    assert [r.request_id for r in driver.scheduler.waiting] == names
    assert all(driver.records[n].status is RequestStatus.PREEMPTED for n in names)
    driver.run()
    for name in names:
        assert driver.outputs[name][: len(before[name])] == before[name]
    driver.assert_reference(*names)
    driver.assert_drained()


def test_nothing_computed_before_a_failure_is_found_after_it() -> None:
    (prompt,) = prompts(13)
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt))
    driver.launch(fails=True)
    driver.land()
    driver.add(make_request("b", prompt, max_tokens=3))
    driver.run()
    assert driver.records["b"].num_cached_tokens == 0
    driver.assert_reference("b")


def test_the_error_travels_with_the_finished_rows() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", [1, 2]))
    plan = driver.scheduler.schedule()
    assert plan is not None
    error = StepError("boom", step_id=plan.step_id)
    (row,) = driver.scheduler.fail(plan, error)
    assert row.error is error and row.reason is FinishReason.ERROR and not row.stopped_by_token
    driver.assert_drained()
