"""A mixture of experts in five kernels: route, sort, gate and up, down, weighted sum.

Both products go tile by tile over the pairs of a token and an expert that `routing` sorted: the
weight of a tile is one expert's, its rows are gathered, and what it computes is stored by pair. So
few pairs that hardly two share an expert are not sorted. The last kernel adds up a token's pairs in
their order: no float is added atomically, so a token's result depends on its own values and the
tiles' shape, never on the tokens beside it or on timing.

The tiles are chosen by how many tokens an expert gets on average. A number of tokens and those it
is padded to in a recorded step share one choice, so padding changes no bit of a token's result: the
choice goes by the next power of two, and recordings exist for every power of two below the largest.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.float8_gemm import GROUP as FLOAT8_GROUP
from termgen.engine.device.kernels.gemm.group_layout import GROUP
from termgen.engine.device.kernels.launch import dot_precision, next_power_of_2, pdl_options
from termgen.engine.device.kernels.moe.float8_experts import (
    Float8Weights,
    float8_product_kernel,
    float8_tile,
)
from termgen.engine.device.kernels.moe.group_experts import (
    GroupWeights,
    fitting,
    group_product_kernel,
    in_orders,
    multiply_lone,
)
from termgen.engine.device.kernels.moe.routing import LonePairs, PairTiles, route, sort_pairs
from termgen.engine.device.kernels.moe.tiles import (
    Clamp,
    ExpertTiles,
    Tile,
    expert_of,
    pairs_of,
    store_pairs,
    tile_at,
)

_COMBINE_BLOCK = 512
_MAX_STREAMED_ROWS = 16
_EXPERTS_OF_LONE_PAIR = 8
"""Experts to a pair from which on pairs are not sorted: of random pairs few share an expert."""
LARGEST_ROWS = 8192
"""Numbers of tokens from which on nothing changes any more."""


_HALF = {  # average number of tokens of an expert, at most -> tiles
    8: ExpertTiles(16, Tile(32, 128, 2, 4, 1), Tile(64, 64, 4, 5, 1), chunk=32, scan=512),
    16: ExpertTiles(32, Tile(32, 128, 4, 4, 1), Tile(64, 128, 4, 4, 1), chunk=64, scan=2048),
    64: ExpertTiles(64, Tile(64, 64, 4, 4, 4), Tile(64, 64, 4, 4, 4), chunk=64, scan=2048),
    LARGEST_ROWS: ExpertTiles(
        128, Tile(64, 64, 8, 3, 16), Tile(128, 64, 8, 3, 16), chunk=128, scan=4096
    ),
}
_EXPERTS_OF_LONE_GROUPS = 1
"""The same where pairs multiply one by one: some weights are read twice, yet the integer products
are faster by more."""
_LONE_IN_GROUPS = ExpertTiles(1, Tile(16, 32, 1, 1, 1), Tile(8, 32, 1, 1, 1), chunk=32, scan=512)
_LONE_WIDE = ExpertTiles(1, Tile(8, 32, 1, 1, 1), Tile(8, 32, 1, 1, 1), chunk=32, scan=512)
"""For more than 4 bits of integers."""
_IN_GROUPS = {
    8: ExpertTiles(16, Tile(32, 4, 2, 3, 1), Tile(64, 4, 2, 3, 1), chunk=32, scan=512),
    16: ExpertTiles(32, Tile(64, 4, 4, 3, 1), Tile(128, 2, 4, 3, 1), chunk=64, scan=2048),
    64: ExpertTiles(64, Tile(128, 2, 4, 3, 4), Tile(128, 2, 8, 3, 4), chunk=64, scan=2048),
    LARGEST_ROWS: ExpertTiles(
        128, Tile(128, 4, 8, 3, 16), Tile(128, 4, 8, 3, 16), chunk=128, scan=4096
    ),
}
_IN_FLOAT8 = {
    8: ExpertTiles(16, Tile(32, 64, 4, 3, 1), Tile(64, 64, 4, 3, 1), chunk=32, scan=512),
    16: ExpertTiles(32, Tile(64, 64, 4, 2, 1), Tile(64, 64, 4, 3, 1), chunk=64, scan=2048),
    64: ExpertTiles(64, Tile(64, 64, 8, 2, 4), Tile(64, 64, 4, 2, 4), chunk=64, scan=2048),
    LARGEST_ROWS: ExpertTiles(
        64, Tile(128, 64, 8, 2, 16), Tile(128, 64, 8, 3, 16), chunk=64, scan=4096
    ),
}
"""A step of each is a run of words, 256 columns. Chosen by the registers and the memory that they
take, not by measurements."""
_FLOAT = ExpertTiles(16, Tile(32, 32, 4, 2, 1), Tile(32, 32, 4, 2, 1), chunk=32, scan=512)
_FLOAT_IN_GROUPS = ExpertTiles(16, Tile(32, 2, 4, 2, 1), Tile(32, 2, 4, 2, 1), chunk=32, scan=512)
_FLOAT_IN_FLOAT8 = ExpertTiles(16, Tile(32, 64, 4, 1, 1), Tile(32, 64, 4, 1, 1), chunk=32, scan=512)
StoredMatrices = GroupWeights | Float8Weights
Weights = torch.Tensor | StoredMatrices
"""The matrices of all experts."""


def choose_tiles(
    num_tokens: int,
    *,
    num_experts: int,
    top_k: int,
    itemsize: int,
    stored: StoredMatrices | None = None,
) -> ExpertTiles:
    """stored: the first weights, where they are no floats of x's type."""
    groups = stored if isinstance(stored, GroupWeights) else None
    if itemsize == 4 and stored is not None:
        return _FLOAT_IN_FLOAT8 if groups is None else _FLOAT_IN_GROUPS
    if itemsize == 4:
        return _FLOAT
    rows = min(next_power_of_2(num_tokens), LARGEST_ROWS)
    is_few = _EXPERTS_OF_LONE_GROUPS * rows * top_k <= num_experts
    if is_few and groups is not None and groups.can_be_lone:
        is_wide = groups.num_bits > 4 or groups.are_floats
        return _LONE_WIDE if is_wide else _LONE_IN_GROUPS
    table = _HALF if stored is None else _IN_FLOAT8 if groups is None else _IN_GROUPS
    average = min(rows * top_k / num_experts, rows)
    return next(tiles for most, tiles in table.items() if average <= most)


