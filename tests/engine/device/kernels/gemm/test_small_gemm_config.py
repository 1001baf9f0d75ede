"""Tilings of small products: candidates that can run, and the choice among measured ones."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from termgen.engine.device.kernels.gemm.candidates import (
    CLOSE,
    FINAL_ROUNDS,
    MAX_FINALISTS,
    TIE,
    Gpu,
    candidates,
    candidates_by_rows,
    search,
)
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    MAX_ROWS,
    ROW_BANDS,
    SmallGemmConfig,
    band_of,
    choose,
)
from termgen.engine.device.kernels.gemm.small_gemm_table import MEASURED

HOPPER = Gpu("H100", (9, 0), 132, 50 << 20, 227 * 1024)
AMPERE = Gpu("A100", (8, 0), 108, 40 << 20, 163 * 1024)
ADA = Gpu("L4", (8, 9), 58, 48 << 20, 99 * 1024)
BF16 = torch.bfloat16
CUDA = torch.device("cuda")
SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024), (4096, 14336), (960, 576)]


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE, ADA], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 16, 17, 33, MAX_ROWS])
def test_candidates(m: int, n: int, k: int, gpu: Gpu) -> None:
    found = candidates(m, n, k, BF16, gpu)
    assert 1 <= len(found) <= 16 and len(set(found)) == len(found)
    for config in found:
        assert config.block_m >= m
        assert config.splits * 2 <= max(2, -(-k // config.block_k))
        if config.kind == "gemv":
            assert config.block_k % (256 * config.num_warps) == 0 and config.splits == 1
        elif config.kind == "held":
            assert config.held_steps(k) * config.num_warps * config.block_k == k
            assert config.held_bytes(k) <= gpu.shared_bytes - 27 * 1024 and config.splits == 1
        else:
            tile_bytes = 2 * config.block_k * (config.block_n + config.block_m)
            assert tile_bytes * config.num_stages <= gpu.shared_bytes


def test_float32_is_not_multiplied_by_matrix_units() -> None:
    assert all(config.kind == "gemv" for config in candidates(1, 1024, 1024, torch.float32, HOPPER))
    assert candidates(16, 1024, 1024, torch.float32, HOPPER) == []


def test_candidates_follow_the_device() -> None:
    """K is cut until every multiprocessor has work, and a program that starts late prefetches
    nothing: both depend on their number."""
    few = replace(HOPPER, num_sms=16)
    many_splits, few_splits = (
        max(config.splits for config in candidates(64, 1024, 4096, BF16, gpu))
        for gpu in (HOPPER, few)
    )
    assert (many_splits, few_splits) == (16, 4)
    asks, asks_not = (
        {c.prefetch_bytes for c in candidates(64, 6144, 1024, BF16, gpu) if c.block_n == 64}
        for gpu in (HOPPER, few)
    )
    assert (asks, asks_not) == ({32768}, {0})


def test_what_is_shipped_is_among_the_candidates_of_its_device() -> None:
    for (n, k), by_rows in MEASURED.items():
        tried = candidates_by_rows(n, k, HOPPER)
        assert by_rows.keys() == set(ROW_BANDS) == tried.keys()
        for rows, config in by_rows.items():
            assert config is None or config in tried[rows], (n, k, rows)


def test_a_count_of_rows_goes_by_the_next_measured_one() -> None:
    assert [band_of(m) for m in (1, 2, 3, 4, 5, 9, 16, 17, 33, 64)] == [
        *(1, 2, 4, 4, 8, 16, 16, 32, 64, 64)
    ]


@pytest.mark.parametrize(
    ("says", "capability", "shared"),
    [
        ({"shared_memory_per_block_optin": 232448}, (9, 0), 227 * 1024),
        ({}, (9, 0), 227 * 1024),
        ({}, (8, 0), 163 * 1024),
        ({}, (8, 6), 99 * 1024),
        ({}, (12, 0), 99 * 1024),
    ],
)
def test_the_facts_are_those_of_the_device(
    says: dict[str, int],
    capability: tuple[int, int],
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    major, minor = capability
    facts = {"name": "X", "major": major, "minor": minor, "multi_processor_count": 108}
    found = SimpleNamespace(**facts, L2_cache_size=40 << 20, **says)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert Gpu.of(CUDA) == Gpu("X", capability, 108, 40 << 20, shared)


# The search, by made-up times.

A, B, C, D, E, F = (SmallGemmConfig("gemv", 1, 2 + n, 1024, 4) for n in range(6))


class Times:
    """Times of successive measurements; the last one of each is repeated."""

    def __init__(self, library: list[float], **others: list[float]) -> None:
        self._left = {None: library} | {globals()[name]: times for name, times in others.items()}
        self.asked: list[SmallGemmConfig | None] = []

    def __call__(self, config: SmallGemmConfig | None) -> float:
        self.asked.append(config)
        times = self._left[config]
        return times.pop(0) if len(times) > 1 else times[0]


def test_the_fastest_is_chosen() -> None:
    times = Times([5.0], A=[4.0], B=[3.0], C=[6.0])
    found = search([A, B, C], times)
    assert found.choice == B and found.seconds == 3.0 and found.library_seconds == 5.0
    assert found.chosen_seconds == 3.0
    assert times.asked == [None, A, B, C, *[None, B] * FINAL_ROUNDS]


def test_a_disturbed_measurement_is_taken_again() -> None:
    close = 3.0 * CLOSE - 0.01
    found = search([A, B], Times([9.0], A=[3.0], B=[close, 2.8]))
    assert found.choice == B and found.seconds == 2.8
    disturbed = search([A], Times([9.0, 3.0], A=[4.0]))
    assert disturbed.choice is None and disturbed.chosen_seconds == 3.0, "cuBLAS, too"


def test_at_most_some_are_timed_again() -> None:
    times = Times([9.0], A=[3.0], B=[3.01], C=[3.02], D=[3.03], E=[3.04], F=[9.0])
    assert search([F, E, D, C, B, A], times).choice == A
    assert times.asked[7:11] == [None, A, B, C] and times.asked.count(E) == 1
    assert len(times.asked) == 7 + FINAL_ROUNDS * (1 + MAX_FINALISTS)


def test_cublas_stays_unless_it_is_beaten_clearly() -> None:
    assert search([A], Times([3.0 * TIE - 0.001], A=[3.0])).choice is None
    assert search([A], Times([3.0 * TIE + 0.001], A=[3.0])).choice == A


def test_kernels_that_overlap_with_others_may_be_a_little_slower_alone() -> None:
    gpus = [Gpu("", capability, 100, 2**25, 2**17) for capability in ((8, 9), (9, 0), (10, 0))]
    ties = [gpu.tie for gpu in gpus]
    assert ties[0] > 1 > ties[1] == ties[2]
    assert search([A], Times([2.95], A=[3.0]), ties[0]).choice is None
    assert search([A], Times([2.95], A=[3.0]), ties[1]).choice == A
    assert search([A], Times([2.85], A=[3.0]), ties[1]).choice is None


def test_there_may_be_no_candidate_that_runs() -> None:
    for tried in ([], [A, B]):
        found = search(tried, Times([3.0], A=[math.inf], B=[math.inf]))
        assert found.choice is None and found.chosen_seconds == 3.0 and found.seconds == math.inf


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
