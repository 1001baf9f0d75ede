"""The products of `experts` with weights of 4 or 8 bits in groups, or floats of 4 bits.

Columns of an expert may be in an order of their own, so that those of a group lie side by side: the
rows of x that meet it are brought into this order first.

The matrices of all experts lie as `kernels.gemm.group_layout` has one. Two kernels, as in
`group_gemm`: one adds up integers, for so few pairs of a token and an expert that each reads its
weight alone; in the other weights become operands of the matrix units in registers, rounded to x's
type as if they had been dequantised before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.group_gemv import (
    add_products,
    no_sums,
    sum_of_four,
    words_and_pairs,
)
from termgen.engine.device.kernels.gemm.group_layout import (
    GROUP,
    numbers_and_scales,
    rows_aside,
    weight_at,
)
from termgen.engine.device.kernels.launch import next_power_of_2, pdl_options, shared_bytes
from termgen.engine.device.kernels.moe.routing import LonePairs
from termgen.engine.device.kernels.moe.tiles import (
    Tile,
    clamped_glu,
    expert_of,
    pairs_of,
    store_pairs,
    tile_at,
)
from termgen.engine.device.kernels.rows.gated_activation import activate

_SPARE_BYTES = 2048
"""Shared memory for all but the tiles."""
_LEAST_STAGES = 2
_REORDER_BLOCK = 512
"""Columns that a program brings into another order."""
_LEAST_GROUPS = 2
"""Less, in 4 bits, is no operand of the matrix units."""


class GroupWeights(NamedTuple):
    """The matrices [num_rows, num_columns] of `num_experts`."""

    words: torch.Tensor
    """[num_experts, num_rows, words of a row] int32, from `pack`."""
    pairs: torch.Tensor
    """[num_experts, num_rows / rows_aside, groups, rows_aside], from `pack_pairs`: int32, of floats
    int16."""
    row_scale: torch.Tensor
    """[num_experts, num_rows] float32."""
    num_columns: int
    num_bits: int
    is_halved: bool = False
    """True for floats, if 16 columns share a scale: pairs are int32."""
    orders: torch.Tensor | None = None
    """[num_experts, num_columns] int32: the columns of x that those of each expert meet; None: they
    are in their order."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.row_scale.shape, self.num_columns

    @property
    def are_floats(self) -> bool:
        return self.is_halved or self.pairs.dtype == torch.int16

    @property
    def can_be_lone(self) -> bool:
        """True if `multiply_lone` takes these, and those [num_experts, num_columns, ...] that
        follow them: it loads four rows at a time."""
        return self.shape[1] % 8 == 0 and self.num_columns % 4 == 0

    @property
    def options(self) -> dict[str, Any]:
        """Those that all kernels have."""
        options = {"BITS": self.num_bits, "FLOATS": self.are_floats, "USE_PTX": self.words.is_cuda}
        return {**options, "HALVED": True} if self.is_halved else options

    def check(self) -> None:
        num_experts, num_rows, num_columns = self.shape
        num_groups = -(-num_columns // GROUP.value)
        assert self.words.shape == (num_experts, num_rows, num_groups * self.num_bits)
        rows = rows_aside(self.num_bits)
        assert self.pairs.shape == (num_experts, -(-num_rows // rows), num_groups, rows)
        assert all(part.is_contiguous() for part in self[:3])
        if self.orders is not None:
            assert self.orders.shape == (num_experts, num_columns) and self.orders.is_contiguous()


@triton.jit
def _load_words(
    w_at,
    pairs_at,
    is_row,
    start,
    elements,
    groups,
    NUM_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    POLICY: tl.constexpr,
):
    at, place = w_at + (start * ELEMENTS + elements), pairs_at + (start + groups) * ROWS
    if NUM_GROUPS % BLOCK_K == 0:
        w = tl.load(at, eviction_policy=POLICY)
        pair = tl.load(place, mask=is_row, other=0)
    else:
        w = tl.load(
            at, mask=elements < (NUM_GROUPS - start) * ELEMENTS, other=0, eviction_policy=POLICY
        )
        pair = tl.load(place, mask=is_row & (start + groups < NUM_GROUPS), other=0)
    return w, pair


@triton.jit(do_not_specialize=["num_tiles"])
def group_product_kernel(
    x_ptr,  # [num_pairs / PAIRS_PER_ROW, K]
    w_ptr,  # int16, the elements of `GroupWeights.words`
    pairs_ptr,
    row_scale_ptr,
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
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # in groups
    NUM_STAGES: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    POLICY: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    HALVED: tl.constexpr = False,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ELEMENTS: tl.constexpr = 2 * BITS
    ROWS: tl.constexpr = 32 // BITS
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    ALL_ROWS: tl.constexpr = 2 * N if GATED else N
    RUNS: tl.constexpr = (ALL_ROWS + ROWS - 1) // ROWS
    tile, of_rows = tile_at(tl.program_id(0), num_tiles, N_TILES, TILES_TOGETHER)
    expert = expert_of(order_ptr, tiles_ptr, tile, IS_SORTED)
    if expert < 0:
        return
    pairs, is_pair = pairs_of(order_ptr, tiles_ptr, num_tiles, tile, IS_SORTED, BLOCK_M)
    rows = of_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    # With `minimum` no run of pairs would be seen.
    is_row, here = (rows < N)[:, None], tl.minimum(rows, N - 1)[:, None]
    matrix = expert.to(tl.int64)
    w_ptr += matrix * (ALL_ROWS * NUM_GROUPS * ELEMENTS)
    pairs_ptr += matrix * (RUNS * NUM_GROUPS * ROWS)
    row_scale_ptr += matrix * ALL_ROWS
    w_at = w_ptr + here * (NUM_GROUPS * ELEMENTS)
    pairs_at = pairs_ptr + (rows // ROWS * (NUM_GROUPS * ROWS) + rows % ROWS)[:, None]
    x_at = x_ptr + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    elements, groups = tl.arange(0, BLOCK_K * ELEMENTS)[None, :], tl.arange(0, BLOCK_K)[None, :]
    # A group's elements are those of a run of columns.
    columns = elements // ELEMENTS * GROUP + elements % ELEMENTS
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    if GATED:
        other = N + rows
        up_at = w_ptr + (N + here) * (NUM_GROUPS * ELEMENTS)
        up_pairs_at = pairs_ptr + (other // ROWS * (NUM_GROUPS * ROWS) + other % ROWS)[:, None]
    for start in tl.range(0, NUM_GROUPS, BLOCK_K, num_stages=NUM_STAGES):
        w, pair = _load_words(
            *(w_at, pairs_at, is_row, start, elements, groups),
            *(NUM_GROUPS, BLOCK_K, ELEMENTS, ROWS, POLICY),
        )
        kept = numbers_and_scales(w, pair, BITS, FLOATS, USE_PTX, HALVED)
        if GATED:
            w, pair = _load_words(
                *(up_at, up_pairs_at, is_row, start, elements, groups),
                *(NUM_GROUPS, BLOCK_K, ELEMENTS, ROWS, POLICY),
            )
            up_kept = numbers_and_scales(w, pair, BITS, FLOATS, USE_PTX, HALVED)
        for place in tl.static_range(16 // BITS):
            of_x = start * GROUP + place * ELEMENTS + columns
            x_mask = is_pair[:, None]
            if not EVEN_K:
                x_mask = x_mask & (of_x < K)
            x = tl.trans(tl.load(x_at + of_x, mask=x_mask, other=0.0))
            weight = weight_at(place, *kept, dtype, BITS, FLOATS, HALVED)
            acc = tl.dot(weight, x, acc, input_precision=PRECISION)
            if GATED:
                up = weight_at(place, *up_kept, dtype, BITS, FLOATS, HALVED)
                acc_up = tl.dot(up, x, acc_up, input_precision=PRECISION)
    acc *= tl.load(row_scale_ptr + here)
    if GATED:
        acc_up *= tl.load(row_scale_ptr + N + here)
    store_pairs(
        *(acc, acc_up, bias_ptr, weights_ptr, out_ptr, expert, rows, pairs, is_pair),
        *(N, GATED, ACTIVATION, HAS_BIAS, WEIGHTED, LIMIT, ALPHA),
    )


@triton.jit
def lone_product_kernel(
    x_ptr,  # [num_pairs / PAIRS_PER_ROW, K]
    w_ptr,  # int32, `GroupWeights.words`
    pairs_ptr,
    row_scale_ptr,
    bias_ptr,  # [num_experts, N]; of GATED, [num_experts, 2 * N]
    out_ptr,  # [num_pairs, N]
    order_ptr,
    weights_ptr,  # [num_pairs] float32
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # in groups
    EVEN_K: tl.constexpr,
    MAY_MISS: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    HALVED: tl.constexpr = False,
):
    """A pair times some rows of its expert's weight, as in `group_gemv`: of GATED, as many of gate
    and of up, which meet the same integers of x."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    ROWS: tl.constexpr = 32 // BITS
    ALL_ROWS: tl.constexpr = 2 * N if GATED else N
    RUNS: tl.constexpr = (ALL_ROWS + ROWS - 1) // ROWS
    ALL_OF_PROGRAM: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    pair = tl.program_id(0) // N_TILES
    first_row = tl.program_id(0) % N_TILES * BLOCK_N
    expert = tl.load(order_ptr + pair)
    if MAY_MISS:
        if expert < 0:
            return
    matrix = expert.to(tl.int64)
    w_ptr += matrix * (ALL_ROWS * NUM_GROUPS * BITS)
    pairs_ptr += matrix * (RUNS * NUM_GROUPS * ROWS)
    row_scale_ptr += matrix * ALL_ROWS
    x_ptr += (pair // PAIRS_PER_ROW) * K
    sums = no_sums(ALL_OF_PROGRAM, BLOCK_K)
    for start in tl.range(0, NUM_GROUPS, BLOCK_K):
        groups = start + tl.arange(0, BLOCK_K)
        words, pairs = words_and_pairs(
            *(w_ptr, pairs_ptr, first_row, groups, N, NUM_GROUPS, BITS, BLOCK_N)
        )
        if GATED:
            up_words, up_pairs = words_and_pairs(
                *(w_ptr, pairs_ptr, N + first_row, groups, 2 * N, NUM_GROUPS, BITS, BLOCK_N)
            )
            words = words + up_words
            pairs = pairs + up_pairs
        sums = add_products(
            *(sums, words, pairs, x_ptr, groups, 1, K, NUM_GROUPS, K),
            *(BITS, 1, ALL_OF_PROGRAM, EVEN_K, USE_PTX, FLOATS, HALVED),
        )
    if WEIGHTED:
        weight = tl.load(weights_ptr + pair)
    for r in tl.static_range(0, BLOCK_N, 4):
        rows = first_row + r + tl.arange(0, 4)
        is_row = rows < N
        y = sum_of_four(sums, r, BLOCK_K)
        y *= tl.load(row_scale_ptr + rows, mask=is_row, other=0.0)
        bias_at = bias_ptr
        if HAS_BIAS:
            bias_at += expert * ALL_ROWS + rows
            y += tl.load(bias_at, mask=is_row, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= weight
        if GATED:
            up = sum_of_four(sums, BLOCK_N + r, BLOCK_K)
            up *= tl.load(row_scale_ptr + N + rows, mask=is_row, other=0.0)
            if HAS_BIAS:
                up += tl.load(bias_at + N, mask=is_row, other=0.0).to(tl.float32)
            if WEIGHTED:
                up *= weight
            if LIMIT > 0:
                y = clamped_glu(y, up, LIMIT, ALPHA)
            else:
                y = activate(y, ACTIVATION) * up
        out_at = out_ptr + pair.to(tl.int64) * N + rows
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _reorder_kernel(
    x_ptr,  # [num_pairs / PAIRS_PER_ROW, K]
    orders_ptr,
    ids_ptr,  # [num_pairs] int32
    out_ptr,  # [num_pairs, K]
    K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < K
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    places = tl.load(orders_ptr + expert.to(tl.int64) * K + columns, mask=inside, other=0)
    x = tl.load(x_ptr + pair // PAIRS_PER_ROW * K + places, mask=inside, other=0.0)
    tl.store(out_ptr + pair * K + columns, x, mask=inside)


def in_orders(
    x: torch.Tensor,  # [num_pairs / top_k, K], contiguous
    ids: torch.Tensor,  # the expert of each pair, int32, in any shape
    orders: torch.Tensor,  # [num_experts, K] int32
    *,
    top_k: int,
    pdl: bool = True,
) -> torch.Tensor:
    """[num_pairs, K]: each pair's row of x with its columns in the order of its expert. A row of a
    negative id is left as it is in memory."""
    assert x.is_contiguous() and ids.is_contiguous() and len(x) * top_k == ids.numel()
    k = x.shape[1]
    out = torch.empty((ids.numel(), k), dtype=x.dtype, device=x.device)
    _reorder_kernel[(len(out), triton.cdiv(k, _REORDER_BLOCK))](
        *(x, orders, ids, out),
        K=k,
        PAIRS_PER_ROW=top_k,
        BLOCK=_REORDER_BLOCK,
        num_warps=2,
        **pdl_options(x.device, enabled=pdl),
    )
    return out


def fitting(
    tile: Tile, block_m: int, weight: GroupWeights, x: torch.Tensor, *, is_gated: bool
) -> Tile:
    """The tile with as many stages as this GPU has shared memory for."""
    of_group = 4 * weight.num_bits + weight.pairs.element_size()
    rows = 2 * tile.block_n if is_gated else tile.block_n
    stage = tile.block_k * (rows * of_group + block_m * GROUP.value * x.element_size())
    most = (shared_bytes(x.device) - _SPARE_BYTES) // stage
    if most >= _LEAST_STAGES or tile.block_k <= _LEAST_GROUPS:
        return replace(tile, num_stages=max(1, min(tile.num_stages, most)))
    narrower = replace(tile, block_k=tile.block_k // 2)
    return fitting(narrower, block_m, weight, x, is_gated=is_gated)


def multiply_lone(
    x: torch.Tensor,  # [num_pairs / pairs of a row, K]
    weight: GroupWeights,
    bias: torch.Tensor | None,
    out: torch.Tensor,  # [num_pairs, N]
    pairs: LonePairs,
    weights: torch.Tensor | None,
    tile: Tile,
    product: dict[str, Any],
) -> None:
    """product: the options of the kernel that the weight does not have."""
    weight.check()
    assert tile.block_n % 4 == 0 and out.shape[1] % 4 == 0, (tile, out.shape)
    k = weight.num_columns
    block_k = min(tile.block_k, max(32, next_power_of_2(k // GROUP.value)))
    lone_product_kernel[(pairs.num_tiles * triton.cdiv(out.shape[1], tile.block_n),)](
        *(x, weight.words, weight.pairs, weight.row_scale, bias, out, pairs.order, weights),
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=k % GROUP.value == 0,
        num_warps=block_k // 32,
        **weight.options,
        **product,
    )
