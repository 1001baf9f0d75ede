"""Device times on the host's clock: the arithmetic on scripted events, and real ones on a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from termgen.config import EngineConfig
from termgen.engine.device.runner.async_output import (
    AsyncOutput,
    DeviceClock,
    DeviceStart,
    Launch,
    StepTensors,
    TimingEvent,
)
from termgen.engine.device.runner.dispatch import Dispatch, GraphMode
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import SamplingNeeds, StepPlan, StepResult

US, MS, SECOND = 1e3, 1e6, 1e9


class World:
    """A device whose clock runs at its own rate; times in ns of the host."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now = 5 * SECOND
        self.num_events = 0

    def event(self) -> ScriptedEvent:
        self.num_events += 1
        return ScriptedEvent(self)


class ScriptedEvent:
    def __init__(self, world: World) -> None:
        self._world = world
        self.device_ns = -1.0

    def record(self, stream: object = None) -> None:
        self.device_ns = self._world.now * self._world.rate

    def synchronize(self) -> None:
        self._world.now += 30 * US

    def query(self) -> bool:
        return self.device_ns <= self._world.now * self._world.rate

    def elapsed_time(self, end: ScriptedEvent, /) -> float:
        return float(np.float32((end.device_ns - self.device_ns) / MS))


def errors_of_a_run(
    world: World, clock: DeviceClock, rng: random.Random, count: int, *, most_rest_s: float
) -> tuple[list[float], list[float]]:
    """For each step: the errors of the reported end and of the reported duration, in ns."""
    ends, durations = [], []
    for _ in range(count):
        world.now += rng.uniform(0, most_rest_s) * SECOND
        start, started = clock.mark(), world.now
        world.now += rng.uniform(0.5, 30) * MS
        end, ended = clock.mark(), world.now
        world.now += rng.expovariate(1 / (100 * US)) + 10 * US
        seen = round(world.now)
        told_start, told_end = clock.read(start, end, seen)
        assert told_end <= seen, "an event was told to end after it was seen"
        ends.append(told_end - ended)
        durations.append((told_end - told_start) - (ended - started))
    return ends, durations


@pytest.mark.parametrize("rate", [1.0, 1 + 2e-5, 1 - 2e-5])
def test_device_times_stay_right_over_hours_of_clocks_that_drift(rate: float) -> None:
    seed = 11
    print(f"seed {seed}")
    rng, world = random.Random(seed), World(rate)
    clock = DeviceClock(world.event, lambda: round(world.now))
    for _ in range(3):
        ends, durations = errors_of_a_run(world, clock, rng, 7000, most_rest_s=0.4)
        # 8 s of drift at 20 ppm are 160 us, and the time of the fastest reading is taken as 0.
        settled = ends[200:]
        assert max(map(abs, settled)) < 300 * US
        assert max(map(abs, durations)) < 2 * US
        world.now += 3600 * SECOND  # which makes 72 ms of drift


def test_a_device_is_busy_until_the_last_step_has_ended() -> None:
    world = World(1.0)
    clock = DeviceClock(world.event, lambda: round(world.now))
    assert not clock.is_busy, "before the first step"
    ends = [clock.end(), clock.end()]
    for end, length in zip(ends, (1 * MS, 5 * MS), strict=True):
        assert isinstance(end, ScriptedEvent)
        end.device_ns = world.now + length
    for wait, is_busy in ((0, True), (2 * MS, True), (4 * MS, False)):
        world.now += wait
        assert clock.is_busy == is_busy


def test_marks_are_used_again_once_they_have_been_read() -> None:
    world = World(1.0)
    clock = DeviceClock(world.event, lambda: round(world.now))
    in_flight: list[tuple[DeviceStart, TimingEvent, float]] = []
    for step in range(50):
        start, length = clock.start(), (1 + step) * US
        world.now += length
        in_flight.append((start, clock.end(), length))
        if len(in_flight) == 4:
            start, end, length = in_flight.pop(0)
            began, ended = clock.read(start.mark, end, round(world.now))
            assert ended - began == pytest.approx(length, abs=1 * US)
    assert world.num_events <= 1 + 2 * 4


def test_without_a_device_clock_a_step_begins_when_the_host_began_it() -> None:
    before = time.perf_counter_ns()
    result = AsyncOutput(Launch(make_plan(), DISPATCH, 123), make_tensors("cpu"), None).result()
    assert result.started_ns == 123
    assert before <= result.ended_ns <= time.perf_counter_ns()


@pytest.mark.gpu
def test_steps_queued_on_a_gpu_begin_when_the_one_before_them_ends() -> None:
    clock = DeviceClock()
    copy_stream = torch.cuda.Stream()
    tensors = make_tensors("cuda")
    torch.cuda.synchronize()
    begun = time.perf_counter_ns()
    outputs = []
    for _ in range(6):
        start = clock.start()
        torch.cuda._sleep(20_000_000)  # about 10 ms
        outputs.append(
            AsyncOutput(
                Launch(make_plan(), DISPATCH, time.perf_counter_ns(), start), tensors, copy_stream
            )
        )
    launched = time.perf_counter_ns()
    results: list[StepResult] = [output.result() for output in outputs]
    over = time.perf_counter_ns()
    assert begun - MS < results[0].started_ns and results[-1].ended_ns <= over
    assert results[-1].started_ns > launched, "the last step began long after it was launched"
    for one, two in zip(results, results[1:], strict=False):
        assert one.ended_ns - one.started_ns > MS
        assert -0.2 * MS < two.started_ns - one.ended_ns < MS


@pytest.mark.gpu
def test_an_engine_tells_its_steps_by_the_device_clock(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    engine = SyncEngine(
        EngineConfig(
            model=str(tiny_model_dir("llama")),
            device="cuda",
            max_num_seqs=4,
            num_gpu_blocks_override=64,
            max_model_len=128,
            skip_tokenizer_init=True,
        )
    )
    ring = engine.core.bus.subscribe()
    for i in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.add(
            GenerationRequest(request_id=str(i), prompt_token_ids=(5, 6, 7 + i), params=params)
        )
    while engine.has_unfinished:
        engine.step()
    engine.shutdown()
    records = [e for e in ring.drain() if isinstance(e, StepRecord)]
    assert len(records) >= 40
    for record in records:
        assert record.planned_ns < record.launched_ns
        assert record.started_ns < record.ended_ns <= record.landed_ns < record.applied_ns
    for one, two in zip(records, records[1:], strict=False):
        assert two.started_ns > one.ended_ns - 0.2 * MS, "the device does one step at a time"
        assert two.idle_us == max(0, two.started_ns - one.ended_ns) / 1e3


DISPATCH = Dispatch(GraphMode.NONE, None, None, "test")


def make_tensors(device: str) -> StepTensors:
    return StepTensors(torch.tensor([7], dtype=torch.int32, device=device))


def make_plan() -> StepPlan:
    one, none = np.ones(1, np.int32), np.zeros(0, np.int32)
    return StepPlan(
        step_id=0,
        slots=none,
        epochs=none,
        num_tokens=one,
        num_draft_tokens=none,
        num_computed=none,
        num_decode_rows=0,
        released_slots=(),
        added=(),
        block_slots=none,
        block_positions=none,
        block_ids=none,
        sampling=SamplingNeeds(all_greedy=True),
    )
