"""Endings of requests: limits, stop ids, aborts; and when slots and blocks become free.

Over a scripted device, see scheduler_harness.py.
"""

from __future__ import annotations

import pytest
from scheduler_harness import (
    DEPTHS,
    Driver,
    all_different,
    drive,
    make_request,
    make_scheduler,
    prompt_with_output,
    prompts,
    reference_tokens,
)

from termgen.vocabulary.request import FinishReason


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
    """This is `ignore_eos`: an empty set."""
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
