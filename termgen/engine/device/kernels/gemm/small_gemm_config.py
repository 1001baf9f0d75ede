"""Tilings of `small_gemm`, and the measured choice for each shape.

The table is made on the device by `benchmarks/gpu_gemm.py`, out of that program's candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

MAX_ROWS = 64
"""Rows of x from which on nothing but cuBLAS is worth trying."""
_MAX_HELD_BYTES = 200 * 1024
_NEAR = 1.0
"""Doublings of N and K together within which a measured shape speaks for another one."""


@dataclass(frozen=True, slots=True)
class SmallGemmConfig:
    """Tiling of one shape of product."""

    kind: Literal["gemv", "held", "mma"]
    block_m: int
    """Rows of x it is made for, at most: a power of two, at least 8 for held and 16 for mma."""
    block_n: int
    """Rows of the weight in a tile."""
    block_k: int
    """gemv: 256 a warp, or a multiple of it, keeps the loop free of barriers. held: of one warp."""
    num_warps: int
    num_stages: int = 1
    """Tiles in flight, plus one. 1, for gemv only: the next tile is held in registers, and the
    first is loaded while the kernel ahead still runs."""
    splits: int = 1
    """mma: programs that share the K of one tile."""
    prefetch_bytes: int = 32768
    """Bytes that a program prefetches into the L2 cache before it waits for the kernel ahead."""

    def tiles(self, out_features: int) -> int:
        return -(-out_features // self.block_n)

    def held_steps(self, in_features: int) -> int:
        """held: tiles of K that each warp takes."""
        return -(-in_features // (self.num_warps * self.block_k))

    def held_bytes(self, in_features: int) -> int:
        """held: shared memory of a program, in a half type."""
        width = self.held_steps(in_features) * self.num_warps * self.block_k
        return 2 * width * (self.block_n + self.block_m)

    def can_run(self, in_features: int) -> bool:
        return self.kind != "held" or self.held_bytes(in_features) <= _MAX_HELD_BYTES

    def partial_values(self, out_features: int) -> int:
        """float32 values of workspace for a product with `out_features`."""
        if self.splits == 1:
            return 0
        return self.tiles(out_features) * self.splits * self.block_n * self.block_m


Table = dict[tuple[int, int], dict[int, SmallGemmConfig | None]]
"""(N, K) -> rows of x -> the fastest up to this many rows; None: cuBLAS."""


def choose(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, table: Table
) -> SmallGemmConfig | None:
    """The configuration for x [m, k] times a weight [n, k], or None for cuBLAS.

    A shape that was not measured goes by the nearest one that was. The table holds for the device
    generation it was measured on, and for both half types.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or not 0 < m:
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if k % 16:
        return None  # rows that no wide load can start at
    nearest = min(table, key=lambda shape: _distance(shape, (n, k)), default=None)
    if nearest is None or _distance(nearest, (n, k)) > _NEAR:
        return None
    by_rows = table[nearest]
    rows = min((rows for rows in by_rows if rows >= m), default=None)
    config = None if rows is None else by_rows[rows]
    return config if config is None or config.can_run(k) else None


def _distance(shape: tuple[int, int], other: tuple[int, int]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(shape, other, strict=True))
