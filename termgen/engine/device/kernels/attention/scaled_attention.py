"""Attention to keys and values that are integers with a scale for each head of a token.

One loop for `paged_decode` and `paged_prefill`, in place of theirs. A key's scale multiplies the
column of its scores, a value's the column of weights, so that a tile's numbers are only converted:
every one is exact in float16 and bfloat16. Numbers of four bits have an offset as well, which adds
the same to all products of a query with a key, and to all numbers of a result.

Weights times scales may be far below what float16 holds with all its bits. They are divided by the
largest scale so far, which the sums are kept in units of.
"""

from __future__ import annotations

import triton
import triton.language as tl

from termgen.engine.device.kernels.attention.byte_pairs import (
    add_values,
    joined,
    no_sums,
    numbers_of_bytes,
    numbers_of_words,
    words_at,
)
from termgen.engine.device.kernels.attention.window import first_key
from termgen.engine.device.kernels.rows.store_heads import scales_pointer, split_halves

_SMALLEST_SCALE = tl.constexpr(2.0**-24)
"""The smallest float16 above zero."""


@triton.jit
def _finite_top(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _capped(doubled, SOFTCAP: tl.constexpr):
    return SOFTCAP - 2 * SOFTCAP / (1.0 + tl.exp2(doubled))


@triton.jit
def _seen(key, is_inside, first_keys, last_keys, PER_QUERY: tl.constexpr, WINDOW: tl.constexpr):
    """[M or 1, TILE]: the keys that each query sees, of those that are inside for some query."""
    if PER_QUERY:
        is_seen = key[None, :] <= last_keys[:, None]
        if WINDOW != 0:
            is_seen = is_seen & (key[None, :] >= first_keys[:, None])
    else:
        is_seen = is_inside[None, :]
    return is_seen


@triton.jit
def _places(table, begin, keys, last_key, BLOCK_SIZE: tl.constexpr, IS_WITHIN_BLOCK: tl.constexpr):
    """The block of each key of a tile, or that of all, and the keys' places in it."""
    if IS_WITHIN_BLOCK:
        block = tl.load(table + tl.minimum(begin, last_key) // BLOCK_SIZE)
        inner = begin % BLOCK_SIZE + keys
    else:
        place = tl.minimum(begin + keys, last_key)
        block = tl.load(table + place // BLOCK_SIZE)
        inner = place % BLOCK_SIZE
    return block, inner


@triton.jit
def _scales(
    scales_ptr,
    block,
    inner,
    key,
    first_seen,
    last_key,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_4BIT: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Scales of a tile's keys and of its values, then the offsets: float16 [TILE] each."""
    at = scales_ptr + block.to(tl.int64) * (BLOCK_STRIDE // 2) + inner * (TOKEN_STRIDE // WIDTH)
    is_inside = key <= last_key
    if WINDOW != 0:
        is_inside = is_inside & (key >= first_seen)
    found = ()
    for plane in tl.static_range(2 if IS_4BIT else 1):
        for part in tl.static_range(2):
            place = at + plane * OFFSETS + part * (V_OFFSET // WIDTH)
            found += (tl.load(place, mask=is_inside, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def attend_scaled(
    q,
    cache_ptr,
    kv_head,
    table,
    begin,
    run,
    last_key,
    last_keys,
    scale,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    V_OFFSET: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PER_QUERY: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    IS_WITHIN_BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):
    """`run` tiles from key `begin`, none past `last_key`: sums that are not yet divided, [M, D],
    and of each query the largest score and the sum of the weights, [M]. last_keys: the last key
    that each query sees, [M] where PER_QUERY, else one for all. IN_PAIRS: values are loaded two
    columns at a time."""
    IS_4BIT: tl.constexpr = cache_ptr.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = HEAD_DIM // 2 if IS_4BIT else HEAD_DIM
    BLOCK_W: tl.constexpr = BLOCK_D // 2 if IS_4BIT else BLOCK_D
    OFFSETS: tl.constexpr = SCALES // WIDTH
    dims = tl.arange(0, BLOCK_W)
    keys = tl.arange(0, TILE)
    head_base = cache_ptr + kv_head * HEAD_STRIDE + dims[None, :]
    scales_ptr = scales_pointer(cache_ptr, SCALES) + kv_head * (HEAD_STRIDE // WIDTH)
    first_keys = last_keys
    if WINDOW != 0:
        first_keys = first_key(last_keys, WINDOW)
        first_seen = first_keys
        if PER_QUERY:
            first_seen = tl.min(first_keys, axis=0)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    PARTS: tl.constexpr = (2 if IS_4BIT else 1) * (2 if IN_PAIRS else 1)
    sums = no_sums(q.shape[0], BLOCK_D, PARTS)
    if IS_4BIT:
        q_low, q_high = split_halves(q)
        q_sum = tl.sum(q.to(tl.float32), axis=1)
        added = tl.zeros([q.shape[0]], tl.float32)
    unit = tl.full([], _SMALLEST_SCALE, tl.float32)
    if WINDOW == 0:
        first_seen = 0
    # Block ids are fetched one tile ahead, for the reason that `attend_run` gives, and scales at
    # the end of a tile for the next: they are too small to be copied as numbers are.
    block, inner = _places(table, begin, keys, last_key, BLOCK_SIZE, IS_WITHIN_BLOCK)
    scales = _scales(  # a row without keys has no blocks
        scales_ptr, block, inner, begin + keys, first_seen, tl.where(run > 0, last_key, -1),
        BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, WIDTH, WINDOW, IS_4BIT, OFFSETS,
    )  # fmt: skip
    for step in tl.range(0, run, num_stages=NUM_STAGES):
        here = begin + step * TILE
        key = here + keys
        start = block.to(tl.int64)
        base = start * BLOCK_STRIDE + inner * TOKEN_STRIDE
        at = head_base + base[:, None]
        block, inner = _places(table, here + TILE, keys, last_key, BLOCK_SIZE, IS_WITHIN_BLOCK)
        is_inside = key <= last_key
        if WINDOW != 0:  # the blocks before it are given up, and 0 * NaN is not 0
            is_inside = is_inside & (key >= first_seen)
        inside = is_inside[:, None]
        if BLOCK_W > WIDTH:
            inside = inside & (dims < WIDTH)[None, :]
        key_scales, value_scales = scales[0].to(tl.float32), scales[1].to(tl.float32)
        numbers = tl.load(at, mask=inside, other=0)
        if IS_4BIT:
            k_low, k_high = numbers_of_bytes(numbers, q.dtype, IS_4BIT)
            scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
            key_offsets = scales[2].to(tl.float32)
            scores = scores * key_scales[None, :] + q_sum[:, None] * key_offsets[None, :]
            scores = scores * scale
        else:
            (k,) = numbers_of_bytes(numbers, q.dtype, IS_4BIT)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = scores * (key_scales * scale)[None, :]
        if SOFTCAP > 0:
            scores = _capped(scores, SOFTCAP)
        is_seen = _seen(key, is_inside, first_keys, last_keys, PER_QUERY, WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        reference = _finite_top(new_top)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights, axis=1)
        new_unit = tl.maximum(unit, tl.max(value_scales, axis=0))
        if IS_4BIT:
            value_offsets = scales[3].to(tl.float32)
            added = added * shrink + tl.sum(weights * value_offsets[None, :], axis=1)
        weights = (weights * (value_scales / new_unit)[None, :]).to(q.dtype)
        shrink = shrink * (unit / new_unit)
        if IN_PAIRS:
            offsets = V_OFFSET + kv_head * HEAD_STRIDE + base
            words = words_at(cache_ptr, offsets, is_inside[:, None], WIDTH, BLOCK_W)
            values = numbers_of_words(words, q.dtype, IS_4BIT)
        else:
            numbers = tl.load(at + V_OFFSET, mask=inside, other=0)
            values = numbers_of_bytes(numbers, q.dtype, IS_4BIT)
        sums = add_values(sums, weights, values, shrink, PRECISION)
        top = new_top
        unit = new_unit
        scales = _scales(
            scales_ptr, block, inner, key + TILE, first_seen, last_key,
            BLOCK_STRIDE, TOKEN_STRIDE, V_OFFSET, WIDTH, WINDOW, IS_4BIT, OFFSETS,
        )  # fmt: skip
    acc = joined(sums, IS_4BIT) * unit
    if IS_4BIT:
        acc += added[:, None]
    return acc, top, total
