"""Mixtures whose experts are quantised in a file: what a GPU keeps of them, beside the same weights
in a model of float32."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_model import CPU, PagedModel, Row, build, load
from quantized_weights import (
    MODULES,
    Write,
    awq,
    fp8_blocks,
    fp8_whole,
    gptq,
    modelopt_nvfp4,
    mxfp4,
    nvfp4,
    packed,
    quantize_folder,
    scaled,
)
from safetensors.torch import load_file, save_file
from triton_device import require_triton

from termgen.config import EngineConfig
from termgen.engine.device import kernels
from termgen.engine.device.layers.linear import Build, FloatLinear
from termgen.engine.device.layers.ops import TorchOps
from termgen.engine.device.loader import (
    are_apart,
    as_stored,
    kept_form,
    load_model_config,
    open_checkpoint,
)
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models import registry
from termgen.engine.device.models.decoder import CausalDecoder
from termgen.engine.device.models.mlp import SparseMoe
from termgen.engine.device.models.rehearsal import weights_of
from termgen.engine.device.native.int8_blocks import quantize_rows
from termgen.engine.device.quantization.affine_blocks import GROUPS, ORDERED_GROUPS
from termgen.engine.device.quantization.stored_matrices import FLOAT8_BLOCKS, FLOAT8_ROWS
from termgen.engine.device.runner.memory import weight_bytes
from termgen.engine.device.runner.resolve import resolve_quantization
from termgen.engine.device.runner.tuning import planned_shapes
from termgen.engine.device.runner.warm_up import _expert_steps
from termgen.errors import CorruptFileError

require_triton()

from termgen.engine.device.kernels.moe.experts import experts  # noqa: E402
from termgen.engine.device.kernels.moe.float8_experts import Float8Weights  # noqa: E402
from termgen.engine.device.quantization.float8_experts import Float8Experts  # noqa: E402
from termgen.engine.device.quantization.group_experts import Form, GroupExperts  # noqa: E402
from termgen.engine.device.quantization.int8_groups import GroupLinears  # noqa: E402

TinyModelDir = Callable[..., Path]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FORMATS: dict[str, tuple[dict[str, Any], Write]] = {
    "fp8, blocks": (BLOCKS, fp8_blocks(128, 128)),
    "fp8, fine blocks": ({**BLOCKS, "weight_block_size": [16, 128]}, fp8_blocks(16, 128)),
    "fp8, rows": (FLOATS, scaled("float", strategy="channel")),
    "fp8, whole": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_whole),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 144},
    "mixtral": {"hidden_size": 256, "intermediate_size": 136},
    "qwen3_5_moe_text": {
        "hidden_size": 256,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
EXPERTS_ALONE = ("gate_proj", "up_proj", "down_proj")
OF_EXPERTS = (*MODULES, "w1", "w2", "w3")
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


class Ops(TorchOps):
    """Only experts are computed as on a GPU."""

    def experts(
        self, x: torch.Tensor, router_logits: torch.Tensor, *matrices: Any, **options: Any
    ) -> torch.Tensor:
        weights = [getattr(part, "weights", part) for part in matrices]
        return experts(x.contiguous(), router_logits.contiguous(), *weights, **options)


def layers(model: CausalDecoder) -> list[SparseMoe]:
    return [module for module in model.modules() if isinstance(module, SparseMoe)]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "why_unusable", lambda *_, **__: "")


@pytest.fixture
def stored(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def make(name: str, family: str = "qwen3_moe", floats: str = "") -> tuple[Path, Path]:
        config, write = FORMATS[name]
        source = tiny_model_dir(family, **FAMILIES[family])
        return quantize_folder(source, tmp_path / "m", config, write, OF_EXPERTS, floats)

    return make


def compare(model: CausalDecoder, twin: Path) -> None:
    """Sums in another order change the last places of logits, which reach 11, a second rounding far
    more."""
    tokens = list(range(5, 25))
    paged, exact = PagedModel(model), PagedModel(load(twin))
    near = {"rtol": 1e-4, "atol": 3e-4}
    found, expected = (one.step([Row(0, 0, tokens)])[0] for one in (paged, exact))
    torch.testing.assert_close(found, expected, **near)
    rows = [Row(0, len(tokens), [7])]
    torch.testing.assert_close(paged.step(rows)[0], exact.step(rows)[0], **near)


def divergence(model: CausalDecoder, twin: Path) -> float:
    """Nats in the mean."""
    tokens = list(range(5, 25))
    found, expected = (
        PagedModel(one).step([Row(0, 0, tokens)])[0].double().log_softmax(-1)
        for one in (model, load(twin))
    )
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_mixture_of_8_bit_floats_computes_as_its_twin(
    name: str, family: str, stored: Callable[..., tuple[Path, Path]]
) -> None:
    folder, twin = stored(name, family)
    assert kept_form(folder) == "fp8"
    model = load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)
    for layer in layers(model):
        for part in (layer.gate_up, layer.down):
            assert isinstance(part, Float8Experts) and isinstance(part.weights, Float8Weights)
            held = sum(p.numel() * p.element_size() for p in part.parameters())
            # Rows are filled up to whole words of 256 columns.
            padded = math.prod(part.shape[:2]) * (part.shape[2] + -part.shape[2] % 256)
            assert held <= padded * 1.05, "8 bits a number"
    compare(model, twin)


GROUPED: dict[str, tuple[dict[str, Any], Write, Form]] = {
    "GPTQ": (GPTQ, gptq(4, 64), Form.FOUR_BITS),
    "GPTQ, act-order": (GPTQ, gptq(4, 32, in_order=False), Form.FOUR_BITS),
    "GPTQ, act-order, 8 bits": ({**GPTQ, "bits": 8}, gptq(8, 32, in_order=False), Form.EIGHT_BITS),
    "AWQ": ({"quant_method": "awq", "version": "gemm"}, awq(32), Form.FOUR_BITS),
    "W4A16": (PACKED, packed(4, group=32), Form.FOUR_BITS),
    "W4A16, zero points, another order": (
        PACKED,
        packed(4, group=32, symmetric=False, in_order=False),
        Form.FOUR_BITS,
    ),
    "W8A16, rows": (PACKED, packed(8), Form.EIGHT_BITS),
    "W8A8": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        scaled("int", strategy="channel"),
        Form.EIGHT_BITS,
    ),
    "W8A8, zero points": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        scaled("int", strategy="channel", symmetric=False),
        Form.EIGHT_BITS,
    ),
    "NVFP4": (NVFP4, nvfp4, Form.HALVED),
    "NVFP4 of ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        modelopt_nvfp4,
        Form.HALVED,
    ),
    "MXFP4": (
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        mxfp4,
        Form.FLOATS,
    ),
}
GROUPED_SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}
ROUNDED_SCALES = 0.15
"""The most that scales of 16 bits change logits by, which reach 11."""


def load_grouped(folder: Path, *, is_apart: bool = False) -> CausalDecoder:
    """Experts are as a GPU has them, and other matrices floats. is_apart: as the file has it."""
    checkpoint = open_checkpoint(folder)
    config = as_stored(folder, checkpoint.config, "int8") if is_apart else checkpoint.config
    model = build(config, ops=Ops(), make_experts=GroupLinears().experts)
    load_weights(model, checkpoint)
    checkpoint.close()
    model.finalize()
    return model


def forms(model: CausalDecoder) -> set[Form | None]:
    parts = [part for layer in layers(model) for part in (layer.gate_up, layer.down)]
    assert all(isinstance(part, GroupExperts) for part in parts)
    return {part._form for part in parts}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", GROUPED)
def test_a_mixture_in_groups_computes_as_its_twin(
    name: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    config, write, form = GROUPED[name]
    source = tiny_model_dir("qwen3_moe", **GROUPED_SIZES)
    folder, twin = quantize_folder(source, tmp_path / "m", config, write, EXPERTS_ALONE)
    assert kept_form(folder) == "int8"
    model = load_grouped(folder)
    assert forms(model) == {form}
    is_ordered = "order" in name
    for layer in layers(model):
        for part in (layer.gate_up, layer.down):
            assert isinstance(part, GroupExperts) and (part.orders is not None) == is_ordered
            bits = 8 * weight_bytes(part) / math.prod(part.shape)
            at_most = {Form.EIGHT_BITS: 9.3, Form.FLOATS: 4.8}.get(form, 5.3)
            assert bits < at_most + (0.3 if is_ordered else 0)
    tokens = list(range(5, 25))
    paged, exact = PagedModel(model), PagedModel(load(twin))
    near = 1e-3 if form in (Form.HALVED, Form.FLOATS) else ROUNDED_SCALES
    for rows in ([Row(0, 0, tokens)], [Row(0, len(tokens), [7])]):
        found, expected = paged.step(rows)[0], exact.step(rows)[0]
        # One token multiplies integers of 16 bits.
        assert (found - expected).abs().max() < max(near, 0.01 if len(found) == 1 else 0)


@pytest.fixture
def shared_floats(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A model whose expert of all tokens stays floats of its size."""

    def make(config: dict[str, Any], write: Write) -> tuple[Path, Path]:
        sizes = FAMILIES["qwen3_5_moe_text"]
        source = tiny_model_dir("qwen3_5_moe_text", **sizes)
        folder, twin = quantize_folder(source, tmp_path / "m", config, write, EXPERTS_ALONE)
        weights, floats = (load_file(one / "model.safetensors") for one in (folder, source))
        shared = {name: floats[name] for name in floats if ".shared_expert." in name}
        kept = {name: t for name, t in weights.items() if ".shared_expert." not in name}
        save_file(kept | shared, folder / "model.safetensors")
        plain = load_file(twin / "model.safetensors")
        save_file(plain | shared, twin / "model.safetensors")
        return folder, twin

    return make


