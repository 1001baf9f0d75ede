"""Weights with a scale for every 16 numbers (Q6_K, Q3_K, NVFP4): kept as files have them, with the
products of these numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from paged_model import PagedModel, Row, load
from quantized_weights import Write, modelopt_nvfp4, nvfp4, quantize_folder
from safetensors.torch import load_file, save_file
from triton_device import DEVICES_AND_DTYPES, normal, require_triton

from termgen.engine.device.layers.linear import FloatLinear, LinearMethod, LinearSpec
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.loader import kept_form, open_checkpoint
from termgen.engine.device.models import registry
from termgen.engine.device.quantization.stored_matrices import NVFP4, FourBitFloats, nvfp4_rows
from termgen.errors import CorruptFileError

require_triton()

from termgen.engine.device.quantization import int8_groups  # noqa: E402
from termgen.engine.device.quantization.int8_groups import (  # noqa: E402
    Group4Linear,
    GroupLinear,
    GroupLinears,
)

TinyModelDir = Callable[..., Path]
COLUMNS = 512
SCALE_AT = {"Q6_K": 208, "Q3_K": 108, "Q4_K": 0}
ROUNDING = {torch.float32: 2.0**-11, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Scales have 16 bits always."""
PARTS: dict[str, list[tuple[str, int]]] = {
    "Q6_K": [("Q6_K", 70)],
    "Q3_K": [("Q3_K", 33)],
    "NVFP4": [(NVFP4, 40), (NVFP4, 9)],
    "Q4_K and Q6_K": [("Q4_K", 64), ("Q4_K", 9), ("Q6_K", 33)],
    "NVFP4 and Q6_K": [(NVFP4, 32), ("Q6_K", 5), (NVFP4, 32)],
}


WIDTHS = {
    "Q6_K": [8],
    "Q3_K": [8],
    "NVFP4": [4],
    "Q4_K and Q6_K": [4, 8],
    "NVFP4 and Q6_K": [4, 8, 4],
}
"""Bits of the runs of each."""


