"""Contents of plans and results while steps run ahead, and limits of a plan.

The loop over a scripted device, see core_harness.py; test_async_cases.py says which case is where.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from core_harness import CoreDriver, residencies
from scheduler_harness import Driver, make_request, make_scheduler, prompts

from termgen.api.sampling import REFUSED
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepPlan, StepResult


def busy(depth: int, *, requests: int = 7, **sizes: int) -> CoreDriver:
    """Chunked prompts, a cache that is too small, reused slots: run to the end."""
    sizes = {"num_blocks": 18, "max_num_seqs": 3, "max_num_batched_tokens": 12, **sizes}
    driver = CoreDriver(depth=depth, **sizes)  # type: ignore[arg-type]
    lengths = [5, 19, 26, 3, 14, 9, 22][:requests]
    for i, prompt in enumerate(prompts(*lengths)):
        driver.submit(f"r{i}", prompt, max_tokens=10 + 3 * i, logprobs=i % 3)
    return driver


@pytest.mark.parametrize("depth", [1, 4])
def test_a_chunk_that_is_not_the_last_gives_no_token_and_expects_none(depth: int) -> None:
    """Plan and device decide by their own counts, and agree on every row of every step."""
    driver = Driver(make_scheduler(max_num_batched_tokens=8), depth=depth)
    (prompt,) = prompts(30)
    driver.add(make_request("x", prompt, max_tokens=3))
    table = driver.scheduler.slots
    sampled = []
    for num_pending in (0, 0, 0, 1):
        if len(driver.in_flight) == depth:
            applied = driver.land()
            assert applied is not None
            sampled.append(len(applied.slots))
        driver.launch()
        assert int(table.num_pending[driver.records["x"].slot]) == num_pending
    while driver.in_flight:
        applied = driver.land()
        assert applied is not None
        sampled.append(len(applied.slots))
    assert sampled == [0, 0, 0, 1]
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_the_hosts_lengths_are_never_below_the_devices(depth: int) -> None:
    """They size what attention reads; for rows that still run they are exact."""
    driver = busy(depth)
    for i in range(7, 14):
        driver.submit(f"r{i}", [i, 3, 5], max_tokens=30, stop_token_ids=tuple(range(0, 40, 9)))
    device, execute = driver.executor.device, driver.executor.device.execute
    num_beyond = 0

    def checked(plan: StepPlan, **options: Any) -> StepResult:
        nonlocal num_beyond
        added = {row.slot: row.num_computed_tokens for row in plan.added}
        for slot, host in zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True):
            exact = added.get(slot, int(device.num_computed[slot]))
            if slot not in added and device.finished[slot]:
                exact = int(device.num_tokens[slot]) - 1  # KV it ever wrote
                num_beyond += host > exact
                assert host >= exact
            else:
                assert host == exact
        return execute(plan, **options)

    device.execute = checked  # type: ignore[method-assign]
    driver.run()
    assert depth < 3 or num_beyond > 0, "some row ran on behind its stop token"
    driver.assert_reference()
    driver.assert_drained()


def test_no_result_may_bring_two_tokens_of_a_row_without_drafts() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("x", [1, 2]))
    plan = scheduler.schedule()
    assert plan is not None
    two = StepResult(
        step_id=plan.step_id,
        num_sampled=np.asarray([2], np.int32),
        token_ids=np.asarray([3, 4], np.int32),
        logprobs=None,
        started_ns=0,
        ended_ns=0,
    )
    with pytest.raises(AssertionError, match="no drafts"):
        scheduler.apply(plan, two)


@pytest.mark.parametrize("depth", [2, 8])
def test_a_token_in_flight_never_stands_in_a_plan_as_a_placeholder(depth: int) -> None:
    """A row that comes back brings what had landed: real ids, all of which its reader has seen."""
    driver = busy(depth)
    driver.run()
    num_resumed = 0
    owner = {row: bearer for bearer in driver.bearers for row in bearer.residencies}
    for plan in driver.executor.plans:
        for row in plan.added:
            bearer = owner[row.slot, row.epoch]
            history = [*bearer.request.prompt_token_ids, *bearer.tokens]
            assert row.token_ids.tolist() == history[: len(row.token_ids)]
            num_resumed += len(row.token_ids) > row.num_prompt_tokens
    assert num_resumed > 0
    driver.assert_reference()


@pytest.mark.parametrize("name", ["logits_processors"])
def test_nothing_else_that_needs_the_host_between_two_steps_can_be_asked_for(name: str) -> None:
    """Only grammars wait for the last step's token: such fields are refused, not passed on."""
    assert name in REFUSED
    assert name not in {f.name for f in fields(SamplingParams)}
    assert name not in {f.name for f in fields(GenerationRequest)}


