"""Pause, resume, reset of the prefix cache and drain, with steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from fake_executor import FakeExecutor, make_core
from test_core import endings, expected, next_token, outputs, run, submit

from termgen.client import PauseMode
from termgen.engine.loop.control import EngineControl
from termgen.engine.loop.core import EngineCore
from termgen.engine.schedule.invariants import check_scheduler
from termgen.errors import EngineDeadError, EngineError, RequestError, StepError
from termgen.vocabulary.events import RequestEvent, RequestEventKind
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepDelivery

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
PROMPTS = {"a": [5] * 9, "b": [6] * 14, "c": [7] * 5}


class Loop:
    """A core in the middle of three requests of 30 tokens, with two slots."""

    def __init__(self, depth: int, **options: Any) -> None:
        self.executor = FakeExecutor(next_token)
        self.deliveries: list[StepDelivery] = []
        options = {"max_num_seqs": 2, **options}
        self.core: EngineCore = make_core(self.executor, self.deliveries, depth=depth, **options)
        for name, prompt in PROMPTS.items():
            submit(self.core, name, prompt, max_tokens=30)
        for _ in range(6):
            self.step()

    def step(self) -> None:
        self.core.step()
        check_scheduler(self.core.scheduler)

    def ask(self, command: Callable[[EngineControl], Future[Any]]) -> Future[Any]:
        """Give a command as another thread would; returns a future of its completion."""
        asked = self.core.call(lambda: command(self.core.control))
        self.step()
        settled: Future[Any] = asked.result(0)
        return settled

    def pause(self, mode: PauseMode) -> Future[None]:
        return self.ask(lambda control: control.pause(mode))

    def reset(self, *, force: bool) -> Future[bool]:
        return self.ask(lambda control: control.reset_prefix_cache(force))

    def settle(self) -> None:
        """Run the engine's loop until there is nothing to do."""
        run(self.core)

    def resume(self) -> None:
        asked = self.core.call(self.core.control.resume)
        self.step()
        asked.result(0)

    def assert_undisturbed(self, *names: str) -> None:
        told = outputs(self.deliveries)
        for name in names or tuple(PROMPTS):
            assert told[name] == expected(PROMPTS[name], 30), name
            assert endings(self.deliveries)[name].reason is FinishReason.LENGTH

    def assert_empty(self) -> None:
        assert self.core.scheduler.kv.pool.num_used == 0
        check_scheduler(self.core.scheduler)
        names = [row.request_id for d in self.deliveries for row in d.finished]
        assert len(names) == len(set(names)), "a request ended twice"


@DEPTHS
def test_keep_stops_after_the_steps_in_flight_and_goes_on_after_resume(depth: int) -> None:
    loop = Loop(depth)
    num_planned = len(loop.executor.plans)
    paused = loop.pause("keep")
    while not paused.done():
        loop.step()
    assert len(loop.executor.plans) == num_planned
    assert [d.step_id for d in loop.deliveries] == list(range(num_planned)), "all have landed"
    scheduler = loop.core.scheduler
    assert (scheduler.num_running, len(scheduler.waiting)) == (2, 1)
    assert scheduler.kv.pool.num_used > 0, "they keep their blocks"
    loop.resume()
    loop.settle()
    loop.assert_undisturbed()
    assert scheduler.stats.num_preemptions == 0
    loop.assert_empty()


@DEPTHS
def test_a_paused_engine_has_no_work_and_does_none(depth: int) -> None:
    """Otherwise its thread would spin, and a watchdog would report it as stuck."""
    loop = Loop(depth)
    loop.pause("keep")
    loop.settle()
    loop.executor.num_idle_jobs = 1
    assert not loop.core.has_work and not loop.core.step()
    assert not loop.core.use_idle_time(), "rows are in the middle of their requests"
    assert loop.core.copy_state().snapshot().paused
    loop.resume()
    assert loop.core.has_work and not loop.core.copy_state().snapshot().paused


@DEPTHS
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_wait_lets_what_has_begun_end_and_starts_nothing(depth: int, policy: str) -> None:
    loop = Loop(depth, policy=policy)
    paused = loop.pause("wait")
    submit(loop.core, "late", [8] * 4, max_tokens=5)
    loop.step()
    assert not paused.done()
    loop.settle()
    paused.result(0)
    assert endings(loop.deliveries).keys() == {"a", "b"}
    loop.assert_undisturbed("a", "b")
    assert [r.request_id for r in loop.core.scheduler.waiting] == ["c", "late"]
    assert loop.core.scheduler.kv.pool.num_used == 0
    loop.resume()
    loop.settle()
    loop.assert_undisturbed()
    assert outputs(loop.deliveries)["late"] == expected([8] * 4, 5)
    loop.assert_empty()


