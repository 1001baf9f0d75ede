"""Pause, resume, reset and shutdown through both front ends of the engine, on a tiny random
model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from termgen.client import PauseMode, TokenDelta
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine, SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.errors import EngineDeadError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

LONG = SamplingParams(temperature=0.9, seed=3, max_tokens=150, ignore_eos=True)
TEXTS = ("Hello, how are you?", "word " * 40, "A scheduler decides")


def config(folder: Path, **options: Any) -> EngineConfig:
    options = {"async_scheduling": True, **options}
    return EngineConfig(model=str(folder), device="cpu", kv_cache_gib=0.01, threads=1, **options)


@pytest.fixture
async def engine(tiny_llama_dir: Path) -> AsyncIterator[AsyncEngine]:
    started = await AsyncEngine.start(config(tiny_llama_dir))
    yield started
    await started.shutdown()


class Reading:
    """Reads one request to its end, in a task of its own."""

    def __init__(self, engine: AsyncEngine, text: str, params: SamplingParams = LONG) -> None:
        self.deltas: list[TokenDelta] = []
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine, text, params))

    async def _read(self, engine: AsyncEngine, text: str, params: SamplingParams) -> None:
        async for delta in engine.generate(text, params):
            self.deltas.append(delta)
            if delta.num_output_tokens >= 3:
                self.begun.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None


async def read_all(engine: AsyncEngine) -> list[Reading]:
    """Every request in the middle of its answer."""
    readings = [Reading(engine, text) for text in TEXTS]
    await asyncio.gather(*(reading.begun.wait() for reading in readings))
    return readings


async def ended(readings: list[Reading]) -> list[list[int]]:
    async with asyncio.timeout(30):
        await asyncio.gather(*(reading.task for reading in readings))
    return [reading.tokens for reading in readings]


async def test_pauses_and_resets_in_mid_generation_change_no_token(engine: AsyncEngine) -> None:
    undisturbed = await ended(await read_all(engine))

    readings = await read_all(engine)
    await engine.pause("keep")
    snapshot = await engine.snapshot()
    assert snapshot.paused and snapshot.num_running == len(TEXTS)
    assert engine.is_healthy
    told = [len(reading.tokens) for reading in readings]
    await asyncio.sleep(0.05)
    await engine.snapshot()
    assert [len(reading.tokens) for reading in readings] == told, "it stands still"
    await engine.resume()
    assert await ended(readings) == undisturbed
    assert not (await engine.snapshot()).paused

    readings = await read_all(engine)
    assert await engine.reset_prefix_cache(force=True)
    assert await ended(readings) == undisturbed
    assert (await engine.snapshot()).num_preemptions == len(TEXTS)
    assert (await engine.snapshot()).num_used_blocks == 0


async def test_wait_returns_when_everybody_has_been_told_the_end(engine: AsyncEngine) -> None:
    readings = await read_all(engine)
    paused = asyncio.create_task(engine.pause("wait"))
    while not (await engine.snapshot()).paused:
        await asyncio.sleep(0)
    late = Reading(engine, TEXTS[0])
    await paused
    snapshot = await engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (0, 1)
    await ended(readings)
    assert {reading.reason for reading in readings} == {FinishReason.LENGTH}
    assert not late.deltas
    await engine.resume()
    assert await ended([late]) == [readings[0].tokens]


async def test_abort_ends_every_stream_and_a_paused_engine_uses_no_cpu(
    engine: AsyncEngine,
) -> None:
    readings = await read_all(engine)
    await engine.pause("abort")
    await ended(readings)
    assert {reading.reason for reading in readings} == {FinishReason.ABORT}
    assert (await engine.snapshot()).num_used_blocks == 0
    late = Reading(engine, TEXTS[0])
    while not (await engine.snapshot()).num_waiting:
        await asyncio.sleep(0)
    num_turns = 0
    step = engine.parts.core.step

    def count() -> bool:
        nonlocal num_turns
        num_turns += 1
        return step()

    engine.parts.core.step = count  # type: ignore[method-assign]
    await asyncio.sleep(0.1)
    assert num_turns <= 2, "its thread sleeps"
    await engine.resume()
    assert len((await ended([late]))[0]) == LONG.max_tokens


@pytest.mark.parametrize("mode", ["wait", "keep", None])
async def test_shutting_down_a_busy_or_paused_engine(
    tiny_llama_dir: Path, mode: PauseMode | None
) -> None:
    engine = await AsyncEngine.start(config(tiny_llama_dir))
    readings = await read_all(engine)
    core = engine.parts.core
    pausing = None
    if mode is not None:
        pausing = asyncio.create_task(engine.pause(mode))
        while not (await engine.snapshot()).paused:
            await asyncio.sleep(0)
    late = Reading(engine, TEXTS[0])
    async with asyncio.timeout(30):
        await engine.shutdown()
        for reading in (*readings, late):
            with pytest.raises(EngineDeadError):
                await reading.task
            assert reading.reason is None
        if mode == "wait" and pausing is not None:
            with pytest.raises(EngineDeadError):
                await pausing
        for command in (engine.pause, engine.resume, engine.reset_prefix_cache):
            with pytest.raises(EngineDeadError):
                await command()
    check_scheduler(core.scheduler)
    assert core.scheduler.kv.pool.num_used == 0 and not core.scheduler.has_requests


async def test_giving_up_on_a_pause_leaves_it_in_force(engine: AsyncEngine) -> None:
    readings = await read_all(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await engine.pause("wait")
    await ended(readings)
    await engine.pause("wait")
    assert (await engine.snapshot()).paused
    await engine.resume()


@pytest.mark.parametrize("is_async", [True, False])
def test_the_stepped_engine_pauses_and_loses_no_news(tiny_llama_dir: Path, is_async: bool) -> None:
    engine = SyncEngine(config(tiny_llama_dir, async_scheduling=is_async))
    told: dict[str, list[int]] = {}
    reasons: dict[str, list[FinishReason]] = {}

    def add(name: str) -> None:
        told[name], reasons[name] = [], []
        engine.add(engine.input_processor.process(TEXTS[0], LONG, request_id=name))

    def step(times: int = 10_000) -> None:
        for _ in range(times):
            if not engine.has_unfinished:
                return
            for delta in engine.step():
                told[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    reasons[delta.request_id].append(delta.finish_reason)

    add("alone")
    step()
    add("kept")
    step(5)
    engine.pause("keep")
    add("later")
    step()
    assert 0 < len(told["kept"]) < 12 and not told["later"] and engine.snapshot().paused
    engine.resume()
    step(5)
    assert engine.reset_prefix_cache() is False
    assert engine.reset_prefix_cache(force=True) is True
    engine.pause("wait")
    step()
    assert told["kept"] == told["alone"] == told["later"]
    add("aborted")
    engine.pause("abort")
    engine.resume()
    step()
    assert reasons == {
        "alone": [FinishReason.LENGTH],
        "kept": [FinishReason.LENGTH],
        "later": [FinishReason.LENGTH],
        "aborted": [FinishReason.ABORT],
    }
    add("dropped")
    step(3)
    engine.shutdown()
    engine.shutdown()
    check_scheduler(engine.core.scheduler)
    assert engine.core.scheduler.kv.pool.num_used == 0