def test_a_shared_expert_in_floats_does_not_widen_the_others(
    shared_floats: Callable[..., tuple[Path, Path]],
) -> None:
    folder, twin = shared_floats(NVFP4, nvfp4)
    model = load_grouped(folder, is_apart=True)
    assert forms(model) == {Form.HALVED}
    compare(model, twin)
    rounded = load_grouped(folder)
    assert forms(rounded) == {Form.EIGHT_BITS}
    assert divergence(rounded, twin) < 0.03


def test_a_shared_expert_in_floats_leaves_others_in_8_bits(
    shared_floats: Callable[..., tuple[Path, Path]],
) -> None:
    folder, twin = shared_floats(*FORMATS["fp8, blocks"])
    checkpoint = open_checkpoint(folder)
    assert as_stored(folder, checkpoint.config, "int8") is checkpoint.config, "all are rounded"
    config = as_stored(folder, checkpoint.config, "fp8")
    assert config.moe is not None and config.moe.is_shared_apart
    model = build(config, quantization="fp8", ops=Ops(), keeps_floats=True)
    load_weights(model, checkpoint)
    checkpoint.close()
    model.finalize()
    for layer in layers(model):
        assert isinstance(layer.gate_up.weights, Float8Weights)  # type: ignore[union-attr]
    compare(model, twin)
    # What is measured are its layers, and not those of experts.
    sizes = [
        {(shape.n, shape.k) for shape in planned_shapes(one, torch.device("cuda:0"), "fp8")}
        for one in (folder, twin)
    ]
    assert (2 * 64, 256) in sizes[0] - sizes[1]


