"""Warm-up reaches every kernel variant that serving does, seen without a GPU.

`variants_without_gpu` runs in a process of its own: the interpreter, in which the other tests run
kernels, has no variants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton_device
from mixed_load import run_mixed_load

triton_device.require_triton()

from termgen.config import EngineConfig  # noqa: E402
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher  # noqa: E402
from termgen.engine.device.runner.warm_up import (  # noqa: E402
    run_steps,
    size_classes,
    warm_up_steps,
)
from termgen.engine.loop.engine import SyncEngine  # noqa: E402

MODES = {
    "none": ["NONE"],
    "full": ["FULL", "NONE"],
    "piecewise": ["NONE", "PIECEWISE"],
    "full_and_piecewise": ["FULL", "NONE", "PIECEWISE"],
}
"""Graph mode of steps with these graphs: some are too large for any."""
DELTA_KERNELS = 6
"""Kernels of gated delta nets, and the gate of attention."""
PROGRAM = Path(__file__).with_name("variants_without_gpu.py")


def reach(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_serving_reaches_no_variant_that_warm_up_did_not(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    seed = 11
    print("seed", seed)
    settings = {"max_num_batched_tokens": 1100, "max_model_len": 512, "skip_tokenizer_init": True}
    common = {"seed": seed, "graphs": "full"}
    # Each kind of layer once: what others run is the same.
    few = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    cases = [
        {  # odd sizes: no slice of a buffer by rows stays aligned
            **common,
            "folder": str(tiny_model_dir("llama", vocab_size=5001)),
            "settings": {**settings, "max_num_seqs": 19},
            "batches": list(range(1, 20)),
            "num_blocks": 23,
        },
        {
            **common,
            "folder": str(tiny_model_dir("mistral")),
            "settings": {**settings, "max_num_seqs": 6},
            "batches": list(range(1, 7)),
            "num_blocks": 30,
            "graphs": "none",
        },
        {  # more rows than the plans of attention are compiled for at least
            **common,
            "folder": str(tiny_model_dir("qwen3")),
            "settings": {**settings, "max_num_seqs": 301},
            "batches": [3, 257, 301],
            "num_blocks": 330,
        },
        # pieces beside whole steps; experts have another tiling at 4096 tokens than around that
        {
            **common,
            "folder": str(tiny_model_dir("qwen3_moe", num_experts=256, num_experts_per_tok=1)),
            "settings": {**settings, "max_num_seqs": 12, "max_num_batched_tokens": 8200},
            "batches": [3, 12],
            "num_blocks": 160,
            "graphs": "full_and_piecewise",
        },
        {  # experts with biases, sinks
            **common,
            "folder": str(tiny_model_dir("gpt_oss")),
            "settings": {**settings, "max_num_seqs": 6},
            "batches": [1, 5, 6],
            "num_blocks": 30,
        },
        {  # chunks, factors of queries, experts with weighted inputs
            **common,
            "folder": str(tiny_model_dir("llama4_text")),
            "settings": {**settings, "max_num_seqs": 6},
            "batches": [1, 5, 6],
            "num_blocks": 60,
        },
        {  # a gate of attention, in pieces
            **common,
            "folder": str(tiny_model_dir("muse_glimmer", num_hidden_layers=3)),
            "settings": {**settings, "max_num_seqs": 7},
            "batches": [1, 2, 3, 7],
            "num_blocks": 60,
            "graphs": "piecewise",
        },
        {  # layers of unequal sizes that share keys and values, and have inputs of their own
            **common,
            "folder": str(tiny_model_dir("gemma4_text", num_kv_shared_layers=2, **few)),
            "settings": {**settings, "max_num_seqs": 6},
            "batches": [1, 5, 6],
            "num_blocks": 60,
        },
        {  # streams, and gates that are closed, in pieces
            **common,
            "folder": str(
                tiny_model_dir(
                    "gemma3n_text",
                    num_kv_shared_layers=2,
                    intermediate_size=[112, 80, 112, 112],
                    activation_sparsity_pattern=[0.7, 0.0, 0.0, 0.0],
                    **few,
                )
            ),
            "settings": {**settings, "max_num_seqs": 7},
            "batches": [1, 2, 3, 7],
            "num_blocks": 60,
            "graphs": "piecewise",
        },
        {  # experts beside the MLP, in pieces
            **common,
            "folder": str(tiny_model_dir("gemma4_moe", **few)),
            "settings": {**settings, "max_num_seqs": 7},
            "batches": [1, 2, 3, 7],
            "num_blocks": 60,
            "graphs": "piecewise",
        },
        {  # gated delta nets: no pieces
            **common,
            "folder": str(tiny_model_dir("qwen3_5_text")),
            "settings": {**settings, "max_num_seqs": 7},
            "batches": [1, 2, 3, 7],
            "num_blocks": 60,
        },
        {  # all steps in pieces, with windows and two rotations
            **common,
            "folder": str(tiny_model_dir("gemma3_text")),
            "settings": {**settings, "max_num_seqs": 7},
            "batches": [1, 2, 3, 7],
            "num_blocks": 30,
            "graphs": "piecewise",
        },
    ]
    results = reach(cases)
    # Prompts are alike only where a row goes on that was preempted, which is a matter of times.
    assert any(found["num_preemptions"] for found in results)
    assert any(found["prefix_hit_tokens"] for found in results)
    for case, found in zip(cases, results, strict=True):
        assert not found["late"], (case, found["late"])
        assert found["modes"] == MODES[case["graphs"]]
        # pytest numbers folders: the fifth of llama is no llama4.
        family = Path(case["folder"]).name.rstrip("0123456789")
        has_experts = any(name in family for name in ("moe", "gpt_oss", "llama4"))
        num_kernels = 18 + 3 * has_experts - (case["graphs"] == "piecewise")
        num_kernels += "muse" in family or "llama4" in family
        num_kernels += "gemma4_moe" in family  # the activation of an MLP, too
        num_kernels += DELTA_KERNELS * ("qwen3_5" in family)
        assert len(found["kernels"]) == num_kernels, found["kernels"]
        assert found["largest_step"] >= 1024 or case is cases[0]


def test_warm_up_leaves_no_trace(tiny_model_dir: Callable[[str], Path]) -> None:
    """Its steps really run, with the kernels interpreted where there is no GPU."""

    def make_engine() -> tuple[SyncEngine, Any]:
        engine = SyncEngine(
            EngineConfig(
                model=str(tiny_model_dir("llama")),
                device="cpu",
                threads=1,
                max_num_seqs=3,
                max_num_batched_tokens=24,
                num_gpu_blocks_override=30,
                max_model_len=20,  # less than a step may hold: its tokens are spread over rows
                skip_tokenizer_init=True,
            )
        )
        return engine, engine.core.executor._runner  # type: ignore[attr-defined]

    def generate(engine: SyncEngine) -> dict[str, list[int]]:
        outputs, _ = run_mixed_load(engine, 5, num_requests=6, longest_prompt=9, most_tokens=6)
        return outputs

    expected = generate(make_engine()[0])
    engine, runner = make_engine()
    if triton_device.IS_INTERPRETED:
        runner.use_fused_sampler(3)
        runner.state.fused = runner.buffers.fused = True
    before = {name: t.clone() for name, t in state_tensors(runner).items()}
    dispatcher = CudaGraphDispatcher((1, 2, 3), mixed=(16,), max_num_seqs=3)
    num_steps = 0
    for step in warm_up_steps(runner, dispatcher):
        run_steps(runner, [step])
        num_steps += 1
    assert num_steps > 15
    for name, tensor in state_tensors(runner).items():
        assert torch.equal(tensor, before[name]), name
    assert generate(engine) == expected


def state_tensors(runner: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(runner.state).items() if isinstance(v, torch.Tensor)}


def test_size_classes_are_the_powers_of_two_and_the_limit() -> None:
    assert size_classes(1) == [1]
    assert size_classes(19) == [1, 2, 4, 8, 16, 19]
    assert size_classes(64) == [1, 2, 4, 8, 16, 32, 64]