def k_rows(kind: str, rows: int, generator: torch.Generator) -> tuple[StoredRows, torch.Tensor]:
    """Random blocks with scales of one magnitude, and their numbers."""
    quant = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[quant]
    shape = (rows, COLUMNS // size, num_bytes)
    blocks = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    num_scales = 2 if kind == "Q4_K" else 1
    scales = torch.rand(*shape[:2], num_scales, generator=generator).add(0.5).div(2000).half()
    at = SCALE_AT[kind]
    blocks[:, :, at : at + 2 * num_scales] = scales.view(torch.uint8)
    values = gguf.quants.dequantize(blocks.flatten(1).numpy(), quant)
    return StoredRows(kind, blocks), torch.from_numpy(values.copy()).double()


def nvfp4_of(rows: int, generator: torch.Generator) -> tuple[StoredRows, torch.Tensor]:
    scale = torch.rand(rows, COLUMNS // 16, generator=generator).mul(400).to(torch.float8_e4m3fn)
    scale[0, 0] = 2.0**-9  # the smallest
    packed = torch.randint(0, 256, (rows, COLUMNS // 2), generator=generator).to(torch.uint8)
    tensors = {"weight_packed": packed, "scale": scale, "global_scale": torch.tensor(3e-5)}
    values = FourBitFloats((rows, COLUMNS)).rows(tensors, 0, rows).double()
    return nvfp4_rows(tensors, 0, rows, is_divided=False), values


def rows_of(kind: str, rows: int, generator: torch.Generator) -> tuple[StoredRows, torch.Tensor]:
    return nvfp4_of(rows, generator) if kind == NVFP4 else k_rows(kind, rows, generator)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("seed", [1])
def test_products_are_those_of_the_files_numbers(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, name: str, seed: int
) -> None:
    print("seed", seed)
    monkeypatch.setattr(int8_groups, "_PART_NUMBERS", 17 * COLUMNS)
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(rows for _, rows in PARTS[name])
    spec = LinearSpec(COLUMNS, num_rows, dtype, torch.device(device), is_looked_up=True)
    layer = GroupLinears()(spec)
    assert isinstance(layer, GroupLinear)
    loads, values, first = [], [], 0
    for kind, rows in PARTS[name]:
        stored, own = rows_of(kind, rows, generator)
        values.append(own)
        for begin in range(0, rows, 23):
            loads.append((StoredRows(kind, stored.blocks[begin : begin + 23]), first + begin))
        first += rows
    random.Random(seed).shuffle(loads)
    for part, row in loads:
        layer.load_stored(part, row)
    layer.finalize()
    assert [run.num_bits for run in layer._runs] == WIDTHS[name]
    for run in layer._runs:
        words = layer.get_parameter(f"words_{layer._runs.index(run)}")
        assert words.nbytes == (run.end - run.first) * COLUMNS * run.num_bits // 8
    weight = torch.cat(values).to(device)
    bias = normal(num_rows, dtype=dtype, device=device, seed=9)
    for count in (0, 1, 2, 16, 65, 130):
        x = normal(count, COLUMNS, dtype=dtype, device=device, seed=count)
        for added in (None, bias):
            wide = torch.zeros_like(bias).double() if added is None else added.double()
            expected = x.double() @ weight.T + wide
            room = (x.double().abs() @ weight.abs().T + wide.abs()) * ROUNDING[dtype] + 1e-4
            found = layer.multiply(x, added).double()
            assert ((found - expected).abs() <= room).all(), count
    ids = torch.tensor([0, num_rows - 1, 35 % num_rows, num_rows // 2], device=device)
    kept = layer.embed(ids).double()
    assert ((kept - weight[ids]).abs() <= weight[ids].abs() * 2 * ROUNDING[dtype] + 2e-5).all()


def test_floats_of_4_bits_are_exact() -> None:
    spec = LinearSpec(COLUMNS, 40, torch.float32, torch.device("cpu"), is_looked_up=True)
    for make in (GroupLinears(), GroupLinears().in_4_bits):
        layer = make(spec)
        stored, values = nvfp4_of(40, torch.Generator().manual_seed(4))
        layer.load_stored(stored, 0)
        layer.finalize()
        found = layer.embed(torch.arange(40)).double()
        torch.testing.assert_close(found, values, rtol=1e-6, atol=0)
        assert isinstance(layer, GroupLinear)
        assert [run.num_bits for run in layer._runs] == [4]
        assert layer.words_0.nbytes + layer.pairs_0.nbytes == 40 * COLUMNS * 5 // 8


def test_what_is_asked_for_in_4_bits_is_rounded() -> None:
    spec = LinearSpec(COLUMNS, 32, torch.float32, torch.device("cpu"), is_looked_up=True)
    layer = GroupLinears().in_4_bits(spec)
    assert isinstance(layer, Group4Linear)
    layer.load_stored(k_rows("Q6_K", 32, torch.Generator().manual_seed(1))[0], 0)
    layer.finalize()
    assert [run.num_bits for run in layer._runs] == [4]


VOCABULARY = 333
NVFP4_CONFIG = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
FORMATS: dict[str, tuple[dict[str, str], Write]] = {
    "compressed-tensors": (NVFP4_CONFIG, nvfp4),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
}
_factory = GroupLinears()


def make_group_linear(spec: LinearSpec) -> LinearMethod:
    is_table = spec.is_looked_up or spec.out_features == VOCABULARY
    return FloatLinear(spec) if is_table else _factory(spec)


@pytest.fixture
def groups_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that a GPU has, on a CPU. Tables and heads are floats, which nothing rounds."""
    monkeypatch.setitem(registry.LINEAR_METHODS, "int8", "test_halved_groups:make_group_linear")


@pytest.fixture
def stored(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    def make(name: str) -> tuple[Path, Path]:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": VOCABULARY}
        return quantize_folder(tiny_model_dir("llama", **sizes), tmp_path / "m", *FORMATS[name])

    return make


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_of_them_computes_as_its_twin(
    name: str, stored: Callable[[str], tuple[Path, Path]], groups_of_a_gpu: None
) -> None:
    folder, twin = stored(name)
    checkpoint = open_checkpoint(folder)
    kind = checkpoint.kind("model.layers.0.self_attn.q_proj.weight")  # type: ignore[attr-defined]
    checkpoint.close()
    assert kind == NVFP4 and kept_form(folder) == "int8"
    tokens = list(range(5, 25))
    found = PagedModel(load(folder, quantization="int8")).step([Row(0, 0, tokens)])[0]
    expected = PagedModel(load(twin)).step([Row(0, 0, tokens)])[0]
    # Logits reach 11; sums in another order change their last places.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("end", ["weight_scale", "weight_global_scale"])
def test_what_is_no_number_is_named(
    end: str, stored: Callable[[str], tuple[Path, Path]], groups_of_a_gpu: None
) -> None:
    folder = stored("compressed-tensors")[0]
    weights = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.down_proj.{end}"
    wrong = weights[name].float()
    wrong.view(-1)[-1] = float("nan")
    weights[name] = wrong.to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=f"tensor {name} has NaN or infinite values"):
        load(folder, quantization="int8")
