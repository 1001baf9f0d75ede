"""What a program of `paged_decode` does with a run of tiles of one (row, key head)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from termgen.engine.device.kernels.prefetch import ask_l2


@triton.jit
def ask_for_keys(
    head_ptr,
    table_ptr,
    first_key,
    end_key,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Asks the L2 cache for a head's keys and values from first_key to end_key, blocks whole."""
    blocks = first_key // BLOCK_SIZE + tl.arange(0, THREADS)
    asks = (blocks * BLOCK_SIZE < end_key) & (first_key < end_key)
    ids = tl.load(table_ptr + blocks, mask=asks, other=0)
    ITEM_BYTES: tl.constexpr = head_ptr.dtype.element_ty.primitive_bitwidth // 8
    address = head_ptr.to(tl.int64) + ids.to(tl.int64) * (BLOCK_STRIDE * ITEM_BYTES)
    ask_l2(address, tl.where(asks, 2 * BLOCK_SIZE * HEAD_DIM * ITEM_BYTES, 0))


@triton.jit
def attend_run(
    q,
    head_ptr,
    table,
    first_key,
    run,
    seq_len,
    scale,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    IS_WITHIN_BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`run` tiles of one (row, head) from `first_key`: sums that are not yet divided, [M, D], and
    of each query the largest score and the sum of the weights, [M]."""
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, TILE)
    head_base = head_ptr + dims[None, :]
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    # Block ids are fetched one tile ahead of the keys that they lead to, or they would halve the
    # depth of the pipeline. Nothing outside the sequence is ever read.
    if IS_WITHIN_BLOCK:
        block = tl.load(table + first_key // BLOCK_SIZE)
    else:
        place = tl.minimum(first_key + keys, seq_len - 1)
        block = tl.load(table + place // BLOCK_SIZE)
    for step in tl.range(0, run, num_stages=NUM_STAGES):
        here = first_key + step * TILE
        key = here + keys
        if IS_WITHIN_BLOCK:
            base = block.to(tl.int64) * BLOCK_STRIDE + here % BLOCK_SIZE * TOKEN_STRIDE
            at = head_base + base + (keys * TOKEN_STRIDE)[:, None]
            block = tl.load(table + tl.minimum(here + TILE, seq_len - 1) // BLOCK_SIZE)
        else:
            base = block.to(tl.int64) * BLOCK_STRIDE + place % BLOCK_SIZE * TOKEN_STRIDE
            at = head_base + base[:, None]
            place = tl.minimum(key + TILE, seq_len - 1)
            block = tl.load(table + place // BLOCK_SIZE)
        inside = (key < seq_len)[:, None]
        if BLOCK_D > HEAD_DIM:
            inside = inside & (dims < HEAD_DIM)[None, :]
        k = tl.load(at, mask=inside, other=0.0).to(q.dtype)  # from an 8-bit cache; else nothing
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        is_seen = key < seq_len
        if WINDOW > 0:
            is_seen = is_seen & (key >= seq_len - WINDOW)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(at + V_OFFSET, mask=inside, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def combine_pieces(
    partial_ptr,
    softmax_ptr,
    out_ptr,
    first_program,
    last_program,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
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
        weights = tl.exp2(maxima - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(sums * weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        top = new_top
    inside = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    to = out_ptr + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
