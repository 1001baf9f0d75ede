"""Timing of products: how many copies of a weight it needs, and its parts on a GPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_device import DEVICES, require_triton

require_triton()

from termgen.engine.device.kernels import launch  # noqa: E402
from termgen.engine.device.kernels.gemm import timed_weights  # noqa: E402
from termgen.engine.device.kernels.gemm.candidates import Gpu, candidates_by_rows  # noqa: E402
from termgen.engine.device.kernels.gemm.small_gemm_config import Shape, Weights  # noqa: E402
from termgen.engine.device.kernels.gemm.timed_weights import FORMS  # noqa: E402
from termgen.engine.device.kernels.gemm.timing import (  # noqa: E402
    Products,
    compile_all,
    error_of,
    make_workspace,
    num_copies,
)

PROGRAM = Path(__file__).with_name("compiled_without_gpu.py")


@pytest.mark.parametrize("l2_mib", [6, 40, 50, 126])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (1024, 1024), (4096, 14336), (151936, 1024)])
def test_the_copies_of_a_weight_do_not_fit_the_cache(n: int, k: int, l2_mib: int) -> None:
    gpu = Gpu("made up", (8, 0), 108, l2_mib << 20, 99 * 1024)
    copies = num_copies(n, k, gpu)
    assert copies * 2 * n * k >= 2.4 * gpu.l2_bytes
    assert copies == 1 or (copies - 1) * 2 * n * k < 2.4 * gpu.l2_bytes


def test_what_was_not_written_is_an_error_without_bound() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert error_of(torch.tensor([1.0, -3.0]), expected) == 0.25
    assert error_of(torch.tensor([1.0, math.nan]), expected) == math.inf


def test_a_workspace_is_large_enough_for_each() -> None:
    gpu = Gpu("made up", (9, 0), 132, 50 << 20, 227 * 1024)
    configs = [c for tried in candidates_by_rows(1024, 4096, gpu).values() for c in tried]
    assert any(config.splits > 1 for config in configs)
    workspace = make_workspace(configs, 1024, torch.device("cpu"))
    assert workspace.partial.numel() == max(c.partial_values(1024) for c in configs)
    assert workspace.arrivals.numel() == max(c.tiles(1024) for c in configs)
    assert make_workspace([], 1024, torch.device("cpu")).partial.numel() == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8", "fp8-blocks"])
@pytest.mark.parametrize("k", [256, 416])
def test_both_ways_multiply_the_same_weight(device: str, weights: Weights, k: int) -> None:
    n, form = 48, FORMS[weights]
    gpu = Gpu("made up", (9, 0), 132, 50 << 20, 227 * 1024)
    weight = form.make(n, k, torch.Generator(device).manual_seed(1))
    num_bytes = sum(part.nbytes for part in weight)
    padding = 0.25 if weights.startswith("fp8") and k % 256 else 0
    assert form.item_bytes <= num_bytes / (n * k) <= (1 + padding) * form.item_bytes + 0.05
    wide = form.widen(weight, slice(0, n), k)
    assert wide.shape == (n, k) and 0.05 < wide.float().std() < 2
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(2)).to(device)
    expected = x.half().float() @ wide.float().T
    config = candidates_by_rows(n, k, gpu, weights)[2][0]
    out = form.multiply(
        x.half(), weight, config=config, workspace=make_workspace([config], n, x.device)
    )
    assert error_of(out, expected) < 1e-2
    out = torch.full((2, n), math.nan, dtype=torch.bfloat16, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed_weights, "PART_NUMBERS", 16 * k)  # more than one part
        form.multiply_wide(x.bfloat16(), weight, out)
    assert error_of(out, x.bfloat16().float() @ wide.float().T) < 1e-2


@pytest.mark.gpu
def test_times_grow_with_the_weight() -> None:
    device = torch.device("cuda:0")
    gpu = Gpu.of(device)
    seconds = []
    for n in (1024, 16384):
        configs = candidates_by_rows(n, 2048, gpu)[1]
        assert compile_all([(config, 2048) for config in configs], device) == set()
        timer = Products(Shape(n, 2048), gpu, device).timer(1, configs)
        times = [timer(config) for config in [None, *configs]]
        assert all(1e-7 < time < 1e-3 for time in times)
        seconds.append(min(times))
    assert seconds[1] > 3 * seconds[0], "64 MB take longer than 4 MB"


def test_candidates_compile_for_generations_before_hopper() -> None:
    """They fit in a program's shared memory, and have no instruction of a later generation."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(found["arch"], found["kind"]) for found in compiled} == {
        (arch, kind) for arch in (80, 89, 90) for kind in ("gemv", "held", "mma")
    }
    for found in compiled:
        assert 0 <= found["shared"] <= found["has"], found
        assert bool(found["hopper_only"]) == (found["arch"] == 90), found


@pytest.mark.parametrize(
    ("capability", "is_early"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_only_hopper_and_later_start_early(
    capability: tuple[int, int], is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launch, "has_pdl", launch.has_pdl.__wrapped__)
    options = launch.pdl_options(torch.device("cuda"))
    assert options == ({"USE_PDL": True, "launch_pdl": True} if is_early else {"USE_PDL": False})
