"""Which tiles a program of `paged_prefill_hopper` takes, and the warp that copies what they see.

The warps that multiply read the same plan, in the same order, in that module.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from termgen.engine.device.kernels.prefill_plan import PLAN_FIELDS

COPIED = gl.constexpr(64)
"""Keys of one copy: they lie within a block."""


@gluon.jit
def next_work(turn):
    """Back and forth over the programs: who got the most keys in one turn gets the fewest next."""
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return turn * gl.num_programs(0) + place


@gluon.jit
def read_tile(
    plan_ptr,
    tile,
    num_tiles,
    QUERIES: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
):
    """A tile of the plan, and which tiles of keys it sees: [first, last), none for a tile that is
    not in use or whose row is padding. The first, and those from `num_full`, need a mask."""
    entry = plan_ptr + (num_tiles - 1 - tile) * PLAN_FIELDS
    row = gl.load(entry)
    first_token = gl.load(entry + 1)
    num_queries = gl.load(entry + 2)
    first_position = gl.load(entry + 3)
    seq_len = gl.load(entry + 4)
    first = 0
    num_full = gl.maximum(first_position + 1, 0) // TILE
    if WINDOW > 0:
        first = gl.maximum(first_position - WINDOW + 1, 0) // TILE
        num_full = first
    end = gl.minimum(first_position + QUERIES, seq_len)
    last = gl.maximum((end + TILE - 1) // TILE, first)
    if row < 0:
        num_queries = 0
        last = first
    if seq_len == 0:
        last = first
    return row, first_token, num_queries, first_position, seq_len, first, num_full, last


@gluon.jit
def copy_tiles(
    lines,
    block_table_ptr,
    plan_ptr,
    num_tiles,
    table_stride,
    ring,
    ready,
    free,
    NUM_KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    QUERIES: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that copies. Keys of the n-th tile go to place 2n of the ring, values to 2n + 1."""
    count = 0
    num_works = num_tiles * NUM_KV_HEADS
    for turn in range(gl.cdiv(num_works, gl.num_programs(0))):
        work = next_work(turn)
        if work < num_works:
            kv_head = work % NUM_KV_HEADS
            row, first_token, num_queries, first_position, seq_len, first, num_full, last = (
                read_tile(plan_ptr, work // NUM_KV_HEADS, num_tiles, QUERIES, WINDOW, TILE)
            )
            table = block_table_ptr + gl.maximum(row, 0).to(gl.int64) * table_stride
            for tile in range(first, last):
                stage = count % STAGES * 2
                phase = (count // STAGES & 1) ^ 1
                for part in gl.static_range(2):
                    mbarrier.wait(free.index(stage + part), phase)
                    mbarrier.expect(
                        ready.index(stage + part), lines.block_type.nbytes * (TILE // COPIED)
                    )
                    for piece in gl.static_range(TILE // COPIED):
                        # Keys past the last one are masked: any block will do for them.
                        key = gl.minimum(tile * TILE + piece * COPIED, seq_len - 1)
                        block = gl.load(table + key // BLOCK_SIZE)
                        line = (block * NUM_KV_HEADS + kv_head) * 2 + part
                        line = line * BLOCK_SIZE + key % BLOCK_SIZE // COPIED * COPIED
                        tma.async_copy_global_to_shared(
                            lines,
                            [line, 0],
                            ready.index(stage + part),
                            ring.index(stage + part).slice(piece * COPIED, COPIED),
                        )
                count += 1
