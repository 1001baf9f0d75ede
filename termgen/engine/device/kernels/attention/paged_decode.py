"""Attention of rows with one query each, or a few, over the paged KV cache, split over the keys.

A plan of `decode_plan` divides the step's tiles of keys among a fixed number of programs by the
lengths on the device, so one 32k context among short ones costs what its bytes cost and a recorded
launch is right for every context. The heads that share a key head are the rows of one matrix
product, and so are a row's queries, of which each sees the keys up to its own position.

    whole (row, head) in one run        written straight to the output
    (row, head) cut between programs    partial sums in a workspace; the last program to arrive adds
                                        them up, in program order, so timing changes no result

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] of any layout.
An 8-bit cache meets its queries as float16: eight bits become float16 in one instruction for two
values, and bfloat16 only through float16, by an instruction so slow that decode would wait for it
rather than for memory. Every e4m3 value is exact in float16, and so is a bfloat16 query, but for
values beyond its range (where softmax knows one key only) or too small to matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.attention.byte_pairs import (
    add_values,
    bytes_of_float8,
    joined,
    no_sums,
    words_at,
)
from termgen.engine.device.kernels.attention.decode_plan import DecodeWorkspace
from termgen.engine.device.kernels.attention.scaled_attention import attend_scaled
from termgen.engine.device.kernels.attention.window import first_key, window_constant
from termgen.engine.device.kernels.kv_cache import cache_constants, scales_at
from termgen.engine.device.kernels.launch import ask_l2, dot_precision, next_power_of_2, pdl_options
from termgen.vocabulary.cache_groups import Window

_LOG2_E = tl.constexpr(1.4426950408889634)
_MMA_ROWS = 16
_PREFETCH_TILES = 3
_MAX_COMBINED = 8192
"""Float32 values of partial sums a program holds at once while it adds them up."""


@triton.jit
def to_product_type(q, CACHE_BITS: tl.constexpr):
    """q in the type for both of attention's products; keys and values follow it."""
    if CACHE_BITS == 8 and q.dtype == tl.bfloat16:
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q


