"""What limits real engines, each held back in one way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.tui.dashboard.state.limits import Limit, limit_of
from termgen.tui.dashboard.state.store import DashboardStore
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

Engines = Callable[..., SyncEngine]


@pytest.fixture
def engines(tiny_llama_dir: Path) -> Iterator[Engines]:
    made: list[SyncEngine] = []

    def make(**options: Any) -> SyncEngine:
        fixed = {"model": str(tiny_llama_dir), "device": "cpu", "skip_tokenizer_init": True}
        made.append(SyncEngine(EngineConfig(**{**fixed, **options})))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def limit_after(
    engine: SyncEngine, prompts: list[int], *, output: int, steps: int, slow_host_s: float = 0.0
) -> Limit | None:
    """Requests of so many prompt tokens, and the limit while they run. What only first steps do was
    done before."""
    first = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.add(GenerationRequest(request_id="first", prompt_token_ids=(1, 2, 3), params=first))
    while engine.has_unfinished:
        engine.step()
    ring = engine.core.bus.subscribe()
    store = DashboardStore(started_ns=time.perf_counter_ns(), on_cpu=True)
    for i, length in enumerate(prompts):
        ids = tuple(3 + (i + j) % 90 for j in range(length))
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(request_id=f"{i}", prompt_token_ids=ids, params=params))
    for _ in range(steps):
        engine.step()
        time.sleep(slow_host_s)
    assert engine.has_unfinished
    store.apply(ring.drain())
    store.set_snapshot(engine.snapshot())
    limit = limit_of(store.view(time.perf_counter_ns()), engine.model.memory)
    engine.core.bus.unsubscribe(ring)
    return limit


@pytest.mark.parametrize(
    ("options", "prompts", "output", "expected"),
    [
        ({"max_num_seqs": 2}, [8] * 6, 400, "places"),
        ({"max_num_seqs": 8, "num_gpu_blocks_override": 24}, [100] * 8, 100, "KV blocks"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 2048}, [480] * 90, 2, "prompts"),
    ],
)
def test_an_engine_held_back(
    engines: Engines,
    options: dict[str, Any],
    prompts: list[int],
    output: int,
    expected: str,
) -> None:
    engine = engines(**options)
    limit = limit_after(engine, prompts, output=output, steps=20)
    assert limit is not None and limit.cause == expected, limit


def test_a_host_that_dawdles(engines: Engines) -> None:
    engine = engines(max_num_seqs=2)
    limit = limit_after(engine, [8, 8], output=200, steps=30, slow_host_s=0.02)
    assert limit is not None and limit.cause == "host", limit
