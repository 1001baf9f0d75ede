"""Steps that run far ahead, on simulated devices and with a real model.

`FarAhead` queues all that `run_ahead_ms` allows; test_run_ahead_policy.py is about how much is
queued.
"""

from __future__ import annotations

import ctypes
import json
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_executor import FakeExecutor, make_core
from far_ahead import FarAhead

from termgen.config import EngineConfig
from termgen.engine.loop.core import EngineCore
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.loop.executor import StepHandle
from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import (
    MAX_STEPS_IN_FLIGHT,
    FinishedRow,
    StepDelivery,
    StepPlan,
    StepResult,
)

MS = 1_000_000


def test_who_leaves_does_not_end_the_run_ahead() -> None:
    core, executor, deliveries = loop(never_ends, ms=8.0)
    submit(core, "short", [5, 6], max_tokens=20)
    submit(core, "long", [7, 8, 9], max_tokens=60)
    ring = core.bus.subscribe()
    run(core)
    assert [len(tokens) for tokens in outputs(deliveries).values()] == [20, 60]
    records = [event for event in ring.drain() if isinstance(event, StepRecord)]
    assert {r.queue_depth for r in records[18:50]} == {8}
    assert records[18].num_decode_rows == 2 and records[50].num_decode_rows == 1


def test_a_queue_of_20_ms_fits_steps_of_1_ms() -> None:
    core, executor, _ = loop(never_ends, ms=20.0)
    submit(core, "a", [5, 6], max_tokens=60)
    run(core)
    assert executor.deepest == 21 < MAX_STEPS_IN_FLIGHT


# -- the loop ------------------------------------------------------------------------------


class PacedExecutor(FakeExecutor):
    """Steps of a fixed device time, one after the other, on a clock of their own."""

    def __init__(self, next_token: Callable[[Sequence[int]], int], step_ms: float = 1.0) -> None:
        super().__init__(next_token)
        self.step_ns = round(step_ms * MS)
        self.clock_ns = 0
        self.in_flight: deque[int] = deque()
        self.deepest = 0

    def submit(self, plan: StepPlan) -> StepHandle:  # type: ignore[override]
        handle = super().submit(plan)
        self.in_flight.append(plan.step_id)
        self.deepest = max(self.deepest, len(self.in_flight))
        return _Paced(self, handle)


class _Paced:
    def __init__(self, executor: PacedExecutor, handle: StepHandle) -> None:
        self._executor, self._handle = executor, handle

    def result(self) -> StepResult:
        executor = self._executor
        executor.in_flight.popleft()
        start = executor.clock_ns
        executor.clock_ns += executor.step_ns
        return self._handle.result()._replace(started_ns=start, ended_ns=executor.clock_ns)


def next_token(tokens: Sequence[int]) -> int:
    """Depends on the whole history; 1, end-of-sequence, comes up now and then."""
    return 1 + (sum(tokens) * 31 + len(tokens) * 7) % 43


def never_ends(tokens: Sequence[int]) -> int:
    return 2 + (sum(tokens) * 31 + len(tokens)) % 97


def submit(core: EngineCore, request_id: str, prompt: Sequence[int], **params: object) -> None:
    core.submit(
        GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**params),  # type: ignore[arg-type]
        ),
        0,
    )


def outputs(deliveries: Sequence[StepDelivery]) -> dict[str, list[int]]:
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


def run(core: EngineCore, limit: int = 2000) -> None:
    for _ in range(limit):
        if not core.has_work:
            break
        core.step()
        check_scheduler(core.scheduler)
    assert not core.has_work, "the engine never came to rest"
    assert core.scheduler.kv.pool.num_used == 0 and not core.scheduler.fence.num_blocks
    assert len(core.scheduler.free_slots) == core.scheduler.config.max_num_seqs


def loop(
    next_token: Callable[[Sequence[int]], int], *, ms: float = 20.0, depth: int = 2, **sizes: int
) -> tuple[EngineCore, PacedExecutor, list[StepDelivery]]:
    deliveries: list[StepDelivery] = []
    executor = PacedExecutor(next_token)
    core = make_core(executor, deliveries, depth=depth, **sizes)
    core.run_ahead = FarAhead(depth, ms)
    return core, executor, deliveries


def step_until_deep(core: EngineCore, executor: PacedExecutor, depth: int) -> None:
    for _ in range(100):
        if len(executor.in_flight) >= depth - 1:
            return
        core.step()
    raise AssertionError("the queue never grew")


def test_a_steady_batch_is_queued_for_the_time_asked_for_and_no_row_past_its_limit() -> None:
    core, executor, deliveries = loop(never_ends, ms=10.0)
    submit(core, "a", [5, 6], max_tokens=60)
    submit(core, "b", [7, 8, 9], max_tokens=60)
    ring = core.bus.subscribe()
    run(core)
    assert executor.deepest == 11
    assert {len(tokens) for tokens in outputs(deliveries).values()} == {60}
    assert len(executor.plans) == 60, "an end by length is known before, and wastes nothing"
    records = [event for event in ring.drain() if isinstance(event, StepRecord)]
    depths = [r.queue_depth for r in records]
    assert depths[0] == 0, "the device had nothing to do before the first step"
    assert depths == sorted(depths) and set(depths) == set(range(11))
    assert records[-1].num_wasted_tokens == 0
    assert all(r.planned_ns <= r.submitted_ns <= r.landed_ns <= r.applied_ns for r in records)
    assert all(r.launch_us > 0 for r in records)


