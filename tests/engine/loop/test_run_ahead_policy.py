"""How many steps are queued: what the host's recent pauses need, on devices in virtual time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fake_executor import FakeExecutor, make_core
from far_ahead import FarAhead

from termgen.engine.loop import core as core_module
from termgen.engine.loop import event_publisher as publisher_module
from termgen.engine.loop.control import WINDOW_S, RunAhead
from termgen.engine.loop.core import EngineCore
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import MAX_STEPS_IN_FLIGHT, StepPlan, StepResult

MS = 1_000_000
TURN_NS = MS // 10
"""Host time of a launch."""


class Machine(FakeExecutor):
    """Host and device on one virtual clock; holds keep the host away, as of the GIL would."""

    def __init__(self, step_ms: float = 1.0) -> None:
        super().__init__(lambda tokens: 2 + (sum(tokens) * 31 + len(tokens)) % 97)
        self.step_ns = round(step_ms * MS)
        self.prompt_ns = 30 * MS
        self.now_ns = self.free_ns = 1_000 * MS
        self.idle_ns = 0
        """Time without a step on the device, behind steps that were not the last."""
        self.holds: deque[tuple[int, int]] = deque()
        """(begin, end) of the times in which the host does not run."""
        self.in_flight = 0
        self.deepest = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def go_on(self) -> None:
        """Wait for the end of a hold that has begun."""
        while self.holds and self.holds[0][0] <= self.now_ns:
            self.now_ns = max(self.now_ns, self.holds.popleft()[1])

    def submit(self, plan: StepPlan) -> _Landing:  # type: ignore[override]
        self.go_on()
        self.now_ns += TURN_NS
        result = super().submit(plan).result()
        start = max(self.now_ns, self.free_ns)
        self.idle_ns += start - self.free_ns
        self.free_ns = start + (self.step_ns if plan.is_decode else self.prompt_ns)
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)
        return _Landing(self, result._replace(started_ns=start, ended_ns=self.free_ns))


class _Landing:
    def __init__(self, machine: Machine, result: StepResult) -> None:
        self._machine, self._result = machine, result

    def result(self) -> StepResult:
        machine = self._machine
        machine.now_ns = max(machine.now_ns, self._result.ended_ns)
        machine.go_on()
        machine.in_flight -= 1
        return self._result


Start = Callable[..., tuple[EngineCore, Machine]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def begin(
        step_ms: float = 1.0, ms: float = 25.0, *, depth: int = 2, is_far: bool = False
    ) -> tuple[EngineCore, Machine]:
        machine = Machine(step_ms)
        clock = SimpleNamespace(perf_counter_ns=machine.perf_counter_ns)
        monkeypatch.setattr(core_module, "time", clock)
        monkeypatch.setattr(publisher_module, "time", clock)
        sizes = {"max_model_len": 20_000, "num_blocks": 2_000, "block_size": 64}
        core = make_core(machine, [], depth=depth, run_ahead_ms=ms, **sizes)  # type: ignore[arg-type]
        if is_far:
            core.run_ahead = FarAhead(depth, ms)
        submit(core, "steady", 19_000)
        steps(core, 40)
        machine.idle_ns = 0
        return core, machine

    return begin


def submit(core: EngineCore, name: str, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    core.submit(
        GenerationRequest(request_id=name, prompt_token_ids=(5, 6), params=params),
        core_module.time.perf_counter_ns(),
    )


def steps(core: EngineCore, count: int) -> None:
    for _ in range(count):
        core.step()


def until(core: EngineCore, machine: Machine, time_ns: int) -> None:
    while machine.now_ns < time_ns:
        core.step()


def hold_each_second(machine: Machine, count: int, hold_ms: float, rng: random.Random) -> int:
    """Holds of this length, a second apart, at any time within a step; the end of the last."""
    end = machine.now_ns
    for second in range(count):
        begin = machine.now_ns + second * 1_000 * MS + rng.randrange(50 * MS)
        end = begin + round(hold_ms * MS)
        machine.holds.append((begin, end))
    return end


def wait_of_a_request(core: EngineCore, machine: Machine) -> int:
    """Time from a request's arrival to the start of its prefill on the device."""
    submit(core, f"late {machine.now_ns}", 1)
    arrived = machine.now_ns
    while not machine.plans[-1].added:
        core.step()
    waited = machine.free_ns - machine.prompt_ns - arrived
    steps(core, 40)
    return waited


