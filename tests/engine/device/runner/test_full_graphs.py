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
from termgen.vocabulary.step import MAX_STEPS_IN_FLIGHT, StepPlan


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
    load = {"num_requests": 28, "longest_prompt": 39, "most_tokens": 29}
    return run_mixed_load(engine, seed, **load, tells_likeliest=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_recorded_steps_give_the_tokens_of_eager_ones(
    tiny_model_dir: Callable[[str], Path], asynchronous: bool
) -> None:
    seed = 99
    print(f"seed {seed}")
    folder = tiny_model_dir("llama")
    eager, steps = run(make_engine(folder, (), asynchronous=asynchronous), seed)
    assert {(s.graph_mode, s.graph_reason) for s in steps} == {("NONE", "no CUDA device")}
    assert any(name.endswith("likeliest") for name in eager)
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_counts_are_made_anew_after_a_preemption(
    tiny_model_dir: Callable[[str], Path], asynchronous: bool
) -> None:
    """Recorded steps count on the device what the host tells it again when a request returns."""
    params = {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2}
    outputs = []
    for resets in ((), (6, 11, 17)):
        engine = make_engine(tiny_model_dir("llama"), (1, 2, 4, 8), asynchronous=asynchronous)
        for i in range(3):
            engine.add(
                GenerationRequest(
                    request_id=str(i),
                    prompt_token_ids=(5, 6, 7 + i),
                    params=SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3, **params),
                )
            )
        told: dict[str, list[object]] = {}
        turn = 0
        while engine.has_unfinished:
            turn += 1
            if turn in resets:
                engine.core.control.reset_prefix_cache(True)
            for delta in engine.step():
                assert delta.error is None, delta.error
                told.setdefault(delta.request_id, []).extend(delta.token_ids)
                tops = [[top[0] for top in entry.top] for entry in delta.logprobs or ()]
                told[delta.request_id] += tops
        outputs.append(told)
        assert (engine.core.scheduler.stats.num_preemptions > 2) == bool(resets)
    assert outputs[0] == outputs[1]


def test_log_probabilities_survive_all_the_steps_in_flight(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    """A result is read when as many steps as there may be have been launched behind it."""
    engine = make_engine(tiny_model_dir("llama"), (1, 2), asynchronous=True)
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    plans: list[StepPlan] = []
    execute = runner.execute
    runner.execute = lambda plan: (plans.append(plan), execute(plan))[1]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=4)
    engine.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), params=params))
    while engine.has_unfinished:
        engine.step()
    again = next(plan for plan in plans if plan.is_decode and not plan.changes_rows)
    ring, waiting, expected = runner.graphs.ring, [], []
    for _ in range(MAX_STEPS_IN_FLIGHT):
        row = int(ring.index)
        waiting.append(execute(again))
        expected.append(ring.logprobs.logprobs[row, 0, :5].tolist())
    late = [step.result().logprobs for step in waiting]
    assert [logprobs.logprobs[0].tolist() for logprobs in late] == expected
    assert len({tuple(row) for row in expected}) > 10, "each step has its own"
    assert all(logprobs.token_ids.shape == (1, 5) for logprobs in late)


def test_results_that_the_host_cannot_see_are_copied(tiny_model_dir: Callable[[str], Path]) -> None:
    """A GPU without termgen's kernels keeps the ring in its own memory."""
    seed = 5
    print(f"seed {seed}")
    folder = tiny_model_dir("llama")
    expected, _ = run(make_engine(folder, (1, 4, 8), asynchronous=False), seed)
    engine = make_engine(folder, (1, 4, 8), asynchronous=False)
    graphs = engine.core.executor._runner.graphs  # type: ignore[attr-defined]
    graphs.ring.host = None
    copied, steps = run(engine, seed)
    assert copied == expected
    assert any(s.graph_mode == "FULL" for s in steps)