def test_a_new_request_waits_for_the_queued_steps_and_no_more() -> None:
    core, executor, deliveries = loop(never_ends, ms=8.0)
    submit(core, "a", [5, 6], max_tokens=100)
    step_until_deep(core, executor, 9)
    queued = len(executor.in_flight)
    launched = len(executor.plans)
    submit(core, "late", [9, 9, 9], max_tokens=3)
    while not executor.plans[-1].added:
        core.step()
    assert len(executor.plans) == launched + 1, "nothing is queued before the new request"
    assert len(executor.in_flight) <= 2 <= queued
    run(core)
    assert endings(deliveries)["late"].reason is FinishReason.LENGTH


def test_stops_found_late_waste_no_more_than_the_queued_steps() -> None:
    stop_at = 40
    core, executor, deliveries = loop(lambda tokens: 1 if len(tokens) == stop_at else 50, ms=6.0)
    submit(core, "a", [7, 8, 9], max_tokens=100)
    run(core)
    assert len(outputs(deliveries)["a"]) == stop_at + 1 - 3
    assert endings(deliveries)["a"].reason is FinishReason.STOP
    wasted = core.scheduler.stats.wasted_tokens
    assert wasted == executor.deepest - 1 == 6
    assert wasted == sum(p.total_tokens for p in executor.plans) - (stop_at + 1 - 1)


def test_an_abort_is_delivered_at_once_and_its_queued_steps_touch_nobody() -> None:
    core, executor, deliveries = loop(never_ends, ms=8.0, max_num_seqs=2)
    submit(core, "a", [5, 6], max_tokens=100)
    submit(core, "b", [7, 8, 9], max_tokens=30)
    step_until_deep(core, executor, 9)
    queued = len(executor.in_flight)
    core.abort("a")
    submit(core, "next", [4, 4], max_tokens=10)
    core.step()
    assert endings(deliveries)["a"].reason is FinishReason.ABORT
    run(core)
    expected = [4, 4]
    for _ in range(10):
        expected.append(never_ends(expected))
    assert outputs(deliveries)["next"] == expected[2:]
    assert len(outputs(deliveries)["b"]) == 30
    assert core.scheduler.stats.wasted_tokens == queued


def test_nobody_is_preempted_for_a_step_ahead() -> None:
    """Both requests fit until one of them stops; steps ahead of that stop want more blocks."""

    def until_20(tokens: Sequence[int]) -> int:
        return 1 if tokens[0] == 50 and len(tokens) == 20 else 60

    core, executor, deliveries = loop(until_20, ms=1000.0, num_blocks=13)
    submit(core, "stops", [50] * 4, max_tokens=40)
    submit(core, "goes on", [51] * 4, max_tokens=36)
    run(core)
    assert executor.deepest > 8
    assert [len(tokens) for tokens in outputs(deliveries).values()] == [17, 36]
    assert core.scheduler.stats.num_preemptions == 0


def test_a_failing_step_fails_with_many_behind_it() -> None:
    core, executor, deliveries = loop(never_ends, ms=8.0)
    submit(core, "a", [5, 6], max_tokens=60)
    executor.fail_steps[20] = ValueError("device on fire")
    step_until_deep(core, executor, 9)
    run(core)
    assert endings(deliveries)["a"].reason is FinishReason.ERROR
    submit(core, "b", [5, 6], max_tokens=60)
    run(core)
    assert len(outputs(deliveries)["b"]) == 60


@pytest.mark.parametrize("blocks", [64, 20])
def test_tokens_do_not_depend_on_run_ahead(blocks: int) -> None:
    seed = 20 + blocks
    print(f"seed {seed}")

    def once(depth: int, ms: float) -> tuple[dict[str, list[int]], int]:
        rng = random.Random(seed)
        core, executor, deliveries = loop(next_token, ms=ms, depth=depth, num_blocks=blocks)
        for i in range(40):
            prompt = [rng.randrange(2, 40) for _ in range(rng.randrange(1, 20))]
            submit(core, f"r{i}", prompt, max_tokens=rng.randrange(1, 50))
            for _ in range(rng.choice((0, 3, 30))):
                core.step()
                check_scheduler(core.scheduler)
        run(core)
        return outputs(deliveries), executor.deepest

    expected, deepest = once(1, 20.0)
    assert deepest == 1
    for depth, ms in ((2, 0.0), (2, 4.0), (2, 1000.0), (8, 0.0), (8, 20.0)):
        tokens, deepest = once(depth, ms)
        assert tokens == expected, f"depth {depth}, {ms} ms"
        assert deepest > depth or depth == 8 or not ms


