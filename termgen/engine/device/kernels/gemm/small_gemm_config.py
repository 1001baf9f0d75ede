"""Tilings of `small_gemm`, and the measured choice for each shape.

A shape that was measured on this very GPU (`tuned_tables`) has its own choice. For any other there
is the table that comes with termgen, made by `benchmarks/gpu_gemm.py` on a Hopper GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from termgen.engine.device.kernels import MIN_COMPUTE_CAPABILITY

ROW_BANDS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of x for which a shape is measured; a count in between goes by the next one. Recorded
batches are padded within these bands, so padding changes no bit of a row."""
MAX_ROWS = ROW_BANDS[-1]
"""Rows of x from which on nothing but cuBLAS is worth trying."""
GROUP_BANDS = (*ROW_BANDS, 128)
"""The same for weights in groups, whose matrix units take twice as many; from the last on such a
weight is widened in memory."""
HALF_TYPES = (torch.bfloat16, torch.float16)
COLUMNS_MULTIPLE = 16
"""Other values of K give rows that no wide load can start at."""
SHIPPED_CAPABILITY = (9, 0)
"""Compute capability of the GPU that the table in the package was measured on."""
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
    resident: int = 0
    """gemv of groups, of which block_k holds all: programs for each multiprocessor, which keep x
    and take one tile after another. 0: a program for each tile."""

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


Weights = Literal["half", "int8", "int4", "fp8", "fp8-blocks"]
"""How a weight is stored: in 16 bits, in groups of integers, or in 8-bit floats whose scales are
those of rows alone, or of blocks too."""


class Shape(NamedTuple):
    """A weight [n, k] whose products may be measured."""

    n: int
    k: int
    weights: Weights = "half"

    @property
    def bands(self) -> tuple[int, ...]:
        """Rows of x for which it is measured."""
        return GROUP_BANDS if self.weights in ("int8", "int4") else ROW_BANDS

    def __str__(self) -> str:
        size = f"{self.n} x {self.k}"
        return size if self.weights == "half" else f"{size} {self.weights}"


ByRows = dict[int, SmallGemmConfig | None]
"""Rows of x -> the fastest up to this many rows; None: cuBLAS, with a weight that is not in 16 bits
widened before."""
Table = dict[tuple[int, int], ByRows]
"""(N, K) -> what was measured for it."""


class Tuned(Protocol):
    """Shapes measured on this GPU."""

    def get(self, n: int, k: int, weights: Weights = "half") -> ByRows | None: ...


def band_of(m: int) -> int:
    """The measured number of rows that m rows go by, m <= MAX_ROWS."""
    return next(rows for rows in ROW_BANDS if rows >= m)


def can_choose(k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if a product with K columns has a choice besides cuBLAS here."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    is_able = torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY
    return is_able and dtype in HALF_TYPES and k % COLUMNS_MULTIPLE == 0


def measured(shape: Shape, dtype: torch.dtype, tuned: Tuned | None) -> ByRows | None:
    """What was measured on this GPU for a weight that is not in 16 bits; None: nothing that holds
    for activations of the type."""
    return tuned.get(*shape) if tuned is not None and dtype in HALF_TYPES else None


def choose(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    shipped: Table,
    tuned: Tuned | None = None,
) -> SmallGemmConfig | None:
    """The configuration for x [m, k] times a weight [n, k], or None for cuBLAS.

    A shape that was measured on this GPU has what was found there. Any other goes, on the device
    generation of the shipped table, by the nearest shape in that one. Either holds for both half
    types.
    """
    if not 0 < m or not can_choose(k, dtype, device):
        return None
    by_rows = tuned.get(n, k) if tuned is not None else None
    if by_rows is None and torch.cuda.get_device_capability(device) == SHIPPED_CAPABILITY:
        by_rows = nearest(n, k, shipped)
    if by_rows is None:
        return None
    rows = min((rows for rows in by_rows if rows >= m), default=None)
    config = None if rows is None else by_rows[rows]
    return config if config is None or config.can_run(k) else None


def nearest(n: int, k: int, table: Table) -> ByRows | None:
    """What was measured for the shape, or for the next one that speaks for it."""
    found = min(table, key=lambda shape: _distance(shape, (n, k)), default=None)
    if found is None or _distance(found, (n, k)) > _NEAR:
        return None
    return table[found]


def _distance(shape: tuple[int, int], other: tuple[int, int]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(shape, other, strict=True))
