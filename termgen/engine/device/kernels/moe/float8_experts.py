"""The products of `experts` with weights of 8-bit floats.

The matrices of all experts lie as `kernels.gemm.float8_gemm` has one, and have scales as it takes
them: each row's is applied to its sums, those of blocks to sums of 128 columns. Numbers become
operands of the matrix units in registers, exactly; no weight is rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.float8_gemm import (
    BLOCK_ROWS,
    GROUP,
    RUN,
    WORD,
    four_numbers,
)
from termgen.engine.device.kernels.launch import shared_bytes
from termgen.engine.device.kernels.moe.tiles import (
    Tile,
    expert_of,
    pairs_of,
    store_pairs,
    tile_at,
)

_SPARE_BYTES = 2048
"""Shared memory for all but the tiles."""
_LEAST_STAGES = 2
_LEAST_ROWS = 32
"""Rows of a tile that is not made narrower."""


class Float8Weights(NamedTuple):
    """The matrices [num_rows, num_columns] of `num_experts`."""

    words: torch.Tensor
    """[num_experts, num_rows, words of a row] int32, from `pack`."""
    scale: torch.Tensor
    """[num_experts, num_rows] float32."""
    blocks: torch.Tensor | None
    """[num_experts, num_rows / r, 2 * groups] float32, r `BLOCK_ROWS` or 1: further scales of
    blocks; None: there are none."""
    num_columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, num_rows = self.scale.shape
        return num_experts, num_rows, self.num_columns

    @property
    def scale_rows(self) -> int:
        """Rows that share the scales of blocks; 0: there are none."""
        if self.blocks is None:
            return 0
        return 1 if self.blocks.shape[1] == self.scale.shape[1] else BLOCK_ROWS

    def check(self) -> None:
        num_experts, num_rows, num_columns = self.shape
        num_groups = -(-num_columns // GROUP)
        assert self.words.shape == (num_experts, num_rows, num_groups * RUN.value)
        parts = [self.words, self.scale]
        if self.blocks is not None:
            runs = -(-num_rows // self.scale_rows)
            assert self.blocks.shape == (num_experts, runs, 2 * num_groups)
            parts.append(self.blocks)
        assert all(part.is_contiguous() for part in parts)


@triton.jit
def _run_of_x(x_at, columns, is_pair, K: tl.constexpr, EVEN_K: tl.constexpr):
    """x of a run of columns, [columns, pairs]."""
    mask = is_pair[:, None]
    if not EVEN_K:
        mask = mask & (columns < K)[None, :]
    return tl.trans(tl.load(x_at + columns[None, :], mask=mask, other=0.0))


@triton.jit
def _added(
    acc,
    w,
    x,
    blocks_at,
    start,
    SCALE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """acc and the sums of a group of columns."""
    numbers = four_numbers(w, x[0].dtype, USE_PTX)
    for half in tl.static_range(2):
        if SCALE_ROWS > 0:
            part = tl.dot(numbers[2 * half], x[2 * half], input_precision=PRECISION)
            part = tl.dot(numbers[2 * half + 1], x[2 * half + 1], part, input_precision=PRECISION)
            acc += part * tl.load(blocks_at + (start // RUN * 2 + half))[:, None]
        else:
            acc = tl.dot(numbers[2 * half], x[2 * half], acc, input_precision=PRECISION)
            acc = tl.dot(numbers[2 * half + 1], x[2 * half + 1], acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_tiles"])
def float8_product_kernel(
    x_ptr,  # [num_pairs / PAIRS_PER_ROW, K]
    w_ptr,
    scale_ptr,
    blocks_ptr,
    bias_ptr,  # [num_experts, N]; of GATED, [num_experts, 2 * N]
    out_ptr,  # [num_pairs, N]
    order_ptr,
    tiles_ptr,
    weights_ptr,  # [num_pairs] float32
    num_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    IS_SORTED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # in words: `RUN`
    NUM_STAGES: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    POLICY: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_WORDS: tl.constexpr = (K + WORD * RUN - 1) // (WORD * RUN) * RUN
    ALL_ROWS: tl.constexpr = 2 * N if GATED else N
    tile, of_rows = tile_at(tl.program_id(0), num_tiles, N_TILES, TILES_TOGETHER)
    expert = expert_of(order_ptr, tiles_ptr, tile, IS_SORTED)
    if expert < 0:
        return
    pairs, is_pair = pairs_of(order_ptr, tiles_ptr, num_tiles, tile, IS_SORTED, BLOCK_M)
    rows = of_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    here = tl.minimum(rows, N - 1)
    matrix = expert.to(tl.int64)
    run = tl.arange(0, BLOCK_K)
    w_ptr += matrix * (ALL_ROWS * NUM_WORDS)
    scale_ptr += matrix * ALL_ROWS
    w_at = w_ptr + here[:, None] * NUM_WORDS + run[None, :]
    x_at = x_ptr + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * K
    blocks_at, up_blocks_at = scale_ptr + here, scale_ptr + here
    if SCALE_ROWS > 0:
        OF_ROW: tl.constexpr = 2 * NUM_WORDS // RUN
        blocks_ptr += matrix * ((ALL_ROWS + SCALE_ROWS - 1) // SCALE_ROWS * OF_ROW)
        blocks_at = blocks_ptr + here // SCALE_ROWS * OF_ROW
        up_blocks_at = blocks_ptr + (N + here) // SCALE_ROWS * OF_ROW
    # The weight's rows are the tall operand of the matrix units, the pairs the narrow one.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    for start in tl.range(0, NUM_WORDS, BLOCK_K, num_stages=NUM_STAGES):
        columns = start * WORD + run
        x = (
            _run_of_x(x_at, columns, is_pair, K, EVEN_K),
            _run_of_x(x_at, columns + RUN, is_pair, K, EVEN_K),
            _run_of_x(x_at, columns + 2 * RUN, is_pair, K, EVEN_K),
            _run_of_x(x_at, columns + 3 * RUN, is_pair, K, EVEN_K),
        )
        # Numbers of gate are in registers no more when those of up are.
        w = tl.load(w_at + start, eviction_policy=POLICY)
        acc = _added(acc, w, x, blocks_at, start, SCALE_ROWS, PRECISION, USE_PTX)
        if GATED:
            w = tl.load(w_at + (N * NUM_WORDS + start), eviction_policy=POLICY)
            acc_up = _added(acc_up, w, x, up_blocks_at, start, SCALE_ROWS, PRECISION, USE_PTX)
    acc *= tl.load(scale_ptr + here)[:, None]
    if GATED:
        acc_up *= tl.load(scale_ptr + N + here)[:, None]
    store_pairs(
        *(acc, acc_up, bias_ptr, weights_ptr, out_ptr, expert, rows, pairs, is_pair),
        *(N, GATED, ACTIVATION, HAS_BIAS, WEIGHTED, LIMIT, ALPHA),
    )


def float8_tile(tile: Tile, block_m: int, x: torch.Tensor, *, is_gated: bool) -> Tile:
    """The tile with as many stages, and rows, as this GPU has shared memory for."""
    rows = 2 * tile.block_n if is_gated else tile.block_n
    stage = GROUP * (rows + block_m * x.element_size())
    most = (shared_bytes(x.device) - _SPARE_BYTES) // stage
    if most >= _LEAST_STAGES or tile.block_n <= _LEAST_ROWS:
        stages = max(1, min(tile.num_stages, most))
        return replace(tile, block_k=RUN.value, num_stages=stages)
    narrower = replace(tile, block_n=tile.block_n // 2)
    return float8_tile(narrower, block_m, x, is_gated=is_gated)
