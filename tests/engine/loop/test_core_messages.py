"""The loop's treatment of submitted requests, of a step's logprobs, and of handles in flight."""

from __future__ import annotations

import numpy as np
import pytest
from fake_executor import FakeExecutor, make_core
from test_core import next_token, run

from termgen.engine.loop.core import EngineCore
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepDelivery, StepLogprobs, StepPlan, StepResult


def submit(core: EngineCore, request_id: str, **fields: object) -> None:
    given = {"prompt_token_ids": (5, 6, 7), "params": SamplingParams(max_tokens=9), **fields}
    core.submit(GenerationRequest(request_id=request_id, **given), arrival_ns=77)  # type: ignore[arg-type]


def test_a_request_reaches_the_scheduler_as_it_was_submitted() -> None:
    core = make_core(FakeExecutor(next_token), [], eos=1)
    params = SamplingParams(max_tokens=9, seed=-4, stop_token_ids=(8,), ignore_eos=True)
    submit(core, "a", params=params, priority=3, cache_salt="pepper")
    submit(core, "b", params=SamplingParams(max_tokens=500, stop_token_ids=(8,)))
    submit(core, "c", params=SamplingParams())
    core.step()
    a, b, c = (core.scheduler.requests[name] for name in "abc")
    assert a.params is params and a.seed == -4 and a.arrival_ns == 77
    assert (a.priority, a.cache_salt) == (3, "pepper")
    assert (b.priority, b.cache_salt) == (0, None)
    assert a.stop_token_ids == {8} and b.stop_token_ids == {1, 8} and c.stop_token_ids == {1}
    # 128 is the whole context
    assert [r.max_total_tokens for r in (a, b, c)] == [12, 128, 128]


def test_requests_without_a_seed_draw_apart_and_alike_from_run_to_run() -> None:
    def seeds() -> list[int]:
        core = make_core(FakeExecutor(next_token), [])
        submit(core, "a")
        submit(core, "b")
        core.step()
        return [core.scheduler.requests[name].seed for name in "ab"]

    first, second = seeds()
    assert first != second and seeds() == [first, second]


class Scoring(FakeExecutor):
    """Gives each row of a step its slot as the rank of its token."""

    def submit(self, plan: StepPlan) -> object:  # type: ignore[override]
        handle = super().submit(plan)
        result = handle.result()
        ranks = plan.slots.copy()
        scores = np.zeros((plan.num_rows, 1), np.float32)
        logprobs = StepLogprobs(ranks[:, None].copy(), scores, ranks)
        handle._result = result._replace(logprobs=logprobs)
        return handle


def test_logprobs_go_with_the_rows_that_are_delivered() -> None:
    deliveries: list[StepDelivery] = []
    executor = Scoring(next_token)
    # The prompt of `late` takes two steps, so that a step has rows without a token.
    core = make_core(executor, deliveries, depth=2, max_num_batched_tokens=16)
    for name in "abc":
        submit(core, name)
    submit(core, "late", prompt_token_ids=(9,) * 20)
    executor.on_submit = lambda plan: core.abort("b") if plan.step_id == 2 else None
    run(core)
    dropped = 0
    landed = [d for d in deliveries if d.step_id >= 0]
    for delivery, plan in zip(landed, executor.plans, strict=True):
        assert delivery.logprobs is not None and delivery.step_id == plan.step_id
        assert delivery.logprobs.ranks.tolist() == delivery.slots.tolist()
        assert delivery.logprobs.token_ids[:, 0].tolist() == delivery.slots.tolist()
        assert len(delivery.logprobs.logprobs) == len(delivery.slots)
        dropped += plan.num_rows - len(delivery.slots)
    assert dropped >= 2, "the chunk of `late`, and what was aborted"


class Waited(FakeExecutor):
    """Records the handles that were waited for, in order."""

    def __init__(self) -> None:
        super().__init__(next_token)
        self.waited: list[int] = []

    def submit(self, plan: StepPlan) -> object:  # type: ignore[override]
        handle, waited, step_id = super().submit(plan), self.waited, plan.step_id

        class Handle:
            def result(self) -> StepResult:
                waited.append(step_id)
                return handle.result()

        return Handle()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_step_in_flight_is_waited_for_once_also_behind_a_failure(depth: int) -> None:
    """No request may get a slot or a block while a step can still write there."""
    executor = Waited()
    core = make_core(executor, [], depth=depth)
    executor.fail_steps = {2: ValueError("device on fire"), 3: ValueError("and still")}
    submit(core, "a", params=SamplingParams(max_tokens=20))
    while core.has_work and not core.scheduler.stats.num_finished:
        core.step()
    assert executor.waited == list(range(len(executor.plans)))
    assert len(executor.plans) == 2 + depth
    submit(core, "b")
    run(core)
    assert executor.waited == list(range(len(executor.plans)))


def test_work_that_can_wait_is_done_only_without_other_work() -> None:
    executor = FakeExecutor(next_token)
    executor.num_idle_jobs = 2
    core = make_core(executor, [], depth=2)
    submit(core, "a")
    while core.has_work:
        assert not core.use_idle_time()
        core.step()
    assert (
        core.copy_state().snapshot().num_graphs_recorded,
        core.copy_state().snapshot().num_graphs,
    ) == (0, 2)
    assert core.use_idle_time()
    submit(core, "b")
    assert not core.use_idle_time(), "a request waits"
    run(core)
    assert core.use_idle_time() and not core.use_idle_time()
    assert core.copy_state().snapshot().num_graphs == 0
