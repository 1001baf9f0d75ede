"""Configurations worth timing for a shape on a GPU, of `small_gemm` and of its siblings for weights
that are not in 16 bits; and the search among them.

The search knows no device: the caller times a product. Every GPU has its own candidates, by the
number of its multiprocessors and by the shared memory that a program may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from termgen.engine.device.kernels.gemm.float8_config import float8_cut
from termgen.engine.device.kernels.gemm.group_config import (
    GROUP_COLUMNS,
    SPARE_BYTES,
    WALK_GROUPS,
    group_cut,
    stage_bytes,
    walking,
)
from termgen.engine.device.kernels.gemm.small_gemm_config import (
    SHIPPED_CAPABILITY,
    Shape,
    SmallGemmConfig,
    Weights,
    band_of,
)

TIE = 1.02
"""Factor by which a candidate must beat cuBLAS, which stays otherwise."""
OVERLAPPED_TIE = 0.97
"""The same where kernels start before the one ahead has ended, as ours do and cuBLAS's do not. In a
model that gains more than beside products alone: qwen3-4b's decode of 8 rows took 3.43 ms with
cuBLAS where both were level, and 3.29 ms with our kernels (H200)."""
OVERLAP_CAPABILITY = (9, 0)
CLOSE = 1.05
"""Factor within which candidates are timed again: one timing may be disturbed."""
MAX_FINALISTS = 4
FINAL_ROUNDS = 2
_MAX_GEMV_ROWS = 4
_MIN_MMA_ROWS = 16
_SPLITS = (1, 2, 4, 8, 16)
_MAX_CANDIDATES = 16
_MIN_HELD_ROWS, _MAX_HELD_ROWS = 8, 32
_MAX_HELD_VALUES = 256
"""Values of the weight that a thread moves, at most: what is in flight must be in registers."""
_MAX_WAVES = 4
"""Programs for each multiprocessor up to which most of them start before the kernel ahead ends."""
_SPARE_BYTES = 27 * 1024
"""Shared memory that `held` leaves to the sums of its warps."""
_GEMV_SHAPES = {  # block_n, block_k, num_warps, num_stages
    "any": [(4, 1024, 4, 1), (8, 1024, 4, 1)],
    "below 2048": [(2, 1024, 4, 1), (8, 512, 2, 1)],
    "from 2048": [(4, 2048, 4, 1), (4, 2048, 8, 1), (8, 2048, 8, 1)],
    "above 2048": [(4, 1024, 4, 4), (8, 1024, 4, 3), (8, 1024, 4, 4)],
}
_MMA_SHAPES = {  # block_n, block_k, num_warps, num_stages
    16: [(64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 3), (16, 256, 2, 4), (128, 128, 4, 3)],
    32: [(64, 128, 4, 4), (128, 128, 8, 3), (64, 256, 4, 3), (128, 64, 4, 4), (32, 256, 4, 3)],
    64: [(64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (64, 64, 4, 5), (64, 128, 4, 4)],
}
_FLOAT8_WORD = 4
"""Columns in a word of `float8_gemm`."""
_FLOAT8_MMA_SHAPES = [  # block_n, block_k, num_warps, num_stages
    *[(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3)],
    (64, 64, 4, 2),  # for GPUs with less shared memory
]
_GROUP_GEMV_WARPS = (1, 2, 4, 8)
"""A thread has a group: a tile is as wide as its warps."""
_MOST_GROUP_GEMV_ROWS = 2
_GROUP_MMA_SHAPES = {  # block_n, block_k, num_warps, num_stages at most
    16: [(128, 4, 4, 4), (128, 4, 8, 4), (128, 8, 8, 3), (64, 4, 4, 4), (64, 8, 4, 3)],
    32: [(128, 4, 8, 4), (128, 4, 4, 3), (64, 4, 4, 4), (64, 8, 4, 3)],
    64: [(128, 4, 8, 4), (128, 4, 8, 3), (128, 4, 4, 3), (64, 4, 4, 4)],
    128: [(128, 4, 8, 4), (128, 4, 8, 3), (128, 2, 8, 4), (64, 4, 8, 3)],
}
_SHARED_BYTES = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024}
"""Compute capability -> shared memory of a program, for a torch that does not say; 99 KiB else."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What candidates and measurements depend on."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    l2_bytes: int
    shared_bytes: int
    """Shared memory that one program may have."""

    @property
    def tie(self) -> float:
        """Factor by which a candidate must beat cuBLAS."""
        return OVERLAPPED_TIE if self.capability >= OVERLAP_CAPABILITY else TIE

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        found = torch.cuda.get_device_properties(device)
        capability = (found.major, found.minor)
        shared = getattr(found, "shared_memory_per_block_optin", 0)
        return cls(
            name=found.name,
            capability=capability,
            num_sms=found.multi_processor_count,
            l2_bytes=found.L2_cache_size,
            shared_bytes=shared or _SHARED_BYTES.get(capability, 99 * 1024),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of one search."""

    choice: SmallGemmConfig | None
    """None: cuBLAS."""
    seconds: float
    """Time of the fastest candidate; infinite if none ran."""
    library_seconds: float
    """Time of cuBLAS."""

    @property
    def chosen_seconds(self) -> float:
        return self.library_seconds if self.choice is None else self.seconds


def search(
    tried: Iterable[SmallGemmConfig],
    time: Callable[[SmallGemmConfig | None], float],
    tie: float = TIE,
) -> Found:
    """The fastest of the candidates and cuBLAS. tie: see `Gpu`.

    time: seconds of one product; None: cuBLAS; infinite for a candidate that cannot run or is
    wrong. Those near the fastest are timed again, in turns with cuBLAS, and the least time counts:
    whatever else happens on the machine only adds to it.
    """
    library = time(None)
    times = {config: time(config) for config in tried}
    fastest = min(times.values(), default=math.inf)
    close = [c for c in times if math.isfinite(times[c]) and times[c] <= CLOSE * fastest]
    finalists = sorted(close, key=times.__getitem__)[:MAX_FINALISTS]
    if not finalists:
        return Found(None, math.inf, library)
    for _ in range(FINAL_ROUNDS):
        library = min(library, time(None))
        for config in finalists:
            times[config] = min(times[config], time(config))
    winner = min(finalists, key=times.__getitem__)
    is_faster = times[winner] * tie < library
    return Found(winner if is_faster else None, times[winner], library)


def candidates_by_rows(
    n: int, k: int, gpu: Gpu, weights: Weights = "half"
) -> dict[int, list[SmallGemmConfig]]:
    """Candidates of a shape in a half type, for each measured number of rows. Of weights that are
    not in 16 bits, what is used without a measurement is among them."""
    bands = Shape(n, k, weights).bands
    if weights == "half":
        return {rows: candidates(rows, n, k, torch.bfloat16, gpu) for rows in bands}
    if weights in ("fp8", "fp8-blocks"):
        return {rows: float8_candidates(rows, n, k, gpu) for rows in bands}
    num_bits = 8 if weights == "int8" else 4
    return {rows: group_candidates(rows, n, k, num_bits, gpu) for rows in bands}


def float8_candidates(m: int, n: int, k: int, gpu: Gpu) -> list[SmallGemmConfig]:
    """Candidates of `float8_gemm`, whose block_k counts words of four columns."""
    found = []
    if m <= _MAX_GEMV_ROWS:
        for config in _gemv_candidates(band_of(m), k):
            found.append(replace(config, block_k=config.block_k // _FLOAT8_WORD))
    for block_n, block_k, num_warps, num_stages in _FLOAT8_MMA_SHAPES:
        block_m = max(_MIN_MMA_ROWS, band_of(m))
        if not _holds_float8(block_m, block_n, block_k, num_stages, gpu):
            continue
        tiles, steps = -(-n // block_n), -(-k // (_FLOAT8_WORD * block_k))
        for splits in _split_choices(tiles, steps, gpu.num_sms):
            found.append(
                SmallGemmConfig("mma", block_m, block_n, block_k, num_warps, num_stages, splits)
            )
    found = [_without_late_prefetch(config, n, gpu) for config in found]
    usual = float8_cut(band_of(m), n, k, gpu.capability == SHIPPED_CAPABILITY)
    sizes = (usual.block_m, usual.block_n, usual.block_k, usual.num_stages)
    if usual.kind == "gemv" or _holds_float8(*sizes, gpu):
        found.append(usual)
    return list(dict.fromkeys(found))


def _holds_float8(block_m: int, block_n: int, block_k: int, num_stages: int, gpu: Gpu) -> bool:
    tile_bytes = _FLOAT8_WORD * block_k * (block_n + 2 * block_m)
    return tile_bytes * num_stages <= gpu.shared_bytes


def group_candidates(m: int, n: int, k: int, num_bits: int, gpu: Gpu) -> list[SmallGemmConfig]:
    """Candidates of `group_gemm`, whose block_k counts groups; m: one of `GROUP_BANDS`."""
    usual = group_cut(m, n, k, num_bits, item_bytes=2, shared_bytes=gpu.shared_bytes)
    groups = -(-k // GROUP_COLUMNS)
    found = [usual]
    if m <= _MOST_GROUP_GEMV_ROWS:
        for num_warps in _GROUP_GEMV_WARPS:
            width = 32 * num_warps
            if num_warps > 1 and width >= 2 * groups:
                continue
            found += [SmallGemmConfig("gemv", m, rows, width, num_warps) for rows in (4, 8)]
        if m == 1 and groups <= WALK_GROUPS:
            found += [walking(m, rows, groups) for rows in (4, 8)]
    block_m = max(_MIN_MMA_ROWS, m)
    for block_n, block_k, num_warps, num_stages in _GROUP_MMA_SHAPES[block_m]:
        of_stage = stage_bytes(block_m, block_n, block_k, num_bits, item_bytes=2)
        stages = min(num_stages, (gpu.shared_bytes - SPARE_BYTES) // of_stage)
        if not stages:
            continue
        for splits in _split_choices(-(-n // block_n), -(-groups // block_k), gpu.num_sms):
            config = SmallGemmConfig("mma", block_m, block_n, block_k, num_warps, stages, splits)
            found.append(_without_late_prefetch(config, n, gpu))
    return list(dict.fromkeys(found))


def candidates(m: int, n: int, k: int, dtype: torch.dtype, gpu: Gpu) -> list[SmallGemmConfig]:
    """Candidates worth timing for this shape, at most a dozen or so, the likelier ones first."""
    found: list[SmallGemmConfig] = []
    if m <= _MAX_GEMV_ROWS:
        found += _gemv_candidates(band_of(m), k)
    if dtype.itemsize == 2:
        if m <= _MAX_HELD_ROWS:
            found += _held_candidates(max(_MIN_HELD_ROWS, band_of(m)), k, gpu)
        block_m = max(_MIN_MMA_ROWS, band_of(m))
        found += _mma_candidates(block_m, n, k, gpu)[: _MAX_CANDIDATES - len(found)]
    return [_without_late_prefetch(config, n, gpu) for config in found[:_MAX_CANDIDATES]]


def _without_late_prefetch(config: SmallGemmConfig, n: int, gpu: Gpu) -> SmallGemmConfig:
    """A program that starts late loads at once: asking for the same bytes before only costs."""
    programs = config.tiles(n) * config.splits
    if programs > _MAX_WAVES * gpu.num_sms:
        return replace(config, prefetch_bytes=0)
    return config


def _gemv_candidates(block_m: int, k: int) -> list[SmallGemmConfig]:
    shapes = [*_GEMV_SHAPES["any"], *_GEMV_SHAPES["from 2048" if k >= 2048 else "below 2048"]]
    if k > 2048:
        shapes += _GEMV_SHAPES["above 2048"]
    return [SmallGemmConfig("gemv", block_m, *shape) for shape in shapes]


def _held_candidates(block_m: int, k: int, gpu: Gpu) -> list[SmallGemmConfig]:
    found = []
    for block_n in (16, 32):
        for num_warps in (4, 8):
            values = block_n * k // (32 * num_warps)
            block_k = math.gcd(k // num_warps, 256) if k % num_warps == 0 else 0
            if block_k < 64 or values > _MAX_HELD_VALUES:
                continue
            config = SmallGemmConfig("held", block_m, block_n, block_k, num_warps, prefetch_bytes=0)
            if config.can_run(k) and config.held_bytes(k) <= gpu.shared_bytes - _SPARE_BYTES:
                found.append(config)
    return found


def _mma_candidates(block_m: int, n: int, k: int, gpu: Gpu) -> list[SmallGemmConfig]:
    firsts: list[SmallGemmConfig] = []
    seconds: list[SmallGemmConfig] = []
    for block_n, block_k, num_warps, num_stages in _MMA_SHAPES[block_m]:
        if 2 * block_k * (block_n + block_m) * num_stages > gpu.shared_bytes:
            continue
        tiles, steps = -(-n // block_n), -(-k // block_k)
        for place, splits in enumerate(_split_choices(tiles, steps, gpu.num_sms)):
            config = SmallGemmConfig(
                "mma", block_m, block_n, block_k, num_warps, num_stages, splits
            )
            (seconds if place else firsts).append(config)
    return firsts + seconds


def _split_choices(tiles: int, steps: int, num_sms: int) -> list[int]:
    """At most two, by how evenly they load the multiprocessors; of equals, the smaller."""
    most = max(1, min(steps // 2, 4 * num_sms // tiles))

    def evenness(splits: int) -> float:
        # Every program pays for its own start and for its part of the sum.
        load = -(-tiles * splits // num_sms) * -(-steps // splits)
        return load + (0.5 if splits > 1 else 0.0) + 0.05 * splits

    return sorted((s for s in _SPLITS if s <= most), key=evenness)[:2]
