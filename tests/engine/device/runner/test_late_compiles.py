"""Nothing is compiled once the engine is ready; a late compilation would be counted and shown."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constrained_harness import FakeGrammar
from triton_device import require_triton

require_triton()

from triton import knobs  # noqa: E402

from termgen.config import EngineConfig  # noqa: E402
from termgen.engine.device.kernels.compilation import CompileCounter, compile_all  # noqa: E402
from termgen.engine.loop.engine import SyncEngine  # noqa: E402
from termgen.vocabulary.events import StepRecord  # noqa: E402
from termgen.vocabulary.request import GenerationRequest  # noqa: E402
from termgen.vocabulary.sampling_params import SamplingParams  # noqa: E402

ModelDir = Callable[..., Path]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.1},
    {"temperature": 0.7, "frequency_penalty": 0.5, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "min_tokens": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 20, "min_tokens": 2},
    {"temperature": 0.6, "logit_bias": {7: 2.5}, "allowed_token_ids": range(3, 400)},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


def compile_something() -> None:
    """Call what Triton calls when it has compiled a kernel, or loaded it from its cache."""
    hook = knobs.runtime.jit_post_compile_hook
    if hook is not None:
        hook(repr="kernel[num_warps=4]()", key="", fn=None, compile={})


def test_the_counter_counts_what_happens_within_its_block() -> None:
    counter, other = CompileCounter(), CompileCounter()
    before = knobs.runtime.jit_post_compile_hook
    compile_something()
    with counter:
        compile_something()
        with other:
            compile_something()
    compile_something()
    assert (counter.count, other.count) == (2, 1)
    assert knobs.runtime.jit_post_compile_hook is before


def test_counters_of_two_engines_come_and_go_in_any_order() -> None:
    counter, other = CompileCounter(), CompileCounter()
    before = knobs.runtime.jit_post_compile_hook
    for _ in range(2):
        entered, leaves = threading.Event(), threading.Event()

        def run(entered: threading.Event = entered, leaves: threading.Event = leaves) -> None:
            with other:
                entered.set()
                assert leaves.wait(10)
                compile_something()

        thread = threading.Thread(target=run)
        with counter:
            thread.start()
            assert entered.wait(10)
            compile_something()
        leaves.set()  # the first one has left first
        thread.join()
    assert (counter.count, other.count) == (2, 2)
    assert knobs.runtime.jit_post_compile_hook is before


def test_a_failure_of_one_kernel_ends_the_compilation() -> None:
    import torch

    class Kernel:
        def preload(self, data: str) -> None:
            raise ValueError(data)

    with pytest.raises(ValueError, match="no such instruction"):
        missing = {("kernel", "key"): (Kernel(), "no such instruction")}
        compile_all(missing, torch.device("cpu"), lambda done: None)


def add(engine: SyncEngine, name: str, prompt: list[int], kind: dict[str, Any], most: int) -> None:
    params = SamplingParams(max_tokens=most, ignore_eos=True, seed=1, **kind)
    grammar = FakeGrammar(most, vocab=512) if len(prompt) % 3 == 0 else None
    engine.add(
        GenerationRequest(
            request_id=name, prompt_token_ids=tuple(prompt), params=params, grammar=grammar
        )
    )


def test_a_late_compilation_reaches_the_records_of_steps(tiny_model_dir: ModelDir) -> None:
    engine = SyncEngine(
        EngineConfig(
            model=str(tiny_model_dir("llama")),
            device="cpu",
            threads=1,
            max_num_seqs=2,
            num_gpu_blocks_override=20,
            max_model_len=64,
            skip_tokenizer_init=True,
        )
    )
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    runner.use_fused_sampler(2)
    runner.be_ready()
    prepare = runner.buffers.prepare

    def prepare_and_compile(plan: Any, state: Any) -> Any:
        if plan.step_id == 2:
            compile_something()
        return prepare(plan, state)

    runner.buffers.prepare = prepare_and_compile
    ring = engine.core.bus.subscribe()
    add(engine, "a", [5, 6, 7], {"temperature": 0.0}, 5)
    while engine.has_unfinished:
        engine.step()
    counts = {r.step_id: r.num_late_compiles for r in ring.drain() if isinstance(r, StepRecord)}
    assert [counts[step] - counts[min(counts)] for step in sorted(counts)][-1] == 1
    assert counts[1] == 0 and counts[2] == counts[max(counts)] == 1


def run_everything(engine: SyncEngine, seed: int, max_num_seqs: int) -> list[StepRecord]:
    """Every batch size, then requests of all kinds that share text, are aborted and preempted."""
    rng = np.random.default_rng(seed)
    ring = engine.core.bus.subscribe()

    def drain() -> None:
        while engine.has_unfinished:
            step()

    def step() -> None:
        for delta in engine.step():
            assert delta.error is None, delta.error

    for batch in range(1, max_num_seqs + 1):
        for i in range(batch):
            add(engine, f"{batch} {i}", [5, 6, 7], KINDS[(batch + i) % 3], 3)
        drain()
    for i in range(max_num_seqs):  # one ends in each step, so that every number of rows occurs
        add(engine, f"until {i}", [5, 6, 7, 8], KINDS[0], 3 + i)
    drain()
    text = rng.integers(3, 500, 420).tolist()
    for i in range(6):
        add(engine, f"long {i}", rng.integers(3, 500, 400 + i).tolist(), KINDS[0], 2)
    for i in range(60):
        length = int(rng.integers(1, 421))
        prompt = text[:length] if i % 4 == 0 else rng.integers(3, 500, length).tolist()
        add(engine, str(i), prompt, KINDS[i % len(KINDS)], int(rng.integers(3, 40)))
        for _ in range(int(rng.integers(0, 4))):
            step()
        if i % 9 == 0:
            engine.abort(str(i))
    drain()
    return [e for e in ring.drain() if isinstance(e, StepRecord)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"cudagraph_mode": "full_decode_only", "dtype": "float16"}],
)
def test_nothing_is_compiled_after_ready(options: dict[str, Any], tiny_model_dir: ModelDir) -> None:
    seed = 3
    print("seed", seed)
    engine = SyncEngine(
        EngineConfig(
            **{
                "model": str(tiny_model_dir("qwen3")),
                "device": "cuda",
                "dtype": "bfloat16",
                "max_num_seqs": 19,
                "max_num_batched_tokens": 1100,
                "max_model_len": 512,
                "num_gpu_blocks_override": 25,
                "skip_tokenizer_init": True,
                **options,
            }
        )
    )
    steps = run_everything(engine, seed, 19)
    assert steps[-1].num_preemptions > 0 and steps[-1].prefix_hit_tokens > 0
    assert {s.num_decode_rows for s in steps} >= set(range(1, 20))
    assert steps[-1].num_late_compiles == 0
    names = [phase.name for phase in engine.model.startup]
    assert {"libraries", "weights", "kernels", "KV cache"} <= set(names)
    assert ("graphs" in names) == ("enforce_eager" not in options)
