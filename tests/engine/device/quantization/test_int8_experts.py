"""Experts in 8 and 4 bits on a CPU: the model is the float model of the rounded weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_experts import write_experts
from mixed_load import run_mixed_load
from paged_model import PagedModel, Row, build, load
from torch import nn

from termgen.config import EngineConfig
from termgen.engine.device.layers.linear import FloatLinear, Linear
from termgen.engine.device.layers.matrix_list import MatrixList
from termgen.engine.device.loader import load_model_config, open_checkpoint
from termgen.engine.device.loader.weights import load_dummy, load_weights
from termgen.engine.device.quantization.int8 import Int8Linear
from termgen.engine.device.runner.memory import weight_bytes
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

TinyModelDir = Callable[..., Path]
FAMILIES = (
    *("qwen3_moe", "mixtral", "gpt_oss", "gemma4_moe"),
    *("qwen3_5_moe_text", "qwen3_next", "llama4_text"),
)
Q = gguf.GGMLQuantizationType


def matrix_of(method: Any) -> torch.Tensor:
    """What an 8-bit matrix stands for."""
    assert isinstance(method, Int8Linear)
    return method.embed(torch.arange(method._spec.out_features))


def twin_of(quantized: nn.Module, folder: Path) -> Any:
    """The float model with the rounded weights."""
    checkpoint = open_checkpoint(folder)
    twin = build(checkpoint.config)
    load_weights(twin, checkpoint)
    checkpoint.close()
    num_lists = 0
    with torch.no_grad():
        for name, module in quantized.named_modules():
            if isinstance(module, MatrixList):
                layer, _, part = name.rpartition(".")
                experts = getattr(twin.get_submodule(layer), part)
                for expert, method in enumerate(module._methods):
                    experts[expert] = matrix_of(method)
                num_lists += 1
            elif isinstance(module, Linear) and isinstance(module.method, Int8Linear):
                method = twin.get_submodule(name).method
                assert isinstance(method, FloatLinear) and method.weight is not None
                method.weight.copy_(matrix_of(module.method))
    assert num_lists > 0
    twin.finalize()
    return twin


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_with_its_rounded_experts(
    family: str, tiny_model_dir: TinyModelDir
) -> None:
    folder = tiny_model_dir(family)
    quantized = load(folder, quantization="int8")
    twin = twin_of(quantized, folder)
    seed = 3
    print("seed", seed)
    tokens = [random.Random(seed).randrange(512) for _ in range(70)]
    paged, expected = PagedModel(quantized), PagedModel(twin).step([Row(0, 0, tokens)])[0]
    whole = paged.step([Row(0, 0, tokens)])[0]
    singles = [paged.step([Row(1, i, [token])])[0] for i, token in enumerate(tokens)]
    for found in (whole, torch.cat(singles)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-4)


def test_experts_take_as_little_memory_as_other_matrices(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("mixtral")
    floats = sum(p.nbytes for p in build(load_model_config(folder)).parameters())
    assert weight_bytes(load(folder, quantization="int8")) < 0.34 * floats


def test_the_router_and_its_gate_stay_floats(tiny_model_dir: TinyModelDir) -> None:
    """A little off, they pick other experts."""
    model = load(tiny_model_dir("qwen3_5_moe_text"), quantization="int8")
    routers = [m for name, m in model.named_modules() if name.endswith("mlp.router")]
    assert routers and all(isinstance(router.method, FloatLinear) for router in routers)


@pytest.mark.parametrize(("quant", "bits"), [(Q.Q8_0, 8), (Q.Q4_0, 4)])
@pytest.mark.parametrize("has_one_tensor", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_blocks_of_a_file_are_kept(
    quant: gguf.GGMLQuantizationType,
    bits: int,
    has_one_tensor: bool,
    family: str,
    tiny_model_dir: TinyModelDir,
    tmp_path: Path,
) -> None:
    """Gate and up lie in a tensor each, or in one. What gpt-oss has, its checkpoints turn round."""
    is_turned = family == "gpt_oss"
    size = {"intermediate_size" if is_turned else "moe_intermediate_size": 32}
    arch = "gpt-oss" if is_turned else "qwen3moe"
    change = join if has_one_tensor else None
    folder = tiny_model_dir(family, **size)
    path = write_experts(folder, tmp_path / "m.gguf", arch, quant=quant, change=change)
    checkpoint = open_checkpoint(path)
    quantized = load(path, quantization="int8")
    name = "model.layers.0.mlp.experts"
    assert checkpoint.kind(f"{name}.gate_up_proj") == quant.name  # type: ignore[attr-defined]
    for part in ("gate_up", "down"):
        expected = checkpoint.tensor(f"{name}.{part}_proj")
        if is_turned:
            expected = expected.mT
            if part == "gate_up":
                expected = torch.cat((expected[:, ::2], expected[:, 1::2]), 1)
        matrices = quantized.get_submodule(f"layers.0.mlp.{part}")
        assert isinstance(matrices, MatrixList) and len(matrices) == len(expected)
        for method, values in zip(matrices._methods, expected, strict=True):
            assert isinstance(method, Int8Linear) and method._blocks is not None
            assert [run.num_bits for run in method._blocks.runs] == [bits]
            # Scales are rounded to 16 bits, numbers are not.
            largest = values.abs().max().item()
            torch.testing.assert_close(matrix_of(method), values, rtol=1e-3, atol=2e-3 * largest)
    checkpoint.close()


def join(weights: dict[str, Any]) -> None:
    """Gate and up of all experts into one tensor of the file."""
    for name in [name for name in weights if "ffn_gate_exps" in name]:  # and biases
        gate, up = weights.pop(name), weights.pop(name.replace("gate", "up"))
        weights[name.replace("gate_exps", "gate_up_exps")] = np.concatenate((gate, up), 1)


def test_random_weights_fill_them_too(tiny_model_dir: TinyModelDir) -> None:
    """`--load-format dummy`, in which pieces come one by one."""
    model = build(load_model_config(tiny_model_dir("qwen3_moe")), quantization="int8")
    load_dummy(model, 1)
    model.finalize()
    assert PagedModel(model).step([Row(0, 0, [5, 6, 7])])[0].isfinite().all()


def test_requests_get_what_they_get_alone(tiny_model_dir: TinyModelDir) -> None:
    """Whatever else is in a step, preempted and asynchronous."""

    def tokens(**options: Any) -> dict[str, list[int]]:
        engine = SyncEngine(
            EngineConfig(
                model=str(tiny_model_dir("qwen3_moe")),
                device="cpu",
                threads=1,
                quantization="int8",
                max_model_len=128,
                skip_tokenizer_init=True,
                **options,
            )
        )
        outputs, _ = run_mixed_load(engine, 4, num_requests=8, longest_prompt=50, most_tokens=12)
        engine.shutdown()
        return outputs

    alone = tokens(max_num_seqs=1, num_gpu_blocks_override=60)
    many = tokens(max_num_seqs=6, num_gpu_blocks_override=14, block_size=16, async_scheduling=True)
    assert many == alone


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["int8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_what_a_cpu_does(
    family: str, quantization: str, tiny_model_dir: TinyModelDir
) -> None:
    """Whose kernels have nothing in common: shared experts, biases and clamps included."""
    seed = 5
    print("seed", seed)
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(512) for _ in range(size)) for size in (3, 40, 17)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tokens: dict[str, dict[str, list[int]]] = {}
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 128,
        }
        options["num_gpu_blocks_override"] = 80  # beside the engines of other tests
        engine = SyncEngine(
            EngineConfig(
                model=str(tiny_model_dir(family)),
                device=device,
                quantization=quantization,
                **options,
            )
        )
        found: dict[str, list[int]] = {}
        for name, prompt in enumerate(prompts):
            engine.add(
                GenerationRequest(request_id=str(name), prompt_token_ids=prompt, params=params)
            )
        while engine.has_unfinished:
            for delta in engine.step():
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
        tokens[device] = found
        engine.shutdown()
    assert len(tokens["cpu"]) == 3
    assert tokens["cuda"] == tokens["cpu"]
