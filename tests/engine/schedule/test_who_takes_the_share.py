"""Which prompts a step computes where others generate, in simulated time.

Each case is compared with the same one without adaptive prefill, which is at most a little better.
"""

from __future__ import annotations

import numpy as np
import pytest
from pace_simulation import STEP_MS, Arrival, Times, simulate

WORSE = 1.15
"""At most this many times as long as without adaptive prefill."""
GENERATING = [Arrival(i * 100, f"g{i}", 200 + 150 * i, 2000) for i in range(8)]
"""They generate all the time, and tell the times of steps."""
LATER = 1000.0


def both(*arrivals: Arrival, **options: object) -> tuple[Times, Times]:
    """With adaptive prefill, and without."""
    with_it, without = (
        simulate([*GENERATING, *arrivals], adaptive=adaptive, **options)  # type: ignore[arg-type]
        for adaptive in (True, False)
    )
    return with_it, without


def p95_gap(times: Times, start: float, end: float) -> float:
    """95th percentile of the gaps, ms, of those that generate all the time."""
    return float(np.percentile(gaps(times, start, end), 95))


def gaps(times: Times, start: float, end: float) -> list[float]:
    return [
        after - before
        for request in GENERATING
        for before, after in zip(
            times.tokens[request.name], times.tokens[request.name][1:], strict=False
        )
        if start <= before < end
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_that_wait_for_blocks_hurry_no_prompt(policy: str) -> None:
    """A long queue, and blocks for a few of its requests at a time."""
    queue = [Arrival(LATER + i, f"q{i}", 3000, 60) for i in range(60)]
    # The 8 that generate take 1,400 blocks at most; 1,600 are left, for 8 of the queue.
    adaptive, whole = both(*queue, num_blocks=3000, policy=policy)
    busy = (LATER + 500, LATER + 2500)
    assert p95_gap(adaptive, *busy) <= 6 * STEP_MS < 0.3 * p95_gap(whole, *busy)
    ends, whole_ends = (
        max(times.tokens[request.name][-1] for request in queue) for times in (adaptive, whole)
    )
    assert ends - LATER <= WORSE * (whole_ends - LATER)
    firsts, wholes = (
        np.mean([times.first(request.name) for request in queue]) for times in (adaptive, whole)
    )
    assert firsts <= WORSE * wholes


@pytest.mark.parametrize("threshold", [0, 1024])
def test_an_urgent_request_does_not_wait_for_a_long_prompt(threshold: int) -> None:
    long = Arrival(LATER, "long", 100_000, 4, priority=5)
    urgent = Arrival(LATER + 200, "urgent", 600, 4, priority=-5)
    adaptive, whole = both(long, urgent, threshold=threshold, policy="priority")
    assert adaptive.first("urgent") <= WORSE * whole.first("urgent")
    assert adaptive.first("urgent") <= 10 * STEP_MS


def test_an_urgent_long_prompt_comes_before_one_that_is_running() -> None:
    long = Arrival(LATER, "long", 100_000, 4, priority=5)
    urgent = Arrival(LATER + 200, "urgent", 5000, 4, priority=-5)
    adaptive, whole = both(long, urgent, policy="priority")
    assert adaptive.first("urgent") <= WORSE * whole.first("urgent")
    assert adaptive.first("urgent") < 0.5 * adaptive.first("long")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_short_prompts_do_not_wait_for_a_long_one(policy: str) -> None:
    long = Arrival(LATER, "long", 50_000, 4)
    shorts = [Arrival(LATER + 50 + i, f"s{i}", 150, 4) for i in range(3)]
    adaptive, whole = both(long, *shorts, policy=policy)
    for short in shorts:
        assert adaptive.first(short.name) <= WORSE * whole.first(short.name)
        assert adaptive.first(short.name) <= 10 * STEP_MS
    busy = (LATER, LATER + adaptive.first("long"))
    assert p95_gap(adaptive, *busy) <= 7 * STEP_MS


def test_a_burst_of_long_prompts_is_computed_in_order() -> None:
    """Equal parts would make all of them end late."""
    burst = [Arrival(LATER, f"b{i:02}", 3000, 20) for i in range(20)]
    adaptive, whole = both(*burst)
    firsts = [adaptive.first(request.name) for request in burst]
    assert firsts == sorted(firsts) and firsts[0] < 0.3 * firsts[-1]
    assert np.mean(firsts) <= WORSE * np.mean([whole.first(r.name) for r in burst])


def test_a_burst_of_short_prompts_is_admitted_at_once() -> None:
    burst = [Arrival(LATER, f"b{i:03}", 20, 20) for i in range(200)]
    adaptive, whole = both(*burst)
    for request in burst:
        assert adaptive.first(request.name) <= WORSE * whole.first(request.name)


def test_a_long_prompt_ends_though_short_ones_keep_coming() -> None:
    long = Arrival(LATER, "long", 20_000, 4)
    shorts = [Arrival(LATER + 10 * i, f"s{i}", 100, 4) for i in range(600)]
    adaptive = simulate([*GENERATING, long, *shorts], adaptive=True)
    alone = simulate([*GENERATING, long], adaptive=True)
    assert adaptive.first("long") <= 2 * alone.first("long")


def test_requests_that_may_not_start_hurry_no_prompt() -> None:
    """While admission is paused, only what runs counts."""
    long = Arrival(LATER, "long", 20_000, 4)
    held = [Arrival(LATER + 50 + i, f"h{i}", 500, 4) for i in range(40)]
    pause = (LATER + 40, LATER + 800)
    times = simulate([*GENERATING, long, *held], adaptive=True, pauses_admission_ms=pause)
    assert max(gaps(times, LATER + 60, LATER + 800)) <= 4 * STEP_MS
