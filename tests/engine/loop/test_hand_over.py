"""Messages from the engine's thread to the loop: arrays, once a step, without any text work.

On a tiny random model, running ahead.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from termgen.client import TokenDelta
from termgen.config import EngineConfig
from termgen.engine.loop import engine as engine_module
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.text.detokenizer import Detokenizer, StopAutomaton
from termgen.engine.text.output import OutputProcessor
from termgen.engine.text.tokenizer import Tokenizer
from termgen.errors import StepError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepDelivery, StepPlan

TEXTS = ("Hello, how are you?", "A scheduler decides which requests", "Paris")


@pytest.fixture
async def engine(tiny_llama_dir: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=str(tiny_llama_dir),
        device="cpu",
        kv_cache_gib=0.01,
        threads=1,
        async_scheduling=True,
    )
    started = await AsyncEngine.start(config)
    yield started
    await started.shutdown()


async def collect(engine: AsyncEngine, text: str, **params: Any) -> list[TokenDelta]:
    sampling = SamplingParams(temperature=0.9, seed=1, ignore_eos=True, **params)
    return [delta async for delta in engine.generate(text, sampling)]


async def collect_all(engine: AsyncEngine, **params: Any) -> list[list[TokenDelta]]:
    return await asyncio.gather(*(collect(engine, text, **params) for text in TEXTS))


def tokens(answers: list[list[TokenDelta]]) -> list[list[int]]:
    return [[token for delta in deltas for token in delta.token_ids] for deltas in answers]


class HandOver:
    """Records deliveries that leave the engine's thread, and wake-ups of the loop for them."""

    def __init__(self, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.deliveries: list[StepDelivery] = []
        self.num_wakes = 0
        self.threads: set[int] = set()
        core, post = engine.parts.core, engine._post

        def hand_over(delivery: StepDelivery) -> None:
            self.deliveries.append(delivery)
            self.threads.add(threading.get_ident())
            engine._hand_over(delivery)

        def counted(function: Callable[[], None]) -> None:
            self.num_wakes += 1
            post(function)

        monkeypatch.setattr(core, "_on_delivery", hand_over)
        monkeypatch.setattr(engine, "_post", counted)


async def test_one_delivery_of_arrays_a_step_and_at_most_one_wake_up(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = HandOver(engine, monkeypatch)
    answers = await collect_all(engine, max_tokens=30)
    told = [delivery for delivery in watch.deliveries if len(delivery.slots)]
    assert len({delivery.step_id for delivery in told}) == len(told)
    assert max(len(delivery.slots) for delivery in told) == len(TEXTS), "all rows in one"
    for delivery in told:
        for array in (delivery.slots, delivery.epochs, delivery.num_tokens, delivery.token_ids):
            assert isinstance(array, np.ndarray) and len(array) == len(delivery.slots)
    assert sum(len(delivery.token_ids) for delivery in told) == 30 * len(TEXTS)
    assert [sum(len(d.token_ids) for d in deltas) for deltas in answers] == [30] * len(TEXTS)
    assert 1 <= watch.num_wakes <= len(watch.deliveries)


async def test_a_loop_that_is_behind_is_woken_once_and_its_readers_get_larger_deltas(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(await collect_all(engine, max_tokens=60))
    watch = HandOver(engine, monkeypatch)
    reading = asyncio.ensure_future(collect_all(engine, max_tokens=60))
    while not watch.deliveries:
        await asyncio.sleep(0)
    before = watch.num_wakes
    while len(engine._deliveries) < 12:  # the loop does nothing else meanwhile
        time.sleep(0.001)
    assert watch.num_wakes <= before + 1
    answers = await reading
    assert tokens(answers) == expected
    assert max(len(delta.token_ids) for deltas in answers for delta in deltas) >= 10


async def test_no_text_is_made_on_the_engines_thread(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is made neither from tokens, nor from prompts."""
    seen: dict[str, set[int]] = {}

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident())
            return real(*args, **kwargs)

        return call

    for owner in (OutputProcessor, Detokenizer, StopAutomaton, Tokenizer):
        for name, real in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("_"):
                monkeypatch.setattr(owner, name, watched(f"{owner.__name__}.{name}", real))
    watch = HandOver(engine, monkeypatch)
    await collect_all(engine, max_tokens=30, stop=("zzz",), logprobs=2)
    (engine_thread,) = watch.threads
    assert engine_thread == engine._thread.ident != threading.get_ident()
    assert {"OutputProcessor.process", "Detokenizer.push"} <= set(seen), set(seen)
    assert not {name for name, threads in seen.items() if engine_thread in threads}
    assert seen["OutputProcessor.process"] == {threading.get_ident()}


async def test_an_exception_in_flight_names_its_step_and_batch_and_ends_each_request_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(await collect_all(engine, max_tokens=30))
    runner = engine.parts.core.executor._runner  # type: ignore[attr-defined]
    real = runner._run_model
    failed: list[int] = []

    def fail_when_all_decode(plan: StepPlan, dispatch: object) -> Any:
        if not failed and plan.is_decode and plan.num_rows == len(TEXTS):
            failed.append(1)
            raise RuntimeError("a cosmic ray")
        return real(plan, dispatch)

    monkeypatch.setattr(runner, "_run_model", fail_when_all_decode)
    answers = await collect_all(engine, max_tokens=30)
    errors = {delta.error for deltas in answers for delta in deltas if delta.error is not None}
    assert len(errors) == 1
    (error,) = errors
    assert isinstance(error, StepError) and len(error.request_ids) == len(TEXTS)
    start = f"step {error.step_id} ({len(TEXTS)} requests, {len(TEXTS)} tokens) failed: "
    assert str(error) == start + "RuntimeError: a cosmic ray"
    for deltas in answers:
        assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.ERROR]
    again = await collect_all(engine, max_tokens=30)
    assert tokens(again) == expected
    assert engine.is_healthy and (await engine.snapshot()).num_used_blocks == 0


async def test_the_loop_takes_only_what_is_there_when_the_engine_is_faster(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tasks on the loop get their turn, however fast deliveries arrive."""
    nothing = np.zeros(0, np.int32)
    delivery = StepDelivery(-1, 0, (), nothing, nothing, nothing, nothing, None, ())
    turns: list[int] = []
    num_processed = 0

    def process(taken: StepDelivery) -> list[TokenDelta]:
        nonlocal num_processed
        num_processed += 1
        if num_processed < 200:  # the engine's thread hands over the next ones meanwhile
            engine._hand_over(delivery)
        return []

    monkeypatch.setattr(engine.parts.output_processor, "process", process)

    async def somebody_else() -> None:
        while num_processed < 200:
            turns.append(num_processed)
            await asyncio.sleep(0)

    other = asyncio.create_task(somebody_else())
    engine._hand_over(delivery)
    await asyncio.wait_for(other, 30)
    assert len(set(turns)) > 100


async def test_the_engine_waits_for_a_loop_that_is_far_behind(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MOST_BEHIND", 3)
    answer = asyncio.create_task(collect(engine, TEXTS[0], max_tokens=60))
    while not engine.parts.core.scheduler.requests:
        await asyncio.sleep(0.001)
    most = 0
    for _ in range(20):
        time.sleep(0.02)  # the loop is blocked
        most = max(most, len(engine._deliveries))
    assert 2 <= most <= 4
    assert len(tokens([await answer])[0]) == 60, "nothing is lost"
