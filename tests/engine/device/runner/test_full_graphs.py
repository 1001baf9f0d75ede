"""Whole steps from device memory: padding, rows kept on the device, the ring of tokens.

A recorder that simply runs the operations again replaces CUDA graphs, so the same path runs on a
CPU. `test_cuda_graphs` does the same with real recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mixed_load import run_mixed_load

from termgen.config import EngineConfig
from termgen.engine.device.runner.cuda_graphs import RING_SIZE
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams


def make_engine(
    folder: Path, sizes: tuple[int, ...], mixed: tuple[int, ...] = (), *, asynchronous: bool
) -> SyncEngine:
    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            threads=1,
            max_num_seqs=8,
            num_gpu_blocks_override=40,
            max_model_len=128,
            skip_tokenizer_init=True,
            async_scheduling=asynchronous,
        )
    )
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    if sizes:
        dispatcher = CudaGraphDispatcher(sizes, mixed=mixed, max_num_seqs=8)
        runner.graphs = runner.make_graphs(dispatcher)
        runner.graphs.record_all(lambda operations: operations, lambda done: None)
    return engine


def run(engine: SyncEngine, seed: int) -> tuple[dict[str, list[int]], list[StepRecord]]:
    return run_mixed_load(engine, seed, num_requests=28, longest_prompt=39, most_tokens=29)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_recorded_steps_give_the_tokens_of_eager_ones(
    tiny_model_dir: Callable[[str], Path], asynchronous: bool
) -> None:
    seed = 99
    print(f"seed {seed}")
    folder = tiny_model_dir("llama")
    eager, steps = run(make_engine(folder, (), asynchronous=asynchronous), seed)
    assert {(s.graph_mode, s.graph_reason) for s in steps} == {("NONE", "no CUDA device")}
    recorded, steps = run(make_engine(folder, (1, 2, 4, 8), asynchronous=asynchronous), seed)
    assert recorded == eager
    assert len(steps) > RING_SIZE * 2
    full = [s for s in steps if s.graph_mode == "FULL"]
    assert full and any(s.num_padded_tokens for s in full)
    assert all(s.num_prefill_tokens == 0 for s in full)
    engine = make_engine(folder, (1, 2, 4, 8), (16, 40), asynchronous=asynchronous)
    recorded, steps = run(engine, seed)
    assert recorded == eager
    mixed = [s for s in steps if s.graph_mode == "FULL" and s.num_prefill_tokens]
    assert any(s.num_decode_rows for s in mixed) and any(s.num_padded_tokens for s in mixed)
    large = "a prompt, and more than 40 tokens"
    assert {(s.graph_mode, s.graph_reason) for s in steps} == {("FULL", ""), ("NONE", large)}


def test_rows_are_uploaded_only_when_the_batch_changes(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    engine = make_engine(tiny_model_dir("llama"), (1, 2, 4, 8), asynchronous=False)
    graphs = engine.core.executor._runner.graphs  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for i in range(3):
        request = GenerationRequest(request_id=str(i), prompt_token_ids=(5, 6, 7), params=params)
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    assert graphs.header.num_uploads == 1