@DEPTHS
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_wait_also_waits_for_those_that_were_preempted(depth: int, policy: str) -> None:
    """A more urgent request that has not begun is ahead of them in the queue."""
    loop = Loop(depth, policy=policy, num_blocks=15)
    urgent = GenerationRequest(
        request_id="urgent",
        prompt_token_ids=(9,) * 8,
        params=SamplingParams(max_tokens=4),
        priority=-5,
    )
    loop.core.submit(urgent, 0)
    paused = loop.pause("wait")
    loop.settle()
    paused.result(0)
    assert loop.core.scheduler.stats.num_preemptions > 0, "the cache was meant to be too small"
    began = {row.request_id for d in loop.deliveries for row in d.started}
    assert began == endings(loop.deliveries).keys() and "urgent" not in began
    loop.resume()
    loop.settle()
    loop.assert_undisturbed()
    loop.assert_empty()


@DEPTHS
def test_abort_ends_all_at_once_and_keeps_what_comes_later(depth: int) -> None:
    loop = Loop(depth)
    paused = loop.pause("abort")
    submit(loop.core, "late", [8] * 4, max_tokens=5)
    loop.settle()
    paused.result(0)
    ends = endings(loop.deliveries)
    assert {name: row.reason for name, row in ends.items()} == dict.fromkeys(
        PROMPTS, FinishReason.ABORT
    )
    told = outputs(loop.deliveries)
    assert all(told[name] == expected(PROMPTS[name], len(told[name])) for name in told)
    loop.assert_empty()
    assert [r.request_id for r in loop.core.scheduler.waiting] == ["late"]
    loop.resume()
    loop.settle()
    assert outputs(loop.deliveries)["late"] == expected([8] * 4, 5)
    loop.assert_empty()


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_pausing_an_idle_engine_is_done_at_once_and_holds_the_queue(mode: PauseMode) -> None:
    core = make_core(FakeExecutor(next_token), deliveries := [], depth=2)
    asked = core.call(lambda: core.control.pause(mode))
    run(core)
    asked.result(0).result(0)
    submit(core, "a", [5] * 9, max_tokens=4)
    run(core)
    assert len(core.scheduler.waiting) == 1 and not deliveries
    core.call(core.control.resume)
    run(core)
    assert outputs(deliveries) == {"a": expected([5] * 9, 4)}


@DEPTHS
def test_resume_without_pause_changes_nothing(depth: int) -> None:
    loop = Loop(depth)
    loop.resume()
    loop.settle()
    loop.assert_undisturbed()
    loop.assert_empty()


@DEPTHS
def test_the_second_pause_decides(depth: int) -> None:
    loop = Loop(depth)
    first = loop.pause("wait")
    second = loop.pause("keep")
    loop.settle()
    assert first.done() and second.done() and loop.core.scheduler.num_running == 2
    third = loop.pause("wait")
    assert not third.done()
    loop.settle()
    assert third.done() and endings(loop.deliveries).keys() == {"a", "b"}
    again = loop.pause("wait")
    loop.settle()
    assert again.done()
    loop.resume()
    loop.settle()
    loop.assert_undisturbed()
    loop.assert_empty()


@DEPTHS
def test_a_pause_that_is_overtaken_by_resume_says_so(depth: int) -> None:
    loop = Loop(depth)
    paused = loop.pause("wait")
    given_up = loop.pause("wait")
    given_up.cancel()
    loop.resume()
    with pytest.raises(EngineError, match="resumed before"):
        paused.result(0)
    loop.settle()
    loop.assert_undisturbed()


def test_an_unknown_mode_is_refused() -> None:
    loop = Loop(1)
    with pytest.raises(RequestError, match="wait, abort, keep") as caught:
        loop.pause("sleep")  # type: ignore[arg-type]
    assert caught.value.param == "mode"
    loop.settle()
    loop.assert_undisturbed()


@DEPTHS
def test_an_abort_reaches_a_request_that_stands_still(depth: int) -> None:
    loop = Loop(depth)
    loop.pause("keep")
    loop.settle()
    loop.core.abort("a")
    loop.core.abort("c")
    loop.settle()
    ends = endings(loop.deliveries)
    assert {name: row.reason for name, row in ends.items()} == dict.fromkeys(
        "ac", FinishReason.ABORT
    )
    loop.resume()
    loop.settle()
    loop.assert_undisturbed("b")
    loop.assert_empty()