@triton.jit
def capped(doubled, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(doubled / 2 * ln 2), for scores that `cap_scale` has scaled."""
    return SOFTCAP - 2 * SOFTCAP / (1.0 + tl.exp2(doubled))


def cap_scale(scale: float, softcap: float | None) -> tuple[float, float]:
    """The kernel's factor of products, and its cap: 0 for none. Its scores are powers of two, and
    a capped one is made from the power that tanh consists of."""
    if softcap is None:
        return scale * _LOG2_E.value, 0.0
    return 2 * scale / softcap * _LOG2_E.value, softcap * _LOG2_E.value


@triton.jit
def ask_for_keys(
    head_ptr,
    table_ptr,
    begin,
    end_key,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Asks the L2 cache for a head's keys and values from begin to end_key, blocks whole."""
    blocks = begin // BLOCK_SIZE + tl.arange(0, THREADS)
    asks = (blocks * BLOCK_SIZE < end_key) & (begin < end_key)
    ids = tl.load(table_ptr + blocks, mask=asks, other=0)
    ITEM_BYTES: tl.constexpr = head_ptr.dtype.element_ty.primitive_bitwidth // 8
    address = head_ptr.to(tl.int64) + ids.to(tl.int64) * (BLOCK_STRIDE * ITEM_BYTES)
    ask_l2(address, tl.where(asks, 2 * BLOCK_SIZE * HEAD_DIM * ITEM_BYTES, 0))


@triton.jit
def attend_run(
    q,
    head_ptr,
    table,
    begin,
    run,
    seq_len,
    last_keys,
    scale,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    IS_WITHIN_BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """`run` tiles of one (row, head) from key `begin`: sums that are not yet divided, [M, D], and
    of each query the largest score and the sum of the weights, [M]. last_keys: where QUERIES are
    more than one, [M] the last key that each sees."""
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, TILE)
    head_base = head_ptr + dims[None, :]
    if QUERIES == 1:
        last_keys = seq_len - 1
    if WINDOW != 0:
        first_keys = first_key(last_keys, WINDOW)
        first_seen = first_keys
        if QUERIES > 1:
            first_seen = tl.min(first_keys, axis=0)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    IS_FLOAT8: tl.constexpr = head_ptr.dtype.element_ty == tl.float8e4nv
    sums = no_sums(q.shape[0], BLOCK_D, 2 if IS_FLOAT8 else 1)
    # Block ids are fetched one tile ahead of the keys that they lead to, or they would halve the
    # depth of the pipeline. Nothing outside the sequence is ever read.
    if IS_WITHIN_BLOCK:
        block = tl.load(table + begin // BLOCK_SIZE)
    else:
        place = tl.minimum(begin + keys, seq_len - 1)
        block = tl.load(table + place // BLOCK_SIZE)
    for step in tl.range(0, run, num_stages=NUM_STAGES):
        here = begin + step * TILE
        key = here + keys
        if IS_WITHIN_BLOCK:
            base = block.to(tl.int64) * BLOCK_STRIDE + here % BLOCK_SIZE * TOKEN_STRIDE
            base = base + keys * TOKEN_STRIDE
            block = tl.load(table + tl.minimum(here + TILE, seq_len - 1) // BLOCK_SIZE)
        else:
            base = block.to(tl.int64) * BLOCK_STRIDE + place % BLOCK_SIZE * TOKEN_STRIDE
            place = tl.minimum(key + TILE, seq_len - 1)
            block = tl.load(table + place // BLOCK_SIZE)
        at = head_base + base[:, None]
        inside = (key < seq_len)[:, None]
        if WINDOW != 0:  # the blocks before it are given up, and 0 * NaN is not 0
            inside = inside & (key >= first_seen)[:, None]
        is_token = inside
        if BLOCK_D > HEAD_DIM:
            inside = inside & (dims < HEAD_DIM)[None, :]
        k = tl.load(at, mask=inside, other=0.0).to(q.dtype)  # from an 8-bit cache; else nothing
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            scores = capped(scores, SOFTCAP)
        if QUERIES == 1:
            is_seen = key < seq_len
            if WINDOW != 0:
                is_seen = is_seen & (key >= first_seen)
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            reference = new_top
        else:
            is_seen = key[None, :] <= last_keys[:, None]
            if WINDOW != 0:
                is_seen = is_seen & (key[None, :] >= first_keys[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            reference = finite_top(new_top)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        if IS_FLOAT8:
            words = words_at(head_ptr, V_OFFSET + base, is_token, HEAD_DIM, BLOCK_D)
            values = bytes_of_float8(words, q.dtype)
        else:
            values = (tl.load(at + V_OFFSET, mask=inside, other=0.0),)
        sums = add_values(sums, weights.to(q.dtype), values, shrink, PRECISION)
        top = new_top
    return joined(sums), top, total


@triton.jit
def _attend(
    q,
    head_ptr,
    cache_ptr,
    kv_head,
    table,
    begin,
    run,
    seq_len,
    last_keys,
    scale,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    IS_WITHIN_BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """`attend_run`, or `attend_scaled` for a cache with scales."""
    if SCALES > 0:
        acc, top, total = attend_scaled(
            q, cache_ptr, kv_head, table, begin, run, seq_len - 1, last_keys, scale,
            BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, HEAD_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D,
            QUERIES > 1, WINDOW, TILE, IS_WITHIN_BLOCK, NUM_STAGES, PRECISION, SOFTCAP, SCALES,
            True,
        )  # fmt: skip
    else:
        acc, top, total = attend_run(
            q, head_ptr, table, begin, run, seq_len, last_keys, scale,
            BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, BLOCK_SIZE, HEAD_DIM, BLOCK_D, QUERIES,
            WINDOW, TILE, IS_WITHIN_BLOCK, NUM_STAGES, PRECISION, SOFTCAP,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def finite_top(top):
    """What weights are relative to: 0 for a query that has seen no key of a program's run."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def offsets_of(rows, stride, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where the rows of a matrix product begin: heads of a group, and those of the next query
    `stride` further on."""
    if QUERIES == 1:
        offsets = rows * HEAD_DIM
    else:
        offsets = rows // GROUP * stride + rows % GROUP * HEAD_DIM
    return offsets


@triton.jit
def divided(acc, total, value_scale):
    """The result of sums. value_scale: of values in the cache; None: 1."""
    result = acc / total[:, None]
    if value_scale is not None:
        result = result * value_scale
    return result


@triton.jit
def weigh_sinks(sinks_ptr, rows, GROUP: tl.constexpr, QUERIES: tl.constexpr, top):
    """What the sinks of a group's heads add to the sums of their weights."""
    heads = rows
    if QUERIES > 1:
        heads = rows % GROUP
    sinks = tl.load(sinks_ptr + heads, mask=rows < GROUP * QUERIES, other=0.0)
    return tl.exp2(sinks * _LOG2_E - top)


@triton.jit
def combine_pieces(
    partial_ptr,
    softmax_ptr,
    out_ptr,
    sinks_ptr,
    value_scale,
    first_program,
    last_program,
    out_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Adds up the pieces of one (row, head): slot 1 of its first program, slot 0 of the others."""
    heads = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32)
    for first in range(first_program, last_program + 1, PIECES):
        programs = first + tl.arange(0, PIECES)
        inside = (programs <= last_program)[:, None]
        piece = programs * 2 + (programs == first_program).to(tl.int32)
        at = softmax_ptr + piece[:, None] * (2 * GROUP_ROWS) + heads[None, :]
        # L1 may hold what an earlier launch left in the workspace: read past it.
        maxima = tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(at + GROUP_ROWS, mask=inside, other=0.0, cache_modifier=".cg")
        rows = piece[:, None, None] * GROUP_ROWS + heads[None, :, None]
        values = tl.load(
            partial_ptr + rows * BLOCK_D + dims[None, None, :],
            mask=inside[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(maxima, axis=0))
        reference = new_top
        if QUERIES > 1:
            reference = finite_top(new_top)
        weights = tl.exp2(maxima - reference[None, :])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(sums * weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        top = new_top
    if HAS_SINKS:
        total += weigh_sinks(sinks_ptr, heads, GROUP, QUERIES, top)
    inside = (heads < GROUP * QUERIES)[:, None] & (dims < HEAD_DIM)[None, :]
    at_head = offsets_of(heads, out_stride, GROUP, QUERIES, HEAD_DIM)
    to = out_ptr + at_head[:, None] + dims[None, :]
    tl.store(to, divided(acc, total, value_scale).to(out_ptr.dtype.element_ty), mask=inside)


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
    positions_ptr,
    plan_ptr,
    partial_ptr,
    softmax_ptr,
    arrivals_ptr,
    sinks_ptr,
    scale,
    value_scale,
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
    QUERIES: tl.constexpr,
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
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALES: tl.constexpr,
    STORED_DIM: tl.constexpr,
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
    head_mask = (heads < GROUP * QUERIES)[:, None] & (dims < HEAD_DIM)[None, :]
    out_dtype = out_ptr.dtype.element_ty
    ROW_SIZE: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    q_offsets = offsets_of(heads, q_stride, GROUP, QUERIES, HEAD_DIM)[:, None] + dims[None, :]
    out_offsets = offsets_of(heads, ROW_SIZE, GROUP, QUERIES, HEAD_DIM)[:, None] + dims[None, :]
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    query = tl.minimum(heads // GROUP, QUERIES - 1)
    last_keys = seq_len - 1
    if QUERIES > 1:
        at = positions_ptr + row * QUERIES + query
        last_keys = tl.load(at, mask=row < num_rows, other=0).to(tl.int32)
    if USE_PDL:
        if PREFETCH_TILES > 0:
            first = tile
            if WINDOW != 0:
                first += first_key(seq_len - QUERIES, WINDOW) // TILE
            keys_ahead = tl.minimum(num_tiles, PREFETCH_TILES) * TILE
            ask_for_keys(
                cache_ptr + kv_head * HEAD_STRIDE,
                block_table_ptr + row * table_stride,
                first * TILE,
                tl.minimum(first * TILE + keys_ahead, seq_len),
                BLOCK_STRIDE,
                BLOCK_SIZE,
                STORED_DIM,
                THREADS,
            )
        gdc_wait()

    done = 0
    while done < num_tiles:
        first_tile = 0
        if WINDOW != 0:
            first_tile = first_key(seq_len - QUERIES, WINDOW) // TILE
        all_tiles = (seq_len + TILE - 1) // TILE - first_tile
        run = tl.minimum(all_tiles - tile, num_tiles - done)
        if run > 0:
            q_at = q_ptr + row.to(tl.int64) * QUERIES * q_stride + kv_head * (GROUP * HEAD_DIM)
            q = tl.load(q_at + q_offsets, mask=head_mask, other=0.0)
            q = to_product_type(q, CACHE_BITS)
            acc, top, total = _attend(
                q,
                cache_ptr + kv_head * HEAD_STRIDE,
                cache_ptr,
                kv_head,
                block_table_ptr + row.to(tl.int64) * table_stride,
                (first_tile + tile) * TILE,
                run,
                seq_len,
                last_keys,
                scale,
                BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, HEAD_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D,
                QUERIES, WINDOW, TILE, IS_WITHIN_BLOCK, NUM_STAGES, PRECISION, SOFTCAP, SCALES,
            )  # fmt: skip

            out_at = out_ptr + row.to(tl.int64) * QUERIES * ROW_SIZE + kv_head * (GROUP * HEAD_DIM)
            if run == all_tiles:
                if HAS_SINKS:
                    total += weigh_sinks(sinks_ptr + kv_head * GROUP, heads, GROUP, QUERIES, top)
                result = divided(acc, total, value_scale).to(out_dtype)
                tl.store(out_at + out_offsets, result, mask=head_mask)
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
                        sinks_ptr + kv_head * GROUP if HAS_SINKS else None,
                        value_scale,
                        first_program,
                        last_program,
                        ROW_SIZE,
                        GROUP=GROUP,
                        QUERIES=QUERIES,
                        GROUP_ROWS=GROUP_ROWS,
                        HEAD_DIM=HEAD_DIM,
                        BLOCK_D=BLOCK_D,
                        PIECES=PIECES,
                        HAS_SINKS=HAS_SINKS,
                    )
            done += run
        tile = 0
        kv_head += 1
        if (kv_head == NUM_KV_HEADS) | (all_tiles == 0):
            kv_head = 0
            row += 1
            seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
            if QUERIES == 1:
                last_keys = seq_len - 1
            else:
                at = positions_ptr + row * QUERIES + query
                last_keys = tl.load(at, mask=row < num_rows, other=0).to(tl.int32)
    _zero_empty_rows(
        seq_lens_ptr, out_ptr, program, num_rows, ROW_SIZE * QUERIES, 1024, NUM_PROGRAMS
    )


def paged_decode(
    q: torch.Tensor,  # [B * Q, num_heads, head_dim], heads dense
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [B, max_blocks] int32
    seq_lens: torch.Tensor,  # [B] int32; a row of length 0 gives zeros
    plan: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    num_rows: int,
    positions: torch.Tensor | None = None,  # [B * Q] int64
    num_queries: int = 1,
    scale: float,
    value_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads] float32
    out: torch.Tensor,  # [B * Q, num_heads, head_dim], contiguous
    pdl: bool = True,
) -> torch.Tensor:
    """The queries' keys and values are in the cache already. `plan` was made by `plan_decode` for
    these lengths, heads, queries and window.

    num_queries: Q of each row, the workspace's at most. With more than one, a query sees the keys
    up to its position, which is less than the row's length and at least that less Q.

    With `pdl` the kernel reads plan, lengths and block ids before the kernel ahead of it has ended:
    between what writes them and this must lie a launch without early start, as a step's embedding
    is.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[3]
    assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous(), (q.stride(), out.stride())
    assert block_table.stride(1) == 1
    config, group = workspace.config, num_heads // num_kv_heads
    assert num_queries <= workspace.max_queries, (num_queries, workspace.max_queries)
    assert (positions is not None) == (num_queries > 1)
    group_rows, block_d = next_power_of_2(group * num_queries), next_power_of_2(head_dim)
    # With several queries a piece is large enough by itself: sums over more of them are four times
    # as slow.
    pieces = max(1, min(32, _MAX_COMBINED // (group_rows * block_d))) if num_queries == 1 else 1
    factor, cap = cap_scale(scale, softcap)
    if num_rows:
        _paged_decode_kernel[(workspace.num_programs,)](
            q,
            cache,
            out,
            block_table,
            seq_lens,
            positions,
            plan,
            workspace.partial,
            workspace.softmax,
            workspace.arrivals,
            sinks,
            factor,
            value_scale,
            num_rows,
            q.stride(0),
            block_table.stride(0),
            **cache_constants(cache),
            GROUP=group,
            QUERIES=num_queries,
            GROUP_ROWS=group_rows,
            WINDOW=window_constant(window),
            NUM_PROGRAMS=workspace.num_programs,
            TILE=config.tile,
            IS_WITHIN_BLOCK=cache.shape[1] % config.tile == 0,
            CACHE_BITS=8 * cache.element_size(),
            NUM_STAGES=config.num_stages,
            BLOCK_M=max(_MMA_ROWS, group_rows),
            BLOCK_D=block_d,
            PIECES=pieces,
            PRECISION=dot_precision(q.dtype),
            PREFETCH_TILES=_prefetch_tiles(cache, config.tile),
            THREADS=32 * config.num_warps,
            SOFTCAP=cap,
            HAS_SINKS=sinks is not None,
            SCALES=scales_at(cache),
            STORED_DIM=cache.shape[4],
            num_warps=config.num_warps,
            **pdl_options(q.device, enabled=pdl),
        )
    return out


def _prefetch_tiles(cache: torch.Tensor, tile: int) -> int:
    """Tiles whose keys and values are asked for ahead: with a head's part of a block in one piece,
    that is one request a block."""
    block_size, head_dim = cache.shape[1], cache.shape[4]
    in_one_piece = cache.stride()[1:3] == (head_dim, block_size * head_dim)
    aligned = all(n * cache.element_size() % 16 == 0 for n in (head_dim, cache.stride(0)))
    return _PREFETCH_TILES if in_one_piece and aligned else 0