@pytest.mark.parametrize("step_ms", [0.8, 1.0, 7.0])
def test_in_a_quiet_process_a_request_waits_as_without_run_ahead(
    start: Start, step_ms: float
) -> None:
    waits = {}
    for ms in (0.0, 20.0):
        core, machine = start(step_ms, ms)
        waits[ms] = wait_of_a_request(core, machine)
        assert machine.deepest == 2
        assert core.run_ahead.covered_ns == 0
    assert waits[20.0] == waits[0.0] <= 2 * step_ms * MS
    core, machine = start(step_ms, 20.0, is_far=True)
    assert wait_of_a_request(core, machine) > 2 * waits[0.0], "a queue of 20 ms would show"


def test_two_steps_in_flight_keep_a_device_busy_whose_steps_last_longer_than_a_turn(
    start: Start,
) -> None:
    core, machine = start(0.8, 20.0)
    steps(core, 1000)
    assert machine.idle_ns == 0 and machine.deepest == 2


@pytest.mark.parametrize("step_ms", [0.82, 1.0, 3.3, 7.0])
def test_pauses_that_recur_cost_the_device_no_time_after_the_first(
    start: Start, step_ms: float
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    core, machine = start(step_ms, 35.0)
    end = hold_each_second(machine, 8, 20.0, rng)
    until(core, machine, machine.holds[0][1] + 100 * MS)
    assert machine.idle_ns > 0, "the first one is not foreseen"
    machine.idle_ns = 0
    until(core, machine, end + 100 * MS)
    assert not machine.holds
    assert machine.idle_ns == 0


def test_without_run_ahead_every_pause_costs_its_time(start: Start) -> None:
    core, machine = start(1.0, 0.0)
    end = hold_each_second(machine, 5, 20.0, random.Random(0))
    until(core, machine, end + 100 * MS)
    assert 5 * 18 * MS < machine.idle_ns < 5 * 21 * MS and machine.deepest == 2


@pytest.mark.parametrize(("ms", "deepest"), [(10.0, 11), (20.0, 21), (1000.0, MAX_STEPS_IN_FLIGHT)])
def test_no_pause_queues_more_than_run_ahead_ms_or_the_steps_a_device_keeps(
    start: Start, ms: float, deepest: int
) -> None:
    core, machine = start(1.0, ms)
    ring = core.bus.subscribe(10_000)
    end = hold_each_second(machine, 4, 300.0, random.Random(1))
    until(core, machine, end + 200 * MS)
    assert machine.deepest == deepest
    records = [event for event in ring.drain() if isinstance(event, StepRecord)]
    assert max(r.covered_us for r in records) == pytest.approx(min(ms, 301.0) * 1e3, rel=0.01)
    assert max(r.queue_depth for r in records) == deepest - 1


def test_when_pauses_end_the_depth_returns_within_the_window(start: Start) -> None:
    core, machine = start()
    end = hold_each_second(machine, 3, 20.0, random.Random(2))
    until(core, machine, end + round((WINDOW_S - 0.1) * 1e9))
    assert machine.in_flight > 18
    until(core, machine, end + round((WINDOW_S + 0.1) * 1e9))
    assert machine.in_flight < 2 and core.run_ahead.covered_ns == 0


def test_a_shorter_pause_is_covered_when_a_longer_one_is_long_past(start: Start) -> None:
    core, machine = start()
    now = machine.now_ns
    machine.holds += [(now, now + 15 * MS), (now + 1_500 * MS, now + 1_505 * MS)]
    until(core, machine, now + 2_000 * MS)
    assert machine.in_flight >= 15
    until(core, machine, now + 4_000 * MS)
    assert 5 <= machine.in_flight <= 7


def test_prompts_idle_time_and_pauses_of_the_engine_are_no_pauses_of_the_host(
    start: Start,
) -> None:
    core, machine = start()
    for _ in range(5):  # a long prefill, and the host away while it runs
        submit(core, f"prompt {machine.now_ns}", 1)
        while not machine.plans[-1].added:
            core.step()
        machine.now_ns += 20 * MS
        steps(core, 1)
        machine.now_ns += 20 * MS
        steps(core, 10)
    assert core.run_ahead.covered_ns == 0
    core.control.pause("keep")
    while core.has_work:
        core.step()
    machine.now_ns += 500 * MS
    core.control.resume()
    steps(core, 10)
    assert core.run_ahead.covered_ns == 0
    core.abort("steady")
    while core.has_work:
        core.step()
    machine.now_ns += 500 * MS
    submit(core, "next", 100)
    steps(core, 50)
    assert core.run_ahead.covered_ns == 0 and machine.deepest == 2


def test_a_step_with_masks_is_neither_a_pause_nor_next_to_one(start: Start) -> None:
    core, machine = start()
    policy = RunAhead(2, 20.0)
    free = machine.plans[-1]
    bound = free._replace(constrained=free.slots)
    for plan in (*[free] * 4, *[bound] * 2, *[free] * 2):
        policy.launched(plan, machine.now_ns, 1)
        machine.now_ns += MS
        policy.landed(plan, _result(plan, machine.now_ns - MS, machine.now_ns))
        machine.now_ns += 15 * MS if plan is bound else 0
    assert policy.covered_ns == 0
    machine.now_ns += 15 * MS
    policy.launched(free, machine.now_ns, 1)
    assert policy.covered_ns == 16 * MS, "three steady steps show the same delay as a pause"


def test_a_host_slower_than_the_device_is_covered_but_does_not_queue_ever_more(
    start: Start,
) -> None:
    core, machine = start(0.04, 20.0)
    steps(core, 3000)
    assert machine.deepest <= 6


@pytest.mark.parametrize(("base", "run_ahead_ms"), [(1, 20.0), (2, 0.0), (1, 0.0)])
def test_without_run_ahead_and_without_async_scheduling_the_depth_is_fixed(
    start: Start, base: int, run_ahead_ms: float
) -> None:
    core, machine = start(1.0, run_ahead_ms, depth=base)
    end = hold_each_second(machine, 3, 20.0, random.Random(3))
    until(core, machine, end + 100 * MS)
    assert machine.deepest == base and core.run_ahead.covered_ns == 0


@pytest.mark.parametrize("step_ms", [0.1, 0.0])
def test_however_short_the_steps_the_tokens_on_the_device_bound_the_queue(
    start: Start, step_ms: float
) -> None:
    core, machine = start(step_ms, 1000.0)
    until(core, machine, hold_each_second(machine, 2, 200.0, random.Random(4)))
    steps(core, 100)
    assert machine.deepest == MAX_STEPS_IN_FLIGHT


def test_whatever_waits_or_joins_ends_the_run_ahead_at_once(start: Start) -> None:
    core, machine = start()
    until(core, machine, hold_each_second(machine, 1, 20.0, random.Random(5)))
    steps(core, 60)
    policy, plan = core.run_ahead, machine.plans[-1]
    assert policy.allowed(is_wanted=True) > 20
    assert policy.allowed(is_wanted=False) == policy.allowed(is_wanted=True) == 2
    steps(core, 60)
    assert policy.allowed(is_wanted=True) > 20
    policy.launched(plan._replace(num_decode_rows=0), machine.now_ns, 2)
    assert policy.allowed(is_wanted=True) == 2


def test_time_in_the_queue_is_not_time_of_a_step(start: Start) -> None:
    """A step that reports its launch as its start lasts from the end of the step before it."""
    _, machine = start()
    policy, plan = FarAhead(2, 20.0), machine.plans[-1]
    for i in range(20):
        policy.launched(plan, i * 4 * MS, 1)
        policy.landed(plan, _result(plan, max(0, i - 5) * 4 * MS, (i + 1) * 4 * MS))
    assert policy.allowed(is_wanted=True) == 6


def _result(plan: StepPlan, start_ns: int, end_ns: int) -> StepResult:
    tokens = plan.slots
    return StepResult(plan.step_id, tokens, tokens, None, started_ns=start_ns, ended_ns=end_ns)