@triton.jit
def expert_tile(at, columns, K: tl.constexpr, BLOCK_K: tl.constexpr, POLICY: tl.constexpr):
    if K % BLOCK_K == 0:
        return tl.load(at, eviction_policy=POLICY)
    return tl.load(at, mask=(columns < K)[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit(do_not_specialize=["num_tiles"])
def _product_kernel(
    x_ptr,  # [num_pairs / PAIRS_PER_ROW, K]
    w_ptr,  # [num_experts, N, K]; of GATED, [num_experts, 2 * N, K]
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    POLICY: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile, of_rows = tile_at(tl.program_id(0), num_tiles, N_TILES, TILES_TOGETHER)
    expert = expert_of(order_ptr, tiles_ptr, tile, IS_SORTED)
    if expert < 0:
        return
    pairs, is_pair = pairs_of(order_ptr, tiles_ptr, num_tiles, tile, IS_SORTED, BLOCK_M)
    rows = of_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = expert.to(tl.int64) * ((2 if GATED else 1) * N) + tl.minimum(rows, N - 1)
    w_at = w_ptr + w_rows[:, None] * K
    x_at = x_ptr + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * K
    # The weight's rows are the tall operand of the matrix units, the pairs the narrow one.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BLOCK_K)
        x_mask = is_pair[:, None]
        if K % BLOCK_K != 0:
            x_mask = x_mask & (columns < K)[None, :]
        x = tl.trans(tl.load(x_at + columns[None, :], mask=x_mask, other=0.0))
        w = expert_tile(w_at + columns[None, :], columns, K, BLOCK_K, POLICY)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if GATED:
            up = expert_tile(w_at + N * K + columns[None, :], columns, K, BLOCK_K, POLICY)
            acc_up = tl.dot(up, x, acc_up, input_precision=PRECISION)
    store_pairs(
        *(acc, acc_up, bias_ptr, weights_ptr, out_ptr, expert, rows, pairs, is_pair),
        *(N, GATED, ACTIVATION, HAS_BIAS, WEIGHTED, LIMIT, ALPHA),
    )


@triton.jit
def _combine_kernel(
    y_ptr,  # [T * TOP_K, SIZE]
    weights_ptr,  # [T, TOP_K] float32
    ids_ptr,  # [T, TOP_K] int32, of MAY_MISS
    out_ptr,  # [T, SIZE]
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MAY_MISS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        is_here = inside
        if MAY_MISS:
            is_here = inside & (tl.load(ids_ptr + row * TOP_K + slot) >= 0)
        y = tl.load(y_ptr + (row * TOP_K + slot) * SIZE + columns, mask=is_here, other=0.0)
        y = y.to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weights_ptr + row * TOP_K + slot)
        acc += y
    tl.store(out_ptr + row * SIZE + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)


def experts(
    x: torch.Tensor,  # [T, hidden], contiguous
    router_logits: torch.Tensor,  # [T, num_experts]
    gate_up: Weights,  # [num_experts, 2 * inner, hidden]
    down: Weights,  # [num_experts, hidden, inner]
    *,
    top_k: int,
    renormalize: bool,
    activation: str,
    gate_up_bias: torch.Tensor | None = None,  # [num_experts, 2 * inner]
    down_bias: torch.Tensor | None = None,  # [num_experts, hidden]
    clamp: Clamp | None = None,
    expert_scale: torch.Tensor | None = None,  # [num_experts] float32
    has_shared: bool = False,
    weighs_inputs: bool = False,
    tiles: ExpertTiles | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """[T, hidden]. `layers.ops.run_experts` is the reference. `tiles`: the cut, to try others."""
    num_tokens = len(x)
    num_experts = down.shape[0]
    num_logits = num_experts - (has_shared and weighs_inputs)
    assert router_logits.shape == (num_tokens, num_logits), router_logits.shape
    assert not (weighs_inputs and gate_up_bias is not None), "a bias would be weighted, too"
    if not num_tokens:
        return torch.empty_like(x)
    if tiles is None:
        tiles = choose_tiles(
            num_tokens,
            num_experts=num_experts,
            top_k=top_k,
            itemsize=x.element_size(),
            stored=None if isinstance(gate_up, torch.Tensor) else gate_up,
        )
    ids, weights = route(
        router_logits,
        top_k,
        renormalize=renormalize,
        scale=expert_scale,
        has_shared=has_shared,
        weighs_inputs=weighs_inputs,
        pdl=pdl,
    )
    return run_routed(
        *(x, ids, weights, gate_up, down),
        activation=activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        clamp=clamp,
        weighs_inputs=weighs_inputs,
        tiles=tiles,
        pdl=pdl,
    )


def run_routed(
    x: torch.Tensor,  # [T, hidden], contiguous
    ids: torch.Tensor,  # [T, k] int32
    weights: torch.Tensor,  # [T, k] float32
    gate_up: Weights,  # [num_experts, 2 * inner, hidden]
    down: Weights,  # [num_experts, hidden, inner]
    *,
    activation: str,
    tiles: ExpertTiles,
    gate_up_bias: torch.Tensor | None = None,  # [num_experts, 2 * inner]
    down_bias: torch.Tensor | None = None,  # [num_experts, hidden]
    clamp: Clamp | None = None,
    weighs_inputs: bool = False,
    may_miss: bool = False,
    pdl: bool = True,
) -> torch.Tensor:
    """[T, hidden]: each token's experts, weighted and added up. may_miss: a negative id is an
    expert that is not here, and adds nothing."""
    num_experts, hidden, inner = down.shape
    assert gate_up.shape == (num_experts, 2 * inner, hidden), (gate_up.shape, down.shape)
    assert hidden == x.shape[1] and x.is_contiguous(), (x.shape, x.stride())
    num_tokens, top_k = ids.shape
    out = torch.empty_like(x)
    pairs: PairTiles | LonePairs = LonePairs(ids.view(-1))
    is_sorted = num_tokens > 1 and _EXPERTS_OF_LONE_PAIR * ids.numel() > num_experts
    if is_sorted and tiles.block_m > 1:
        pairs = sort_pairs(
            ids,
            num_experts=num_experts,
            block_m=tiles.block_m,
            chunk=tiles.chunk,
            scan=tiles.scan,
            may_miss=may_miss,
            pdl=pdl,
        )
    activated = multiply(
        x,
        gate_up,
        pairs,
        tiles.block_m,
        tiles.gate_up,
        top_k=top_k,
        activation=activation,
        bias=gate_up_bias,
        clamp=clamp,
        weights=weights if weighs_inputs else None,
        ids=ids,
        may_miss=may_miss,
        pdl=pdl,
    )
    y = multiply(
        *(activated, down, pairs, tiles.block_m, tiles.down),
        bias=down_bias,
        ids=ids,
        may_miss=may_miss,
        pdl=pdl,
    )
    _combine_kernel[(num_tokens, triton.cdiv(hidden, _COMBINE_BLOCK))](
        y,
        weights,
        ids,
        out,
        TOP_K=top_k,
        SIZE=hidden,
        WEIGHTED=not weighs_inputs,
        MAY_MISS=may_miss,
        BLOCK=_COMBINE_BLOCK,
        num_warps=2,
        **pdl_options(x.device, enabled=pdl),
    )
    return out


def multiply(
    x: torch.Tensor,  # [num_pairs / top_k, K]: pair p has row p // top_k
    weight: Weights,  # [num_experts, rows, K]
    pairs: PairTiles | LonePairs,
    block_m: int,
    tile: Tile,
    *,
    top_k: int = 1,
    activation: str | None = None,
    bias: torch.Tensor | None = None,  # [num_experts, rows]
    clamp: Clamp | None = None,
    weights: torch.Tensor | None = None,  # [num_pairs] float32, in any shape
    ids: torch.Tensor | None = None,  # [num_pairs] int32, in any shape
    may_miss: bool = False,
    pdl: bool = True,
) -> torch.Tensor:
    """[num_pairs, rows]: each pair's row of x times its expert's weight. With an activation the
    rows of a weight are those of gate, then those of up, and the result is act(gate) * up. The
    clamp, if any, takes the activation's place. weights: factors of each pair's row. ids: each
    pair's expert, for weights that have orders."""
    num_experts, n, k = weight.shape
    assert bias is None or (bias.shape == (num_experts, n) and bias.is_contiguous())
    assert x.is_contiguous() and x.shape[1] == k, (x.stride(), x.shape)
    if activation is not None:
        n //= 2
    if isinstance(weight, GroupWeights) and weight.orders is not None:
        assert ids is not None, "whose order a row is to have"
        x, top_k = in_orders(x, ids, weight.orders, top_k=top_k, pdl=pdl), 1
    num_pairs, num_tiles = len(pairs.order), pairs.num_tiles
    out = torch.empty((num_pairs, n), dtype=x.dtype, device=x.device)
    product: dict[str, Any] = {
        "N": n,
        "K": k,
        "PAIRS_PER_ROW": top_k,
        "GATED": activation is not None,
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "WEIGHTED": weights is not None,
        "LIMIT": 0.0 if clamp is None else clamp.limit,
        "ALPHA": 0.0 if clamp is None else clamp.alpha,
        **pdl_options(x.device, enabled=pdl),
    }
    if isinstance(weight, GroupWeights) and block_m == 1:
        assert isinstance(pairs, LonePairs), "pairs that each read a weight alone"
        multiply_lone(x, weight, bias, out, pairs, weights, tile, {**product, "MAY_MISS": may_miss})
        return out
    if isinstance(weight, GroupWeights):
        tile = fitting(tile, block_m, weight, x, is_gated=activation is not None)
    elif isinstance(weight, Float8Weights):
        tile = float8_tile(tile, block_m, x, is_gated=activation is not None)
    cut: dict[str, Any] = {
        "IS_SORTED": pairs.tiles is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "NUM_STAGES": tile.num_stages,
        "TILES_TOGETHER": tile.group,
        # A weight that few pairs use is read once: it should leave the L2 cache first.
        "POLICY": "evict_first" if block_m <= _MAX_STREAMED_ROWS else "",
        "PRECISION": dot_precision(x.dtype),
        "num_warps": tile.num_warps,
    }
    grid = (num_tiles * triton.cdiv(n, tile.block_n),)
    if isinstance(weight, torch.Tensor):
        assert weight.is_contiguous(), weight.stride()
        _product_kernel[grid](x, weight, bias, out, *pairs, weights, num_tiles, **product, **cut)
        return out
    weight.check()
    if isinstance(weight, Float8Weights):
        blocks = weight.scale if weight.blocks is None else weight.blocks
        float8_product_kernel[grid](
            *(x, weight.words, weight.scale, blocks, bias, out, *pairs, weights, num_tiles),
            SCALE_ROWS=weight.scale_rows,
            EVEN_K=k % FLOAT8_GROUP == 0,
            USE_PTX=x.is_cuda,
            **product,
            **cut,
        )
        return out
    group_product_kernel[grid](
        *(x, weight.words.view(torch.int16), weight.pairs, weight.row_scale, bias, out),
        *(*pairs, weights, num_tiles),
        EVEN_K=k % (tile.block_k * GROUP.value) == 0,
        **weight.options,
        **product,
        **cut,
    )
    return out
