"""The forms that weights will have, known without them: those of the loaded model, and of no other
one, are what `termgen tune` measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_samples import write_model
from paged_model import CPU, build
from quantized_weights import Write, awq, fp8_blocks, gptq, packed, quantize_folder, scaled
from triton_device import require_triton

from termgen.engine.device import kernels
from termgen.engine.device.layers.linear import FloatLinear, LinearMethodFactory
from termgen.engine.device.loader import open_checkpoint
from termgen.engine.device.loader.weights import load_weights
from termgen.engine.device.models import registry
from termgen.engine.device.runner.tuning import linear_shapes, planned_shapes
from termgen.errors import CorruptFileError

require_triton()

from termgen.engine.device.kernels.gemm.small_gemm_config import Shape  # noqa: E402
from termgen.engine.device.quantization.float8 import Float8Linears  # noqa: E402
from termgen.engine.device.quantization.int8_groups import GroupLinears  # noqa: E402

TinyModelDir = Callable[..., Path]
GPU = torch.device("cuda")
Q = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 256, "intermediate_size": 320}
GPTQ = {"quant_method": "gptq", "bits": 4}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FOLDERS: dict[str, tuple[dict[str, Any], Write]] = {
    "GPTQ": (GPTQ, gptq(4, 64)),
    "GPTQ, 8 bits": ({**GPTQ, "bits": 8}, gptq(8, 64)),
    "GPTQ, groups in disorder": ({**GPTQ, "desc_act": True}, gptq(4, 32, in_order=False)),
    "AWQ": ({"quant_method": "awq"}, awq(32)),
    "3 bits": (PACKED, packed(3, group=32, symmetric=False)),
    "groups of 16": (PACKED, packed(4, group=16)),
    "blocks of 8-bit floats": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8_blocks(128, 128),
    ),
    "rows of 8-bit floats": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        scaled("float", strategy="channel"),
    ),
}

IN_4_BITS = ("GPTQ", "GPTQ, groups in disorder", "AWQ", "3 bits")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, registry):
        monkeypatch.setattr(module, "why_unusable", lambda *_, **__: "")


def loaded_shapes(path: Path, quantization: str) -> list[Shape]:
    """Those of a model that was loaded with the layers of a GPU."""
    groups = GroupLinears()
    methods: dict[str, tuple[LinearMethodFactory, LinearMethodFactory]] = {
        "int8": (groups, groups),
        "q4": (groups.in_4_bits, groups),
        "fp8": (Float8Linears(), FloatLinear),
    }
    checkpoint = open_checkpoint(path)
    method, of_tables = methods[quantization]
    real = registry.make_build

    def make(*args: Any, **options: Any) -> Any:
        made = real(*args, **options | {"quantization": None})
        return registry.replace(
            made, method=method, table_method=of_tables, router_method=FloatLinear
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "make_build", make)
        model = build(checkpoint.config, dtype=torch.bfloat16, device=CPU)
    load_weights(model, checkpoint)
    model.finalize()
    checkpoint.close()
    return linear_shapes(model)


@pytest.mark.parametrize("quantization", ["int8", "q4", "fp8"])
def test_floats_are_rounded(tiny_model_dir: TinyModelDir, quantization: str) -> None:
    folder = tiny_model_dir("llama", **SIZES)
    found = planned_shapes(folder, GPU, quantization)
    assert found == loaded_shapes(folder, quantization)
    form = {"int8": "int8", "q4": "int4", "fp8": "fp8"}[quantization]
    of_head = {"int8": "int8", "q4": "int8", "fp8": "half"}[quantization]
    assert {shape.weights for shape in found if shape.n != 512 or shape.k != 256} == {form}
    assert Shape(512, 256, of_head) in found  # type: ignore[arg-type]
    assert planned_shapes(folder, GPU, "none") == planned_shapes(folder, GPU, "auto")
    assert {shape.weights for shape in planned_shapes(folder, GPU, "none")} == {"half"}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_keep_what_can_be_kept(
    name: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    config, write = FOLDERS[name]
    folder, _ = quantize_folder(tiny_model_dir("llama", **SIZES), tmp_path / "m", config, write)
    expected = {
        "int8": "int4" if name in IN_4_BITS else "int8",
        "q4": "int4",
        "fp8": "fp8-blocks" if name == "blocks of 8-bit floats" else "fp8",
    }
    for quantization, form in expected.items():
        found = planned_shapes(folder, GPU, quantization)
        assert found == loaded_shapes(folder, quantization)
        of_layers = {shape.weights for shape in found if shape.n != 512 or shape.k != 256}
        assert of_layers == {form}, quantization


@pytest.mark.parametrize("quantization", ["int8", "q4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_of_several_types(
    family: str, quantization: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    """Matrices of one layer that are multiplied together have runs of rows of both widths."""
    quants = {"v_proj": Q.Q8_0, "gate_proj": Q.Q5_1, "embed": Q.Q8_0, "down_proj": Q.Q4_1}
    source = tiny_model_dir(family, **SIZES)
    path = write_model(source, tmp_path / "m.gguf", arch=family, quant=Q.Q4_0, quants=quants)
    found = planned_shapes(path, GPU, quantization)
    assert found == loaded_shapes(path, quantization)
    forms = [shape.weights for shape in found]
    if quantization == "int8":
        # q and k; v; the output; gate; up; down; and the head.
        assert forms == ["int4", "int8", "int4", "int8", "int4", "int4", "int4"]
    else:
        assert forms[:-1] == ["int4"] * (len(forms) - 1)


def test_what_is_found_by_default(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """auto, as an engine resolves it."""
    source = tiny_model_dir("qwen3", **SIZES)
    path = write_model(source, tmp_path / "m.gguf", arch="qwen3", quant=Q.Q8_0)
    folder, _ = quantize_folder(source, tmp_path / "fp8", *FOLDERS["blocks of 8-bit floats"])
    assert planned_shapes(path, GPU, "auto") == planned_shapes(path, GPU, "int8")
    assert planned_shapes(folder, GPU, "auto") == planned_shapes(folder, GPU, "fp8")
    assert planned_shapes(folder, GPU, "int8") != planned_shapes(folder, GPU, "fp8")


def test_routers_and_experts(tiny_model_dir: TinyModelDir) -> None:
    """Routers stay in 16 bits; experts are no linear layers."""
    folder = tiny_model_dir("qwen3_moe")
    found = planned_shapes(folder, GPU, "q4")
    halves = [shape for shape in found if shape.weights == "half"]
    assert halves == [Shape(8, 64)]
    in_float8 = planned_shapes(folder, GPU, "fp8")
    assert {shape for shape in in_float8 if shape.weights == "half"} == {
        Shape(8, 64),
        Shape(512, 64),  # the head
    }


def test_a_model_without_weights(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """Its weights will be made up, and rounded. Other faults of a folder are not passed over."""
    source = tiny_model_dir("llama", **SIZES)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert planned_shapes(tmp_path, GPU, "int8") == planned_shapes(source, GPU, "int8")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CorruptFileError):
        planned_shapes(tmp_path, GPU, "int8")
