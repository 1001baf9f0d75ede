"""Sharing through the prefix cache, and the time of publication.

Over a scripted device, see scheduler_harness.py.
"""

from __future__ import annotations

import pytest
from scheduler_harness import (
    Driver,
    all_different,
    drive,
    make_request,
    make_scheduler,
    prompt_with_output,
    prompts,
)

from termgen.engine.schedule.invariants import check_scheduler


def test_two_equal_prompts_in_one_step_compute_it_once() -> None:
    (prompt,) = prompts(14)
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt), make_request("b", prompt))
    plan = driver.launch()
    assert plan is not None and driver.scheduled(plan) == {"a": 14, "b": 2}
    (table,) = driver.scheduler.kv.block_tables
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
    assert not driver.scheduler.reset_prefix_cache(), "their blocks are still found"
    check_scheduler(driver.scheduler)
    driver.add(make_request("b", prompt, max_tokens=20))
    driver.run()
    assert driver.records["b"].num_cached_tokens == 12
    assert driver.scheduler.stats.num_preemptions == 0
    driver.assert_reference()
    driver.assert_drained()
    assert driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.kv.pool.num_cached == 0
