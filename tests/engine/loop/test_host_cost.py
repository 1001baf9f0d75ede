"""The scheduler's work per decode step, counted in calls and not in time.

Python and C function calls of schedule + apply stand for host time: they are exact and do not
depend on the machine. Whole-array operators (a[b], a + b) are not calls and count as nothing.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType

import numpy as np
from scheduler_harness import make_request, make_scheduler

from termgen.engine.schedule.scheduler import Scheduler
from termgen.vocabulary.step import StepPlan, StepResult

BLOCK_SIZE = 16
NUM_STEPS = 64


def decoding_scheduler(batch_size: int, context: int, *, caching: bool = True) -> Scheduler:
    """Every request has `context` tokens (less 0..15, to spread block crossings) and decodes."""
    blocks_each = (context + 2 * NUM_STEPS) // BLOCK_SIZE + 1
    scheduler = make_scheduler(
        num_blocks=batch_size * blocks_each + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=batch_size,
        max_num_batched_tokens=batch_size * context,
        max_model_len=context + 2 * NUM_STEPS,
        caching=caching,
    )
    rng = np.random.default_rng(batch_size)
    for i in range(batch_size):
        prompt = rng.integers(0, 1000, context - i % BLOCK_SIZE).tolist()
        scheduler.add_request(make_request(f"r{i}", prompt, max_tokens=2 * NUM_STEPS))
    run_step(scheduler)
    assert scheduler.num_running == batch_size and not len(scheduler.waiting)
    return scheduler


def make_result(plan: StepPlan) -> StepResult:
    ones = np.ones(plan.num_rows, np.int32)
    return StepResult(plan.step_id, ones, ones, None, started_ns=0, ended_ns=0)


def run_step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, make_result(plan))


def count_calls(scheduler: Scheduler) -> list[int]:
    """Calls made by schedule + apply in each of NUM_STEPS decode steps."""
    counts = []
    calls = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # what runs in its callbacks would be counted too
    try:
        for _ in range(NUM_STEPS):
            calls = 0
            sys.setprofile(profile)
            plan = scheduler.schedule()
            sys.setprofile(None)
            assert plan is not None and plan.num_rows == plan.total_tokens == scheduler.num_running
            result = make_result(plan)
            sys.setprofile(profile)
            scheduler.apply(plan, result)
            sys.setprofile(None)
            counts.append(calls)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def test_only_rows_that_cross_a_block_cost_calls() -> None:
    one = np.mean(count_calls(decoding_scheduler(1, 100)))
    many = np.mean(count_calls(decoding_scheduler(256, 100)))
    assert one <= 60
    crossing = 256 / BLOCK_SIZE
    assert many - one <= 22 * crossing, f"{many:.0f} calls a step for 256 requests, {one:.0f} for 1"


def test_a_step_that_crosses_no_block_costs_the_same_for_any_batch() -> None:
    """All requests cross blocks in the same steps: 15 of 16 steps only touch whole columns."""
    many = make_scheduler(
        num_blocks=10_000, block_size=BLOCK_SIZE, max_num_seqs=256, max_num_batched_tokens=20_000
    )
    for i in range(256):
        many.add_request(make_request(f"r{i}", [i, *range(50)], max_tokens=2 * NUM_STEPS))
    run_step(many)
    one = np.median(count_calls(decoding_scheduler(1, 100)))
    assert np.median(count_calls(many)) <= one + 2


def test_context_length_does_not_matter() -> None:
    short = count_calls(decoding_scheduler(4, 1_000))
    long = count_calls(decoding_scheduler(4, 16_008))  # blocks are crossed in the same steps
    assert abs(int(np.sum(long)) - int(np.sum(short))) <= 8, (short, long)
    assert max(long) <= max(short) + 4


def test_a_waiting_request_costs_the_same_however_long_its_prompt() -> None:
    """The head of the queue does not fit; no step may walk its prompt to find that out again."""
    totals = []
    for prompt_length in (1_000, 16_000):
        scheduler = make_scheduler(
            num_blocks=1_060,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            max_num_batched_tokens=20_000,
            max_model_len=17_000,
        )
        scheduler.add_request(make_request("running", [1] * 16_000, max_tokens=2 * NUM_STEPS))
        scheduler.add_request(make_request("filler", [2] * 500, max_tokens=2 * NUM_STEPS))
        run_step(scheduler)
        scheduler.add_request(make_request("waiting", [3] * prompt_length, max_tokens=4))
        run_step(scheduler)
        assert len(scheduler.waiting) == 1
        totals.append(sum(count_calls(scheduler)))
    assert abs(totals[0] - totals[1]) <= 8, totals
