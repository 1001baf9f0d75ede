"""Steps cut at attention, on a CPU: rows, padding, shared buffers, and addresses that moved.

A recorder that simply runs the operations again replaces CUDA graphs. `test_cuda_graphs` does the
same with real recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_load import run_mixed_load

from termgen.config import EngineConfig
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

ModelDir = Callable[..., Path]
PIECES = (1, 2, 4, 8, 16, 32)
MAX_NUM_SEQS = 8


def make_engine(folder: Path, **graphs: Any) -> SyncEngine:
    """graphs: sizes, mixed and piecewise of the recordings; asynchronous, debug."""
    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            threads=1,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=48,
            num_gpu_blocks_override=40,
            max_model_len=128,
            skip_tokenizer_init=True,
            async_scheduling=graphs.pop("asynchronous", False),
            debug=graphs.pop("debug", False),
        )
    )
    runner = runner_of(engine)
    if graphs:
        dispatcher = CudaGraphDispatcher(
            graphs.pop("sizes", ()), max_num_seqs=MAX_NUM_SEQS, **graphs
        )
        runner.graphs = runner.make_graphs(dispatcher)
        runner.graphs.record_all(rehearse_and_run, lambda done: None)
        spoil(runner.graphs.pieces)
    return engine


def rehearse_and_run(operations: Callable[[], None]) -> Callable[[], None]:
    """Runs operations as often as a real recorder does: once to load kernels, once to record."""
    operations()
    operations()
    return operations


def runner_of(engine: SyncEngine) -> Any:
    return engine.core.executor._runner  # type: ignore[attr-defined]


def spoil(pieces: Any) -> None:
    """Overwrite everything that a step does not write itself: it must not matter."""
    for buffer in (pieces.q, pieces.attended, pieces.hidden):
        buffer.fill_(float("nan"))
    pieces.last_tokens.zero_()


def run(engine: SyncEngine, seed: int = 31) -> tuple[dict[str, list[int]], list[StepRecord]]:
    print(f"seed {seed}")
    return run_mixed_load(engine, seed, num_requests=14, longest_prompt=39, most_tokens=29)


@pytest.mark.parametrize(
    ("family", "asynchronous"),
    [
        ("llama", False),
        ("llama", True),
        ("mistral", True),
        ("qwen3", False),
        ("gemma2", False),
        ("gemma3_text", True),
        ("gemma3n_text", False),
        ("gemma4_text", True),
        ("gemma4_moe", True),
        ("qwen3_moe", False),
        ("gpt_oss", False),
        ("llama4_text", True),
        ("muse_glimmer", True),
    ],
)
def test_pieces_give_the_tokens_of_eager_steps(
    family: str, asynchronous: bool, tiny_model_dir: ModelDir
) -> None:
    folder = tiny_model_dir(family)
    eager, steps = run(make_engine(folder, asynchronous=asynchronous))
    assert {s.graph_mode for s in steps} == {"NONE"}
    pieces, steps = run(make_engine(folder, asynchronous=asynchronous, piecewise=PIECES))
    assert pieces == eager
    replayed = [s for s in steps if s.graph_mode == "PIECEWISE"]
    assert not any(s.graph_reason for s in replayed)
    assert any(s.num_prefill_tokens and s.num_decode_rows for s in replayed)
    assert any(s.num_padded_tokens and not s.num_prefill_tokens for s in replayed)
    assert {s.num_padded_tokens + s.num_decode_rows + s.num_prefill_tokens for s in replayed} <= {
        *PIECES
    }
    missed = {s.graph_reason for s in steps if s.graph_mode == "NONE"}
    assert missed == {"a prompt, and more than 32 tokens"}


def test_decodes_that_no_whole_recording_serves_are_replayed_in_pieces(
    tiny_model_dir: ModelDir,
) -> None:
    folder = tiny_model_dir("llama")
    eager, _ = run(make_engine(folder))
    both, steps = run(make_engine(folder, sizes=(1, 2, 4), piecewise=PIECES))
    assert both == eager
    kinds = {
        (s.graph_mode, bool(s.num_prefill_tokens), s.graph_reason)
        for s in steps
        if s.graph_mode != "NONE"
    }
    assert kinds == {
        ("FULL", False, ""),
        ("PIECEWISE", True, ""),
        ("PIECEWISE", False, "more than 4 rows"),
    }


def caches_of(engine: SyncEngine, num_requests: int) -> list[torch.Tensor]:
    """The KV cache after `num_requests` requests of 6 and 4 tokens."""
    runner = runner_of(engine)
    for cache in runner.kv_caches:
        cache.fill_(7.0)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for i in range(num_requests):
        prompt = tuple(range(3 + i, 9 + i))
        engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    while engine.has_unfinished:
        engine.step()
    return list(runner.kv_caches)


@pytest.mark.parametrize("num_requests", [1, MAX_NUM_SEQS])
def test_padding_writes_to_the_null_block_alone(
    num_requests: int, tiny_model_dir: ModelDir
) -> None:
    folder = tiny_model_dir("llama")
    # Without and with rows of padding, to which tokens of padding could be assigned.
    padded = caches_of(make_engine(folder, piecewise=(16, 48)), num_requests)
    eager = caches_of(make_engine(folder), num_requests)
    for cache, expected in zip(padded, eager, strict=True):
        torch.testing.assert_close(cache[1:], expected[1:], atol=1e-4, rtol=1e-4)
        written = (cache != 7.0).flatten(2).any(-1)  # [num_blocks, block_size]
        assert int(written[1:].sum()) == num_requests * (6 + 3), "the last token's is never stored"
        assert written[0].nonzero().flatten().tolist() == [0]


def test_rows_that_stay_are_not_uploaded_again(tiny_model_dir: ModelDir) -> None:
    engine = make_engine(tiny_model_dir("llama"), sizes=(4,), piecewise=(4, 16))
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for i in range(4):
        request = GenerationRequest(request_id=str(i), prompt_token_ids=(5, 6, 7), params=params)
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    assert runner_of(engine).graphs.header.num_uploads == 2, "one for the prompts, one for decodes"


def replace_cache(runner: Any) -> None:
    runner.kv_caches = [cache.clone() for cache in runner.kv_caches]


def replace_rows(runner: Any) -> None:
    runner.state.block_tables = runner.state.block_tables.clone()


def replace_weight(runner: Any) -> None:
    norm = runner.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.clone(), requires_grad=False)


def replace_header(runner: Any) -> None:
    runner.graphs.header.tensor = runner.graphs.header.tensor.clone()


@pytest.mark.parametrize(
    ("move", "names"),
    [
        (replace_cache, "kv_caches[0], kv_caches[1]"),
        (replace_rows, "state.block_tables"),
        (replace_weight, "model.norm.weight"),
        (replace_header, "header.tensor"),
    ],
)
@pytest.mark.parametrize("kind", ["sizes", "piecewise"])
def test_debugging_finds_what_moved_since_the_recording(
    kind: str, move: Callable[[Any], None], names: str, tiny_model_dir: ModelDir
) -> None:
    engine = make_engine(tiny_model_dir("llama"), debug=True, **{kind: (1, 2)})
    runner = runner_of(engine)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine.add(GenerationRequest(request_id="0", prompt_token_ids=(5, 6, 7), params=params))
    errors = [d.error for _ in range(4) for d in engine.step()]
    assert errors and not any(errors)
    with torch.inference_mode():
        move(runner)
    (delta,) = engine.step()
    assert str(delta.error).endswith(f"was recorded: {names}"), delta.error
