"""What a step reads of the weights, and the memory's own rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paged_model import CPU, load

from termgen.engine.device.models.mlp import SparseMoe
from termgen.engine.device.runner.memory import weight_bytes
from termgen.engine.device.runner.weight_reads import weight_reads
from termgen.vocabulary.memory_ledger import WeightReads

TinyModelDir = Callable[..., Path]


def reads_of(folder: Path, quantization: str | None = None) -> tuple[WeightReads, int]:
    """The reads of a loaded model, and the bytes of all its weights."""
    model = load(folder, quantization=quantization)
    found = weight_reads(model, CPU)
    assert found is not None and found.bytes_per_s == 0.0
    return found, weight_bytes(model)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tables_that_are_only_looked_up_are_not_read(
    tiny_model_dir: TinyModelDir, quantization: str | None
) -> None:
    tied, whole = reads_of(tiny_model_dir("llama", tie_word_embeddings=True), quantization)
    assert tied.always_bytes == whole == tied.of_step(1) == tied.of_step(64)
    apart, more = reads_of(tiny_model_dir("llama", tie_word_embeddings=False), quantization)
    assert apart.always_bytes < more
    if quantization is not None:  # floats have a table and, of a CPU's layout, a head
        assert apart.always_bytes == whole
    small, all_of_it = reads_of(tiny_model_dir("gemma4_text"), quantization)
    assert small.always_bytes < all_of_it, "without the table of inputs for each layer"


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_experts_are_read_as_far_as_tokens_go_to_them(
    tiny_model_dir: TinyModelDir, family: str, quantization: str | None
) -> None:
    """The second has an expert of all tokens among the others."""
    model = load(tiny_model_dir(family), quantization=quantization)
    found = weight_reads(model, CPU)
    assert found is not None
    moe = model.config.moe
    share = moe.num_experts_per_tok / moe.num_experts
    layers = [module for module in model.modules() if isinstance(module, SparseMoe)]
    per_expert = sum(
        (part.nbytes if isinstance(part, torch.nn.Parameter) else weight_bytes(part)) / len(part)
        for layer in layers
        for part in (layer.gate_up, layer.down)
    )
    assert found.experts_bytes == pytest.approx(moe.num_experts * per_expert, abs=len(layers) * 2)
    assert found.experts_share == share < 1
    one = found.always_bytes + moe.num_experts_per_tok * per_expert
    assert found.of_step(1) == pytest.approx(one, abs=len(layers) * 2)
    two = found.always_bytes + found.experts_bytes * (1 - (1 - share) ** 2)
    assert found.of_step(2) == pytest.approx(two)
    assert found.of_step(2000) == pytest.approx(found.always_bytes + found.experts_bytes)


def test_a_model_of_other_code_tells_nothing() -> None:
    assert weight_reads(torch.nn.Linear(3, 3), CPU) is None


def test_the_rate_is_that_of_two_transfers_a_cycle(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H200's figures; a device whose driver tells nothing has none."""
    model = load(tiny_model_dir("llama"))
    for facts, rate in (
        ({"memory_clock_rate": 3_201_000, "memory_bus_width": 6144}, 4.917e12),
        ({}, 0.0),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, facts=facts: SimpleNamespace(**facts)
        )
        found = weight_reads(model, torch.device("cuda", 0))
        assert found is not None and found.bytes_per_s == pytest.approx(rate, rel=1e-3)


@pytest.mark.gpu
def test_a_gpu_tells_its_rate(tiny_model_dir: TinyModelDir) -> None:
    found = weight_reads(load(tiny_model_dir("llama")), torch.device("cuda", 0))
    assert found is not None and 1e11 < found.bytes_per_s < 2e13