def test_experts_that_are_all_alike_stay_together(
    stored: Callable[..., tuple[Path, Path]],
) -> None:
    for family in ("qwen3_5_moe_text", "qwen3_moe"):
        folder, twin = stored("fp8, blocks", family)
        for path in (folder, twin):
            config = load_model_config(path)
            assert as_stored(path, config, "fp8") is config
        shutil.rmtree(folder)
        shutil.rmtree(twin)


@pytest.mark.parametrize(
    ("shared", "others", "quantization", "expected"),
    [
        (None, GROUPS, "int8", True),
        (None, "Q4_K", "int8", True),
        ("Q8_0", "Q4_K", "int8", True),
        ("Q6_K", "Q5_K", "int8", False),
        ("F16", "Q8_0", "int8", False),
        ("BF16", "F32", "int8", False),
        ("Q4_K", "Q4_0", "int8", False),
        (ORDERED_GROUPS, GROUPS, "int8", False),
        (None, "MXFP4", "int8", True),
        (None, FLOAT8_ROWS, "fp8", True),
        (FLOAT8_BLOCKS, FLOAT8_ROWS, "fp8", False),
        (None, FLOAT8_ROWS, "int8", False),
    ],
)
def test_which_forms_are_apart(
    shared: str | None, others: str | None, quantization: str, expected: bool
) -> None:
    assert are_apart(shared, others, quantization) == expected


