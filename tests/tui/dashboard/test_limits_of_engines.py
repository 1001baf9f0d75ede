"""What limits real engines, each held back in one way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.engine.loop.sync_engine import SyncEngine
from termgen.tui.dashboard.state.limits import Limit, limit_of
from termgen.tui.dashboard.state.store import DashboardStore
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams
from termgen.vocabulary.token_mask import GrammarState

TinyModelDir = Callable[..., Path]
GREEDY = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
FREE = SamplingParams(max_tokens=3000, ignore_eos=True)
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16}
"""A model whose steps take long beside what the host does."""
SLOW_MASK_S = 0.02


class Held:
    """Engines on one folder, each held back in one way."""

    def __init__(self, make_model: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self._make_model = make_model
        self._patch = monkeypatch

    def _config(self, **options: Any) -> EngineConfig:
        return EngineConfig(**{"model": self.model(), "device": "cpu", "threads": 1} | options)

    def model(self, **shape: int) -> str:
        return str(self._make_model("llama", max_position_embeddings=4096, **shape))

    def _after(
        self,
        prompts: list[int],
        *,
        steps: int,
        params: SamplingParams = GREEDY,
        slow_host_s: float = 0.0,
        memory_busy: float = 0.0,
        **options: Any,
    ) -> Limit | None:
        """Requests of so many prompt tokens, and the limit while they run. What only first steps do
        was done before. memory_busy: the memory moves what a step reads in this part of its
        time."""
        engine = SyncEngine(self._config(skip_tokenizer_init=True, **options))
        try:
            first = replace(params, max_tokens=2)
            engine.add(GenerationRequest(request_id="", prompt_token_ids=(1, 2, 3), params=first))
            while engine.has_unfinished:
                engine.step()
            ring = engine.core.bus.subscribe()
            store = DashboardStore(started_ns=time.perf_counter_ns(), on_cpu=True)
            for i, length in enumerate(prompts):
                ids = tuple(3 + (i + j) % 90 for j in range(length))
                engine.add(
                    GenerationRequest(request_id=str(i), prompt_token_ids=ids, params=params)
                )
            for _ in range(steps):
                engine.step()
                time.sleep(slow_host_s)
            assert engine.has_unfinished
            store.apply(ring.drain())
            store.set_snapshot(engine.snapshot())
            memory = engine.model.memory
            assert memory is not None and memory.reads is not None
            view = store.view(time.perf_counter_ns())
            usual_ms, num_rows = view.step.p50, view.steps[-1].num_decode_rows
            if memory_busy and usual_ms:
                rate = memory.reads.of_step(num_rows) / usual_ms * 1e3 / memory_busy
                memory = replace(memory, reads=replace(memory.reads, bytes_per_s=rate))
            return limit_of(view, memory)
        finally:
            engine.shutdown()

    async def _over(
        self, num_requests: int, params: SamplingParams, *, reads: bool = True, seconds: float = 1.0
    ) -> Limit | None:
        """The same of an engine with a thread of its own."""
        engine = await AsyncEngine.start(self._config(kv_cache_gib=0.2))
        ring = engine.events(4096)
        store = DashboardStore(started_ns=time.perf_counter_ns(), on_cpu=True)

        async def follow() -> None:
            async with contextlib.aclosing(engine.generate("hello", params)) as stream:
                async for _ in stream:
                    if not reads:
                        await asyncio.sleep(3600)

        tasks = [asyncio.create_task(follow()) for _ in range(num_requests)]
        try:
            await asyncio.sleep(seconds)
            assert not any(task.done() for task in tasks)
            store.apply(ring.drain())
            store.set_snapshot(await engine.snapshot())
            return limit_of(store.view(time.perf_counter_ns()), engine.model.memory)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.shutdown()

    # -- one way each ----------------------------------------------------------------------

    def places(self) -> Limit | None:
        return self._after([8] * 6, steps=20, max_num_seqs=2)

    def kv_blocks(self) -> Limit | None:
        few = {"num_gpu_blocks_override": 24, "max_model_len": 350}
        return self._after(
            [100] * 8, steps=20, params=replace(GREEDY, max_tokens=100), max_num_seqs=8, **few
        )

    def prompts(self) -> Limit | None:
        return self._after(
            [480] * 90, steps=20, params=replace(GREEDY, max_tokens=2), max_num_batched_tokens=2048
        )

    def a_slow_caller(self) -> Limit | None:
        return self._after([8, 8], steps=30, slow_host_s=0.02)

    def another_thread(self) -> Limit | None:
        """It never lets go of the interpreter by itself."""
        ends = threading.Event()

        def spin() -> None:
            while not ends.is_set():
                pass

        thread = threading.Thread(target=spin, daemon=True)
        thread.start()
        try:
            return self._after([8, 8], steps=60)
        finally:
            ends.set()
            thread.join()

    def decodes(self) -> Limit | None:
        return self._after([8] * 8, steps=40, model=self.model(**WIDE))

    def memory(self) -> Limit | None:
        return self._after([8] * 8, steps=40, model=self.model(**WIDE), memory_busy=0.8)

    def slow_clients(self) -> Limit | None:
        self._patch.setattr("termgen.engine.loop.engine.UNREAD_S", 0.05)
        return asyncio.run(self._over(3, FREE, reads=False))

    def a_slow_grammar(self) -> Limit | None:
        fill = GrammarState.fill

        def slowly(state: GrammarState, most_forced: int = 0) -> None:
            time.sleep(SLOW_MASK_S)
            fill(state, most_forced)

        self._patch.setattr(GrammarState, "fill", slowly)
        self._patch.setattr(
            GrammarState, "fill_together", lambda rows, **_: [slowly(row) for row in rows] and None
        )
        letters = StructuredOutputsParams(regex="[a-z ]{4000}")
        return asyncio.run(self._over(1, replace(FREE, structured_outputs=letters)))

    def sampling(self) -> Limit | None:
        """Many tokens to choose from, and all edits of their logits."""
        params = SamplingParams(max_tokens=400, top_p=0.9, presence_penalty=1.0, ignore_eos=True)
        return self._after([8] * 8, steps=30, params=params, model=self.model(vocab_size=60_000))


CAUSES = {
    Held.places: "places",
    Held.kv_blocks: "KV blocks",
    Held.prompts: "prompts",
    Held.a_slow_caller: "host",
    Held.another_thread: "host",
    Held.decodes: "decodes",
    Held.memory: "memory",
    Held.slow_clients: "clients",
    Held.a_slow_grammar: "grammars",
    Held.sampling: "sampling",
}


def test_nine_of_ten_limits_are_named(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may be taken for another: these engines are tiny, and other tests run beside them, so
    that each may be induced twice."""
    wrong = []
    for induce, cause in CAUSES.items():
        for _ in range(2):
            with monkeypatch.context() as patch:
                limit = induce(Held(tiny_model_dir, patch))
            print(induce.__name__, limit)
            if limit is not None and limit.cause == cause:
                break
        else:
            wrong.append((induce.__name__, limit))
    assert len(wrong) <= 1, wrong