@pytest.mark.parametrize("depth", [1, 4])
def test_every_column_of_a_plan_and_of_its_result_has_one_entry_a_row(depth: int) -> None:
    """Both halves share one count of rows, so no column can shift against it."""
    driver = busy(depth)
    execute = driver.executor.device.execute

    def checked(plan: StepPlan, **options: Any) -> StepResult:
        columns = (plan.slots, plan.epochs, plan.num_tokens, plan.num_draft_tokens)
        assert {len(column) for column in (*columns, plan.num_computed)} == {plan.num_rows}
        assert len(set(plan.slots.tolist())) == plan.num_rows
        result = execute(plan, **options)
        assert len(result.num_sampled) == plan.num_rows
        assert int(result.num_sampled.sum()) == len(result.token_ids)
        return result

    driver.executor.device.execute = checked  # type: ignore[method-assign]
    driver.run()
    driver.assert_reference()


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_logprobs_come_once_a_token_through_chunks_and_preemptions(depth: int) -> None:
    driver = busy(depth)
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0
    for bearer in driver.bearers:
        assert bearer.num_logprobs == len(bearer.tokens) > 0
    driver.assert_reference()


@pytest.mark.parametrize("depth", [2, 8])
def test_a_plan_in_flight_does_not_change_while_later_ones_are_made(depth: int) -> None:
    """No array of a plan is a view of the host's tables, which change at once."""
    driver = busy(depth)
    submit, execute = driver.executor.submit, driver.executor.device.execute
    copies: dict[int, StepPlan] = {}
    tables = [v for v in vars(driver.scheduler.slots).values() if isinstance(v, np.ndarray)]
    tables.append(driver.scheduler.kv.block_tables)

    def arrays(plan: StepPlan) -> list[np.ndarray]:
        return [a for a in (*plan, *(r.token_ids for r in plan.added)) if isinstance(a, np.ndarray)]

    def copied(plan: StepPlan):
        copies[plan.step_id] = copy.deepcopy(plan)
        assert not any(np.shares_memory(a, t) for a in arrays(plan) for t in tables)
        return submit(plan)

    def compared(plan: StepPlan, **options: Any) -> StepResult:
        before = arrays(copies.pop(plan.step_id))
        assert all((a == b).all() for a, b in zip(arrays(plan), before, strict=True))
        return execute(plan, **options)

    driver.executor.submit = copied  # type: ignore[method-assign]
    driver.executor.device.execute = compared  # type: ignore[method-assign]
    driver.run()
    assert not copies
    driver.assert_reference()


@pytest.mark.parametrize("depth", [1, 4])
def test_a_row_that_decodes_computes_one_token_and_is_never_padded(depth: int) -> None:
    """Without drafts no row is padded to 1 + k: decodes are uniform."""
    driver = busy(depth, num_blocks=200)
    driver.run()
    assert driver.scheduler.stats.num_preemptions == 0
    owner = {row: bearer for bearer in driver.bearers for row in bearer.residencies}
    for plan in driver.executor.plans:
        rows = zip(residencies(plan), plan.num_tokens, plan.num_computed, strict=True)
        for row, count, computed in rows:
            if computed >= len(owner[row].request.prompt_token_ids):
                assert count == 1
    for bearer in driver.bearers:
        (total,) = driver.computed(bearer)
        num_prompt = len(bearer.request.prompt_token_ids)
        assert total == num_prompt - bearer.num_cached_tokens + len(bearer.tokens) - 1
    driver.assert_reference()
