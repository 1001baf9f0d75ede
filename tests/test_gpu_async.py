"""benchmarks/gpu_async.py and the front ends of benchmarks/screen_cost.py run from end to end on a
CPU with a tiny model; their sums are right."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType, ModuleType]]:
    """gpu_async, async_engine_parts, screen_cost."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import async_engine_parts
        import gpu_async
        import screen_cost

        yield gpu_async, async_engine_parts, screen_cost
    finally:
        sys.path.remove(str(BENCHMARKS))


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cpu",
        threads=1,
        kv_cache_gib=0.05,
        max_num_seqs=4,
        max_model_len=4096,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        async_scheduling=True,
        **options,
    )


Modules = tuple[ModuleType, ModuleType, ModuleType]


@pytest.fixture
def long_llama_dir(tiny_model_dir: Any) -> Path:
    folder: Path = tiny_model_dir("llama", max_position_embeddings=4096)
    return folder


def test_the_engines_parts_run_and_are_printed(
    modules: Modules, long_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_async, parts, _ = modules
    sizes = parts.Sizes(
        batches=(1, 3),
        host_batches=(1, 2, 4),
        prompt=8,
        seconds=0.03,
        most_steps=64,
        rounds=1,
        job_requests=6,
        job_tokens=(3, 12),
        vocab=512,
    )
    with parts.engine_core(config(long_llama_dir, skip_tokenizer_init=True)) as core:
        found = {
            "idle": parts.idle(core, sizes, 20.0, can_profile=False),
            "host": parts.host(core, sizes, 20.0),
            "sync": parts.compare(core, sizes, 20.0, names=("sync", "two", "ahead")),
            "hold": parts.compare(core, sizes, 20.0, names=("two", "ahead"), holds=True),
        }
        assert core.scheduler.kv.pool.num_used == 0
    assert [cell["batch"] for cell in found["idle"]["decode"]] == [1, 3]
    assert all(0 <= cell["idle_share"] < 1 for cell in found["idle"]["decode"])
    assert found["idle"]["decode"][0]["queue_depth"] >= 1, "steps were not launched ahead"
    assert set(found["hold"][0]["tokens_per_s"]) == {"two", "two held", "ahead", "ahead held"}
    gpu_async.print_found(found)
    printed = capsys.readouterr().out
    assert "gap_p99_us" in printed and "us x B" in printed and "ahead held" in printed


async def test_the_screens_parts_run_and_are_printed(
    modules: Modules,
    long_llama_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import front_ends

    monkeypatch.setitem(modules[2].SETTLES_S, "stalled", 0.3)
    monkeypatch.setattr(modules[2], "SETTLE_S", 0.1)
    sizes = front_ends.FrontSizes(
        streams=2, prompt=8, seconds=0.2, rounds=1, max_tokens=4000, vocab=512
    )
    bench = modules[2].Bench(config(long_llama_dir), sizes)
    engine = await AsyncEngine.start(bench.config)
    try:
        async with asyncio.timeout(240):
            found = {
                part: await bench.turns(engine, part) for part in ("dashboard-10", "stalled", "sse")
            }
        assert (await engine.snapshot()).num_used_blocks == 0
    finally:
        await engine.shutdown()
    for cells in found.values():
        assert [cell["on"] for cell in cells] == [False, True]
        assert all(cell["tokens_per_s"] > 0 for cell in cells)
    assert found["dashboard-10"][1]["frames_per_s"] > 0
    assert capsys.readouterr().out.count("medians without and with") == 3


def test_made_up_tokens_have_a_text_for_every_id(modules: Modules, tmp_path: Path) -> None:
    from made_up_models import write_tokenizer

    from termgen.engine.text.tokenizer import load_tokenizer

    write_tokenizer(tmp_path, 1000)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode([256, 300, 998], skip_special_tokens=True) == " w0 w44 w742"
    assert tokenizer.eos_token_ids == (999,)


def test_gaps_between_replays_are_where_nothing_runs(modules: Modules) -> None:
    def event(start: float, length: float, correlation: int) -> dict[str, Any]:
        return {"ts": start, "dur": length, "args": {"correlation": correlation}}

    events = []
    for step in range(4):  # ten kernels of 10 us with 1 us between them, every 120 us
        events += [event(120 * step + 11 * i, 10, 100 + step) for i in range(10)]
        events.append(event(120 * step + 111, 4, 500 + step))  # a copy in the gap of 11 us
    found = modules[1].gaps_between_replays(sorted(events, key=lambda e: e["ts"]))
    assert found["profiled_gap_us"] == pytest.approx(7)
    assert found["profiled_idle_share"] == pytest.approx(3 * 7 / (3 * 120 + 109))
