"""The loop over a device without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_executor import FakeExecutor, make_core

from termgen.engine.loop.core import EngineCore
from termgen.engine.schedule.invariants import check_scheduler
from termgen.errors import EngineDeadError, StepError
from termgen.vocabulary.events import RequestEvent, RequestEventKind, StepRecord
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import FinishedRow, StepDelivery


def next_token(tokens: Sequence[int]) -> int:
    """Depends on the whole history, never ends a text (id 1 is end-of-sequence)."""
    return 2 + (sum(tokens) * 31 + len(tokens)) % 97


def submit(core: EngineCore, request_id: str, prompt: Sequence[int], **params: object) -> None:
    request = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )
    core.submit(request, 0)


def run(core: EngineCore, limit: int = 1000) -> None:
    for _ in range(limit):
        if not core.has_work:
            return
        core.step()
        check_scheduler(core.scheduler)
    raise AssertionError("the engine never came to rest")


def outputs(deliveries: Sequence[StepDelivery]) -> dict[str, list[int]]:
    """Tokens by request, put together as a front end does: by (slot, epoch)."""
    owner: dict[tuple[int, int], str] = {}
    tokens: dict[str, list[int]] = {}
    for delivery in deliveries:
        for row in delivery.started:
            owner[row.slot, row.epoch] = row.request_id
            tokens.setdefault(row.request_id, [])
        keys = zip(delivery.slots.tolist(), delivery.epochs.tolist(), strict=True)
        for key, token in zip(keys, delivery.token_ids.tolist(), strict=True):
            tokens[owner[key]].append(token)
    return tokens


def endings(deliveries: Sequence[StepDelivery]) -> dict[str, FinishedRow]:
    return {row.request_id: row for delivery in deliveries for row in delivery.finished}


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_do_not_depend_on_how_far_the_loop_runs_ahead(depth: int) -> None:
    deliveries: list[StepDelivery] = []
    core = make_core(FakeExecutor(next_token), deliveries, depth=depth, num_blocks=20)
    prompts = {f"r{i}": [10 + i] * (3 + 5 * i) for i in range(6)}
    for name, prompt in prompts.items():
        submit(core, name, prompt, max_tokens=12)
    run(core)
    assert outputs(deliveries) == {n: expected(p, 12) for n, p in prompts.items()}
    assert {r.reason for r in endings(deliveries).values()} == {FinishReason.LENGTH}
    assert core.scheduler.stats.num_preemptions > 0, "the cache was meant to be too small"
    assert core.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stop_token_ends_the_request_even_with_later_steps_launched(depth: int) -> None:
    deliveries: list[StepDelivery] = []
    core = make_core(
        FakeExecutor(lambda tokens: 1 if len(tokens) == 9 else 50), deliveries, depth=depth
    )
    submit(core, "a", [7, 8, 9], max_tokens=40)
    run(core)
    assert outputs(deliveries)["a"] == [50] * 6 + [1]
    ending = endings(deliveries)["a"]
    assert ending.reason is FinishReason.STOP
    assert ending.stopped_by_token and ending.stop_token_id is None
    assert (ending.num_prompt_tokens, ending.num_output_tokens) == (3, 7)


def test_an_abort_that_has_arrived_wins_over_the_steps_own_ending() -> None:
    deliveries: list[StepDelivery] = []
    executor = FakeExecutor(next_token)
    core = make_core(executor, deliveries)
    submit(core, "a", [5, 6], max_tokens=3)

    def abort_during_last_step(plan: object) -> None:
        if len(executor.plans) == 3:
            core.abort("a")

    executor.on_submit = abort_during_last_step
    run(core)
    assert endings(deliveries)["a"].reason is FinishReason.ABORT
    assert outputs(deliveries)["a"] == expected([5, 6], 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_fails_only_its_requests_and_names_them(depth: int) -> None:
    deliveries: list[StepDelivery] = []
    executor = FakeExecutor(next_token)
    core = make_core(executor, deliveries, depth=depth, max_num_seqs=2)
    submit(core, "a", [5] * 8, max_tokens=20)
    submit(core, "b", [6] * 8, max_tokens=20)
    submit(core, "waits", [5] * 8, max_tokens=4)
    executor.fail_steps[3] = ValueError("device on fire")
    run(core)
    ends = endings(deliveries)
    for name in ("a", "b"):
        assert ends[name].reason is FinishReason.ERROR
        error = ends[name].error
        assert isinstance(error, StepError)
        assert error.step_id == 3 and set(error.request_ids) == {"a", "b"}
        assert "device on fire" in str(error) and "ValueError" in str(error)
        assert isinstance(error.__cause__, ValueError)
    assert ends["waits"].reason is FinishReason.LENGTH
    assert outputs(deliveries)["waits"] == expected([5] * 8, 4)
    assert core.scheduler.kv.pool.num_used == 0


def test_a_request_that_can_never_fit_is_refused_and_others_run() -> None:
    deliveries: list[StepDelivery] = []
    core = make_core(FakeExecutor(next_token), deliveries, num_blocks=6)
    submit(core, "huge", [5] * 8, max_tokens=60)
    submit(core, "fits", [5] * 8, max_tokens=4)
    run(core)
    refused = endings(deliveries)["huge"]
    assert refused.reason is FinishReason.ERROR and "KV cache" in str(refused.error)
    assert outputs(deliveries) == {"fits": expected([5] * 8, 4)}


def test_events_tell_each_request_in_order_and_count_every_token() -> None:
    deliveries: list[StepDelivery] = []
    core = make_core(FakeExecutor(next_token), deliveries)
    ring = core.bus.subscribe()
    submit(core, "a", [5] * 10, max_tokens=4)
    run(core)
    events = ring.drain()
    life = [e.kind for e in events if isinstance(e, RequestEvent)]
    assert life == [
        RequestEventKind.QUEUED,
        RequestEventKind.SCHEDULED,
        RequestEventKind.FIRST_TOKEN,
        RequestEventKind.FINISHED,
    ]
    details = [e.detail for e in events if isinstance(e, RequestEvent)]
    assert details[1] == "no cached block begins with these tokens", "what it found, and why"
    steps = [e for e in events if isinstance(e, StepRecord)]
    assert sum(s.num_sampled_tokens for s in steps) == 4
    assert [s.num_prefill_tokens for s in steps] == [10, 0, 0, 0]
    assert all(s.planned_ns <= s.submitted_ns <= s.applied_ns for s in steps)


def test_snapshot_says_which_group_of_layers_uses_a_block() -> None:
    core = make_core(FakeExecutor(next_token), [], windows=(None, 8), block_size=4)
    submit(core, "a", [5] * 30, max_tokens=20)
    for _ in range(12):
        core.step()
    (slot,) = core.scheduler.slots.running.tolist()
    groups = core.copy_state().snapshot().block_groups
    for group, row in enumerate(core.scheduler.kv.block_tables[:, slot]):
        held = row[row > 0]
        assert len(held) and set(groups[held].tolist()) == {group}
    alone = make_core(FakeExecutor(next_token), [])
    assert not len(alone.copy_state().snapshot().block_groups)


def test_snapshot_shows_who_is_in_the_step_and_which_blocks_they_hold() -> None:
    deliveries: list[StepDelivery] = []
    core = make_core(FakeExecutor(next_token), deliveries, max_num_seqs=2)
    for i in range(3):
        submit(core, f"r{i}", [5 + i] * 6, max_tokens=10)
    assert core.copy_state().snapshot().block_owners.max() == -1, "nobody runs yet"
    core.step()
    core.step()
    snapshot = core.copy_state().snapshot()
    assert [(r.request_id, r.status) for r in snapshot.requests] == [
        ("r0", "decode"),
        ("r1", "decode"),
        ("r2", "waiting"),
    ]
    assert [r.num_scheduled_tokens for r in snapshot.requests] == [1, 1, 0]
    assert snapshot.num_used_blocks == sum(r.num_blocks for r in snapshot.requests) == 4
    owned = snapshot.block_owners[snapshot.block_owners >= 0]
    assert sorted(owned.tolist()) == [0, 0, 1, 1]
    kv = core.scheduler.kv
    for place, slot in enumerate(core.scheduler.slots.running):
        held = kv.held(slot)
        assert snapshot.block_owners[held].tolist() == [place, place]


def test_a_full_ring_drops_the_oldest_and_says_so() -> None:
    deliveries: list[StepDelivery] = []
    core = make_core(FakeExecutor(next_token), deliveries)
    ring = core.bus.subscribe(capacity=4)
    submit(core, "a", [5] * 4, max_tokens=20)
    run(core)
    kept = ring.drain()
    assert len(kept) == 4
    assert ring.num_dropped == ring.num_appended - 4
    assert isinstance(kept[-1], RequestEvent) and kept[-1].kind is RequestEventKind.FINISHED


def test_calls_run_between_steps_and_bring_their_errors_back() -> None:
    core = make_core(FakeExecutor(next_token), [])
    answer = core.call(lambda: 42)
    failure = core.call(lambda: 1 // 0)
    core.step()
    assert answer.result(0) == 42
    with pytest.raises(ZeroDivisionError):
        failure.result(0)


def test_a_call_nobody_waits_for_any_more_is_left_out() -> None:
    core = make_core(FakeExecutor(next_token), [])
    ran: list[str] = []
    given_up = core.call(lambda: ran.append("given up"))
    assert given_up.cancel()
    kept = core.call(lambda: ran.append("kept"))
    core.step()
    assert kept.result(0) is None and ran == ["kept"]


def test_a_closed_core_answers_calls_with_the_reason() -> None:
    core = make_core(FakeExecutor(next_token), [])
    read, unread = core.call(lambda: 1), core.call(lambda: 2)
    core._calls.append(core._inbox.popleft())  # type: ignore[arg-type]  # as when a step is landing
    given_up = core.call(lambda: 3)
    assert given_up.cancel()
    core.close(EngineDeadError("over"))
    for future in (read, unread, core.call(lambda: 4)):
        with pytest.raises(EngineDeadError, match="over"):
            future.result(0)


def test_a_request_of_one_token_has_a_whole_life_too() -> None:
    deliveries: list[StepDelivery] = []
    core = make_core(FakeExecutor(next_token), deliveries, depth=2)
    ring = core.bus.subscribe()
    submit(core, "before", [5] * 10, max_tokens=4)
    run(core)
    submit(core, "a", [5] * 10, max_tokens=1)
    run(core)
    events = [e for e in ring.drain() if isinstance(e, RequestEvent) and e.request_id == "a"]
    assert [e.kind for e in events] == list(RequestEventKind)[:3] + [RequestEventKind.FINISHED]
    assert [e.num_output_tokens for e in events] == [0, 0, 1, 1]
    assert [e.num_cached_tokens for e in events] == [0, 8, 8, 8]
    assert [e.time_ns for e in events] == sorted(e.time_ns for e in events)


def test_the_last_token_of_a_cached_prompt_is_prefill() -> None:
    core = make_core(FakeExecutor(next_token), [])
    ring = core.bus.subscribe()
    for name in ("a", "b"):
        submit(core, name, [5] * 9, max_tokens=2)
        run(core)
    steps = [e for e in ring.drain() if isinstance(e, StepRecord)]
    assert [(s.num_prefill_tokens, s.num_decode_rows) for s in steps] == [
        (9, 0),
        (0, 1),
        (1, 0),
        (0, 1),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preemption_says_why(depth: int) -> None:
    executor = FakeExecutor(next_token)
    core = make_core(executor, [], depth=depth, max_num_seqs=2, max_num_batched_tokens=8)
    ring = core.bus.subscribe()
    submit(core, "fails", [5] * 16, max_tokens=2)
    executor.fail_steps[1] = ValueError("device on fire")
    core.step()
    submit(core, "bystander", [6] * 3, max_tokens=2)
    run(core)
    # With one step in flight it is queued behind the failing step and never loses anything.
    reasons = [
        (e.request_id, e.detail)
        for e in ring.drain()
        if isinstance(e, RequestEvent) and e.kind is RequestEventKind.PREEMPTED
    ]
    assert reasons == ([("bystander", "a step failed")] if depth == 2 else [])


def test_an_idle_time_is_not_a_stall() -> None:
    core = make_core(FakeExecutor(next_token), [])
    core.last_progress_ns = 0
    submit(core, "a", [5], max_tokens=2)
    begun = core.last_progress_ns
    assert begun > 0
    submit(core, "b", [5], max_tokens=2)
    assert core.last_progress_ns == begun, "work is queued: only a landed step is progress"
