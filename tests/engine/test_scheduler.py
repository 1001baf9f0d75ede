"""The scheduler's rules, one by one, over a scripted device. See scheduler_harness.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scheduler_harness import (
    Driver,
    drive,
    make_request,
    make_scheduler,
    next_token,
    reference_tokens,
    unique_prompts,
)

from termgen.engine.request import FinishReason, Request, RequestStatus
from termgen.engine.step import StepPlan
from termgen.errors import RequestError, StepError

DEPTHS = (1, 2, 3, 4)


def prompts(*lengths: int) -> list[list[int]]:
    return list(unique_prompts(lengths))


def prompt_with_output(
    accepts: Callable[[list[int]], bool], *, length: int = 6, num_tokens: int = 12
) -> tuple[list[int], list[int]]:
    """A prompt whose first output tokens have some property, and those tokens."""
    for seed in itertools.count():
        prompt = np.random.default_rng(seed).integers(0, 40, length).tolist()
        output = reference_tokens(make_request("x", prompt, max_tokens=num_tokens))
        if accepts(output):
            return prompt, output
    raise AssertionError("unreachable")


def all_different(output: list[int]) -> bool:
    return len(set(output)) == len(output)


# -- budget, chunks and admission ----------------------------------------------------------


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
    # A chunk of 7 tokens would fit the budget and the blocks; the prompt as a whole does not.
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


# -- preemption ----------------------------------------------------------------------------


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
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3))
    driver.add(
        *(make_request(f"r{i}", p, max_tokens=16) for i, p in enumerate(prompts(12, 11, 11)))
    )
    driver.step()
    driver.add(make_request("tiny", [1], max_tokens=1))
    plan = driver.step()
    assert driver.scheduler.stats.num_preemptions == 1
    assert driver.scheduler.kv.pool.num_free == 2 and driver.scheduler.free_slots
    assert plan is not None and not plan.added
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
    """Preempted with nobody to evict its blocks, it recomputes only what was not full."""
    driver = Driver(make_scheduler(num_blocks=10, max_num_seqs=3))
    driver.add(*(make_request(f"r{i}", p, max_tokens=8) for i, p in enumerate(prompts(12, 11, 8))))
    driver.run()
    resumed = [row for plan in driver.plans for row in plan.added if row.epoch > 0]
    assert any(row.num_computed_tokens > 0 for row in resumed)
    driver.assert_reference()


@pytest.mark.parametrize("depth", [2, 3, 6])
def test_a_preemption_with_tokens_in_flight_samples_them_again(depth: int) -> None:
    """What lands for the old residency must not count; the new one gives the same tokens."""
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
    plan = driver.step()  # calm needs a block, and nobody is less urgent
    assert plan is not None and set(driver.scheduled(plan)) == {"urgent"}
    assert driver.records["calm"].num_preemptions == 1
    driver.run()
    driver.assert_reference()


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


# -- limits and stops ----------------------------------------------------------------------


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_max_tokens_costs_no_wasted_token(max_tokens: int, depth: int, stops: bool) -> None:
    requests = [
        make_request(f"r{i}", p, max_tokens=max_tokens) for i, p in enumerate(prompts(5, 8, 13))
    ]
    driver = drive(make_scheduler(), requests, depth=depth, stops=stops)
    assert {len(output) for output in driver.outputs.values()} == {max_tokens}
    assert set(driver.reasons.values()) == {FinishReason.LENGTH}
    # The last token of each is reported, its KV never computed.
    assert driver.total_scheduled() == 5 + 8 + 13 + 3 * (max_tokens - 1)


@pytest.mark.parametrize("num_stop_ids", [1, 3, 8, 9, 20])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_id_ends_the_request(depth: int, num_stop_ids: int) -> None:
    prompt, output = prompt_with_output(all_different)
    others = [t for t in range(40) if t not in output]
    stop = [*others[: num_stop_ids - 1], output[4]]
    driver = drive(make_scheduler(), [make_request("x", prompt, stop=stop)], depth=depth)
    assert driver.outputs["x"] == output[:5]
    assert driver.reasons["x"] is FinishReason.STOP
    assert driver.stop_token_ids["x"] == output[4]
    # Steps planned before the stop was seen ran for nothing; no more than the run-ahead.
    assert len(prompt) + 4 <= driver.total_scheduled() <= len(prompt) + 4 + depth - 1


def test_end_of_sequence_stops_without_naming_a_stop_token() -> None:
    prompt, output = prompt_with_output(all_different)
    driver = drive(make_scheduler(), [make_request("x", prompt, eos=[output[2]])])
    assert driver.outputs["x"] == output[:3]
    assert driver.reasons["x"] is FinishReason.STOP and driver.stop_token_ids["x"] is None


def test_without_stop_ids_only_the_length_ends_it() -> None:
    """What `ignore_eos` comes down to: an empty set."""
    prompt, output = prompt_with_output(all_different)
    driver = drive(make_scheduler(), [make_request("x", prompt, max_tokens=12, ignore_eos=True)])
    assert driver.outputs["x"] == output and driver.reasons["x"] is FinishReason.LENGTH


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    prompt, output = prompt_with_output(all_different)
    driver = drive(make_scheduler(), [make_request("x", prompt, max_tokens=3, stop=[output[2]])])
    assert driver.reasons["x"] is FinishReason.STOP


@pytest.mark.parametrize("num_stop_ids", [1, 12])
@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_ids_count_only_after_min_tokens(depth: int, num_stop_ids: int) -> None:
    prompt, output = prompt_with_output(
        lambda out: out[3] == out[7] and len(set(out[:7])) == 7 and out[3] not in out[8:]
    )
    others = [t for t in range(40) if t not in output]
    stop = [*others[: num_stop_ids - 1], output[3]]
    for min_tokens, expected in ((0, 4), (3, 4), (4, 8), (7, 8), (8, 12)):
        request = make_request("x", prompt, max_tokens=12, stop=stop, min_tokens=min_tokens)
        driver = drive(make_scheduler(), [request], depth=depth)
        assert len(driver.outputs["x"]) == expected, min_tokens
        stopped = expected < 12
        assert driver.reasons["x"] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


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


# -- aborts, slots and the fence -----------------------------------------------------------


def test_abort_while_waiting() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(make_request("a", [1, 2]), make_request("b", [3]), make_request("c", [4, 5]))
    driver.step()
    driver.abort("b")
    assert [r.request_id for r in driver.scheduler.waiting] == ["c"]
    driver.run()
    assert driver.reasons["b"] is FinishReason.ABORT and driver.outputs["b"] == []
    driver.assert_reference("a", "c")
    driver.assert_drained()


def test_abort_while_waiting_under_priority() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1, policy="priority"))
    driver.add(*(make_request(f"r{i}", [i], max_tokens=1, priority=-i) for i in range(6)))
    driver.abort("r3")
    driver.abort("r5")
    driver.run()
    assert list(driver.reasons) == ["r3", "r5", "r4", "r2", "r1", "r0"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_in_the_middle_of_a_prefill(depth: int) -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=8), depth=depth)
    (prompt,) = prompts(40)
    driver.add(make_request("x", prompt))
    driver.launch()
    driver.abort("x")
    assert driver.scheduler.kv.pool.num_used == 10, "held until the step in flight has landed"
    driver.land()
    driver.assert_drained()
    assert driver.outputs["x"] == [] and driver.reasons["x"] is FinishReason.ABORT


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_with_tokens_in_flight_drops_them(depth: int) -> None:
    driver = Driver(make_scheduler(), depth=depth)
    driver.add(make_request("x", [1, 2, 3], max_tokens=50), make_request("y", [4, 5], max_tokens=9))
    for _ in range(6):
        driver.step()
    for _ in range(depth - len(driver.in_flight)):
        driver.launch()
    count = len(driver.outputs["x"])
    driver.abort("x")
    driver.run()
    assert len(driver.outputs["x"]) == count
    assert driver.outputs["x"] == reference_tokens(driver.records["x"])[:count]
    driver.assert_reference("y")
    driver.assert_drained()


@pytest.mark.parametrize("depth", DEPTHS)
def test_abort_one_request_a_step(depth: int) -> None:
    driver = Driver(make_scheduler(), depth=depth)
    names = [f"r{i}" for i in range(8)]
    driver.add(*(make_request(n, [i, 1], max_tokens=50) for i, n in enumerate(names)))
    for name in names:
        driver.step()
        driver.abort(name)
    driver.run()
    counts = [len(driver.outputs[name]) for name in names]
    assert counts == [max(0, i + 2 - depth) for i in range(8)]
    driver.assert_drained()


def test_finishing_what_is_gone_returns_none() -> None:
    driver = Driver(make_scheduler())
    assert driver.scheduler.finish("nobody", FinishReason.ABORT) is None
    driver.add(make_request("x", [1], max_tokens=1))
    driver.run()
    assert driver.scheduler.finish("x", FinishReason.ABORT) is None
    assert driver.scheduler.stats.num_finished == 1


def test_results_for_an_earlier_tenant_of_a_slot_are_dropped() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1), depth=4)
    prompt, output = prompt_with_output(all_different)
    driver.add(make_request("first", prompt, stop=[output[1]]))
    driver.add(make_request("second", [7, 8, 9], max_tokens=6))
    driver.run()
    rows = [row for plan in driver.plans for row in plan.added]
    assert [(row.slot, row.epoch) for row in rows] == [(0, 0), (0, 1)]
    assert driver.outputs["first"] == output[:2]
    driver.assert_reference()
    late = [p for p in driver.plans if (p.epochs == 0).all() and p.num_computed.max() > 7]
    assert late, "steps of the first ran after its stop token was sampled"


def test_slots_and_blocks_return_when_the_newest_step_has_landed() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1), depth=4)
    prompt, output = prompt_with_output(all_different, length=8)
    driver.add(make_request("x", prompt, stop=[output[0]]))
    driver.add(make_request("next", [1, 2], max_tokens=1))
    for _ in range(4):
        driver.launch()
    scheduler = driver.scheduler
    applied = driver.land()
    assert applied is not None and [f.request_id for f in applied.finished] == ["x"]
    for landed in range(1, 4):  # three more steps compute x's row
        assert scheduler.free_slots == [] and scheduler.kv.pool.num_used == 3, landed
        assert scheduler.fence.num_blocks == 3
        assert driver.launch() is None, "`next` must wait for the slot"
        driver.land()
    assert scheduler.free_slots == [0] and scheduler.kv.pool.num_used == 0
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_that_ends_by_length_gives_its_blocks_back_at_once(depth: int) -> None:
    """It was in no step after its last, so its blocks need not wait for the steps in flight."""
    driver = Driver(make_scheduler(), depth=depth)
    driver.add(make_request("short", [1, 2, 3, 4, 5], max_tokens=2))
    driver.add(make_request("long", [6, 7], max_tokens=30))
    while "short" not in driver.reasons:
        driver.step()
    assert driver.scheduler.fence.num_blocks == 0
    assert len(driver.in_flight) == depth - 1
    driver.run()
    driver.assert_drained()


# -- prefix cache --------------------------------------------------------------------------


def test_two_equal_prompts_in_one_step_compute_it_once() -> None:
    (prompt,) = prompts(14)
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt), make_request("b", prompt))
    plan = driver.launch()
    assert plan is not None and driver.scheduled(plan) == {"a": 14, "b": 2}
    table = driver.scheduler.kv.block_table
    a, b = driver.records["a"].slot, driver.records["b"].slot
    assert table[a, :3].tolist() == table[b, :3].tolist() and table[a, 3] != table[b, 3]
    driver.run()
    driver.assert_reference()
    driver.assert_drained()


def test_a_chunk_shares_only_what_it_has_computed() -> None:
    (prompt,) = prompts(30)
    driver = Driver(make_scheduler(threshold=10, max_num_batched_tokens=100))
    driver.add(make_request("a", prompt), make_request("b", prompt))
    plan = driver.step()
    assert plan is not None
    assert driver.scheduled(plan) == {"a": 10, "b": 10}, "b starts behind a's two full blocks"
    assert plan.added[1].num_computed_tokens == 8
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_next_turn_hits_every_full_block_of_the_last(
    depth: int, max_tokens: int, stops: bool
) -> None:
    driver = Driver(make_scheduler(), depth=depth, stops=stops)
    (prompt,) = prompts(6)
    driver.add(make_request("turn1", prompt, max_tokens=max_tokens))
    driver.run()
    history = prompt + driver.outputs["turn1"]
    driver.add(make_request("turn2", [*history, 1, 2, 3], max_tokens=2))
    driver.run()
    # The last token's KV was never computed; every block without it is there.
    assert driver.records["turn2"].num_cached_tokens == (len(history) - 1) // 4 * 4
    driver.assert_reference()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_tokens_block_is_not_published(depth: int) -> None:
    """A device that stops by itself writes no KV for the stop token, however far it ran ahead."""
    for length in range(1, 9):
        prompt, output = prompt_with_output(all_different, length=length)
        driver = Driver(make_scheduler(), depth=depth)
        driver.add(make_request("turn1", prompt, stop=[output[4]]))
        driver.run()
        history = prompt + driver.outputs["turn1"]
        assert len(history) == length + 5
        driver.add(make_request("turn2", [*history, 1, 2, 3], max_tokens=2))
        driver.run()
        assert driver.records["turn2"].num_cached_tokens == (len(history) - 1) // 4 * 4
        driver.assert_reference()


def test_salts_do_not_share() -> None:
    (prompt,) = prompts(14)
    driver = Driver(make_scheduler())
    for name, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        driver.add(make_request(name, prompt, salt=salt, max_tokens=2))
    plan = driver.step()
    assert plan is not None
    assert driver.scheduled(plan) == {"a": 14, "b": 14, "c": 14, "d": 2}
    driver.run()
    driver.assert_reference()


def test_without_caching_nothing_is_shared_or_counted() -> None:
    (prompt,) = prompts(14)
    driver = drive(
        make_scheduler(caching=False), [make_request(name, prompt) for name in "ab"], depth=2
    )
    assert [p.total_tokens for p in driver.plans][0] == 28
    stats = driver.scheduler.stats
    assert stats.prefix_query_tokens == stats.prefix_hit_tokens == 0


def test_prefix_statistics_count_each_request_once() -> None:
    first, second = prompts(16, 8)
    driver = Driver(make_scheduler(num_blocks=9, max_num_seqs=4))
    stats = driver.scheduler.stats
    driver.add(make_request("a", first, max_tokens=12))
    driver.step()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (16, 0)
    driver.add(make_request("b", [*first[:8], *second, 1, 2], max_tokens=4))
    for _ in range(3):
        driver.step()
        if "b" in driver.reasons:
            break
    driver.run()
    assert driver.records["a"].num_preemptions + driver.records["b"].num_preemptions > 0
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (16 + 18, 8)
    assert driver.records["b"].num_cached_tokens == 8
    driver.assert_reference()


def test_resetting_the_cache_leaves_running_requests_alone() -> None:
    prompt, other = prompts(14, 9)
    driver = Driver(make_scheduler(), depth=2)
    driver.add(make_request("a", prompt, max_tokens=20), make_request("o", other, max_tokens=20))
    for _ in range(5):
        driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.scheduler.check_integrity()
    driver.add(make_request("b", prompt, max_tokens=20))
    driver.run()
    assert driver.records["b"].num_cached_tokens == 0
    assert driver.scheduler.stats.num_preemptions == 0
    driver.assert_reference()
    driver.assert_drained()


# -- failing steps -------------------------------------------------------------------------


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
    # Everybody runs; a plan made of nobody but `long` fails.
    driver.add(make_request("long", long, max_tokens=2))
    plan = driver.launch(fails=True)
    assert plan is not None
    before = {name: list(driver.outputs[name]) for name in names}
    only = np.flatnonzero(plan.slots == driver.records["long"].slot)
    columns = ("slots", "epochs", "num_tokens", "num_draft_tokens", "num_computed")
    partial = replace(plan, **{name: getattr(plan, name)[only] for name in columns})
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


# -- plans ---------------------------------------------------------------------------------


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
        return {name for name in plan.__dataclass_fields__ if name.startswith("needs_")} & {
            name for name in plan.__dataclass_fields__ if getattr(plan, name) is True
        }

    assert needs() == set()
    assert needs(temperature=0.5) == {"needs_sampling"}
    assert needs(top_k=3) == needs(top_p=0.5) == needs(min_p=0.1) == {"needs_top_k_top_p"}
    assert needs(presence_penalty=0.1) == {"needs_penalties"}
    assert needs(repetition_penalty=1.1) == needs(frequency_penalty=1.0) == {"needs_penalties"}
    assert needs(min_tokens=2) == {"needs_min_tokens"}
    assert needs(logprobs=0) == {"needs_logprobs"}
    assert plan_of(make_request("x", [1], logprobs=5)).max_logprobs == 5
    assert plan_of(make_request("x", [1])).max_logprobs == 0


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


def test_the_scripted_model_depends_on_every_token() -> None:
    """The harness itself: a swapped or changed token shows."""
    tokens = np.arange(20)
    outputs = {next_token(np.concatenate((tokens, [i])), 10_000) for i in range(50)}
    assert len(outputs) > 40
    assert next_token(tokens, 10_000) != next_token(tokens[::-1], 10_000)