@pytest.mark.parametrize(
    ("name", "end"),
    [("NVFP4", "weight_scale"), ("NVFP4", "weight_global_scale"), ("MXFP4", "weight_scale")],
)
def test_scales_of_4_bits_that_are_no_numbers_are_named(
    name: str, end: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    config, write, _ = GROUPED[name]
    source = tiny_model_dir("qwen3_moe", **GROUPED_SIZES)
    folder, _ = quantize_folder(source, tmp_path / "m", config, write, EXPERTS_ALONE)
    weights = load_file(folder / "model.safetensors")
    tensor = f"{EXPERT}.{end}"
    wrong = weights[tensor]
    is_power = wrong.dtype == torch.uint8
    wrong.view(torch.uint8 if is_power or end == "weight_scale" else torch.float32).view(-1)[0] = (
        255 if is_power else 127 if end == "weight_scale" else float("nan")
    )
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=f"tensor {tensor} has NaN or infinite values"):
        load_grouped(folder)


@pytest.mark.parametrize(
    ("name", "end"),
    [("NVFP4", "weight_scale"), ("GPTQ", "scales"), ("AWQ", "qzeros"), ("W4A16", "weight_scale")],
)
def test_truncated_scales_are_named(
    name: str, end: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    config, write, _ = GROUPED[name]
    source = tiny_model_dir("qwen3_moe", **GROUPED_SIZES)
    folder, _ = quantize_folder(source, tmp_path / "m", config, write, EXPERTS_ALONE)
    weights = load_file(folder / "model.safetensors")
    weights[f"{EXPERT}.{end}"] = weights[f"{EXPERT}.{end}"][:-1].clone()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=re.escape(EXPERT)):
        load_grouped(folder)


def test_layers_that_a_file_has_in_floats_stay_so(stored: Callable[..., tuple[Path, Path]]) -> None:
    folder, twin = stored("fp8, blocks", floats="model.layers.0.")
    model = load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)
    first, second = layers(model)
    assert isinstance(first.gate_up.weights, torch.Tensor)  # type: ignore[union-attr]
    assert isinstance(second.gate_up.weights, Float8Weights)  # type: ignore[union-attr]
    compare(model, twin)


