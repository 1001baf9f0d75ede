"""Attention of rows with any number of queries over the paged KV cache: prompts and mixed steps.

A tile is some consecutive queries of one row times the query heads that share one key head: the
rows of one matrix product, against tiles of keys. `plan_prefill` lists the tiles on the device from
`query_start_loc`; the launch covers the most tiles that the token count allows, and programs past
the last tile leave at once, so a recorded launch is right for every split of tokens into rows.
Tiles with the most keys (the last ones of a prompt) start first.

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] of any layout.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from termgen.engine.kernels.cache_layout import cache_constants
from termgen.engine.kernels.launch import dot_precision, next_power_of_2
from termgen.engine.kernels.query_type import to_product_type

_LOG2_E = 1.4426950408889634
_PLAN_TILES = 16
_PLAN_ROWS = 256


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is cut for one kind of cache."""

    rows: int
    """Query-head rows of a tile, at least the heads that share a key head."""
    tile: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int


def default_config(
    head_dim: int, dtype: torch.dtype, *, group: int, max_query_len: int
) -> PrefillConfig:
    """`max_query_len` may be any upper bound: it chooses among two configurations."""
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    is_short = max_query_len * group <= 64
    least = max(16, next_power_of_2(group))
    if row_bytes <= 128:
        large = PrefillConfig(rows=128, tile=128, num_warps=8, num_stages=3)
    elif row_bytes <= 256:
        large = PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3)
    elif row_bytes <= 512:
        large = PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=3)
    else:
        large = PrefillConfig(rows=32, tile=16, num_warps=4, num_stages=2)
    rows = max(least, min(64, large.rows) if is_short else large.rows)
    return PrefillConfig(rows, large.tile, 4 if is_short else large.num_warps, large.num_stages)


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "num_tiles"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "plan_ptr"],
)
def _plan_kernel(
    query_start_loc_ptr,
    plan_ptr,
    first_row,
    num_rows,
    num_tiles,
    QUERIES: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    starts = tl.load(query_start_loc_ptr + rows, mask=inside, other=0)
    lengths = tl.load(query_start_loc_ptr + rows + 1, mask=inside, other=0) - starts
    if SKIP_SINGLE:
        lengths = tl.where(lengths == 1, 0, lengths)
    ends = tl.cumsum((lengths + QUERIES - 1) // QUERIES, axis=0)
    tiles = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    is_before = ends[None, :] <= tiles[:, None]
    row = first_row + tl.sum(is_before.to(tl.int32), axis=1)
    row_start = tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    row = tl.where(row < num_rows, row, -1)
    tl.store(plan_ptr + tiles * 2, row, mask=tiles < num_tiles)
    tl.store(plan_ptr + tiles * 2 + 1, (tiles - row_start) * QUERIES, mask=tiles < num_tiles)


@triton.jit
def _attend_tile(
    q,
    acc,
    top,
    total,
    place,
    block,
    key,
    head_base,
    positions,
    scale,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of keys: their positions `key`, read at `place` of the row, which is in `block`."""
    at = block.to(tl.int64) * BLOCK_STRIDE + place % BLOCK_SIZE * TOKEN_STRIDE
    if BLOCK_D == HEAD_DIM:
        k = tl.load(head_base + at[:, None])
    else:
        in_head = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        k = tl.load(head_base + at[:, None], mask=in_head, other=0.0)
    k = k.to(q.dtype)  # an 8-bit cache; else nothing
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        is_seen = key[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = new_top
    if WINDOW > 0:
        # A query may see nothing of a tile at its window's far end, and nothing before it either.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(top - shift)
    total = total * shrink + tl.sum(weights, axis=1)
    if BLOCK_D == HEAD_DIM:
        v = tl.load(head_base + V_OFFSET + at[:, None])
    else:
        v = tl.load(head_base + V_OFFSET + at[:, None], mask=in_head, other=0.0)
    v = v.to(q.dtype)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(
    do_not_specialize=["num_tiles", "table_stride"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr", "block_table_ptr"],
)
def _paged_prefill_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    plan_ptr,
    scale,
    num_tiles,
    q_stride,
    table_stride,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    entry = plan_ptr + (num_tiles - 1 - tl.program_id(0)) * 2
    kv_head = tl.program_id(1)
    row = tl.load(entry)
    if row < 0:
        return
    first_query = tl.load(entry + 1)
    query_start = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + row)
    first_position = seq_len - query_len + first_query

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, TILE)
    queries = lanes // GROUP
    is_live = (queries < QUERIES) & (first_query + queries < query_len)
    live = is_live[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = query_start.to(tl.int64) + first_query + queries
    heads = kv_head * GROUP + lanes % GROUP
    q_at = q_ptr + tokens * q_stride + heads * HEAD_DIM
    q = tl.load(q_at[:, None] + dims[None, :], mask=live, other=0.0)
    q = to_product_type(q, cache_ptr)
    # Lanes without a query look where the last one does, so that every lane sees something.
    positions = first_position + tl.minimum(queries, QUERIES - 1)

    table = block_table_ptr + row.to(tl.int64) * table_stride
    head_base = cache_ptr + kv_head * HEAD_STRIDE + dims[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(first_position + QUERIES, seq_len)
    first_key = 0
    num_full = tl.maximum(first_position + 1, 0) // TILE
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
        num_full = 0
    if seq_len == 0:
        num_full = 0
        end = 0
    key_tiles = (end - first_key + TILE - 1) // TILE
    last = tl.maximum(end - 1, 0)

    # Block ids are fetched one tile ahead of the keys that they lead to, or they would halve the
    # depth of the pipeline. Keys past the end repeat the last one: nothing outside the sequence
    # is ever read.
    place = tl.minimum(first_key + keys, last)
    block = tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0)
    for step in tl.range(0, num_full, num_stages=NUM_STAGES):
        here, block_here = place, block
        place = tl.minimum(first_key + (step + 1) * TILE + keys, last)
        block = tl.load(table + place // BLOCK_SIZE)
        acc, top, total = _attend_tile(
            q,
            acc,
            top,
            total,
            here,
            block_here,
            here,
            head_base,
            positions,
            scale,
            BLOCK_STRIDE,
            TOKEN_STRIDE,
            V_OFFSET,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            WINDOW,
            False,
            PRECISION,
        )
    for step in tl.range(num_full, key_tiles, num_stages=NUM_STAGES):
        here, block_here = place, block
        key = first_key + step * TILE + keys
        place = tl.minimum(key + TILE, last)
        block = tl.load(table + place // BLOCK_SIZE)
        acc, top, total = _attend_tile(
            q,
            acc,
            top,
            total,
            here,
            block_here,
            key,
            head_base,
            positions,
            scale,
            BLOCK_STRIDE,
            TOKEN_STRIDE,
            V_OFFSET,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            WINDOW,
            True,
            PRECISION,
        )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a padded row has seen nothing
    to = out_ptr + (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=live)


def max_tiles(num_tokens: int, num_rows: int, *, config: PrefillConfig, group: int) -> int:
    """The most tiles that `num_tokens` queries in `num_rows` rows can make."""
    queries = config.rows // group
    return num_tokens // queries + min(num_rows, num_tokens)


def plan_prefill(
    query_start_loc: torch.Tensor,  # [B+1] int32
    plan: torch.Tensor,  # [>= num_tiles, 2] int32
    *,
    config: PrefillConfig,
    group: int,
    first_row: int,
    num_rows: int,
    num_tiles: int,
    skip_single: bool = False,
) -> None:
    """Lists the tiles of rows [first_row, num_rows): (row, first query), or row -1 past the last.

    skip_single: leave out rows of one query, which decode attention computes.
    Once per step for all layers; no window changes it.
    """
    assert plan.shape[0] >= num_tiles, (plan.shape, num_tiles)
    _plan_kernel[(triton.cdiv(num_tiles, _PLAN_TILES),)](
        query_start_loc,
        plan,
        first_row,
        num_rows,
        num_tiles,
        QUERIES=config.rows // group,
        SKIP_SINGLE=skip_single,
        BLOCK_ROWS=max(_PLAN_ROWS, next_power_of_2(num_rows - first_row)),
        BLOCK_TILES=_PLAN_TILES,
        num_warps=8,
    )


def paged_prefill(
    q: torch.Tensor,  # [T, num_heads, head_dim], heads dense
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [B, max_blocks] int32
    seq_lens: torch.Tensor,  # [B] int32; the tokens of a row of length 0 get zeros
    query_start_loc: torch.Tensor,  # [B+1] int32
    plan: torch.Tensor,
    *,
    config: PrefillConfig,
    num_tiles: int,
    scale: float,
    sliding_window: int | None = None,
    out: torch.Tensor,  # [T, num_heads, head_dim], contiguous
) -> torch.Tensor:
    """Writes the tokens of the planned rows and no others. Their keys and values are in the cache
    already; `plan` was made by `plan_prefill` with the same `config` and `num_tiles`."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[3]
    group = num_heads // num_kv_heads
    assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous(), (q.stride(), out.stride())
    assert block_table.stride(1) == 1 and config.rows >= group
    if num_tiles:
        _paged_prefill_kernel[(num_tiles, num_kv_heads)](
            q,
            cache,
            out,
            block_table,
            seq_lens,
            query_start_loc,
            plan,
            scale * _LOG2_E,
            num_tiles,
            q.stride(0),
            block_table.stride(0),
            **cache_constants(cache),
            GROUP=group,
            WINDOW=sliding_window or 0,
            QUERIES=config.rows // group,
            TILE=config.tile,
            NUM_STAGES=config.num_stages,
            BLOCK_M=config.rows,
            BLOCK_D=next_power_of_2(head_dim),
            PRECISION=dot_precision(q.dtype),
            num_warps=config.num_warps,
        )
    return out


def paged_prefill_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Row by row in float64."""
    block_size, num_kv_heads = cache.shape[1], cache.shape[3]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        if not length:
            continue
        keys = torch.arange(length, device=q.device)
        blocks = block_table[row, keys // block_size].long()
        k, v = cache[blocks, keys % block_size].double().unbind(1)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        positions = torch.arange(length - (end - first), length, device=q.device)[:, None]
        hidden = keys > positions
        if sliding_window is not None:
            hidden |= keys <= positions - sliding_window
        scores = torch.einsum("qhd,nhd->hqn", q[first:end].double() * scale, k)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqn,nhd->qhd", weights, v)
    return out