@DEPTHS
def test_a_reset_spares_what_is_in_use_and_says_so(depth: int) -> None:
    loop = Loop(depth)
    reset = loop.reset(force=False)
    while not reset.done():
        loop.step()
    assert reset.result(0) is False and loop.core.scheduler.stats.num_preemptions == 0
    loop.settle()
    loop.assert_undisturbed()
    assert loop.core.scheduler.kv.pool.num_cached > 0
    assert loop.reset(force=False).result(0) is True
    assert loop.core.scheduler.kv.pool.num_cached == 0
    loop.assert_empty()


@DEPTHS
def test_a_reset_right_after_the_last_token_is_complete(depth: int) -> None:
    """The steps launched past the end still hold blocks: the reset waits for those."""
    loop = Loop(depth)
    while len(endings(loop.deliveries)) < len(PROMPTS):
        loop.step()
    reset = loop.reset(force=False)
    loop.settle()
    assert reset.result(0) is True and loop.core.scheduler.kv.pool.num_cached == 0


@DEPTHS
def test_a_forced_reset_waits_for_the_steps_in_flight_and_leaves_no_block(depth: int) -> None:
    loop = Loop(depth)
    ring = loop.core.bus.subscribe()
    num_planned = len(loop.executor.plans)
    reset = loop.reset(force=True)
    while not reset.done():
        assert len(loop.executor.plans) == num_planned, "nothing may be launched before"
        loop.step()
    assert reset.result(0) is True
    pool = loop.core.scheduler.kv.pool
    assert pool.num_used == 0 and pool.num_cached == 0
    assert loop.core.scheduler.stats.num_preemptions == 2
    loop.settle()
    loop.assert_undisturbed()
    loop.assert_empty()
    events = [e for e in ring.drain() if isinstance(e, RequestEvent)]
    why = {e.detail for e in events if e.kind is RequestEventKind.PREEMPTED}
    assert why == {"the prefix cache was reset"}


@DEPTHS
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_forced_reset_of_a_paused_engine(depth: int, mode: PauseMode) -> None:
    loop = Loop(depth)
    loop.pause(mode)
    if mode == "keep":
        loop.settle()
    reset = loop.reset(force=True)
    loop.settle()
    assert reset.result(0) is True and loop.core.control.is_paused
    assert (mode == "keep") == (not endings(loop.deliveries)), "`wait` lets them end after it"
    loop.resume()
    loop.settle()
    loop.assert_undisturbed()
    loop.assert_empty()


@DEPTHS
@pytest.mark.parametrize("command", ["wait", "abort", "keep", "reset", "forced reset"])
def test_a_step_that_fails_under_a_command(depth: int, command: str) -> None:
    """Its requests end once, with the step and the batch named, and the command takes effect."""
    loop = Loop(depth)
    failing = len(loop.executor.plans)
    loop.executor.fail_steps[failing] = ValueError("device on fire")
    loop.step()
    settled: Future[Any]
    if command.endswith("reset"):
        settled = loop.reset(force=command == "forced reset")
    else:
        settled = loop.pause(command)  # type: ignore[arg-type]
    loop.settle()
    assert settled.done()
    loop.resume()
    loop.settle()
    ends = endings(loop.deliveries)
    assert ends.keys() == PROMPTS.keys()
    if command == "abort" and depth > 1:
        assert {row.reason for row in ends.values()} == {FinishReason.ABORT}, "it came first"
    else:
        for name in "ab":
            error = ends[name].error
            assert isinstance(error, StepError) and error.step_id == failing
            assert set(error.request_ids) == {"a", "b"}
            assert f"step {failing} (2 requests, 2 tokens) failed: ValueError" in str(error)
        assert ends["c"].reason is FinishReason("abort" if command == "abort" else "length")
    loop.assert_empty()
    submit(loop.core, "d", PROMPTS["a"], max_tokens=5)
    loop.settle()
    assert outputs(loop.deliveries)["d"] == expected(PROMPTS["a"], 5)


@DEPTHS
@pytest.mark.parametrize("mode", [None, "wait", "keep"])
def test_draining_with_steps_in_flight_leaves_nothing_held(
    depth: int, mode: PauseMode | None
) -> None:
    loop = Loop(depth)
    loop.executor.fail_steps[len(loop.executor.plans)] = ValueError("the last step fails")
    commands: list[Future[Any]] = [loop.reset(force=False)]
    if mode is not None:
        commands.append(loop.pause(mode))
    loop.core.drain()
    loop.assert_empty()
    assert not loop.core.scheduler.has_requests
    assert len(loop.core.scheduler.free_slots) == 2
    loop.core.close(EngineDeadError("the engine was shut down"))
    assert all(command.done() for command in commands)
    assert not loop.core.has_work
