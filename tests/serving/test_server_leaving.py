"""A client that leaves ends its request within one engine step, in any state of the request."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from server_harness import eventually, serving

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.vocabulary.events import RequestEvent, RequestEventKind, StepRecord

STEP_S = 0.03
LONG = "The model reads this prompt in many small steps, one after the other, " * 4


class SlowSteps:
    """Lengthens every step of an engine, so that a request stays in its state for a while."""

    def __init__(self, engine: AsyncEngine) -> None:
        executor: Any = engine.parts.core.executor
        self._submit = executor.submit
        executor.submit = self._slow

    def _slow(self, plan: Any) -> Any:
        time.sleep(STEP_S)
        return self._submit(plan)


def steps_until_end(events: list[Any], request_id: str, since_ns: int) -> int:
    """Steps planned after that time and before the request ended."""
    end = next(
        i
        for i, e in enumerate(events)
        if isinstance(e, RequestEvent)
        and e.kind is RequestEventKind.FINISHED
        and e.request_id == request_id
    )
    return sum(isinstance(e, StepRecord) and e.planned_ns > since_ns for e in events[:end])


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
async def test_leaving_ends_a_request_within_a_step(
    tiny_llama_dir: Path, async_scheduling: bool
) -> None:
    engine = await AsyncEngine.start(
        EngineConfig(
            model=str(tiny_llama_dir),
            device="cpu",
            max_model_len=256,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            async_scheduling=async_scheduling,
        )
    )
    try:
        SlowSteps(engine)
        async with serving(engine) as server:
            for stage in ("prefill", "decode", "queue"):
                for stream in (False, True):
                    await leave(server, engine, stage, stream)
            state = server._state
            assert state.num_answers == 0 and not state.admission._open
            text = (await state.render_metrics()).decode()
            for stage in ("queue", "prefill", "decode"):
                assert f'stage="{stage}"}} ' in text, stage
        await eventually(lambda: not engine.parts.core.has_work)
        assert (await engine.snapshot()).num_used_blocks == 0
    finally:
        await engine.shutdown()


async def leave(server: Any, engine: AsyncEngine, stage: str, stream: bool) -> None:
    from test_server_connections import address, request

    ring = engine.events(100_000)
    writers = []

    async def ask(prompt: str) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*address(server))
        body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": stream}
        writer.write(request("/v1/completions", body))
        writers.append(writer)
        return reader

    if stage == "queue":  # both slots are taken
        await ask("a")
        await ask("b")
        await at_stage(engine, 2, "decode")
    await ask(LONG if stage == "prefill" else "Hello, you there")
    await at_stage(engine, 3 if stage == "queue" else 1, stage if stage != "queue" else "waiting")
    left_ns = time.perf_counter_ns()
    leaving = writers.pop()
    leaving.transport.abort()
    leaving.close()
    async with asyncio.timeout(10):
        while len((await engine.snapshot()).requests) > len(writers):
            await asyncio.sleep(0.005)
    events = ring.drain()
    engine.close_events(ring)
    newest = [e.request_id for e in events if isinstance(e, RequestEvent)][-1]
    # the step that was running when the news arrived, and one more that was planned ahead
    assert steps_until_end(events, newest, left_ns) <= 2, stage
    for writer in writers:
        writer.transport.abort()
        writer.close()
    async with asyncio.timeout(10):
        while (await engine.snapshot()).requests:
            await asyncio.sleep(0.005)


async def at_stage(engine: AsyncEngine, num_requests: int, status: str) -> None:
    async with asyncio.timeout(10):
        while True:
            requests = (await engine.snapshot()).requests
            if len(requests) == num_requests and requests[-1].status == status:
                return
            await asyncio.sleep(0.002)
