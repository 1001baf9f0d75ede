"""Assignment of a step's decode attention to programs, computed on the device.

The work is tiles of keys: (row, key head, TILE keys). A fixed number of programs takes equal runs
of all tiles in one order, rows first, then heads. Where runs that keep to one (row, head) are about
as short, as with a few rows of like length, those are taken instead: a program's second piece would
wait for its first. `paged_decode` reads the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.attention.window import first_key, window_constant
from termgen.engine.device.kernels.launch import next_power_of_2, num_sms
from termgen.vocabulary.cache_groups import Window

_PLAN_PROGRAMS = 16
"""Entries of the plan that one program of the planning kernel writes."""
_PLAN_ROWS = 256
"""Least rows a plan is compiled for; above it, the next power of two."""
_MOST_SUMS = 8192
"""Float32 sums that a program of the decode kernel may hold in registers."""
_TILES_OF_QUERIES = 2
"""Tiles that a program takes at least of rows with several queries: their partial sums are as many
times as large. Measured on an H200, with contexts of 600 to 16,000 tokens."""
_CANDIDATES = 3
"""Runs tried for keeping to one (row, head): the even share, 1/8 and 1/4 more."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiling of the kernel for one kind of cache."""

    tile: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight, plus one."""
    programs_per_sm: int
    min_tiles: int = 1
    """Tiles a program takes at least: fewer partial sums when contexts are short."""


def default_config(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> DecodeConfig:
    """The tile that registers allow for the type that is multiplied. A cache of fewer bytes has
    more tiles in flight instead."""
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    num_stages = 3 if cache_dtype == dtype else 4
    if row_bytes <= 128:
        return DecodeConfig(tile=128, num_warps=4, num_stages=num_stages, programs_per_sm=2)
    if row_bytes <= 256:
        return DecodeConfig(tile=64, num_warps=4, num_stages=num_stages, programs_per_sm=2)
    if row_bytes <= 512:
        return DecodeConfig(tile=32, num_warps=4, num_stages=num_stages, programs_per_sm=2)
    return DecodeConfig(tile=16, num_warps=4, num_stages=num_stages, programs_per_sm=2)


def most_queries(group: int, head_dim: int) -> int:
    """Queries of a row that one program can take, with `group` heads that share keys."""
    return max(1, _MOST_SUMS // next_power_of_2(head_dim) // group)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens_ptr", "plan_ptr"]
)
def _plan_kernel(
    seq_lens_ptr,
    plan_ptr,
    num_rows,
    NUM_PROGRAMS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_ROWS)
    num_keys = tl.load(seq_lens_ptr + rows, mask=rows < num_rows, other=0)
    tiles = (num_keys + TILE - 1) // TILE
    if WINDOW != 0:
        tiles -= first_key(num_keys - QUERIES, WINDOW) // TILE
    total = tl.sum(tiles, axis=0) * NUM_KV_HEADS
    even = tl.maximum((total + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_TILES)

    # The least of a few runs for which no program needs tiles of two (row, head)s.
    per_program, is_apart = even, total < 0
    for step in tl.static_range(CANDIDATES):
        run = even + even * step // 8
        fits = tl.sum((tiles + run - 1) // run, axis=0) * NUM_KV_HEADS <= NUM_PROGRAMS
        per_program = tl.where(fits & (not is_apart), run, per_program)
        is_apart = is_apart | fits

    # Apart, a row takes one unit per program; else one per tile. A program takes `stride` units.
    parts = tl.where(is_apart, (tiles + per_program - 1) // per_program, tiles)
    stride = tl.where(is_apart, 1, per_program)
    ends = tl.cumsum(parts * NUM_KV_HEADS, axis=0)
    num_units = tl.sum(parts, axis=0) * NUM_KV_HEADS

    programs = tl.program_id(0) * BLOCK_PROGRAMS + tl.arange(0, BLOCK_PROGRAMS)
    starts = programs * stride
    is_before = ends[None, :] <= starts[:, None]
    row = tl.sum(is_before.to(tl.int32), axis=1)
    row_start = tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    is_row = rows[None, :] == row[:, None]
    row_parts = tl.maximum(tl.sum(tl.where(is_row, parts[None, :], 0), axis=1), 1)
    row_tiles = tl.sum(tl.where(is_row, tiles[None, :], 0), axis=1)
    first = (starts - row_start) % row_parts
    first_tile = tl.where(is_apart, first * per_program, first)
    run = tl.minimum(num_units - starts, per_program)
    run = tl.where(is_apart, tl.minimum(row_tiles - first_tile, per_program), run)
    run = tl.where(starts < num_units, run, 0)
    entry = plan_ptr + programs * 4
    inside = programs < NUM_PROGRAMS
    tl.store(entry, row, mask=inside)
    tl.store(entry + 1, (starts - row_start) // row_parts, mask=inside)
    tl.store(entry + 2, first_tile, mask=inside)
    tl.store(entry + 3, run, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(plan_ptr + NUM_PROGRAMS * 4, per_program)


class DecodeWorkspace:
    """Buffers of one engine's decode attention; one launch at a time may use them."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_rows: int,
        max_queries: int = 1,
        config: DecodeConfig,
        device: torch.device,
    ) -> None:
        self.config = config
        self.max_queries = max_queries
        self.max_rows = max_rows
        self.num_programs = num_sms(device) * config.programs_per_sm
        group_rows = next_power_of_2(num_heads // num_kv_heads * max_queries)
        pieces = self.num_programs * 2
        self.partial = torch.empty(
            (pieces, group_rows, next_power_of_2(head_dim)), dtype=torch.float32, device=device
        )
        self.softmax = torch.empty((pieces, 2, group_rows), dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)

    def new_plan(self) -> torch.Tensor:
        """[num_programs + 1, 4] int32: row, key head, first tile, number of tiles of each program;
        the last row holds the number of tiles that makes a run."""
        shape = (self.num_programs + 1, 4)
        return torch.zeros(shape, dtype=torch.int32, device=self.partial.device)


def plan_decode(
    seq_lens: torch.Tensor,  # [B] int32
    workspace: DecodeWorkspace,
    plan: torch.Tensor,
    *,
    num_rows: int,
    num_kv_heads: int,
    num_queries: int = 1,
    window: Window | None = None,
) -> None:
    """Divide the step's tiles among the programs; once per step for all layers of one window."""
    config = workspace.config
    assert num_rows <= workspace.max_rows, (num_rows, workspace.max_rows)
    _plan_kernel[(triton.cdiv(workspace.num_programs, _PLAN_PROGRAMS),)](
        seq_lens,
        plan,
        num_rows,
        NUM_PROGRAMS=workspace.num_programs,
        NUM_KV_HEADS=num_kv_heads,
        TILE=config.tile,
        MIN_TILES=max(config.min_tiles, _TILES_OF_QUERIES if num_queries > 1 else 1),
        QUERIES=num_queries,
        WINDOW=window_constant(window),
        CANDIDATES=_CANDIDATES,
        BLOCK_ROWS=max(_PLAN_ROWS, next_power_of_2(num_rows)),
        BLOCK_PROGRAMS=_PLAN_PROGRAMS,
        num_warps=8,
    )
