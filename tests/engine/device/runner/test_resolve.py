"""The effect of a machine's GPU, or of its absence, on the device setting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_experts import write_experts

from termgen.config import EngineConfig
from termgen.engine.device import kernels
from termgen.engine.device.loader import load_model_config
from termgen.engine.device.runner import resolve
from termgen.engine.device.runner.resolve import (
    resolve_device,
    resolve_quantization,
    resolve_wait,
    seats_for_states,
)
from termgen.errors import ConfigError

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it."


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch behave as its CUDA build does with a driver that it cannot use."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidia0" or exists(self))


@pytest.mark.usefixtures("old_driver")
def test_a_driver_too_old_is_named_with_the_fallback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="device cuda: .*too old .*11040.*; use device cpu") as e:
        resolve_device("cuda")
    assert e.value.param == "device" and "\n" not in str(e.value)
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto") == torch.device("cpu")
    assert "too old" in caplog.text and "using the CPU" in caplog.text


@pytest.mark.usefixtures("old_driver")
def test_the_cpu_needs_no_driver(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_device("cpu") == torch.device("cpu")
    assert not caplog.text


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="has no CUDA support; use device cpu"):
        resolve_device("cuda")


def test_a_gpu_is_taken_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("wait", "num_cpus", "spins"),
    [("auto", 3, False), ("auto", 4, True), ("spin", 1, True), ("sleep", 64, False)],
)
def test_a_cpu_is_kept_busy_by_waiting_only_where_others_are_left(
    wait: str, num_cpus: int, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "usable_cpus", lambda: range(num_cpus))
    assert resolve_wait(wait) == spins


@pytest.mark.parametrize(
    ("state_mib", "total_gib", "expected"),
    [(144, 141, 128), (60, 141, 256), (144, 24, 32), (1, 24, 256), (9000, 24, 1)],
)
def test_states_take_no_more_than_their_share(
    state_mib: int, total_gib: int, expected: int
) -> None:
    assert seats_for_states(256, state_mib * 2**20, total_gib * 2**30) == expected


@pytest.mark.parametrize(
    ("type_", "options", "expected"),
    [
        ("Q8_0", {}, "int8"),
        ("Q4_0", {}, "int8"),
        ("F16", {}, None),
        ("Q8_0", {"quantization": "none"}, None),
        ("Q8_0", {"quantization": "q4"}, "q4"),
        ("Q8_0", {"dtype": "bfloat16"}, None),
        ("Q8_0", {"load_format": "dummy"}, None),
    ],
)
def test_files_of_blocks_stay_so_on_a_gpu(
    type_: str,
    options: dict[str, Any],
    expected: str | None,
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model_dir("qwen3_moe", moe_intermediate_size=32)
    quant = gguf.GGMLQuantizationType[type_]
    path = write_experts(folder, tmp_path / "m.gguf", "qwen3moe", quant=quant)
    config, model = EngineConfig(model=str(path), **options), load_model_config(path)
    monkeypatch.setattr(kernels, "why_unusable", lambda device: "")
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert resolve_quantization(config, model, cuda, path) == expected
    # A model this small gains nothing on a CPU.
    on_cpu = resolve_quantization(config, model, cpu, path)
    assert on_cpu == (expected if "quantization" in options else None)
    monkeypatch.setattr(kernels, "why_unusable", lambda device: "no Triton")
    if "quantization" not in options:
        assert resolve_quantization(config, model, cuda, path) is None


def test_a_folder_of_floats_stays_floats_on_a_gpu(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir("qwen3_moe")
    monkeypatch.setattr(kernels, "why_unusable", lambda device: "")
    config = EngineConfig(model=str(folder))
    model = load_model_config(folder)
    assert resolve_quantization(config, model, torch.device("cuda:0"), folder) is None
