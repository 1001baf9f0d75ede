"""Attention of rows with one query each over the paged KV cache, split over the keys.

A plan of `decode_plan` deals the step's tiles of keys out to a fixed number of programs, from the
lengths on the device, so one 32k context among short ones costs what its bytes cost and a recorded
launch is right for every context. The heads that share a key head are the rows of one matrix
product.

    whole (row, head) in one run        written straight to the output
    (row, head) cut between programs    partial sums in a workspace; who arrives last adds them up,
                                        in program order, so the result does not depend on timing

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] of any layout.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.cache_layout import cache_constants
from termgen.engine.device.kernels.decode_plan import DecodeWorkspace
from termgen.engine.device.kernels.decode_run import ask_for_keys, attend_run, combine_pieces
from termgen.engine.device.kernels.launch import dot_precision, next_power_of_2, pdl_options
from termgen.engine.device.kernels.query_type import to_product_type

_LOG2_E = 1.4426950408889634
_MMA_ROWS = 16
_PREFETCH_TILES = 3
_MAX_COMBINED = 8192
"""Float32 values of partial sums a program holds at once while it adds them up."""


@triton.jit
def _zero_empty_rows(
    seq_lens_ptr,
    out_ptr,
    program,
    num_rows,
    ROW_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    values = tl.arange(0, BLOCK)
    for row in range(program, num_rows, NUM_PROGRAMS):
        if tl.load(seq_lens_ptr + row) == 0:
            to = out_ptr + row * ROW_SIZE  # at most a step of decodes: 32 bits hold it
            for first in range(0, ROW_SIZE, BLOCK):
                zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
                tl.store(to + first + values, zeros, mask=first + values < ROW_SIZE)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "block_table_ptr"],
)
def _paged_decode_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    block_table_ptr,
    seq_lens_ptr,
    plan_ptr,
    partial_ptr,
    softmax_ptr,
    arrivals_ptr,
    scale,
    num_rows,
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
    GROUP_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    IS_WITHIN_BLOCK: tl.constexpr,
    CACHE_BITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH_TILES: tl.constexpr,
    THREADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    # Plan, lengths and block ids are older than the kernel ahead of this one (see `paged_decode`);
    # most keys and values are too, but they are only asked for: the newest come from that kernel.
    row = tl.load(plan_ptr + program * 4)
    kv_head = tl.load(plan_ptr + program * 4 + 1)
    tile = tl.load(plan_ptr + program * 4 + 2)
    num_tiles = tl.load(plan_ptr + program * 4 + 3)
    per_program = tl.load(plan_ptr + NUM_PROGRAMS * 4)
    heads = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    head_mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out_dtype = out_ptr.dtype.element_ty
    ROW_SIZE: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    if USE_PDL:
        if PREFETCH_TILES > 0:
            first = tile
            if WINDOW > 0:
                first += tl.maximum(seq_len - WINDOW, 0) // TILE
            keys_ahead = tl.minimum(num_tiles, PREFETCH_TILES) * TILE
            ask_for_keys(
                cache_ptr + kv_head * HEAD_STRIDE,
                block_table_ptr + row * table_stride,
                first * TILE,
                tl.minimum(first * TILE + keys_ahead, seq_len),
                BLOCK_STRIDE,
                BLOCK_SIZE,
                HEAD_DIM,
                THREADS,
            )
        gdc_wait()

    done = 0
    while done < num_tiles:
        first_tile = 0
        if WINDOW > 0:
            first_tile = tl.maximum(seq_len - WINDOW, 0) // TILE
        all_tiles = (seq_len + TILE - 1) // TILE - first_tile
        run = tl.minimum(all_tiles - tile, num_tiles - done)
        if run > 0:
            q_at = q_ptr + row.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
            q = tl.load(q_at + heads[:, None] * HEAD_DIM + dims[None, :], mask=head_mask, other=0.0)
            q = to_product_type(q, CACHE_BITS)
            acc, top, total = attend_run(
                q,
                cache_ptr + kv_head * HEAD_STRIDE,
                block_table_ptr + row.to(tl.int64) * table_stride,
                (first_tile + tile) * TILE,
                run,
                seq_len,
                scale,
                BLOCK_STRIDE,
                TOKEN_STRIDE,
                V_OFFSET,
                BLOCK_SIZE,
                HEAD_DIM,
                BLOCK_D,
                WINDOW,
                TILE,
                IS_WITHIN_BLOCK,
                NUM_STAGES,
                PRECISION,
            )

            out_at = out_ptr + row.to(tl.int64) * ROW_SIZE + kv_head * (GROUP * HEAD_DIM)
            if run == all_tiles:
                result = (acc / total[:, None]).to(out_dtype)
                tl.store(out_at + heads[:, None] * HEAD_DIM + dims[None, :], result, mask=head_mask)
            else:
                # A run's first piece began in an earlier program (slot 0) or is its last (slot 1).
                piece = program * 2 + (tile == 0).to(tl.int32)
                in_group = heads < GROUP_ROWS
                softmax_at = softmax_ptr + piece * (2 * GROUP_ROWS) + heads
                tl.store(softmax_at, top, mask=in_group)
                tl.store(softmax_at + GROUP_ROWS, total, mask=in_group)
                partial_rows = (piece * GROUP_ROWS + heads[:, None]) * BLOCK_D
                tl.store(partial_ptr + partial_rows + dims[None, :], acc, mask=in_group[:, None])
                first_tile = program * per_program + done - tile
                first_program = first_tile // per_program
                last_program = (first_tile + all_tiles - 1) // per_program
                arrivals = arrivals_ptr + row * NUM_KV_HEADS + kv_head
                tl.debug_barrier()  # every thread's stores come before the one thread's arrival
                arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
                if arrived == last_program - first_program:
                    tl.store(arrivals, 0)  # ready for the next launch
                    combine_pieces(
                        partial_ptr,
                        softmax_ptr,
                        out_at,
                        first_program,
                        last_program,
                        GROUP=GROUP,
                        GROUP_ROWS=GROUP_ROWS,
                        HEAD_DIM=HEAD_DIM,
                        BLOCK_D=BLOCK_D,
                        PIECES=PIECES,
                    )
            done += run
        tile = 0
        kv_head += 1
        if (kv_head == NUM_KV_HEADS) | (all_tiles == 0):
            kv_head = 0
            row += 1
            seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    _zero_empty_rows(seq_lens_ptr, out_ptr, program, num_rows, ROW_SIZE, 1024, NUM_PROGRAMS)


def paged_decode(
    q: torch.Tensor,  # [B, num_heads, head_dim], heads dense
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [B, max_blocks] int32
    seq_lens: torch.Tensor,  # [B] int32; a row of length 0 gives zeros
    plan: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    num_rows: int,
    scale: float,
    sliding_window: int | None = None,
    out: torch.Tensor,  # [B, num_heads, head_dim], contiguous
    pdl: bool = True,
) -> torch.Tensor:
    """The queries' keys and values are in the cache already. `plan` was made by `plan_decode` for
    these lengths, heads and window.

    With `pdl` the kernel reads plan, lengths and block ids before the kernel ahead of it has ended:
    between what writes them and this must lie a launch without early start, as a step's embedding
    is.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[3]
    assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous(), (q.stride(), out.stride())
    assert block_table.stride(1) == 1
    config, group = workspace.config, num_heads // num_kv_heads
    group_rows, block_d = next_power_of_2(group), next_power_of_2(head_dim)
    if num_rows:
        _paged_decode_kernel[(workspace.num_programs,)](
            q,
            cache,
            out,
            block_table,
            seq_lens,
            plan,
            workspace.partial,
            workspace.softmax,
            workspace.arrivals,
            scale * _LOG2_E,
            num_rows,
            q.stride(0),
            block_table.stride(0),
            **cache_constants(cache),
            GROUP=group,
            GROUP_ROWS=group_rows,
            WINDOW=sliding_window or 0,
            NUM_PROGRAMS=workspace.num_programs,
            TILE=config.tile,
            IS_WITHIN_BLOCK=cache.shape[1] % config.tile == 0,
            CACHE_BITS=8 * cache.element_size(),
            NUM_STAGES=config.num_stages,
            BLOCK_M=max(_MMA_ROWS, group_rows),
            BLOCK_D=block_d,
            PIECES=max(1, min(32, _MAX_COMBINED // (group_rows * block_d))),
            PRECISION=dot_precision(q.dtype),
            PREFETCH_TILES=_prefetch_tiles(cache, config.tile),
            THREADS=32 * config.num_warps,
            num_warps=config.num_warps,
            **pdl_options(q.device, enabled=pdl),
        )
    return out


def _prefetch_tiles(cache: torch.Tensor, tile: int) -> int:
    """Tiles whose keys and values are asked for ahead: with a head's part of a block in one piece,
    that is one request a block."""
    block_size, head_dim = cache.shape[1], cache.shape[4]
    in_one_piece = cache.stride()[1:3] == (head_dim, block_size * head_dim)
    aligned = head_dim * cache.element_size() % 16 == 0
    return _PREFETCH_TILES if in_one_piece and aligned else 0


def paged_decode_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Row by row in float64."""
    block_size, num_kv_heads = cache.shape[1], cache.shape[3]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        first = 0 if sliding_window is None else max(0, length - sliding_window)
        place = torch.arange(first, length, device=q.device)
        blocks = block_table[row, place // block_size].long()
        k, v = cache[blocks, place % block_size].double().unbind(1)  # [n, num_kv_heads, head_dim]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        weights = torch.einsum("hd,nhd->hn", q[row].double() * scale, k).softmax(-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, v)
    return out
