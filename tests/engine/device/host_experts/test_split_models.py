"""Models whose experts are in two places compute what those with all in one place do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_experts import write_experts
from paged_model import PagedModel, Row, load
from triton_device import require_triton

require_triton()

from termgen.engine.device.config.model_config import ModelConfig  # noqa: E402
from termgen.engine.device.host_experts.host_list import HostExperts  # noqa: E402
from termgen.engine.device.host_experts.placement import ExpertPlaces  # noqa: E402
from termgen.engine.device.host_experts.split_ops import run_split  # noqa: E402
from termgen.engine.device.layers.matrix_list import MatrixList  # noqa: E402
from termgen.engine.device.layers.ops import TorchOps  # noqa: E402
from termgen.engine.device.quantization.int8 import Int8Linear  # noqa: E402
from termgen.engine.device.runner.cpu_experts import CpuExperts  # noqa: E402

Q = gguf.GGMLQuantizationType
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32},
    "mixtral": {"intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 32},
    "gemma4_moe": {"moe_intermediate_size": 32},
    "qwen3_5_moe_text": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "llama4_text": {"intermediate_size": 64},
}


class Ops(TorchOps):
    """Only experts are computed as on a GPU."""

    def experts(
        self, x: torch.Tensor, router_logits: torch.Tensor, *matrices: Any, **options: Any
    ) -> Any:
        gate_up = matrices[0]
        assert isinstance(gate_up, HostExperts) and isinstance(gate_up.places, ExpertPlaces)
        for name in ("gate_up_bias", "down_bias"):
            options.pop(name, None)
        return run_split(x.contiguous(), router_logits.contiguous(), gate_up.places, **options)


def choice(config: ModelConfig, number: int) -> CpuExperts:
    moe = config.moe
    assert moe is not None
    top_k = moe.num_experts_per_tok + moe.has_shared_of_same_size
    return CpuExperts(number, 8, 2, top_k, 64, None)


@pytest.mark.parametrize("number", [1, 4, 99])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_experts_in_two_places(
    family: str, number: int, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir(family, **FAMILIES[family])
    whole = load(folder, quantization="int8")
    cpu_experts = choice(whole.config, number)
    split = load(folder, quantization="int8", ops=Ops(), cpu_experts=cpu_experts)
    assert cpu_experts.placement is not None
    facts = cpu_experts.placement.facts
    assert facts.num_experts - facts.num_on_card == min(number, facts.num_experts)
    assert facts.nbytes > 0
    seed = 3
    print("seed", seed)
    tokens = [random.Random(seed).randrange(512) for _ in range(40)]
    first, second = PagedModel(whole), PagedModel(split)
    expected = first.step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(second.step([Row(0, 0, tokens)])[0], expected, rtol=1e-3, atol=2e-4)
    for i, token in enumerate(tokens[:4]):
        rows = [Row(1, i, [token])]
        torch.testing.assert_close(second.step(rows)[0], first.step(rows)[0], rtol=1e-3, atol=2e-4)
    assert int(cpu_experts.placement.counts.sum()) > 0


@pytest.mark.parametrize("quant", [Q.Q8_0, Q.Q4_0])
def test_blocks_of_a_file_are_kept(
    quant: gguf.GGMLQuantizationType, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_dir("qwen3_moe", moe_intermediate_size=32)
    path = write_experts(folder, tmp_path / "m.gguf", "qwen3moe", quant=quant)
    whole = load(path, quantization="int8")
    split = load(path, quantization="int8", ops=Ops(), cpu_experts=choice(whole.config, 5))
    for part in ("gate_up", "down"):
        host = split.get_submodule(f"layers.0.mlp.{part}")
        kept = whole.get_submodule(f"layers.0.mlp.{part}")
        assert isinstance(host, HostExperts) and isinstance(kept, MatrixList)
        for one, method in zip(host.blocks, kept._methods, strict=True):
            assert isinstance(method, Int8Linear)
            assert one.num_bits == method.blocks.num_bits == (8 if quant == Q.Q8_0 else 4)
            assert torch.equal(one.tiles, method.blocks.tiles)
    rows = [Row(0, 0, [3, 60, 200, 7])]
    expected = PagedModel(whole).step(rows)[0]
    torch.testing.assert_close(PagedModel(split).step(rows)[0], expected, rtol=1e-3, atol=2e-4)
