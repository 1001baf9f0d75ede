"""A real engine behind a real server, whose helper processes are killed under load."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_resources import resources
from server_harness import error_of, eventually, serving

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.text import text_process
from termgen.serving import state
from termgen.system.helper_process import HelperProcess

NUM_CALLERS = 50
NUM_BLOWS = 6
SMALL = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
REFUSALS = {(413, "request_too_large"), (429, "no_process")}


def bodies() -> list[dict[str, Any]]:
    """Large ones, long prompts, and one that is both."""
    text = "One token at a time. "
    long = text * (text_process.LONG_PROMPT_CHARS // len(text) + 1)
    return [
        {**SMALL, "user": "u" * 100_000},
        {**SMALL, "prompt": long},
        {**SMALL, "prompt": long + text, "user": "u" * 100_000},
    ]


def own_threads() -> set[threading.Thread]:
    """Threads of the engine; asyncio's and torch's, which outlive it, do not count."""
    return {thread for thread in threading.enumerate() if "termgen" in thread.name}


async def test_helpers_that_are_killed_and_stopped_hurt_only_who_needs_them(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "LONG_PROMPT_CHARS", 200)  # the model has 512 positions
    seed = random.randrange(10**6)
    print("seed", seed)
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", threads=1, kv_cache_gib=0.02)
    before, others = resources(), own_threads()  # a tokenizer that tests of this worker share
    engine = await AsyncEngine.start(config, prewarm=True)
    try:
        async with serving(engine) as server:
            texts = engine.parts.input_processor._long_texts
            assert texts is not None
            helpers = [server._state.large_bodies.helper, texts._helper]
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
                await _ask_while_killing(client, helpers, random.Random(seed))
            snapshot = await engine.snapshot()
            assert snapshot.num_used_blocks == 0 and not snapshot.requests
            assert server.num_answers == 0
    finally:
        await engine.shutdown()
    await eventually(lambda: own_threads() <= others, 20)
    assert resources() <= before and len(asyncio.all_tasks()) == 1


async def _ask_while_killing(
    client: httpx.AsyncClient, helpers: Sequence[HelperProcess], rng: random.Random
) -> None:
    async def ask(body: dict[str, Any]) -> str | None:
        """The answer's text; None for a refusal caused by a helper."""
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            return str(answer.json()["choices"][0]["text"])
        assert (answer.status_code, error_of(answer)["code"]) in REFUSALS, answer.text
        return None

    asked = bodies()
    expected, own = [await ask(body) for body in asked], await ask(SMALL)
    assert None not in expected and own is not None
    outcomes: Counter[str] = Counter()

    async def call(number: int) -> None:
        found = await ask(asked[number % len(asked)])
        assert found in (None, expected[number % len(asked)])
        outcomes["refused" if found is None else "answered"] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "PARSE_LIMIT_S", 1.0)
        patch.setattr(text_process, "LIMIT_S", 1.0)
        callers = [asyncio.create_task(call(i)) for i in range(NUM_CALLERS)]
        for _ in range(NUM_BLOWS):
            assert await ask(SMALL) == own, "whoever needs no helper notices nothing"
            await asyncio.sleep(rng.random() * 0.2)
            child = rng.choice(helpers)._child
            if child is not None and not child.process.returncode:
                is_stopped = child.is_ready and rng.random() < 0.3
                child.process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGKILL)
        await asyncio.gather(*callers)
        print(outcomes)
        for body in asked:  # a helper may have been stopped while no request needed it
            await ask(body)
    assert outcomes["answered"]
    assert [await ask(body) for body in asked] == expected