def test_a_start_rehearses_each_form_of_experts(
    stored: Callable[..., tuple[Path, Path]],
) -> None:
    folder, twin = stored("fp8, blocks", floats="model.layers.0.")

    def num_runs(model: CausalDecoder) -> int:
        runner: Any = SimpleNamespace(
            **{"model": model, "config": model.config, "dtype": model.dtype, "device": CPU},
            buffers=SimpleNamespace(input_ids=torch.zeros(4)),
        )
        steps = list(_expert_steps(runner))
        for step in steps:
            step()
        return len(steps)

    model = load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)
    assert num_runs(model) == 2 * 3, "of 1, 2 and 4 tokens"
    assert num_runs(load(twin, ops=Ops())) == 3
    shape, made = (1, 32, 64), []
    for is_nvfp4 in (False, True):
        experts = GroupLinears().experts(shape, Build(torch.float32, CPU, FloatLinear, Ops()))
        if is_nvfp4:
            experts.keep(0, made[0].stored(0), is_halved=True)
        else:
            experts.keep(0, quantize_rows(torch.randn(32, 64), 4))
        made.append(experts)
    assert made[0].words.shape == made[1].words.shape and weights_of(made[0]) != weights_of(made[1])


def test_one_expert_in_floats_makes_its_layer_floats(
    stored: Callable[..., tuple[Path, Path]],
) -> None:
    folder, twin = stored("fp8, rows", floats="model.layers.1.mlp.experts.3.down")
    model = load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)
    _, second = layers(model)
    assert isinstance(second.gate_up.weights, Float8Weights)  # type: ignore[union-attr]
    assert isinstance(second.down.weights, torch.Tensor)  # type: ignore[union-attr]
    compare(model, twin)


def test_experts_that_lie_in_one_tensor(
    stored: Callable[..., tuple[Path, Path]],
) -> None:
    """Newer releases of transformers save them so, the rows of gate before those of up."""
    folder, twin = stored("fp8, fine blocks")
    weights = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in weights.items() if ".experts." not in name}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        for end in ("", "_scale_inv"):
            of = {
                part: torch.stack([weights[f"{path}.{e}.{part}.weight{end}"] for e in range(8)])
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            kept[f"{path}.down_proj{end}"] = of["down_proj"]
            gate_up = torch.cat([of[part].float() for part in ("gate_proj", "up_proj")], 1)
            kept[f"{path}.gate_up_proj{end}"] = gate_up.to(of["gate_proj"].dtype)
    save_file(kept, folder / "model.safetensors")
    model = load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)
    for layer in layers(model):
        assert isinstance(layer.gate_up.weights, Float8Weights)  # type: ignore[union-attr]
        assert isinstance(layer.down.weights, Float8Weights)  # type: ignore[union-attr]
    compare(model, twin)


@pytest.mark.parametrize("end", ["weight", "weight_scale_inv"])
def test_what_is_no_number_is_named(end: str, stored: Callable[..., tuple[Path, Path]]) -> None:
    folder = stored("fp8, blocks")[0]
    weights = load_file(folder / "model.safetensors")
    name = f"{EXPERT}.{end}"
    wrong = weights[name].float()
    wrong[-1, -1] = float("nan")
    weights[name] = wrong.to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=f"tensor {name} has NaN or infinite values"):
        load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)


def test_scales_that_do_not_fit_are_named(stored: Callable[..., tuple[Path, Path]]) -> None:
    folder = stored("fp8, blocks")[0]
    weights = load_file(folder / "model.safetensors")
    name = f"{EXPERT}.weight_scale_inv"
    weights[name] = weights[name][:-1].clone()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CorruptFileError, match=f"tensor '{name}' is .* does not fit {EXPERT}"):
        load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)


