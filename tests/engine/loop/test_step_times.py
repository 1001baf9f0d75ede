"""The times in a step's record: the device idle or not, the loop working or waiting."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_executor import FakeExecutor, make_core

from termgen.config import EngineConfig
from termgen.engine.loop.core import EngineCore
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepPlan, StepResult

STEP_NS = 1_000_000
WAIT_S = 0.002


class TimedExecutor(FakeExecutor):
    """Steps of 1 ms, separated by the times in `gaps_ns`."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: 2 + len(tokens) % 40)
        self.gaps_ns: Sequence[int] = (0,)
        self.clock_ns = 0

    def submit(self, plan: StepPlan) -> TimedHandle:  # type: ignore[override]
        result = super().submit(plan).result()
        start = self.clock_ns + self.gaps_ns[plan.step_id % len(self.gaps_ns)]
        self.clock_ns = start + STEP_NS
        return TimedHandle(result._replace(started_ns=start, ended_ns=self.clock_ns))


class TimedHandle:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        time.sleep(WAIT_S)
        return self._result


def run(core: EngineCore, executor: TimedExecutor, name: str) -> list[StepRecord]:
    """One request of some steps, whose first begins on the device a moment after it came."""
    ring = core.bus.subscribe()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    before_ns = time.perf_counter_ns()
    core.submit(
        GenerationRequest(request_id=name, prompt_token_ids=(3, 4), params=params), before_ns
    )
    executor.clock_ns = time.perf_counter_ns()
    while core.has_work:
        core.step()
    records = [event for event in ring.drain() if isinstance(event, StepRecord)]
    core.bus.unsubscribe(ring)
    first = records[0]
    assert first.idle_us <= (first.started_ns - before_ns) / 1e3, "no work is no idleness"
    return records


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_idle_is_the_time_between_two_steps_while_there_is_work(depth: int) -> None:
    executor = TimedExecutor()
    core = make_core(executor, [], depth=depth)
    run(core, executor, "a")
    executor.gaps_ns = (30_000, 0, 70_000)
    records = run(core, executor, "b")
    expected = [executor.gaps_ns[r.step_id % 3] / 1e3 for r in records[1:]]
    assert [r.idle_us for r in records[1:]] == expected
    assert len(set(expected)) == 3


def test_making_a_result_of_what_was_waited_for_is_work() -> None:
    seen: dict[int, int] = {}

    class Handle(TimedHandle):
        def result(self) -> StepResult:
            result = super().result()._replace(seen_ns=time.perf_counter_ns())
            seen[result.step_id] = result.seen_ns
            time.sleep(WAIT_S)
            return result

    class Executor(TimedExecutor):
        def submit(self, plan: StepPlan) -> TimedHandle:  # type: ignore[override]
            return Handle(super().submit(plan).result())

    executor = Executor()
    records = run(make_core(executor, [], depth=2), executor, "a")
    assert {r.step_id: r.landed_ns for r in records} == seen
    assert all(r.host_us > WAIT_S * 1e6 for r in records[1:])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_loop_works_or_waits_and_nothing_is_counted_twice(depth: int) -> None:
    executor = TimedExecutor()
    core = make_core(executor, [], depth=depth)
    run(core, executor, "a")
    records = run(core, executor, "b")
    for record in records:
        assert record.wait_us >= WAIT_S * 1e6
        assert record.planned_ns < record.submitted_ns < record.launched_ns < record.landed_ns
        assert record.landed_ns < record.applied_ns
    for one, two in zip(records, records[1:], strict=False):
        between_us = (two.landed_ns - one.landed_ns) / 1e3
        assert one.apply_us < two.host_us < between_us - two.wait_us + 1e-3
    if depth == 1:
        assert all(r.host_us > r.schedule_us + r.launch_us for r in records)


def test_on_a_cpu_a_step_tells_what_its_parts_took(tiny_llama_dir: Path) -> None:
    """Input, model and sampling add up to the step; the record has the process's CPU time."""
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", kv_cache_gib=0.01, threads=1)
    engine = SyncEngine(config)
    try:
        ring = engine.core.bus.subscribe()
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        engine.add(
            GenerationRequest(request_id="r", prompt_token_ids=(5, 6, 7, 8, 9), params=params)
        )
        while engine.has_unfinished:
            engine.step()
        steps = [record for record in ring.drain() if isinstance(record, StepRecord)]
        assert len(steps) >= 6
        for record in steps:
            parts = (record.input_us, record.model_us, record.sample_us)
            assert min(parts) > 0
            assert abs(sum(parts) - (record.ended_ns - record.started_ns) / 1e3) < 1
        snapshot = engine.core.copy_state().snapshot()
        assert snapshot.cpu_s > 0
        if sys.platform == "linux":
            assert 10 * 2**20 < snapshot.resident_bytes < 2**40
    finally:
        engine.shutdown()
