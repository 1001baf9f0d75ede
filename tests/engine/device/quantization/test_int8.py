from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_model import CPU, PagedModel, Row, load

from termgen.engine.device.layers.linear import Build, Linear, LinearSpec
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.quantization import int8
from termgen.engine.device.quantization.int8 import Int8Linear, quantize_rows

TinyModelDir = Callable[..., Path]


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-3, 3, rows)[:, None]
    return torch.randn(rows, columns, generator=generator) * scales


def test_each_weight_is_within_half_a_step() -> None:
    matrix = random_matrix(64, 96)
    weight, scale = quantize_rows(matrix)
    restored = weight.float() * scale.float()[:, None]
    assert weight.dtype is torch.int8 and weight.abs().max() <= 127
    assert ((restored - matrix).abs() <= 0.5001 * scale.float()[:, None]).all()
    # The scale is as small as bfloat16 lets it be: the largest weight uses the whole range.
    assert (weight.abs().amax(1) >= 126).all()


def test_rows_of_zeros_stay_zeros() -> None:
    matrix = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [1.0, -1.0]])
    weight, scale = quantize_rows(matrix)
    assert torch.equal(weight[:2], torch.zeros(2, 2, dtype=torch.int8))
    assert (weight.float() * scale.float()[:, None]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 9, 40])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_quantized_matrix(
    dtype: torch.dtype, num_rows: int, wide: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_CHUNK_ELEMENTS", 20 * 64)  # several chunks, the last one short
    layer = Linear(64, {"proj": 70}, bias=True, build=Build(dtype, CPU, Int8Linear, TorchOps()))
    layer.method._wide_dtype = wide
    matrix, bias = random_matrix(70, 64), torch.linspace(-5, 5, 70)
    for slot in layer.weight_slots(""):
        slot.load(matrix if slot.role == "matrix" else bias)
    layer.finalize()
    x = random_matrix(max(num_rows, 1), 64, seed=1)[:num_rows].to(dtype)
    weight, scale = quantize_rows(matrix)
    dequantized = weight.double() * scale.double()[:, None]
    x16 = x.to(torch.bfloat16).double()
    expected = x16 @ dequantized.T + bias.to(dtype).double()
    actual = layer(x)
    assert actual.shape == (num_rows, 70) and actual.dtype is dtype
    # bfloat16 keeps 8 bits: sums of magnitude m are off by up to m / 128 after their roundings.
    magnitude = x16.abs() @ dequantized.abs().T + bias.abs().double()
    assert ((actual.double() - expected).abs() <= magnitude / 128 + 1e-6).all()


def test_rows_are_looked_up_in_the_quantized_matrix() -> None:
    spec = LinearSpec(16, 30, torch.float32, CPU, True)
    method = Int8Linear(spec)
    matrix = random_matrix(30, 16)
    method.load_rows(matrix[:10], 0)
    method.load_rows(matrix[10:], 10)
    ids = torch.tensor([29, 0, 12, 12], dtype=torch.int32)
    rows = method.embed(ids)
    scale = method.scale.float()[ids.long(), None]
    assert rows.dtype is torch.float32
    assert ((rows - matrix[ids.long()]).abs() <= 0.5001 * scale).all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_stay_near_the_float_model(
    family: str, tied: bool, tiny_model_dir: TinyModelDir
) -> None:
    folder = tiny_model_dir(family, tie_word_embeddings=tied)
    tokens = list(range(3, 60))
    expected = PagedModel(load(folder)).step([Row(0, 0, tokens)])[0]
    paged = PagedModel(load(folder, quantization="int8"))
    whole = paged.step([Row(0, 0, tokens)])[0]
    error = (whole - expected).std() / expected.std()
    assert error < 0.06
    # One token at a time takes the other kernel.
    single = torch.cat([paged.step([Row(1, i, [token])])[0] for i, token in enumerate(tokens)])
    assert (single - expected).std() / expected.std() < 0.06


def test_the_float_model_is_not_kept(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("llama", tie_word_embeddings=True)
    sizes = {
        quantization: sum(p.nbytes for p in load_unfinalized(folder, quantization).parameters())
        for quantization in (None, "int8")
    }
    assert sizes["int8"] < 0.3 * sizes[None]


def load_unfinalized(folder: Path, quantization: str | None) -> torch.nn.Module:
    from paged_model import build

    from termgen.engine.device.loader import load_model_config

    return build(load_model_config(folder), quantization=quantization)