def test_a_mixture_stays_what_it_is_by_default(
    stored: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, twin = stored("fp8, blocks")
    monkeypatch.setattr(kernels, "why_unusable", lambda device, dtype=None: "")
    cuda, model = torch.device("cuda:0"), load_model_config(folder)

    def resolved(path: Path, **options: Any) -> str | None:
        return resolve_quantization(EngineConfig(model=str(path), **options), model, cuda, path)

    assert resolved(folder) == "fp8"
    assert resolved(twin) is None
    assert resolved(folder, quantization="none") is None
    assert resolved(twin, quantization="fp8") == "fp8"


def test_a_mixture_of_floats_is_rounded_where_it_is_asked_for(
    tiny_model_dir: TinyModelDir,
) -> None:
    folder = tiny_model_dir("qwen3_moe", **FAMILIES["qwen3_moe"])
    model = load(folder, quantization="fp8", ops=Ops())
    for layer in layers(model):
        assert isinstance(layer.gate_up.weights, Float8Weights)  # type: ignore[union-attr]
        assert layer.router.method.kinds == frozenset(), "routers are floats"
    assert 1e-5 < divergence(model, folder) < 0.2, "routers choose others now and then"


def test_a_cpu_computes_them_in_8_bits(
    stored: Callable[..., tuple[Path, Path]],
) -> None:
    """Its kernels have integers alone."""
    folder, twin = stored("fp8, blocks")
    assert divergence(load(folder, quantization="int8"), twin) < 0.01


def spread(folder: Path, twin: Path, model: CausalDecoder, chunks: list[int]) -> torch.Tensor:
    """Nats between a model and its twin in float32, at each position in rising order. Few positions
    have other experts, where two are nearly as good."""
    checkpoint = open_checkpoint(twin)
    exact = build(checkpoint.config, device=model.device)
    load_weights(exact, checkpoint)
    checkpoint.close()
    exact.finalize()
    ids = torch.randint(0, 512, (sum(chunks),), generator=torch.Generator().manual_seed(5)).tolist()
    found = []
    for one in (model, exact):
        paged, at, rows = PagedModel(one, num_blocks=200, dtype=one.dtype), 0, []
        for length in chunks:
            rows.append(paged.step([Row(0, at, ids[at : at + length])])[0])
            at += length
        found.append(torch.cat(rows).double().log_softmax(-1))
    return (found[1].exp() * (found[1] - found[0])).sum(-1).sort().values


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("name", [*FORMATS, *GROUPED])
def test_some_hundred_positions_on_a_gpu(
    name: str, family: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """Unsorted pairs, sorted ones in several cuts, and steps of one token."""
    from termgen.engine.device.layers.triton_ops import TritonOps

    config, write = (FORMATS.get(name) or GROUPED[name])[:2]
    sizes = GROUPED_SIZES if family == "qwen3_moe" else FAMILIES[family]
    source = tiny_model_dir(family, **sizes)
    folder, twin = quantize_folder(source, tmp_path / "m", config, write, EXPERTS_ALONE)
    checkpoint = open_checkpoint(folder)
    made = build(
        checkpoint.config,
        dtype=torch.float16,
        device=torch.device("cuda"),
        quantization="fp8",
        ops=TritonOps(),
        make_experts=None if name in FORMATS else GroupLinears().experts,
        keeps_floats=True,
    )
    load_weights(made, checkpoint)
    checkpoint.close()
    made.finalize()
    nats = spread(folder, twin, made, [300, 64, 16, 4, *[1] * 40])
    print(
        f"{name}: {nats.median():.1e} nats, of nine tenths at most {nats[len(nats) * 9 // 10]:.1e}"
    )
    assert nats.median() < 1e-3
    assert nats[len(nats) * 9 // 10] < 0.02


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss", "gemma4_moe"])
def test_other_families_of_floats(family: str, tiny_model_dir: TinyModelDir) -> None:
    """Experts that lie in one tensor, with biases or clamps, and beside an MLP."""
    folder = tiny_model_dir(family)
    kept = load(folder, quantization="fp8", ops=Ops(), keeps_floats=True)
    for layer in layers(kept):
        assert isinstance(layer.gate_up.weights, torch.Tensor)  # type: ignore[union-attr]
    tokens = [Row(0, 0, list(range(5, 25)))]
    found, expected = (PagedModel(one).step(tokens)[0] for one in (kept, load(folder)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4)
    rounded = load(folder, quantization="fp8", ops=Ops())
    for layer in layers(rounded):
        assert isinstance(layer.down.weights, Float8Weights)  # type: ignore[union-attr]
    assert 1e-6 < divergence(rounded, folder) < 0.2
