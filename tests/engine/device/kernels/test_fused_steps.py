"""An engine whose steps begin and end in kernels gives the tokens of one that uses torch alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_device import DEVICES, require_triton

require_triton()

from termgen.config import EngineConfig  # noqa: E402
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher  # noqa: E402
from termgen.engine.loop.engine import SyncEngine  # noqa: E402
from termgen.vocabulary.request import GenerationRequest  # noqa: E402
from termgen.vocabulary.sampling_params import SamplingParams  # noqa: E402

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 0.8, "presence_penalty": 0.5},
    {"temperature": 0.9, "logit_bias": {7: 4.0, 99: -50.0}, "top_p": 0.8},
    {"temperature": 0.7, "allowed_token_ids": range(3, 60), "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 5},
    {"temperature": 1.0, "min_tokens": 4, "top_k": 40, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 20, "prompt_logprobs": 3},
]
MAX_NUM_SEQS = 3


def make_engine(folder: Path, device: str, *, fused: bool) -> SyncEngine:
    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device=device,
            dtype="float32",
            threads=1,
            max_num_seqs=MAX_NUM_SEQS,
            num_gpu_blocks_override=40,
            max_model_len=64,
            skip_tokenizer_init=True,
            enforce_eager=True,
            async_scheduling=True,
        )
    )
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    runner.state.fused = runner.buffers.fused = fused
    runner.graphs = runner.make_graphs(runner.graphs.dispatcher)  # whose ring goes by that
    runner.fused_sampler = None
    if fused:
        runner.use_fused_sampler(MAX_NUM_SEQS)
        # Steps with a ring; a recording simply runs its operations again.
        dispatcher = CudaGraphDispatcher((1, 3), mixed=(24,), max_num_seqs=MAX_NUM_SEQS)
        runner.graphs = runner.make_graphs(dispatcher)
        runner.graphs.record_all(lambda operations: operations, lambda done: None)
    return engine


def generate(engine: SyncEngine) -> dict[str, list[int]]:
    """The tokens of each request, and the ranks and tokens of its log-probabilities."""
    rng = np.random.default_rng(4)
    outputs: dict[str, list[int]] = {}
    for i, kind in enumerate(KINDS):
        params = SamplingParams(max_tokens=4 + i, seed=i, ignore_eos=i % 2 == 0, **kind)
        prompt = tuple(rng.integers(3, 500, 5 + i).tolist())
        engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            likeliest = outputs.setdefault(f"{delta.request_id} likeliest", [])
            for entry in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ())):
                if entry is not None:
                    likeliest += [entry.rank, *(top[0] for top in entry.top)]
    return outputs


@pytest.mark.parametrize("device", DEVICES)
def test_fused_steps_give_the_tokens_of_torch(
    device: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    folder = tiny_model_dir("llama")
    expected = generate(make_engine(folder, device, fused=False))
    lengths = {name: len(tokens) for name, tokens in expected.items()}
    assert [lengths[str(i)] for i in range(len(KINDS))] == list(range(4, 4 + len(KINDS)))
    told = [lengths[f"{i} likeliest"] for i in range(len(KINDS))]
    assert told[-3:] == [11 * 6, 12, 13 * 21 + 13 * 4 + 1] and not any(told[:-3])
    assert generate(make_engine(folder, device, fused=True)) == expected
