"""What all products over pairs of a token and an expert share: the cut, and where its tiles are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl

from termgen.engine.device.kernels.rows.gated_activation import activate


class Clamp(Protocol):
    """The two numbers of a clamped activation."""

    @property
    def alpha(self) -> float: ...

    @property
    def limit(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of a product. Up to 96 KiB of tiles in flight fit every supported GPU."""

    block_n: int
    """Rows of the weight; of gate and of up each, where both are multiplied."""
    block_k: int
    """Columns; of a weight in groups, groups of them."""
    num_warps: int
    num_stages: int
    group: int
    """Tiles of tokens that go through the weight side by side, so that it is read once for them."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The cut of both products, which share their tiles of tokens."""

    block_m: int
    """Pairs of a token and an expert in a tile, all of one expert; at least 16, or 1 where each
    pair multiplies alone (`GroupWeights`)."""
    gate_up: Tile
    down: Tile
    chunk: int
    """Pairs that one program sorts by expert."""
    scan: int
    """Pairs that it counts at a time."""


@triton.jit
def tile_at(program, num_tiles, N_TILES: tl.constexpr, TILES_TOGETHER: tl.constexpr):
    """A program's tile of pairs and tile of the weight. TILES_TOGETHER tiles of pairs take turns at
    each tile of the weight, which stays in the L2 cache."""
    first_tile = program // (TILES_TOGETHER * N_TILES) * TILES_TOGETHER
    in_group = program % (TILES_TOGETHER * N_TILES)
    group = tl.minimum(num_tiles - first_tile, TILES_TOGETHER)
    return first_tile + in_group % group, in_group // group


@triton.jit
def expert_of(order_ptr, tiles_ptr, tile, IS_SORTED: tl.constexpr):
    """Negative where the tile is not in use."""
    return tl.load(tiles_ptr + tile) if IS_SORTED else tl.load(order_ptr + tile)


@triton.jit
def pairs_of(order_ptr, tiles_ptr, num_tiles, tile, IS_SORTED: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's pairs [BLOCK_M], and which of them there are."""
    if IS_SORTED:
        at = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BLOCK_M)
        is_pair = at < tl.load(tiles_ptr + 2 * num_tiles + tile)
        pairs = tl.load(order_ptr + at, mask=is_pair, other=0)
    else:
        is_pair = tl.arange(0, BLOCK_M) < 1
        pairs = tl.where(is_pair, tile, 0)
    return pairs, is_pair


@triton.jit
def clamped_glu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """`layers.ops.clamped_glu` of float32; NaN stays NaN."""
    gate = tl.minimum(gate, LIMIT, tl.PropagateNan.ALL)
    up = tl.clamp(up, -LIMIT, LIMIT, tl.PropagateNan.ALL)
    return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))


@triton.jit
def store_pairs(
    acc,
    acc_up,  # of GATED
    bias_ptr,  # [num_experts, N]; of GATED, [num_experts, 2 * N]
    weights_ptr,  # [num_pairs] float32
    out_ptr,  # [num_pairs, N]
    expert,
    rows,
    pairs,
    is_pair,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    if HAS_BIAS:
        bias_at = bias_ptr + expert * ((2 if GATED else 1) * N) + rows
        acc += tl.load(bias_at, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias_at + N, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if WEIGHTED:  # the pairs of an input times its weight
        weights = tl.load(weights_ptr + pairs, mask=is_pair, other=0.0)
        acc *= weights[None, :]
        if GATED:
            acc_up *= weights[None, :]
    if GATED:
        if LIMIT > 0:
            acc = clamped_glu(acc, acc_up, LIMIT, ALPHA)
        else:
            acc = activate(acc, ACTIVATION) * acc_up
    out_at = out_ptr + pairs.to(tl.int64)[None, :] * N + rows[:, None]
    mask = is_pair[None, :] & (rows < N)[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
