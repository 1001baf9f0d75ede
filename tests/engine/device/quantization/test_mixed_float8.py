"""Layers of 8-bit floats beside floats of 16 bits: what is kept of each, and their products."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, build, load
from quantized_weights import MODULES, fp8_blocks, quantize_folder
from safetensors.torch import load_file, save_file
from tiny_heads import add_mtp, quiet_target
from torch import nn
from triton_device import DEVICES_AND_DTYPES, normal, require_triton

from termgen.config import EngineConfig
from termgen.engine.device.attention.groups import GroupedAttention
from termgen.engine.device.attention.torch_reference import TorchReferenceAttention
from termgen.engine.device.config.head_config import mtp_head
from termgen.engine.device.layers.linear import FloatLinear, Linear, LinearSpec
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.layers.stored_rows import StoredRows
from termgen.engine.device.layers.weight_slot import WeightSlot
from termgen.engine.device.loader import kept_form, load_model_config, open_checkpoint
from termgen.engine.device.models import qwen3_5, registry
from termgen.engine.device.quantization.stored_matrices import ScaledNumbers
from termgen.engine.device.runner.make_attention import attention_shapes
from termgen.engine.device.runner.make_drafter import WantedDrafts, load_head
from termgen.engine.device.runner.resolve import keeps_floats, resolve_limits
from termgen.errors import CorruptFileError
from termgen.vocabulary.device.speculation import SpeculativeConfig

require_triton()

from termgen.engine.device.quantization.float8 import Float8Linear, Float8Linears  # noqa: E402
from termgen.engine.device.quantization.mixed_float8 import (  # noqa: E402
    MixedFloat8Linear,
    MixedFloat8Linears,
)

TinyModelDir = Callable[..., Path]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
PARTS: dict[str, list[tuple[str, int]]] = {
    "8 bits alone": [("fp8", 200)],
    "floats alone": [("float", 5), ("float", 40)],
    "floats last": [("fp8", 144), ("fp8", 48), ("float", 3), ("float", 5)],
    "floats between": [("fp8", 40), ("float", 33), ("fp8", 24)],
    "floats first": [("float", 7), ("fp8", 70)],
}
QWEN_MODULES = (*MODULES, "in_proj_qkv", "in_proj_z", "out_proj")


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("seed", range(2))
def test_products_round_no_row(device: str, dtype: torch.dtype, name: str, seed: int) -> None:
    print("seed", seed)
    generator, columns = torch.Generator().manual_seed(seed), 300
    num_rows = sum(rows for _, rows in PARTS[name])
    spec = LinearSpec(columns, num_rows, dtype, torch.device(device), is_looked_up=True)
    layer = MixedFloat8Linears(Float8Linears(), FloatLinear)(spec)
    assert isinstance(layer, MixedFloat8Linear)
    loads: list[Callable[[], None]] = []
    values, first = [], 0
    for kind, rows in PARTS[name]:
        if kind == "float":
            own = torch.randn(rows, columns, generator=generator).to(dtype)
            values.append(own.double())
            loads.append(partial(layer.load_rows, own, first))
        else:
            numbers = torch.randn(rows, columns, generator=generator).mul_(60)
            scale = torch.rand(-(-rows // 128), 3, generator=generator).add_(0.3).div_(1000)
            tensors = {"weight": numbers.to(torch.float8_e4m3fn), "scale": scale}
            matrix = ScaledNumbers((rows, columns), (128, 128))
            values.append(matrix.rows(tensors, 0, rows).double())
            for begin in range(0, rows, 64):
                part = matrix.float8(tensors, begin, min(begin + 64, rows))
                loads.append(partial(layer.load_stored, part, first + begin))
        first += rows
    random.Random(seed).shuffle(loads)
    for load_part in loads:
        load_part()
    layer.finalize()
    kinds = [isinstance(method, FloatLinear) for method in layer.methods]
    assert len(kinds) <= 3 and all(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    weight = torch.cat(values).to(device)
    bias = normal(num_rows, dtype=dtype, device=device, seed=9)
    for count in (0, 1, 2, 16, 64, 65):
        x = normal(count, columns, dtype=dtype, device=device, seed=count)
        for added in (None, bias):
            found = layer.multiply(x, added).double()
            wide = torch.zeros_like(bias).double() if added is None else added.double()
            expected = x.double() @ weight.T + wide
            room = x.double().abs() @ weight.abs().T + wide.abs()
            assert ((found - expected).abs() <= 2 * room * ROUNDING[dtype] + 1e-7).all(), count
    ids = torch.tensor([0, num_rows - 1, num_rows // 2, 5], device=device)
    kept = layer.embed(ids).double()
    torch.testing.assert_close(kept, weight[ids], rtol=2 * ROUNDING[dtype], atol=1e-6)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "why_unusable", lambda *_, **__: "")


def methods(model: nn.Module) -> dict[str, list[type]]:
    """Types of each layer's parts, by the layer's name."""
    return {
        name: [type(part) for part in layer.methods]
        for name, layer in model.named_modules()
        if isinstance(layer, MixedFloat8Linear)
    }


def test_layers_that_are_floats_stay_so(
    tiny_model_dir: TinyModelDir, tmp_path: Path, on_a_cpu: None
) -> None:
    source = tiny_model_dir("llama", hidden_size=256, intermediate_size=272, num_hidden_layers=3)
    first = "model.layers.0."
    folder, twin = quantize_folder(
        source, tmp_path / "m", BLOCKS, fp8_blocks(128, 128), floats=first
    )
    assert kept_form(folder) == "fp8"
    model = load(folder, quantization="fp8", keeps_floats=True)
    for name, parts in methods(model).items():
        assert len(parts) == 1
        assert issubclass(parts[0], FloatLinear) == ("layers.0." in name), name
        assert issubclass(parts[0], Float8Linear) == ("layers.0." not in name), name
    tokens = list(range(5, 25))
    found = PagedModel(model).step([Row(0, 0, tokens)])[0]
    expected = PagedModel(load(twin)).step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    rounded = PagedModel(load(folder, quantization="fp8")).step([Row(0, 0, tokens)])[0]
    assert (rounded - expected).abs().max() > 1e-2, "what is asked for is rounded"


def test_few_layers_of_8_bits_are_floats(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder, _ = quantize_folder(
        tiny_model_dir("llama"), tmp_path / "m", BLOCKS, fp8_blocks(128, 128), ("o_proj",)
    )
    assert kept_form(folder) is None


def test_small_projections_of_delta_nets_stay_floats(
    tiny_model_dir: TinyModelDir, tmp_path: Path, on_a_cpu: None
) -> None:
    """They are rows of a layer whose others are 8-bit floats. Attention's q_proj, whose rows are
    those of gates, too, stays what it is."""
    source = tiny_model_dir("qwen3_5_text", hidden_size=256, intermediate_size=272)
    folder, twin = quantize_folder(
        source, tmp_path / "m", BLOCKS, fp8_blocks(128, 128), QWEN_MODULES
    )
    model = load(folder, quantization="fp8", keeps_floats=True)
    parts = methods(model)
    nets = [own for name, own in parts.items() if len(own) > 1]
    assert len(nets) == 3, parts
    for own in nets:
        assert own[0] is Float8Linear and issubclass(own[1], FloatLinear)
    assert sum(own == [Float8Linear] for own in parts.values()) == len(parts) - 3
    tokens = list(range(5, 25))
    found = PagedModel(model).step([Row(0, 0, tokens)])[0]
    expected = PagedModel(load(twin)).step([Row(0, 0, tokens)])[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_a_head_that_drafts_keeps_its_floats(
    tiny_model_dir: TinyModelDir, tmp_path: Path, on_a_cpu: None
) -> None:
    kinds = ["full_attention"] * 2
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "layer_types": kinds}
    source = quiet_target(tiny_model_dir("qwen3_5_text", **sizes), tmp_path / "source")
    add_mtp(source)
    folder, _ = quantize_folder(source, tmp_path / "m", BLOCKS, fp8_blocks(128, 128), floats="mtp.")
    config = load_model_config(folder)
    caches = (*config.layer_caches, config.layer_caches[-1])
    attention = GroupedAttention.without_windows(TorchReferenceAttention(), caches)
    options: dict[str, Any] = {"quantization": "fp8", "keeps_floats": True}
    target = build(config, attention=attention, **options)
    of_head = registry.make_build(
        config, dtype=torch.float32, device=torch.device("cpu"), ops=TorchOps(), **options
    )
    settings = EngineConfig(model=str(folder))
    drafts = WantedDrafts(SpeculativeConfig(method="mtp"), mtp_head(config))
    limits = resolve_limits(settings, config, torch.device("cpu"))
    (shape,) = attention_shapes(settings, config, limits, torch.float32, torch.device("cpu"))
    head = load_head(settings, folder, drafts, target, of_head, attention, shape)
    parts = methods(head)
    assert len(parts) == 5 and all(
        len(own) == 1 and issubclass(own[0], FloatLinear) for own in parts.values()
    )
    stored = load_file(folder / "model.safetensors")["mtp.layers.0.mlp.down_proj.weight"]
    x = torch.randn(3, stored.shape[1], generator=torch.Generator().manual_seed(1))
    down = head.layer.mlp.down_proj
    assert isinstance(down, Linear)
    torch.testing.assert_close(down(x), x @ stored.T)


@pytest.mark.parametrize("step", [1, 7, 16, 100])
def test_rows_that_take_turns_come_in_parts(step: int) -> None:
    places: dict[str, torch.Tensor] = {}

    def slot(name: str) -> WeightSlot:
        places[name] = torch.zeros(24, dtype=torch.uint8)

        def load_stored(rows: StoredRows, first: int) -> None:
            places[name][first : first + len(rows.blocks)] = rows.blocks[:, 0, 0]

        shape = (24, 4)
        kinds = frozenset({"Q"})
        return WeightSlot(name, shape, "matrix", lambda _: None, None, kinds, load_stored)

    both = qwen3_5._taking_turns(slot("a"), slot("b"), 8)
    assert both.kinds == {"Q"} and both.load_stored is not None
    rows = torch.arange(48, dtype=torch.uint8).view(48, 1, 1)
    for first in range(0, 48, step):
        both.load_stored(StoredRows("Q", rows[first : first + step]), first)
    expected = rows.view(3, 2, 8)
    assert torch.equal(places["a"], expected[:, 0].flatten())
    assert torch.equal(places["b"], expected[:, 1].flatten())


def test_floats_that_are_no_numbers_are_named(
    tiny_model_dir: TinyModelDir, tmp_path: Path, on_a_cpu: None
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    source = tiny_model_dir("llama", hidden_size=256, intermediate_size=272)
    folder, _ = quantize_folder(source, tmp_path / "m", BLOCKS, fp8_blocks(128, 128), floats=name)
    weights = load_file(folder / "model.safetensors")
    weights[name][3, 5] = float("inf")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=f"tensor {name} has NaN or infinite values"):
        load(folder, quantization="fp8", keeps_floats=True)


def test_only_what_is_asked_for_is_rounded() -> None:
    assert keeps_floats(EngineConfig(model="m"))
    assert not keeps_floats(EngineConfig(model="m", quantization="fp8"))


def test_tables_do_not_count(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    source = tiny_model_dir("llama", hidden_size=256, vocab_size=4096)
    folder, _ = quantize_folder(source, tmp_path / "m", BLOCKS, fp8_blocks(128, 128))
    checkpoint = open_checkpoint(folder)
    sizes = {name: checkpoint.tensor(name).numel() for name in checkpoint.names()}
    checkpoint.close()
    assert sizes["model.embed_tokens.weight"] > sum(sizes.values()) / 3
    assert kept_form(folder) == "fp8"
