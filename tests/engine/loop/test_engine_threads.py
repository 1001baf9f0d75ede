"""The boundary of the engine's thread and the event loop: wake-ups, cancelled calls, names, the
end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from termgen.client import TokenDelta
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.errors import EngineDeadError, ModelNotFoundError, RequestError
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import StepDelivery

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "Hello, how are you?"


@pytest.fixture
async def engine(tiny_llama_dir: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", kv_cache_gib=0.01, threads=1)
    started = await AsyncEngine.start(config)
    yield started
    await started.shutdown()


async def collect(
    engine: AsyncEngine, params: SamplingParams = SHORT, request_id: str | None = None
) -> list[TokenDelta]:
    stream = engine.generate(PROMPT, params, request_id=request_id)
    return [delta async for delta in stream]


def token_ids(deltas: list[TokenDelta]) -> list[int]:
    return [t for delta in deltas for t in delta.token_ids]


async def test_giving_up_on_a_snapshot_does_no_harm(engine: AsyncEngine) -> None:
    """A metrics page gives up like this when the engine is in a long step."""
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    for _ in range(20):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.snapshot()
    await engine.snapshot()
    assert engine.is_healthy
    await stream.aclose()
    assert len(token_ids(await collect(engine))) == 12


class TakenMeanwhile(deque[StepDelivery]):
    """The loop takes everything just as the engine thread is about to append."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__()
        self.engine = engine
        self.posted: list[object] = []

    def append(self, delivery: StepDelivery) -> None:
        if len(self):
            self.engine._take_deliveries()
        super().append(delivery)


async def test_no_delivery_is_left_lying_whatever_the_order_of_the_threads(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[StepDelivery] = []
    posted: list[object] = []
    monkeypatch.setattr(engine, "_deliveries", TakenMeanwhile(engine))
    monkeypatch.setattr(engine, "_post", posted.append)
    monkeypatch.setattr(
        engine.parts.output_processor, "process", lambda delivery: taken.append(delivery) or []
    )
    for count, name in enumerate("abc", start=1):
        engine._hand_over(name)  # type: ignore[arg-type]
        assert taken == list("abc")[: count - 1], "the one before"
        assert len(posted) == count, "the loop has been told of this one"


async def test_the_loop_is_woken_once_for_all_it_has_not_taken(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[object] = []
    monkeypatch.setattr(engine, "_post", posted.append)
    for name in "abc":
        engine._hand_over(name)  # type: ignore[arg-type]
    assert len(posted) == 1
    engine._deliveries.clear()


async def test_a_bug_in_text_processing_ends_every_stream(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)

    def broken(delivery: StepDelivery) -> list[TokenDelta]:
        raise KeyError("no such token")

    monkeypatch.setattr(engine.parts.output_processor, "process", broken)
    with pytest.raises(EngineDeadError, match="no such token"):
        async for _ in stream:
            pass
    assert not engine.is_healthy
    assert reported and isinstance(reported[0]["exception"], KeyError)


async def test_a_name_may_be_used_again_at_once(engine: AsyncEngine) -> None:
    """The engine may still deliver tokens of the former request of that name, and then its end."""
    expected = token_ids(await collect(engine))
    for _ in range(20):
        stream = engine.generate(PROMPT, LONG, request_id="same")
        await anext(stream)
        await stream.aclose()
        deltas = await collect(engine, request_id="same")
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert token_ids(deltas) == expected


async def test_a_refused_request_leaves_nothing_running(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, LONG, request_id="busy-1")
    await anext(stream)
    several = SamplingParams(n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    deltas = await collect(engine, several, request_id="busy")  # a child would be called busy-1
    assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2]
    with pytest.raises(RequestError, match="in use"):
        await collect(engine, several, request_id="busy-1")
    assert (await engine.snapshot()).num_running == 1
    await stream.aclose()


async def test_names_given_by_the_engine_avoid_those_in_use(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, LONG, request_id="req-0")
    await anext(stream)
    assert len(token_ids(await collect(engine))) == 12
    await stream.aclose()


class Watched(deque[object]):
    """Calls back as soon as something has been put in."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def append(self, item: object) -> None:
        super().append(item)
        self.look()


async def test_the_first_request_after_an_idle_time_finds_a_healthy_engine(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine.parts.core
    core.last_progress_ns = 0  # long before
    assert engine.is_healthy
    state: list[bool] = []
    monkeypatch.setattr(core, "_inbox", Watched(lambda: state.append(engine.is_healthy)))
    core.abort("nobody")
    assert state == [True]


async def test_after_shutdown_everything_is_refused_and_nothing_waits(
    engine: AsyncEngine,
) -> None:
    stream = engine.generate(PROMPT, LONG)
    await anext(stream)
    asked = [asyncio.ensure_future(engine.snapshot()) for _ in range(3)]
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        async for _ in stream:
            pass
    async with asyncio.timeout(10):
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert not isinstance(answer, BaseException) or isinstance(answer, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await collect(engine)
        with pytest.raises(EngineDeadError):
            await engine.snapshot()
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
    assert not engine.is_healthy
    await engine.shutdown()


async def test_calls_that_wait_when_the_engine_dies_are_answered(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine.parts.core

    def broken() -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(core, "_run_calls", broken)
    async with asyncio.timeout(10):
        with pytest.raises(EngineDeadError, match="a bug"):
            await engine.reset_prefix_cache()


async def test_a_start_that_was_given_up_ends_its_thread(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", kv_cache_gib=0.01, threads=1)
    engine = AsyncEngine(config, None)
    engine._thread.start()
    engine._ready.cancel()
    async with asyncio.timeout(30):
        await asyncio.to_thread(engine._thread.join)
    missing = AsyncEngine(EngineConfig(model=str(tmp_path / "nothing-here")), None)
    missing._ready.cancel()
    missing._run()  # no caller waits for the failure
    with pytest.raises(ModelNotFoundError):
        await AsyncEngine.start(EngineConfig(model=str(tmp_path / "nothing-here")))
