"""Keys and values of 8 and 4 bits as floats.

A value's columns are taken two at a time, as words of 16 bits: even ones, and odd ones. The matrix
units want neighbouring tokens side by side, and only words of that size are loaded so in one
instruction; bytes take an instruction each. An integer becomes a float16 in the last bits of 1024,
for a conversion takes several instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

_USE_PTX = tl.constexpr(not knobs.runtime.interpret and torch.version.hip is None)


@triton.jit
def from_int8(numbers, dtype: tl.constexpr):
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
def bytes_of_float8(words, dtype: tl.constexpr):
    """The same of e4m3 floats."""
    if _USE_PTX and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            .reg .b16 a, b;
            prmt.b32 t, $2, $2, 0x3120;
            mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=&r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
        high = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return low, high


@triton.jit
def numbers_of_bytes(numbers, dtype: tl.constexpr, IS_4BIT: tl.constexpr):
    """A tensor for each number that a byte has."""
    if IS_4BIT:
        parts = halves_of(numbers, dtype)
    else:
        parts = (from_int8(numbers, dtype),)
    return parts


@triton.jit
def numbers_of_words(words, dtype: tl.constexpr, IS_4BIT: tl.constexpr):
    """A tensor for each number that a word of 16 bits has."""
    if IS_4BIT:
        parts = quarters_of(words, dtype)
    else:
        parts = bytes_of_int8(words, dtype)
    return parts


@triton.jit
def words_at(
    cache_ptr,
    offsets,  # [TILE], in bytes
    is_token,  # [TILE, 1]
    NUM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Heads of tokens as words of 16 bits, [TILE, BLOCK / 2]."""
    words = tl.arange(0, BLOCK // 2)[None, :]
    inside = is_token
    if BLOCK > NUM_BYTES:
        inside = inside & (words < NUM_BYTES // 2)
    at = cache_ptr.to(tl.pointer_type(tl.int16)) + (offsets // 2)[:, None]
    return tl.load(at + words, mask=inside, other=0)


@triton.jit
def no_sums(M: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """[M, BLOCK / PARTS] for each part of the columns."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([M, BLOCK // PARTS], tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def joined(sums, IS_4BIT: tl.constexpr = False):
    """The columns in order. Parts: those of each half of a head where IS_4BIT, or all; and of each
    even ones and odd ones, where values were loaded in pairs."""
    result = sums[0]
    if len(sums) == 4:
        result = join_halves(interleaved(sums[0], sums[1]), interleaved(sums[2], sums[3]))
    elif len(sums) == 2 and IS_4BIT:
        result = join_halves(sums[0], sums[1])
    elif len(sums) == 2:
        result = interleaved(sums[0], sums[1])
    return result


@triton.jit
def add_values(sums, weights, values, shrink, PRECISION: tl.constexpr):
    """sums * shrink + weights @ values, for each part of the columns."""
    added = ()
    for i in tl.static_range(len(values)):
        acc = sums[i] * shrink[:, None]
        added += (tl.dot(weights, values[i], acc, input_precision=PRECISION),)  # type: ignore[assignment]
    return added
