"""CUDA graphs on a GPU: recorded steps give the tokens of eager ones and replay on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mixed_load import run_mixed_load

from termgen.config import EngineConfig
from termgen.engine.engine import SyncEngine
from termgen.engine.events import StepRecord
from termgen.engine.request import GenerationRequest
from termgen.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu
ModelDir = Callable[..., Path]
MAX_NUM_SEQS = 20


def make_engine(folder: Path, **options: object) -> SyncEngine:
    settings: dict[str, object] = {
        "dtype": "float32",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 200,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        **options,
    }
    return SyncEngine(EngineConfig(model=str(folder), device="cuda", **settings))  # type: ignore[arg-type]


def add(engine: SyncEngine, name: str, prompt: tuple[int, ...], **params: object) -> None:
    request = GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(ignore_eos=True, **params),  # type: ignore[arg-type]
    )
    engine.add(request)


def mixed_load(engine: SyncEngine, seed: int) -> tuple[dict[str, list[int]], list[StepRecord]]:
    return run_mixed_load(engine, seed, num_requests=40, longest_prompt=89, most_tokens=37)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_recorded_steps_give_the_tokens_of_eager_ones(
    family: str, tiny_model_dir: ModelDir
) -> None:
    seed = 7
    print(f"seed {seed}")
    folder = tiny_model_dir(family)
    eager, steps = mixed_load(make_engine(folder, enforce_eager=True), seed)
    assert {s.graph_mode for s in steps} == {"NONE"}
    recorded, steps = mixed_load(make_engine(folder), seed)
    assert recorded == eager
    full = [s for s in steps if s.graph_mode == "FULL"]
    assert any(s.num_prefill_tokens and s.num_decode_rows for s in full)
    assert any(not s.num_prefill_tokens for s in full)
    reference, _ = mixed_load(make_engine(folder, attention_backend="torch_reference"), seed)
    assert recorded == reference
    synchronous, _ = mixed_load(make_engine(folder, async_scheduling=False), seed)
    assert synchronous == recorded
    small, steps = mixed_load(make_engine(folder, num_gpu_blocks_override=24), seed)
    assert steps[-1].num_preemptions > 0
    assert small == recorded


def test_recorded_steps_over_an_fp8_cache(tiny_model_dir: ModelDir) -> None:
    seed = 8
    print(f"seed {seed}")
    folder = tiny_model_dir("llama")
    eager, _ = mixed_load(make_engine(folder, kv_cache_dtype="fp8", enforce_eager=True), seed)
    recorded, steps = mixed_load(make_engine(folder, kv_cache_dtype="fp8"), seed)
    assert recorded == eager
    assert any(s.graph_mode == "FULL" and s.num_prefill_tokens for s in steps)
    exact, _ = mixed_load(make_engine(folder), seed)
    assert recorded != exact, "fp8 should show somewhere"


def test_every_decode_batch_is_replayed(tiny_model_dir: ModelDir) -> None:
    engine = make_engine(tiny_model_dir("llama"))
    ring = engine.core.bus.subscribe()
    for batch in range(1, MAX_NUM_SEQS + 1):
        for i in range(batch):
            add(engine, f"{batch} {i}", (5, 6, 7), max_tokens=6, temperature=float(i % 2))
        while engine.has_unfinished:
            engine.step()
    decodes = [r for r in ring.drain() if isinstance(r, StepRecord) and r.num_prefill_tokens == 0]
    assert {r.num_decode_rows for r in decodes} == set(range(1, MAX_NUM_SEQS + 1))
    assert all(r.graph_mode == "FULL" for r in decodes)


def test_a_replayed_step_of_an_unchanged_batch_uploads_nothing(tiny_model_dir: ModelDir) -> None:
    from torch.profiler import ProfilerActivity, profile

    # One block holds a whole sequence, so that no step needs a new one.
    engine = make_engine(tiny_model_dir("llama"), block_size=128)
    for i in range(5):
        add(engine, str(i), (5, 6, 7), max_tokens=100, temperature=0.0)
    for _ in range(10):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
    counts: dict[str, int] = {}
    for event in trace.events():
        counts[event.name] = counts.get(event.name, 0) + 1
    launches = sum(n for name, n in counts.items() if name.startswith("cudaGraphLaunch"))
    others = {
        name: n
        for name, n in counts.items()
        if "LaunchKernel" in name or ("Memcpy" in name and "HtoD" in name)
    }
    assert launches == 10, counts
    assert not others, others