@pytest.mark.parametrize("asynchronous, shown", [(True, 20.0), (False, 0.0)])
def test_the_bound_is_said_where_steps_run_ahead(
    tiny_model_dir: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    asynchronous: bool,
    shown: float,
) -> None:
    config = EngineConfig(
        model=str(tiny_model_dir("llama")),
        device="cpu",
        threads=1,
        num_gpu_blocks_override=40,
        skip_tokenizer_init=True,
        async_scheduling=asynchronous,
    )
    with caplog.at_level("INFO", logger="termgen"):
        engine = SyncEngine(config)
    assert engine.model.run_ahead_ms == shown
    assert ("runs up to 20 ms ahead" in caplog.text) == asynchronous
    engine.shutdown()


@pytest.mark.parametrize(
    "device, prefix_caching",
    [("cpu", True), ("cpu", False), pytest.param("cuda", True, marks=pytest.mark.gpu)],
)
def test_a_real_model_gives_the_same_tokens_however_far_it_runs_ahead(
    tiny_model_dir: Callable[[str], Path], device: str, prefix_caching: bool
) -> None:
    """On a GPU the tokens of 31 steps in flight lie in a ring of 32."""
    seed = 4
    print(f"seed {seed}")

    def once(*, asynchronous: bool, ms: float = 20.0) -> tuple[dict[str, list[int]], int]:
        engine = SyncEngine(
            EngineConfig(
                model=str(tiny_model_dir("llama")),
                device=device,
                dtype="float32",
                threads=1,
                max_num_seqs=4,
                block_size=16,
                num_gpu_blocks_override=40,
                max_model_len=128,
                skip_tokenizer_init=True,
                enable_prefix_caching=prefix_caching,
                async_scheduling=asynchronous,
                run_ahead_ms=ms,
            )
        )
        engine.core.run_ahead = FarAhead(2 if asynchronous else 1, ms)
        ring = engine.core.bus.subscribe(100_000)
        rng = random.Random(seed)
        tokens: dict[str, list[int]] = {}
        for i in range(6):
            prompt = tuple(rng.randrange(2, 60) for _ in range(rng.randrange(2, 30)))
            num_tokens = 95 if i == 5 else rng.randrange(20, 60)
            params = SamplingParams(
                max_tokens=num_tokens, seed=i, temperature=float(i % 2), ignore_eos=True
            )
            engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished:
            for delta in engine.step():
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        records = [e for e in ring.drain() if isinstance(e, StepRecord)]
        assert all(r.started_ns <= r.ended_ns <= r.landed_ns for r in records)
        return tokens, max(r.queue_depth for r in records)

    expected, deepest = once(asynchronous=False)
    assert deepest == 0
    for ms, others in ((0.0, 1), (1000.0, MAX_STEPS_IN_FLIGHT - 1)):
        tokens, deepest = once(asynchronous=True, ms=ms)
        assert tokens == expected
        assert deepest == others


@pytest.mark.gpu
def test_holds_of_the_gil_cost_a_gpu_nothing_after_the_first(tmp_path: Path) -> None:
    # A step must take the device several times as long as the host, which refills the queue.
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    engine = SyncEngine(
        EngineConfig(
            model=str(tmp_path),
            load_format="dummy",
            device="cuda",
            max_num_seqs=2,
            num_gpu_blocks_override=600,
            skip_tokenizer_init=True,
            async_scheduling=True,
        )
    )
    ring = engine.core.bus.subscribe(100_000)
    params = SamplingParams(max_tokens=8000, ignore_eos=True)
    engine.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6), params=params))

    def run(count: int) -> list[StepRecord]:
        for _ in range(count):
            engine.step()
        return [e for e in ring.drain() if isinstance(e, StepRecord)]

    run(500)
    quiet = run(500)
    step_us = (quiet[-1].ended_ns - quiet[0].ended_ns) / 1e3 / (len(quiet) - 1)
    assert sum(r.host_us for r in quiet) / len(quiet) < 0.6 * step_us, "the host sets the pace"
    hold_us = round(12 * step_us)
    sleep = ctypes.PyDLL(None).usleep  # unlike CDLL, PyDLL keeps the GIL
    is_over, holds = threading.Event(), []

    def hold() -> None:
        while not is_over.wait(200 * step_us / 1e6):
            holds.append(1)
            sleep(hold_us)

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    try:
        run(800)  # the first holds
        num_before = len(holds)
        held = run(3000)
        num_holds = len(holds) - num_before
    finally:
        is_over.set()
        thread.join()
        engine.shutdown()
    assert num_holds > 4
    assert max(r.covered_us for r in held) >= 0.9 * hold_us
    assert max(r.queue_depth for r in held) >= 12
    lost_us = sum(r.idle_us for r in held) - len(held) * sum(r.idle_us for r in quiet) / len(quiet)
    assert lost_us < 0.25 * num_holds * hold_us, "two steps in flight lose eleven twelfths"
