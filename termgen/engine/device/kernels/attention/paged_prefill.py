"""Attention of rows with any number of queries over the paged KV cache: prompts and mixed steps.

A tile of queries is the rows of one matrix product, against tiles of keys. `prefill_plan` lists the
tiles on the device from `query_start_loc`; the launch covers the most tiles that the token count
allows, and programs past the last tile leave at once, so a recorded launch is right for every split
of tokens into rows. Tiles with the most keys (the last ones of a prompt) start first.

Where a tile of keys lies within one block of the cache, whose part of a head is one piece of
memory, the tensor memory accelerator copies it: threads work out no addresses.

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] of any layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from termgen.engine.device.kernels.attention.paged_decode import (
    cap_scale,
    capped,
    divided,
    to_product_type,
)
from termgen.engine.device.kernels.attention.prefill_plan import PLAN_FIELDS, PrefillConfig
from termgen.engine.device.kernels.attention.scaled_attention import attend_scaled
from termgen.engine.device.kernels.attention.window import (
    first_key,
    first_masked,
    window_constant,
)
from termgen.engine.device.kernels.kv_cache import cache_constants, scales_at
from termgen.engine.device.kernels.launch import dot_precision, has_tma, next_power_of_2
from termgen.vocabulary.cache_groups import Window

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_blocks(
    table,
    begin,
    last_key,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_WITHIN_BLOCK: tl.constexpr,
):
    """The block of each key of a tile; one for all where a tile lies within a block. Keys past the
    last one are taken for it: nothing outside the sequence is ever read."""
    if IS_WITHIN_BLOCK:
        keys = begin
    else:
        keys = begin + tl.arange(0, TILE)
    return tl.load(table + tl.minimum(keys, last_key) // BLOCK_SIZE)


@triton.jit
def _attend_tile(
    q,
    acc,
    top,
    total,
    cache,
    block,
    begin,
    first_seen,
    last_key,
    positions,
    kv_head,
    scale,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    IS_WITHIN_BLOCK: tl.constexpr,
    USE_TMA: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The tile of keys from position `begin`; `block` is what `_load_blocks` found. No key
    before `first_seen` or after `last_key` counts."""
    key = begin + tl.arange(0, TILE)
    if USE_TMA:
        line = (block * NUM_KV_HEADS + kv_head) * (2 * BLOCK_SIZE) + begin % BLOCK_SIZE
        k = cache.load([line, 0])
    else:
        if IS_WITHIN_BLOCK:
            place = begin % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            place = tl.minimum(key, last_key) % BLOCK_SIZE
        dims = tl.arange(0, BLOCK_D)
        at = block.to(tl.int64) * BLOCK_STRIDE + kv_head * HEAD_STRIDE
        at = cache + (at + place * TOKEN_STRIDE)[:, None] + dims[None, :]
        inside = (dims < HEAD_DIM)[None, :]
        if MASKED:
            inside = inside & ((key >= first_seen) & (key <= last_key))[:, None]
        if MASKED or BLOCK_D > HEAD_DIM:
            k = tl.load(at, mask=inside, other=0.0)
        else:
            k = tl.load(at)
    k = k.to(q.dtype)  # an 8-bit cache; else nothing
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP > 0:
        scores = capped(scores * scale, SOFTCAP)
        scale = 1.0  # they are scaled already
    if MASKED:
        is_seen = key[None, :] <= positions[:, None]
        if WINDOW != 0:
            is_seen = is_seen & (key[None, :] >= first_key(positions, WINDOW)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shift = new_top
    if WINDOW != 0:
        # A query may see nothing of a tile at its window's far end, and nothing before it either.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    # Scaled here, scores cost one fused operation each.
    weights = tl.exp2(scores * scale - (shift * scale)[:, None])
    shrink = tl.exp2((top - shift) * scale)
    total = total * shrink + tl.sum(weights, axis=1)
    if USE_TMA:
        v = cache.load([line + BLOCK_SIZE, 0]).to(q.dtype)
        if MASKED:
            # Unused places of a block, and blocks that were given up, may hold anything, and
            # 0 * NaN is not 0.
            v = tl.where(((key >= first_seen) & (key <= last_key))[:, None], v, 0.0)
    elif MASKED or BLOCK_D > HEAD_DIM:
        v = tl.load(at + V_OFFSET, mask=inside, other=0.0).to(q.dtype)
    else:
        v = tl.load(at + V_OFFSET).to(q.dtype)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(
    do_not_specialize=["num_tiles", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "plan_ptr"],
)
def _paged_prefill_kernel(
    q_ptr,
    cache,
    out_ptr,
    block_table_ptr,
    plan_ptr,
    sinks_ptr,
    scale,
    value_scale,
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
    IS_WITHIN_BLOCK: tl.constexpr,
    USE_TMA: tl.constexpr,
    CACHE_BITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SCALES: tl.constexpr,
):
    entry = plan_ptr + (num_tiles - 1 - tl.program_id(0)) * PLAN_FIELDS
    kv_head = tl.program_id(1)
    row = tl.load(entry)
    if row < 0:
        return
    first_token = tl.load(entry + 1)
    num_queries = tl.load(entry + 2)
    first_position = tl.load(entry + 3)
    seq_len = tl.load(entry + 4)

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = lanes // GROUP
    live = (queries < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + queries).to(tl.int64)
    heads = kv_head * GROUP + lanes % GROUP
    q_at = q_ptr + tokens * q_stride + heads * HEAD_DIM
    q = tl.load(q_at[:, None] + dims[None, :], mask=live, other=0.0)
    q = to_product_type(q, CACHE_BITS)
    # Lanes without a query look where the last one does, so that every lane sees something.
    positions = first_position + tl.minimum(queries, QUERIES - 1)

    table = block_table_ptr + row.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(first_position + QUERIES, seq_len)
    first_tile = 0
    first_seen = 0
    num_full = tl.maximum(first_position + 1, 0) // TILE
    if WINDOW != 0:
        first_seen = first_key(first_position, WINDOW)
        first_tile = first_seen // TILE
        num_full = first_masked(num_full, first_position, QUERIES, WINDOW, TILE)
    if seq_len == 0:
        num_full = 0
        end = 0
    last_tile = (end + TILE - 1) // TILE
    last_key = tl.maximum(end - 1, 0)

    if SCALES > 0:
        acc, top, total = attend_scaled(
            q, cache, kv_head, table, first_tile * TILE, last_tile - first_tile, last_key,
            positions, scale, BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, HEAD_STRIDE, BLOCK_SIZE,
            HEAD_DIM, BLOCK_D, True, WINDOW, TILE, IS_WITHIN_BLOCK, NUM_STAGES, PRECISION, SOFTCAP,
            SCALES, False,
        )  # fmt: skip
        scale = 1.0  # scores are scaled already
    else:
        # Block ids are fetched one tile ahead of the keys that they lead to, or they would halve
        # the depth of the pipeline.
        block = _load_blocks(table, first_tile * TILE, last_key, BLOCK_SIZE, TILE, IS_WITHIN_BLOCK)
        for step in tl.range(first_tile, num_full, num_stages=NUM_STAGES):
            block_here = block
            block = _load_blocks(
                table, (step + 1) * TILE, last_key, BLOCK_SIZE, TILE, IS_WITHIN_BLOCK
            )
            acc, top, total = _attend_tile(
                q, acc, top, total, cache, block_here, step * TILE, first_seen, last_key, positions,
                kv_head, scale, BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, HEAD_STRIDE, BLOCK_SIZE,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_D, WINDOW, TILE, IS_WITHIN_BLOCK, USE_TMA, False,
                PRECISION, SOFTCAP,
            )  # fmt: skip
        for step in tl.range(num_full, last_tile, num_stages=NUM_STAGES):
            block_here = block
            block = _load_blocks(
                table, (step + 1) * TILE, last_key, BLOCK_SIZE, TILE, IS_WITHIN_BLOCK
            )
            acc, top, total = _attend_tile(
                q, acc, top, total, cache, block_here, step * TILE, first_seen, last_key, positions,
                kv_head, scale, BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, HEAD_STRIDE, BLOCK_SIZE,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_D, WINDOW, TILE, IS_WITHIN_BLOCK, USE_TMA, True,
                PRECISION, SOFTCAP,
            )  # fmt: skip
    if HAS_SINKS:
        if SOFTCAP > 0:
            scale = 1.0
        sinks = tl.load(sinks_ptr + heads) * _LOG2_E
        total += tl.where(total > 0.0, tl.exp2(sinks - top * scale), 0.0)
    # A padded row has seen nothing.
    result = divided(acc, tl.where(total > 0.0, total, 1.0), value_scale)
    to = out_ptr + (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=live)


def paged_prefill(
    q: torch.Tensor,  # [T, num_heads, head_dim], heads dense
    cache: torch.Tensor,  # view [num_blocks, block_size, 2, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [B, max_blocks] int32
    plan: torch.Tensor,
    *,
    config: PrefillConfig,
    num_tiles: int,
    scale: float,
    value_scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads] float32
    out: torch.Tensor,  # [T, num_heads, head_dim], contiguous
) -> torch.Tensor:
    """Writes the tokens of the planned rows and no others, zeros for a row of length 0. Their keys
    and values are in the cache already; `plan` was made by `plan_prefill` with the same `config`
    and `num_tiles`."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = cache.shape[3]
    group = num_heads // num_kv_heads
    assert q.stride()[1:] == (head_dim, 1) and out.is_contiguous(), (q.stride(), out.stride())
    assert block_table.stride(1) == 1 and config.rows >= group
    if not num_tiles:
        return out
    if config.specialised:
        assert softcap is None, "TritonPagedAttention plans other tiles for it"
        assert value_scale is None, "which an fp8 cache has"
        from termgen.engine.device.kernels.attention.paged_prefill_hopper import (
            paged_prefill_hopper,
        )

        paged_prefill_hopper(
            q,
            cache,
            block_table,
            plan,
            config=config,
            num_tiles=num_tiles,
            scale=scale,
            window=window,
            sinks=sinks,
            out=out,
        )
        return out
    factor, cap = cap_scale(scale, softcap)
    use_tma = can_use_tma(cache, config.tile)
    _paged_prefill_kernel[(num_tiles, num_kv_heads)](
        q,
        _cache_lines(cache, config.tile) if use_tma else cache,
        out,
        block_table,
        plan,
        sinks,
        factor,
        value_scale,
        num_tiles,
        q.stride(0),
        block_table.stride(0),
        **cache_constants(cache),
        GROUP=group,
        WINDOW=window_constant(window),
        QUERIES=config.rows // group,
        TILE=config.tile,
        IS_WITHIN_BLOCK=cache.shape[1] % config.tile == 0,
        USE_TMA=use_tma,
        CACHE_BITS=8 * cache.element_size(),
        NUM_STAGES=config.num_stages,
        BLOCK_M=config.rows,
        BLOCK_D=next_power_of_2(head_dim),
        PRECISION=dot_precision(q.dtype),
        SOFTCAP=cap,
        HAS_SINKS=sinks is not None,
        SCALES=scales_at(cache),
        num_warps=config.num_warps,
    )
    return out


def can_use_tma(cache: torch.Tensor, tile: int) -> bool:
    """True if tiles of keys can be copied whole by the tensor memory accelerator: each lies within
    a block, and a head's part of a block is one piece of memory."""
    block_size, _, num_kv_heads, head_dim = cache.shape[1:]
    row = head_dim * cache.element_size()
    order = (num_kv_heads * 2 * block_size, 1, block_size, 2 * block_size)
    return (
        has_tma(cache.device)
        and not scales_at(cache)
        and cache.element_size() <= 2
        and block_size % tile == 0
        and row % 16 == 0
        and cache.stride() == (*(head_dim * lines for lines in order), 1)
    )


def _cache_lines(cache: torch.Tensor, tile: int) -> TensorDescriptor:
    """The cache as lines of one key or value of one head, to be copied `tile` at a time."""
    lines = cache.permute(0, 3, 2, 1, 4).reshape(-1, cache.shape[4])
    return TensorDescriptor.from_tensor(lines, [tile, next_power_of_2(cache.shape[4])])
