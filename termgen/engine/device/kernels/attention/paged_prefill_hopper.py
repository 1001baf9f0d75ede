"""`paged_prefill` for Hopper GPUs: warps that copy keys and values beside warps that compute.

A program is one warp that copies tiles of keys and values into a ring in shared memory
(`copy_tiles`), and two or three groups of four warps with 64 rows of the queries each. A group
takes the exponentials of a tile's scores while the tile before is multiplied with its values, and
the groups take turns of themselves: what FlashAttention-3 (Shah et al. 2024) calls overlapping
softmax with products. Programs stay: each takes tiles of the plan one after the other.

A `ready` barrier counts the bytes that arrive at a place of the ring. That a place is free again,
the groups tell the warp that copies by one of the 16 barriers every program has in hardware
(`_release`): telling takes each warp one instruction and makes none wait for another.

Skip it on a first reading: `paged_prefill` computes the same. Written in Gluon, Triton's language
for explicit layouts and barriers, which its interpreter does not run: the tests of `paged_prefill`
run over this kernel on such a GPU alone.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from termgen.engine.device.kernels.attention.prefill_plan import PLAN_FIELDS, PrefillConfig
from termgen.engine.device.kernels.attention.window import (
    first_key,
    first_masked,
    window_constant,
)
from termgen.engine.device.kernels.launch import num_sms
from termgen.vocabulary.cache_groups import Window

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Barrier of the warps that run the same function; Triton 3.7 renamed it."""
_LOG2_E = gl.constexpr(1.4426950408889634)
_ROWS = gl.constexpr(64)
"""Rows of a group of four warps, as one of its products has."""
_COPIER_REGISTERS = gl.constexpr(24)
_TWO_GROUPS_REGISTERS = gl.constexpr(240)
_THREE_GROUPS_REGISTERS = gl.constexpr(160)
_HARDWARE_BARRIERS = gl.constexpr(16)
COPIED = gl.constexpr(64)
"""Keys of one copy: they lie within a block."""


