"""Tiling of a step's prompts into tiles of queries, computed on the device.

A tile is some consecutive queries of one row times the query heads that share one key head.
`paged_prefill` reads the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import has_hopper_gluon, next_power_of_2

PLAN_FIELDS = tl.constexpr(5)
"""int32 fields of a tile: its row, -1 where none is left; its first token; its number of queries;
the position of the first one; the row's length."""
_PLAN_TILES = 16
_PLAN_ROWS = 256
_THREE_STAGES_BYTES = 140 * 1024
"""Shared memory that 64 rows of 512 bytes take with three tiles of 32 keys and values."""
_LARGE_HEAD_BYTES = 200 * 1024
"""Shared memory that 64 rows of 512 half values take with two tiles of 32 keys and values."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiling of the kernel for one kind of cache."""

    rows: int
    """Query-head rows of a tile, at least the heads that share a key head."""
    tile: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    specialised: bool = False
    """Warps that copy beside warps that compute: `paged_prefill_hopper`. Its groups of four warps
    take 64 rows each, and `num_warps` are those of one group."""


def can_specialise(
    device: torch.device,
    *,
    head_dim: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    block_size: int,
) -> bool:
    """True if `paged_prefill_hopper` computes attention of this kind."""
    return (
        has_hopper_gluon(device)
        and head_dim in (64, 128)
        and dtype == kv_cache_dtype
        and dtype.itemsize == 2
        and block_size % 64 == 0
    )


def specialised_config(head_dim: int) -> PrefillConfig:
    """A row's result takes half the registers at head size 64: three groups of warps fit, not two.

    There, exponentials take as long as products, and more groups leave fewer of them waiting.
    """
    rows, stages = (192, 3) if head_dim == 64 else (128, 2)
    return PrefillConfig(rows, tile=128, num_warps=4, num_stages=stages, specialised=True)


def default_config(
    head_dim: int,
    dtype: torch.dtype,
    *,
    group: int,
    max_query_len: int,
    block_size: int,
    can_specialise: bool = False,
    shared_bytes: int = _LARGE_HEAD_BYTES,
) -> PrefillConfig:
    """`max_query_len` may be any upper bound: it chooses among two configurations.

    can_specialise: the result of the function of that name. shared_bytes: memory that a program may
    have on a multiprocessor.
    """
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    is_short = max_query_len * group <= 64
    if can_specialise and not is_short:
        return specialised_config(head_dim)
    least = max(16, next_power_of_2(group))
    if row_bytes <= 256 and block_size % 64 == 0:
        # Two programs to a multiprocessor: one multiplies while the other takes exponentials.
        return PrefillConfig(rows=max(64, least), tile=64, num_warps=4, num_stages=3)
    if row_bytes <= 256:
        large = PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=3)
    elif row_bytes <= 512:
        stages = 3 if shared_bytes >= _THREE_STAGES_BYTES else 2
        large = PrefillConfig(rows=64, tile=32, num_warps=4, num_stages=stages)
    elif dtype.itemsize == 2 and row_bytes <= 1024 and shared_bytes >= _LARGE_HEAD_BYTES:
        # 64 rows are what a group of four warps multiplies at once on Hopper; two groups share the
        # result, which would not fit in the registers of one.
        large = PrefillConfig(rows=64, tile=32, num_warps=8, num_stages=2)
    else:
        large = PrefillConfig(rows=32, tile=16, num_warps=4, num_stages=2)
    rows = max(least, min(64, large.rows) if is_short else large.rows)
    return PrefillConfig(rows, large.tile, 4 if is_short else large.num_warps, large.num_stages)


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "num_tiles"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "plan_ptr"],
)
def _plan_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
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
    is_live = row < num_rows
    first_query = (tiles - row_start) * QUERIES
    first_token = tl.load(query_start_loc_ptr + row, mask=is_live, other=0)
    end_token = tl.load(query_start_loc_ptr + row + 1, mask=is_live, other=0)
    seq_len = tl.load(seq_lens_ptr + row, mask=is_live, other=0)
    entry = plan_ptr + tiles * PLAN_FIELDS
    is_planned = tiles < num_tiles
    num_queries = tl.minimum(end_token - first_token - first_query, QUERIES)
    tl.store(entry, tl.where(is_live, row, -1), mask=is_planned)
    tl.store(entry + 1, first_token + first_query, mask=is_planned)
    tl.store(entry + 2, num_queries, mask=is_planned)
    tl.store(entry + 3, seq_len - (end_token - first_token) + first_query, mask=is_planned)
    tl.store(entry + 4, seq_len, mask=is_planned)


def max_tiles(num_tokens: int, num_rows: int, *, config: PrefillConfig, group: int) -> int:
    """The most tiles that `num_tokens` queries in `num_rows` rows can make."""
    queries = config.rows // group
    return num_tokens // queries + min(num_rows, num_tokens)


def plan_prefill(
    query_start_loc: torch.Tensor,  # [B+1] int32
    seq_lens: torch.Tensor,  # [B] int32
    plan: torch.Tensor,  # [>= num_tiles, PLAN_FIELDS] int32
    *,
    config: PrefillConfig,
    group: int,
    first_row: int,
    num_rows: int,
    num_tiles: int,
    skip_single: bool = False,
) -> None:
    """Lists the tiles of rows [first_row, num_rows).

    skip_single: leave out rows of one query, which decode attention computes.
    Once per step for all layers; no window changes it.
    """
    assert plan.shape[0] >= num_tiles and plan.is_contiguous(), (plan.shape, num_tiles)
    _plan_kernel[(triton.cdiv(num_tiles, _PLAN_TILES),)](
        query_start_loc,
        seq_lens,
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
