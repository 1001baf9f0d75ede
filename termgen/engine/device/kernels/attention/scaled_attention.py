"""Attention to keys and values that are integers with a scale for each head of a token.

One loop for `paged_decode` and `paged_prefill`, in place of theirs. A key's scale multiplies the
column of its scores, a value's the column of weights, so that a tile's numbers are only converted:
every one is exact in float16 and bfloat16. Numbers of four bits have an offset as well, which adds
the same to all products of a query with a key, and to all numbers of a result.

Weights times scales may be far below what float16 holds with all its bits. They are divided by the
largest scale so far, which the sums are kept in units of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from termgen.engine.device.kernels.attention.window import first_key
from termgen.engine.device.kernels.rows.store_heads import scales_pointer, split_halves

_USE_PTX = tl.constexpr(not knobs.runtime.interpret and torch.version.hip is None)
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
def from_int8(numbers, dtype: tl.constexpr):
    """Integers as floats. For float16 they are put into the last bits of 1024, which a conversion
    takes several instructions for."""
    if dtype != tl.float16:
        floats = numbers.to(dtype)
    elif _USE_PTX:
        floats = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, m;
            mov.b32 m, 0x64806480;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 $0, t, 0x64646464, 0x4140;
            prmt.b32 $1, t, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, m;
            sub.f16x2 $1, $1, m;
            }""",
            "=&r,=r,r",
            [numbers],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        raised = (numbers.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        floats = raised.to(tl.float16, bitcast=True) - 1152.0
    return floats


@triton.jit
def halves_of(packed, dtype: tl.constexpr):
    """Two numbers of four bits from each byte, those of a head's first half and of its second."""
    if dtype != tl.float16:
        low, high = (packed & 15).to(dtype) - 8.0, (packed >> 4).to(dtype) - 8.0
    elif _USE_PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m;
            mov.b32 m, 0x64086408;
            and.b32 a, $4, 0x0F0F0F0F;
            shr.u32 b, $4, 4;
            and.b32 b, b, 0x0F0F0F0F;
            prmt.b32 $0, a, 0x64646464, 0x4140;
            prmt.b32 $1, a, 0x64646464, 0x4342;
            prmt.b32 $2, b, 0x64646464, 0x4140;
            prmt.b32 $3, b, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, m;
            sub.f16x2 $1, $1, m;
            sub.f16x2 $2, $2, m;
            sub.f16x2 $3, $3, m;
            }""",
            "=&r,=&r,=&r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 15).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        high = ((packed >> 4).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return low, high


@triton.jit
def bytes_of_int8(words, dtype: tl.constexpr):
    """The integers in the lower and in the upper byte of each word of 16 bits."""
    if dtype != tl.float16:
        low, high = ((words << 8) >> 8).to(dtype), (words >> 8).to(dtype)
    elif _USE_PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, m;
            mov.b32 m, 0x64806480;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 $0, t, 0x64646464, 0x4240;
            prmt.b32 $1, t, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, m;
            sub.f16x2 $1, $1, m;
            }""",
            "=&r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        flipped = words ^ -0x7F80
        low = ((flipped & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        high = (((flipped >> 8) & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return low, high


@triton.jit
def quarters_of(words, dtype: tl.constexpr):
    """Four numbers of four bits from each word of 16 bits: of a head's first half those of the
    lower and the upper byte, then those of its second half."""
    if dtype != tl.float16:
        a, b = (words & 15).to(dtype) - 8.0, ((words >> 8) & 15).to(dtype) - 8.0
        c, d = ((words >> 4) & 15).to(dtype) - 8.0, ((words >> 12) & 15).to(dtype) - 8.0
    elif _USE_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m;
            mov.b32 m, 0x64086408;
            and.b32 a, $4, 0x0F0F0F0F;
            shr.u32 b, $4, 4;
            and.b32 b, b, 0x0F0F0F0F;
            prmt.b32 $0, a, 0x64646464, 0x4240;
            prmt.b32 $1, a, 0x64646464, 0x4341;
            prmt.b32 $2, b, 0x64646464, 0x4240;
            prmt.b32 $3, b, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, m;
            sub.f16x2 $1, $1, m;
            sub.f16x2 $2, $2, m;
            sub.f16x2 $3, $3, m;
            }""",
            "=&r,=&r,=&r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = ((words & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        b = (((words >> 8) & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        c = (((words >> 4) & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        d = (((words >> 12) & 15) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return a, b, c, d


@triton.jit
def interleaved(even, odd):
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def join_halves(low, high):
    halves = tl.permute(tl.join(low, high), (0, 2, 1))
    return tl.reshape(halves, [low.shape[0], 2 * low.shape[1]])


@triton.jit
def _add_values(sums, weights, words, shrink, IS_4BIT: tl.constexpr, PRECISION: tl.constexpr):
    """sums, [M, words of a head] for each number that a word has."""
    if IS_4BIT:
        values = quarters_of(words, weights.dtype)
    else:
        values = bytes_of_int8(words, weights.dtype)
    added = ()
    for i in tl.static_range(len(values)):
        acc = sums[i] * shrink[:, None]
        added += (tl.dot(weights, values[i], acc, input_precision=PRECISION),)  # type: ignore[assignment]
    return added


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
):
    """`run` tiles from key `begin`, none past `last_key`: sums that are not yet divided, [M, D],
    and of each query the largest score and the sum of the weights, [M]. last_keys: the last key
    that each query sees, [M] where PER_QUERY, else one for all."""
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
    words = tl.arange(0, BLOCK_W // 2)
    word_base = cache_ptr.to(tl.pointer_type(tl.int16)) + (kv_head * HEAD_STRIDE + V_OFFSET) // 2
    word_base = word_base + words[None, :]
    # Values are taken two at a time, even columns and odd ones: the matrix units want neighbouring
    # tokens side by side, and only words of 16 bits are loaded that way in one instruction.
    none = tl.zeros([q.shape[0], BLOCK_W // 2], tl.float32)
    sums = (none, none)
    if IS_4BIT:
        q_low, q_high = split_halves(q)
        q_sum = tl.sum(q.to(tl.float32), axis=1)
        sums = (none, none, none, none)
        added = tl.zeros([q.shape[0]], tl.float32)
    unit = tl.full([], _SMALLEST_SCALE, tl.float32)
    # Block ids are fetched one tile ahead, for the reason that `attend_run` gives.
    if IS_WITHIN_BLOCK:
        block = tl.load(table + tl.minimum(begin, last_key) // BLOCK_SIZE)
    else:
        place = tl.minimum(begin + keys, last_key)
        block = tl.load(table + place // BLOCK_SIZE)
    for step in tl.range(0, run, num_stages=NUM_STAGES):
        here = begin + step * TILE
        key = here + keys
        if IS_WITHIN_BLOCK:
            start = block.to(tl.int64)
            inner = here % BLOCK_SIZE + keys
            block = tl.load(table + tl.minimum(here + TILE, last_key) // BLOCK_SIZE)
        else:
            start = block.to(tl.int64)
            inner = place % BLOCK_SIZE
            place = tl.minimum(key + TILE, last_key)
            block = tl.load(table + place // BLOCK_SIZE)
        at = head_base + (start * BLOCK_STRIDE + inner * TOKEN_STRIDE)[:, None]
        scale_at = scales_ptr + start * (BLOCK_STRIDE // 2) + inner * (TOKEN_STRIDE // WIDTH)
        is_inside = key <= last_key
        if WINDOW != 0:  # the blocks before it are given up, and 0 * NaN is not 0
            is_inside = is_inside & (key >= first_seen)
        inside = is_inside[:, None]
        if BLOCK_W > WIDTH:
            inside = inside & (dims < WIDTH)[None, :]
        word_at = word_base + (start * (BLOCK_STRIDE // 2) + inner * (TOKEN_STRIDE // 2))[:, None]
        word_inside = is_inside[:, None]
        if BLOCK_W > WIDTH:
            word_inside = word_inside & (words < WIDTH // 2)[None, :]
        key_scales = tl.load(scale_at, mask=is_inside, other=0.0).to(tl.float32)
        numbers = tl.load(at, mask=inside, other=0)
        if IS_4BIT:
            k_low, k_high = halves_of(numbers, q.dtype)
            scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
            key_offsets = tl.load(scale_at + OFFSETS, mask=is_inside, other=0.0).to(tl.float32)
            scores = scores * key_scales[None, :] + q_sum[:, None] * key_offsets[None, :]
            scores = scores * scale
        else:
            k = from_int8(numbers, q.dtype)
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
        value_at = scale_at + V_OFFSET // WIDTH
        value_scales = tl.load(value_at, mask=is_inside, other=0.0).to(tl.float32)
        new_unit = tl.maximum(unit, tl.max(value_scales, axis=0))
        if IS_4BIT:
            offsets = tl.load(value_at + OFFSETS, mask=is_inside, other=0.0).to(tl.float32)
            added = added * shrink + tl.sum(weights * offsets[None, :], axis=1)
        weights = (weights * (value_scales / new_unit)[None, :]).to(q.dtype)
        shrink = shrink * (unit / new_unit)
        pairs = tl.load(word_at, mask=word_inside, other=0)
        sums = _add_values(sums, weights, pairs, shrink, IS_4BIT, PRECISION)
        top = new_top
        unit = new_unit
    acc = interleaved(sums[0], sums[1]) * unit
    if IS_4BIT:
        high = interleaved(sums[2], sums[3]) * unit
        acc = join_halves(acc, high) + added[:, None]
    return acc, top, total
