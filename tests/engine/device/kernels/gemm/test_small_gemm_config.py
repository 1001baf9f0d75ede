"""Tilings of small products: candidates that can run, and the choice among measured ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks"))
from gpu_gemm import candidates

from termgen.engine.device.kernels.gemm.small_gemm_config import (
    MAX_ROWS,
    SmallGemmConfig,
    choose,
)

BF16 = torch.bfloat16
CUDA = torch.device("cuda")
SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (4096, 14336), (960, 576)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 16, 17, 33, MAX_ROWS])
def test_candidates(m: int, n: int, k: int) -> None:
    found = candidates(m, n, k, BF16)
    assert 1 <= len(found) <= 16 and len(set(found)) == len(found)
    for config in found:
        assert config.block_m >= m
        assert config.splits * 2 <= max(2, -(-k // config.block_k))
        if config.kind == "gemv":
            assert config.block_k % (256 * config.num_warps) == 0 and config.splits == 1
        elif config.kind == "held":
            assert config.held_steps(k) * config.num_warps * config.block_k == k
            assert config.held_bytes(k) <= 200 * 1024 and config.splits == 1
        else:
            tile_bytes = 2 * config.block_k * (config.block_n + config.block_m)
            assert tile_bytes * config.num_stages <= 227 * 1024


def test_float32_is_not_multiplied_by_matrix_units() -> None:
    assert all(config.kind == "gemv" for config in candidates(1, 1024, 1024, torch.float32))
    assert candidates(16, 1024, 1024, torch.float32) == []


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = SmallGemmConfig("gemv", 1, 4, 1024, 4), SmallGemmConfig("mma", 16, 64, 128, 4, 4)
    table = {(4096, 1024): {1: one, 16: many, 32: None}, (28672, 4096): {1: None}}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose(1, 4096, 1024, BF16, CUDA, table) == one
    assert choose(2, 4096, 1024, BF16, CUDA, table) == many
    assert choose(16, 4096, 1024, torch.float16, CUDA, table) == many
    assert choose(17, 4096, 1024, BF16, CUDA, table) is None
    assert choose(33, 4096, 1024, BF16, CUDA, table) is None
    assert choose(1, 3072, 1280, BF16, CUDA, table) == one, "near enough"
    assert choose(1, 1024, 2048, BF16, CUDA, table) is None, "too far"
    assert choose(1, 4096, 1000, BF16, CUDA, table) is None
    assert choose(1, 4096, 1024, torch.float32, CUDA, table) is None
    assert choose(0, 4096, 1024, BF16, CUDA, table) is None
    assert choose(1, 4096, 1024, BF16, torch.device("cpu"), table) is None
    assert choose(1, 4096, 1024, BF16, CUDA, {}) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose(1, 4096, 1024, BF16, CUDA, table) is None
