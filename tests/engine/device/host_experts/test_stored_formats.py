"""Experts in main memory whose numbers a file has in formats of other packages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel, Row, load
from quantized_weights import (
    Write,
    awq,
    fp8_blocks,
    gptq,
    mxfp4,
    nvfp4,
    packed,
    quantize_folder,
    scaled,
)
from test_split_models import Ops, choice
from triton_device import require_triton

from termgen.config import EngineConfig
from termgen.engine.device import kernels
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.runner import cpu_experts
from termgen.engine.device.runner.memory import MemoryAccount
from termgen.engine.device.runner.resolve import resolve_limits
from termgen.errors import ConfigError

require_triton()

from termgen.engine.device.host_experts.host_list import HostExperts  # noqa: E402
from termgen.engine.device.quantization.group_experts import Form  # noqa: E402

TinyModelDir = Callable[..., Path]
COMPRESSED = "compressed-tensors"
FORMATS: dict[str, tuple[dict[str, Any], Write, Form]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, gptq(4, 32), Form.FOUR_BITS),
    "GPTQ, act-order": (
        {"quant_method": "gptq", "bits": 4},
        gptq(4, 32, in_order=False),
        Form.EIGHT_BITS,
    ),
    "AWQ": ({"quant_method": "awq"}, awq(32), Form.FOUR_BITS),
    "W4A16": (
        {"quant_method": COMPRESSED, "format": "pack-quantized"},
        packed(4, group=32),
        Form.FOUR_BITS,
    ),
    "W8A16": ({"quant_method": COMPRESSED, "format": "pack-quantized"}, packed(8), Form.EIGHT_BITS),
    "NVFP4": (
        {"quant_method": COMPRESSED, "format": "nvfp4-pack-quantized"},
        nvfp4,
        Form.EIGHT_BITS,
    ),
    "MXFP4": ({"quant_method": COMPRESSED, "format": "mxfp4-pack-quantized"}, mxfp4, Form.FLOATS),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8_blocks(128, 128),
        Form.EIGHT_BITS,
    ),
    "fp8, rows": (
        {"quant_method": COMPRESSED, "format": "float-quantized"},
        scaled("float", strategy="channel"),
        Form.EIGHT_BITS,
    ),
}
EXPERTS_ALONE = ("gate_proj", "up_proj", "down_proj")
TOKENS = [3, 60, 200, 7, 11, 12]


def quantized(name: str, tiny_model_dir: TinyModelDir, tmp_path: Path) -> tuple[Path, Path]:
    config, write, _ = FORMATS[name]
    source = tiny_model_dir("qwen3_moe", moe_intermediate_size=64)
    return quantize_folder(source, tmp_path / "m", config, write, EXPERTS_ALONE)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_in_two_places(name: str, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """What the CPU has no numbers for is rounded to 8 bits, alike in both places."""
    folder, twin = quantized(name, tiny_model_dir, tmp_path)
    whole = load(folder, quantization="int8")
    split = load(folder, quantization="int8", ops=Ops(), cpu_experts=choice(whole.config, 5))
    for part in ("gate_up", "down"):
        host = split.get_submodule(f"layers.0.mlp.{part}")
        assert isinstance(host, HostExperts) and host.form is FORMATS[name][2]
    rows = [Row(0, 0, TOKENS)]
    found = PagedModel(split).step(rows)[0]
    near = {"rtol": 1e-3, "atol": 3e-3}
    torch.testing.assert_close(found, PagedModel(whole).step(rows)[0], **near)
    expected = PagedModel(load(twin)).step(rows)[0].double().log_softmax(-1)
    divergence = (expected.exp() * (expected - found.double().log_softmax(-1))).sum(-1)
    assert float(divergence.mean()) < 0.03


class Memory:
    """The part of a memory account that the choice needs."""

    limit = 2**30

    def __init__(self, room: int) -> None:
        self.room = room

    def room_for_kv(self, limit: int) -> int:
        return self.room


@pytest.fixture
def choose(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., cpu_experts.CpuExperts | None]:
    folder, _ = quantized("fp8, blocks", tiny_model_dir, tmp_path)
    monkeypatch.setattr(cpu_experts, "why_unusable", lambda *_, **__: "")
    monkeypatch.setattr(kernels, "why_unusable", lambda *_, **__: "")
    model = load_model_config(folder)

    def made(wanted: str, quantization: str, room: int) -> cpu_experts.CpuExperts | None:
        config = EngineConfig(model=str(folder), cpu_experts=wanted)
        limits = resolve_limits(config, model, torch.device("cpu"))
        memory: Any = Memory(room)
        assert isinstance(memory, Memory | MemoryAccount)
        device = torch.device("cuda:0")
        return cpu_experts.choose_cpu_experts(
            config, model, limits, device, folder, quantization, memory
        )

    return made


def test_8_bit_floats_are_refused_with_what_works(
    choose: Callable[..., cpu_experts.CpuExperts | None],
) -> None:
    with pytest.raises(
        ConfigError, match="cpu_experts 3: the CPU computes no 8-bit floats; add .* int8 or q4"
    ) as error:
        choose("3", "fp8", 2**30)
    assert error.value.param == "cpu_experts"
    made = choose("3", "int8", 2**30)
    assert made is not None and made.num_wanted == 3


def test_8_bit_floats_that_do_not_fit_are_a_warning(
    choose: Callable[..., cpu_experts.CpuExperts | None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose("auto", "fp8", 2**30) is None
        assert not caplog.records
        assert choose("auto", "fp8", 1000) is None
    assert "experts stay on the GPU: the CPU computes no 8-bit floats" in caplog.text


def test_the_bytes_of_a_model_are_those_of_its_files(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder, _ = quantized("GPTQ", tiny_model_dir, tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    assert cpu_experts._file_bytes(folder) == size
    assert cpu_experts._file_bytes(folder / "model.safetensors") == size
    assert cpu_experts._file_bytes(folder / "config.json") == 0
