"""The policy for the number of queued steps, from their measured times, without a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scheduler_harness import make_request, make_scheduler

from termgen.engine.loop.core import RunAhead
from termgen.vocabulary.step import MAX_STEPS_IN_FLIGHT, StepPlan, StepResult

MS = 1_000_000


def decode_plans(count: int) -> list[StepPlan]:
    """The prompt of one request, then its decodes."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=count + 1))
    plans = []
    for _ in range(count + 1):
        plan = scheduler.schedule()
        assert plan is not None
        plans.append(plan)
    return plans


def result_of(plan: StepPlan, start_ns: int, end_ns: int) -> StepResult:
    ones = np.ones(plan.num_rows, np.int32)
    return StepResult(plan.step_id, ones, ones, None, started_ns=start_ns, ended_ns=end_ns)


def depths(policy: RunAhead, plans: Sequence[StepPlan], step_ms: float) -> list[int]:
    """Depth allowed after each step, one step after the other on the device."""
    found = []
    for i, plan in enumerate(plans):
        policy.planned(plan)
        start = round(i * step_ms * MS)
        policy.landed(plan, result_of(plan, start, start + round(step_ms * MS)))
        found.append(policy.allowed(is_wanted=True))
    return found


def test_the_queue_grows_by_one_step_at_a_time_to_the_time_asked_for() -> None:
    prompt, *decodes = decode_plans(9)
    assert depths(RunAhead(2, 20.0), [prompt, *decodes], 5.0) == [2, 3, 4, *[5] * 7]
    assert depths(RunAhead(2, 7.0), [prompt, *decodes], 5.0) == [2, *[3] * 9]
    assert depths(RunAhead(2, 1.0), [prompt, *decodes], 5.0) == [2] * 10


@pytest.mark.parametrize(("base", "run_ahead_ms"), [(1, 20.0), (2, 0.0), (1, 0.0)])
def test_without_run_ahead_and_without_async_scheduling_the_depth_is_fixed(
    base: int, run_ahead_ms: float
) -> None:
    assert set(depths(RunAhead(base, run_ahead_ms), decode_plans(30), 0.1)) == {base}


@pytest.mark.parametrize("step_ms", [0.1, 0.0])
def test_however_short_the_steps_the_tokens_on_the_device_bound_the_queue(step_ms: float) -> None:
    found = depths(RunAhead(2, 1000.0), decode_plans(MAX_STEPS_IN_FLIGHT + 10), step_ms)
    assert max(found) == MAX_STEPS_IN_FLIGHT == found[-1]


def test_whatever_waits_ends_the_run_ahead_at_once() -> None:
    policy = RunAhead(2, 20.0)
    plans = decode_plans(12)
    assert depths(policy, plans[:8], 1.0)[-1] == 9
    assert policy.allowed(is_wanted=False) == 2
    assert policy.allowed(is_wanted=True) == 2, "it grows again with steps, not with questions"
    assert depths(policy, plans[8:10], 1.0) == [3, 4]


def test_who_joins_or_reads_a_prompt_ends_the_run_ahead() -> None:
    policy = RunAhead(2, 20.0)
    plans = decode_plans(12)
    assert depths(policy, plans[:8], 1.0)[-1] == 9
    changes: list[Callable[[StepPlan], StepPlan]] = [
        lambda plan: plan._replace(num_tokens=plan.num_tokens + 1, num_decode_rows=0),
        lambda plan: plan._replace(added=plans[0].added),
    ]
    for change in changes:
        policy.planned(change(plans[9]))
        assert policy.allowed(is_wanted=True) == 2
        policy.landed(plans[9], result_of(plans[9], 0, MS))
        assert policy.allowed(is_wanted=True) == 2
        depths(policy, plans[8:12], 1.0)
        assert policy.allowed(is_wanted=True) > 2


def test_time_in_the_queue_is_not_time_of_a_step() -> None:
    """A step that reports its launch as its start lasts from the end of the step before it."""
    policy = RunAhead(2, 20.0)
    for i, plan in enumerate(decode_plans(20)):
        policy.planned(plan)
        policy.landed(plan, result_of(plan, max(0, i - 5) * 4 * MS, (i + 1) * 4 * MS))
    assert policy.allowed(is_wanted=True) == 6
