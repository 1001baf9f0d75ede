"""The configurations of `small_gemm` that `gpu_gemm.py` times for a shape."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from termgen.engine.device.kernels.gemm.small_gemm_config import SmallGemmConfig
from termgen.engine.device.kernels.launch import next_power_of_2

_MAX_GEMV_ROWS = 4
_MIN_MMA_ROWS = 16
_NUM_SMS = 132
_SPLITS = (1, 2, 4, 8, 16)
_MAX_CANDIDATES = 16
_MIN_HELD_ROWS, _MAX_HELD_ROWS = 8, 32
_MAX_HELD_VALUES = 256
"""Values of the weight that a thread moves, at most: what is in flight must be in registers."""
_MAX_WAVES = 4
"""Programs for each multiprocessor up to which most of them start before the kernel ahead ends."""


def candidates(m: int, n: int, k: int, dtype: torch.dtype) -> list[SmallGemmConfig]:
    """Candidates worth timing for this shape, at most a dozen, the likelier ones first."""
    found: list[SmallGemmConfig] = []
    if m <= _MAX_GEMV_ROWS:
        found += _gemv_candidates(next_power_of_2(m), k)
    if dtype.itemsize == 2:
        if m <= _MAX_HELD_ROWS:
            found += _held_candidates(max(_MIN_HELD_ROWS, next_power_of_2(m)), k)
        block_m = max(_MIN_MMA_ROWS, next_power_of_2(m))
        found += _mma_candidates(block_m, n, k, _MAX_CANDIDATES - len(found))
    return [_without_late_prefetch(config, n) for config in found[:_MAX_CANDIDATES]]


def _without_late_prefetch(config: SmallGemmConfig, n: int) -> SmallGemmConfig:
    """A program that starts late loads at once: asking for the same bytes before only costs."""
    programs = config.tiles(n) * config.splits
    if programs > _MAX_WAVES * _NUM_SMS:
        return replace(config, prefetch_bytes=0)
    return config


def _gemv_candidates(block_m: int, k: int) -> list[SmallGemmConfig]:
    shapes = [(4, 1024, 4, 1), (8, 1024, 4, 1)]  # block_n, block_k, num_warps, num_stages
    if k >= 2048:
        shapes += [(4, 2048, 4, 1), (4, 2048, 8, 1), (8, 2048, 8, 1)]
    else:
        shapes += [(2, 1024, 4, 1), (8, 512, 2, 1)]
    if k > 2048:
        shapes += [(4, 1024, 4, 4), (8, 1024, 4, 3), (8, 1024, 4, 4)]
    return [SmallGemmConfig("gemv", block_m, *shape) for shape in shapes]


def _held_candidates(block_m: int, k: int) -> list[SmallGemmConfig]:
    found = []
    for block_n in (16, 32):
        for num_warps in (4, 8):
            values = block_n * k // (32 * num_warps)
            block_k = math.gcd(k // num_warps, 256) if k % num_warps == 0 else 0
            if block_k < 64 or values > _MAX_HELD_VALUES:
                continue
            config = SmallGemmConfig("held", block_m, block_n, block_k, num_warps, prefetch_bytes=0)
            if config.can_run(k):
                found.append(config)
    return found


def _mma_candidates(block_m: int, n: int, k: int, limit: int) -> list[SmallGemmConfig]:
    shapes = {  # block_n, block_k, num_warps, num_stages
        16: [(64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 3), (16, 256, 2, 4), (128, 128, 4, 3)],
        32: [(64, 128, 4, 4), (128, 128, 8, 3), (64, 256, 4, 3), (128, 64, 4, 4), (32, 256, 4, 3)],
        64: [(64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (64, 64, 4, 5), (64, 128, 4, 4)],
    }[block_m]
    firsts: list[SmallGemmConfig] = []
    seconds: list[SmallGemmConfig] = []
    for block_n, block_k, num_warps, num_stages in shapes:
        tiles, steps = -(-n // block_n), -(-k // block_k)
        for place, splits in enumerate(_split_choices(tiles, steps)):
            config = SmallGemmConfig(
                "mma", block_m, block_n, block_k, num_warps, num_stages, splits
            )
            (seconds if place else firsts).append(config)
    return (firsts + seconds)[:limit]


def _split_choices(tiles: int, steps: int) -> list[int]:
    """At most two, by how evenly they load the multiprocessors; of equals, the smaller."""
    most = max(1, min(steps // 2, 4 * _NUM_SMS // tiles))

    def evenness(splits: int) -> float:
        # Every program pays for its own start and for its part of the sum.
        load = -(-tiles * splits // _NUM_SMS) * -(-steps // splits)
        return load + (0.5 if splits > 1 else 0.0) + 0.05 * splits

    return sorted((s for s in _SPLITS if s <= most), key=evenness)[:2]