@gluon.jit
def next_work(turn):
    """Back and forth over the programs: most keys in one turn means fewest in the next."""
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
    if WINDOW != 0:
        first = first_key(first_position, WINDOW) // TILE
        num_full = first_masked(num_full, first_position, QUERIES, WINDOW, TILE)
    end = gl.minimum(first_position + QUERIES, seq_len)
    last = gl.maximum((end + TILE - 1) // TILE, first)
    if row < 0:
        num_queries = 0
        last = first
    if seq_len == 0:
        last = first
    return row, first_token, num_queries, first_position, seq_len, first, num_full, last


@gluon.jit
def _free_barrier(stage, STAGES: gl.constexpr):
    """Hardware barrier of a place of the ring: the last ones, as Triton numbers its own from 0."""
    return _HARDWARE_BARRIERS - 2 * STAGES + stage


@gluon.jit
def _release(stage, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """A group has read a place of the ring. An mbarrier would cost a barrier of its four warps, for
    one thread to speak for them."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, 0;",
        "=r,r,r",
        [_free_barrier(stage, STAGES), 32 + 128 * GROUPS],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def _wait_until_free(stage, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The warp that copies waits until every group has released a place of the ring."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;",
        "=r,r,r",
        [_free_barrier(stage, STAGES), 32 + 128 * GROUPS],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def _first_seen(first_position, WINDOW: gl.constexpr):
    """The first key of the first piece that a tile's queries see."""
    first = 0
    if WINDOW != 0:
        first = first_key(first_position, WINDOW) // COPIED * COPIED
    return first


@gluon.jit
def copy_tiles(
    lines,
    block_table_ptr,
    plan_ptr,
    num_tiles,
    table_stride,
    ring,
    ready,
    NUM_KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    QUERIES: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
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
            first_seen = _first_seen(first_position, WINDOW)
            for tile in range(first, last):
                stage = count % STAGES * 2
                for part in gl.static_range(2):
                    if count >= STAGES:
                        _wait_until_free(stage + part, GROUPS, STAGES)
                    mbarrier.expect(
                        ready.index(stage + part), lines.block_type.nbytes * (TILE // COPIED)
                    )
                    for piece in gl.static_range(TILE // COPIED):
                        # Keys past the last one and before the first are masked: any block will
                        # do for them, but for those that were given up.
                        key = gl.minimum(tile * TILE + piece * COPIED, seq_len - 1)
                        key = gl.maximum(key, first_seen)
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


@gluon.jit
def _mask(
    scores,
    tile,
    positions,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
    is_seen = key[None, :] <= positions[:, None]
    if WINDOW != 0:
        is_seen = is_seen & (key[None, :] >= first_key(positions, WINDOW)[:, None])
    return gl.where(is_seen, scores, float("-inf"))


@gluon.jit
def _weigh(scores, top, scale, WINDOW: gl.constexpr):
    """Softmax so far: weights of these keys, by how much what was before shrinks, and the top."""
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    shift = new_top
    if WINDOW != 0:
        # A query may see nothing of a tile at its window's far end, and nothing before it either.
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale - (shift * scale)[:, None])
    shrink = gl.exp2((top - shift) * scale)
    return weights, shrink, new_top


@gluon.jit
def _partial_sums(weights, TILE: gl.constexpr):
    """Sums of each thread's own weights, [rows, 8]: threads add theirs once, after the last tile.

    Eight columns lie with four threads, and the next eight with the same four."""
    return gl.sum(weights.reshape([_ROWS, TILE // 8, 8]), axis=1)


@gluon.jit
def _attend_next(
    q,
    weights,
    acc,
    top,
    total,
    tile,
    count,
    positions,
    scale,
    ring,
    ready,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    MASKED: gl.constexpr,
    S: gl.constexpr,
    R: gl.constexpr,
    W: gl.constexpr,
):
    """Scores and weights of a tile, while `weights` of the one before meet their values."""
    keys = count % STAGES * 2
    values = (count - 1) % STAGES * 2 + 1
    nothing = gl.full([_ROWS, TILE], 0.0, gl.float32, S)
    mbarrier.wait(ready.index(keys), count // STAGES & 1)
    k = ring.index(keys).permute((1, 0))
    scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    mbarrier.wait(ready.index(values), (count - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, ring.index(values), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    _release(keys, GROUPS, STAGES)
    if MASKED:
        scores = _mask(scores, tile, positions, WINDOW, TILE, S)
    new_weights, shrink, top = _weigh(scores, top, scale, WINDOW)
    sums = _partial_sums(new_weights, TILE)
    P: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    total = total * gl.convert_layout(shrink, P, assert_trivial=True)[:, None] + sums
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(values, GROUPS, STAGES)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, R), assert_trivial=True)[:, None]
    return gl.convert_layout(new_weights.to(ring.dtype), W), acc, top, total


@gluon.jit
def _attend(
    group,
    q_ptr,
    out_ptr,
    plan_ptr,
    scale,
    num_tiles,
    q_stride,
    queries,
    ring,
    ready,
    sinks_ptr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    """A group of four warps: 64 rows of each of the program's tiles."""
    # Layouts of scores, of the result, of weights as a left side, and of memory.
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    W: gl.constexpr = gl.DotOperandLayout(0, R, 2)
    M: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    count = 0
    num_works = num_tiles * NUM_KV_HEADS
    lane = group * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, M))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, M))
    # Lanes without a query look where the last one does, so that every lane sees something.
    query = (group * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, S))) // GROUP
    query = gl.minimum(query, QUERIES - 1)
    for turn in range(gl.cdiv(num_works, gl.num_programs(0))):
        work = next_work(turn)
        if work < num_works:
            row, first_token, num_queries, first_position, seq_len, first, num_full, last = (
                read_tile(plan_ptr, work // NUM_KV_HEADS, num_tiles, QUERIES, WINDOW, TILE)
            )
            heads = work % NUM_KV_HEADS * GROUP + lane % GROUP
            tokens = (first_token + lane // GROUP).to(gl.int64)
            is_live = (lane // GROUP < num_queries)[:, None]
            to = (tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
            to = out_ptr + to[:, None] + dims[None, :]
            if last == first:
                gl.store(to, gl.full([_ROWS, HEAD_DIM], 0.0, q_ptr.dtype.element_ty, M), is_live)
            else:
                at = q_ptr + (tokens * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
                # In shared memory: the registers go to scores. The group's own products have read
                # the queries before.
                q = queries.index(group)
                q.store(gl.load(at, mask=is_live, other=0.0))
                fence_async_shared()
                _barrier()
                positions = first_position + query
                top = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
                acc = gl.full([_ROWS, HEAD_DIM], 0.0, gl.float32, R)

                stage = count % STAGES * 2
                mbarrier.wait(ready.index(stage), count // STAGES & 1)
                k = ring.index(stage).permute((1, 0))
                scores = gl.full([_ROWS, TILE], 0.0, gl.float32, S)
                scores = warpgroup_mma(q, k, scores, use_acc=False)
                _release(stage, GROUPS, STAGES)
                scores = _mask(scores, first, positions, WINDOW, TILE, S)
                weights, shrink, top = _weigh(scores, top, scale, WINDOW)
                total = _partial_sums(weights, TILE)
                weights = gl.convert_layout(weights.to(ring.dtype), W)
                count += 1
                num_full = gl.maximum(num_full, first + 1)
                for tile in range(first + 1, num_full):
                    weights, acc, top, total = _attend_next(
                        q, weights, acc, top, total, tile, count, positions, scale,
                        ring, ready, WINDOW, TILE, STAGES, GROUPS, False, S, R, W,
                    )  # fmt: skip
                    count += 1
                for tile in range(num_full, last):
                    weights, acc, top, total = _attend_next(
                        q, weights, acc, top, total, tile, count, positions, scale,
                        ring, ready, WINDOW, TILE, STAGES, GROUPS, True, S, R, W,
                    )  # fmt: skip
                    count += 1

                stage = (count - 1) % STAGES * 2 + 1
                mbarrier.wait(ready.index(stage), (count - 1) // STAGES & 1)
                if last * TILE > seq_len:
                    # A block's unused places may hold anything, and 0 * NaN is not 0. Every group
                    # clears them where they lie: all write the same.
                    key = (last - 1) * TILE + gl.arange(0, TILE, gl.SliceLayout(1, M))
                    is_key = (key >= _first_seen(first_position, WINDOW)) & (key < seq_len)
                    v = ring.index(stage).load(M)
                    ring.index(stage).store(gl.where(is_key[:, None], v, 0.0))
                    fence_async_shared()
                    _barrier()
                acc = warpgroup_mma(weights, ring.index(stage), acc)
                _release(stage, GROUPS, STAGES)
                sums = gl.sum(total, axis=1)
                if HAS_SINKS:
                    member = (group * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, S))) % GROUP
                    sinks = gl.load(sinks_ptr + work % NUM_KV_HEADS * GROUP + member)
                    extra = gl.exp2(sinks * _LOG2_E - top * scale)
                    sums += gl.convert_layout(extra, sums.type.layout, assert_trivial=True)
                share = gl.convert_layout(1.0 / sums, gl.SliceLayout(1, R))
                result = gl.convert_layout((acc * share[:, None]).to(ring.dtype), M)
                gl.store(to, result, is_live)


@gluon.jit(
    do_not_specialize=["num_tiles", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "plan_ptr"],
)
def _paged_prefill_hopper_kernel(
    q_ptr,
    lines,
    out_ptr,
    block_table_ptr,
    plan_ptr,
    sinks_ptr,
    scale,
    num_tiles,
    q_stride,
    table_stride,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    QUERIES: gl.constexpr = GROUPS * _ROWS // GROUP
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(lines.dtype, [2 * STAGES, TILE, HEAD_DIM], lines.layout)
    queries = gl.allocate_shared_memory(lines.dtype, [GROUPS, _ROWS, HEAD_DIM], lines.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIERS)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        0, q_ptr, out_ptr, plan_ptr, scale, num_tiles, q_stride, queries, ring,
                        ready, sinks_ptr, NUM_KV_HEADS, HEAD_DIM, GROUP, QUERIES, WINDOW, TILE,
                        STAGES, GROUPS, HAS_SINKS,
                    ),
                ),
                (
                    _attend,
                    (
                        1, q_ptr, out_ptr, plan_ptr, scale, num_tiles, q_stride, queries, ring,
                        ready, sinks_ptr, NUM_KV_HEADS, HEAD_DIM, GROUP, QUERIES, WINDOW, TILE,
                        STAGES, GROUPS, HAS_SINKS,
                    ),
                ),
                (
                    copy_tiles,
                    (
                        lines, block_table_ptr, plan_ptr, num_tiles, table_stride, ring, ready,
                        NUM_KV_HEADS, BLOCK_SIZE, QUERIES, WINDOW, TILE, STAGES, GROUPS,
                    ),
                ),
            ],
            [4, 1],
            [_TWO_GROUPS_REGISTERS, _COPIER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        0, q_ptr, out_ptr, plan_ptr, scale, num_tiles, q_stride, queries, ring,
                        ready, sinks_ptr, NUM_KV_HEADS, HEAD_DIM, GROUP, QUERIES, WINDOW, TILE,
                        STAGES, GROUPS, HAS_SINKS,
                    ),
                ),
                (
                    _attend,
                    (
                        1, q_ptr, out_ptr, plan_ptr, scale, num_tiles, q_stride, queries, ring,
                        ready, sinks_ptr, NUM_KV_HEADS, HEAD_DIM, GROUP, QUERIES, WINDOW, TILE,
                        STAGES, GROUPS, HAS_SINKS,
                    ),
                ),
                (
                    _attend,
                    (
                        2, q_ptr, out_ptr, plan_ptr, scale, num_tiles, q_stride, queries, ring,
                        ready, sinks_ptr, NUM_KV_HEADS, HEAD_DIM, GROUP, QUERIES, WINDOW, TILE,
                        STAGES, GROUPS, HAS_SINKS,
                    ),
                ),
                (
                    copy_tiles,
                    (
                        lines, block_table_ptr, plan_ptr, num_tiles, table_stride, ring, ready,
                        NUM_KV_HEADS, BLOCK_SIZE, QUERIES, WINDOW, TILE, STAGES, GROUPS,
                    ),
                ),
            ],
            [4, 4, 1],
            [_THREE_GROUPS_REGISTERS, _THREE_GROUPS_REGISTERS, _COPIER_REGISTERS],
        )  # fmt: skip


def paged_prefill_hopper(
    q: torch.Tensor,  # [T, num_heads, head_dim], heads dense
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [B, max_blocks] int32
    plan: torch.Tensor,
    *,
    config: PrefillConfig,
    num_tiles: int,
    scale: float,
    window: Window | None,
    sinks: torch.Tensor | None,  # [num_heads] float32
    out: torch.Tensor,  # [T, num_heads, head_dim], contiguous
) -> None:
    """`paged_prefill` under a configuration that is `specialised`, for a cache that the tensor
    memory accelerator can copy from."""
    num_heads, head_dim = q.shape[1:]
    _, block_size, _, num_kv_heads, _ = cache.shape
    lines = cache.permute(0, 3, 2, 1, 4).reshape(-1, head_dim)
    element = getattr(gl, str(cache.dtype).removeprefix("torch."))
    shape = [COPIED.value, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(shape, element)
    num_programs = min(num_tiles * num_kv_heads, num_sms(q.device))
    _paged_prefill_hopper_kernel[(num_programs,)](
        q,
        TensorDescriptor.from_tensor(lines, shape, layout),
        out,
        block_table,
        plan,
        q if sinks is None else sinks,
        scale * _LOG2_E.value,
        num_tiles,
        q.stride(0),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        WINDOW=window_constant(window),
        TILE=config.tile,
        STAGES=config.num_stages,
        GROUPS=config.rows // _ROWS.value,
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )
