"""`termgen tune`: what it prints, and its errors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_harness import nobodys_settings, one_line_error, run

from termgen.commands import tune_command
from termgen.engine.device.kernels.gemm.candidates import Found, Gpu, candidates_by_rows
from termgen.engine.device.kernels.gemm.small_gemm_config import Shape
from termgen.engine.device.runner import tuning
from termgen.engine.device.runner.tuning import TunedShape

GPU = Gpu("Made-up GPU", (9, 0), 132, 50 << 20, 227 * 1024)


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nobodys_settings(monkeypatch, tmp_path):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


SHAPES = [Shape(4096, 1024), Shape(151936, 1024)]


def measured(shape: Shape) -> TunedShape:
    """A kernel in half the time of cuBLAS for one row, cuBLAS for 32."""
    n, k, weights = shape
    config = candidates_by_rows(n, k, GPU, weights)[1][0]
    kernel = Found(config, 2.04e-6, 4.08e-6)
    return TunedShape(shape, {1: kernel, 8: kernel, 32: Found(None, math.inf, 5e-6)}, 3.21)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A made-up `plan`, with what the command asks of it."""
    asked: dict[str, Any] = {"missing": SHAPES, "error": None}

    def run_all() -> Iterator[TunedShape]:
        for shape in asked["missing"]:
            yield measured(shape)
            if asked["error"] is not None:
                raise asked["error"]

    def plan(path: Path, *, again: bool, quantization: str) -> Any:
        asked.update(path=path, again=again, quantization=quantization)
        tables = SimpleNamespace(gpu=GPU, folder=Path("cache/tuned"))
        return SimpleNamespace(tables=tables, shapes=SHAPES, missing=asked["missing"], run=run_all)

    monkeypatch.setattr(tuning, "plan", plan)
    return asked


def test_each_shape_is_a_line(
    model: Path, planned: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "tune", str(model))
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert lines == [
        f"{model.name} on Made-up GPU: 2 shapes to measure",
        "WEIGHT          1 row           8 rows          32 rows         TOOK",
        "4096 x 1024     2.0 us 50%      2.0 us 50%      5.0 us 100%     3.2 s",
        "151936 x 1024   2.0 us 50%      2.0 us 50%      5.0 us 100%     3.2 s",
    ]
    assert last == "measured 2 shapes in 0 s: engines that start from now on use them"
    assert planned["path"] == model and planned["again"] is False
    assert planned["quantization"] == "auto"


def test_a_line_says_how_a_weight_is_stored(
    model: Path, planned: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    planned["missing"] = [Shape(151936, 1024, "fp8-blocks"), Shape(512, 512)]
    code, out, _ = run(capsys, "tune", "--quantization", "fp8", str(model))
    assert code == 0 and planned["quantization"] == "fp8"
    assert out.splitlines()[1:4] == [
        "WEIGHT                    1 row           8 rows          32 rows         TOOK",
        "151936 x 1024 fp8-blocks  2.0 us 50%      2.0 us 50%      5.0 us 100%     3.2 s",
        "512 x 512                 2.0 us 50%      2.0 us 50%      5.0 us 100%     3.2 s",
    ]


def test_there_may_be_nothing_left(
    model: Path, planned: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    planned["missing"] = []
    code, out, _ = run(capsys, "tune", str(model))
    assert code == 0
    assert out == (
        f"all 2 shapes of {model.name} have been measured on this GPU (--again measures them "
        "again)\n"
    )
    run(capsys, "tune", "--again", str(model))
    assert planned["again"] is True


def test_a_folder_that_cannot_be_written(
    model: Path, planned: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    planned["error"] = OSError(28, "No space left on device")
    code, out, err = run(capsys, "tune", str(model))
    assert code == 2 and "4096 x 1024" in out
    assert err == (
        "termgen: error: cannot write to cache/tuned: No space left on device; TERMGEN_CACHE sets "
        "another folder\n"
    )


def test_in_the_background_it_belongs_to_an_engine(
    model: Path,
    planned: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched: list[object] = []
    monkeypatch.setattr(tune_command, "run_while_owned", watched.append)
    run(capsys, "tune", str(model))
    assert watched == []
    code, _, _ = run(capsys, "tune", "--background", str(model))
    assert code == 0 and watched == [sys.stdin.read]


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such-model" in one_line_error(capsys, "tune", "no-such-model")


def test_without_a_gpu_it_says_so(model: Path) -> None:
    """The whole command, in a process that sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "termgen", "tune", str(model)],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "termgen: error: `termgen tune` measures on an NVIDIA GPU, and this torch"
    )
    assert done.stderr.count("\n") == 1
