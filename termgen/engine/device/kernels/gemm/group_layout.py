"""How weights of 4- or 8-bit integers in groups of 32 lie in memory, and how they are read.

    weight = row_scale * (scale * number + low)

Scale and low are those of 32 columns of a row, float16; a row's scale is a power of two.

    words   [N, K * bits / 32] int32: a group has 8 or 16 elements of 16 bits, one after another.
            Element e has 4 or 2 numbers, the first in its lowest bits: number i is that of column
            8 * i + e or 16 * i + e
    pairs   [N / rows, K / 32, rows] int32: a group's scale in the lower half, its low in the upper;
            rows: 8 in 4 bits, 4 in 8, of which a thread of gemv loads one run

So the elements in a thread's registers become operands of the matrix units, each of which meets x
of columns in a run of 8 or 16, and the bytes of a word are those of one group. Numbers of 4 bits
are those of 8 bits that are multiples of 17, and have scales as if they were.

Floats of 4 bits (E2M1, as in MXFP4) lie alike. Their levels are twice their values and 12 more, so
that `low` is -12 scales, and a pair is the scale alone: int16.

Where 16 columns share a scale (HALVED) a pair is the scales of a group's two halves, and nothing
else lies otherwise: the numbers of an element's first half of places are those of the first one.
Then `low` is a constant times the scale, -12 of floats and -32 of integers, whose bits are 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(32)
"""Columns that share a scale."""
COARSE: tl.constexpr = tl.constexpr(17)
"""Levels of 8 bits between those of 4."""
FLOAT_ZERO: tl.constexpr = tl.constexpr(12)
"""The level of 0 among floats of 4 bits."""
HALVED_ZERO: tl.constexpr = tl.constexpr(32)
"""That of integers where 16 columns share a scale."""


def pack(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """numbers [N, K] uint8 -> words [N, K * num_bits / 32] int32, K a multiple of `GROUP`.
    num_bits 4: each is a multiple of `COARSE`, so its halves are alike."""
    n, k = numbers.shape
    per_element = 16 // num_bits
    parts = numbers.view(n, k // GROUP.value, per_element, GROUP.value // per_element)
    if num_bits == 4:
        parts = (parts[:, :, ::2] & 15) | (parts[:, :, 1::2] & 240)
    return parts.transpose(2, 3).contiguous().view(n, -1).view(torch.int32)


def unpack(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The inverse of `pack`: words [N, n] int32 -> [N, n * 32 / num_bits] uint8."""
    n = len(words)
    bytes_ = words.view(torch.uint8).view(n, -1, GROUP.value * num_bits // 16, 2).transpose(2, 3)
    if num_bits == 4:
        bytes_ = torch.stack((bytes_ & 15, bytes_ >> 4), 3) * COARSE.value
    return bytes_.reshape(n, -1)


def rows_aside(num_bits: int) -> int:
    """Rows whose scales lie side by side: as many as a program of gemv takes at best."""
    return 32 // num_bits


def pack_pairs(scale: torch.Tensor, low: torch.Tensor | None, num_bits: int) -> torch.Tensor:
    """scale, low [N, K / GROUP] float16 -> [N / rows, K / GROUP, rows] int32, N filled up; rows:
    `rows_aside`. low None: of floats, int16."""
    rows = rows_aside(num_bits)
    if low is None:
        pairs = scale.view(torch.int16)
    else:
        pairs = torch.stack((scale, low), -1).view(torch.int32)[..., 0]
    pairs = F.pad(pairs, (0, 0, 0, -len(pairs) % rows))
    return pairs.view(-1, rows, pairs.shape[1]).transpose(1, 2).contiguous()


@triton.jit
def _two_of_bytes(w):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 m;
        mov.b32 m, 0x47000000;
        prmt.b32 $0, $4, m, 0x7604;
        prmt.b32 $1, $4, m, 0x7624;
        prmt.b32 $2, $4, m, 0x7614;
        prmt.b32 $3, $4, m, 0x7634;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [w],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _four_of_halves(w):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, m, n;
        mov.b32 m, 0x47000000;
        mov.b32 n, 0x45000000;
        shl.b32 a, $8, 8;
        shr.u32 b, $8, 8;
        shr.u32 c, $8, 16;
        lop3.b32 $0, a, 0x0F00, m, 0xEA;
        lop3.b32 $1, b, 0x0F00, m, 0xEA;
        lop3.b32 $2, a, 0xF000, n, 0xEA;
        lop3.b32 $3, b, 0xF000, n, 0xEA;
        lop3.b32 $4, $8, 0x0F00, m, 0xEA;
        lop3.b32 $5, c, 0x0F00, m, 0xEA;
        lop3.b32 $6, $8, 0xF000, n, 0xEA;
        lop3.b32 $7, c, 0xF000, n, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [w],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _four_of_floats(w):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p, q, r, s, v, w, a, b, m;
        mov.b32 p, 0x0F0E0D0C;
        mov.b32 q, 0x18141210;
        mov.b32 r, 0x090A0B0C;
        mov.b32 s, 0x00040608;
        mov.b32 m, 0x47000000;
        xor.b32 v, $8, 0x88888888;
        prmt.b32 a, p, q, $8;
        prmt.b32 w, r, s, v;
        or.b32 a, a, w;
        shr.u32 b, $8, 16;
        shr.u32 v, v, 16;
        prmt.b32 b, p, q, b;
        prmt.b32 w, r, s, v;
        or.b32 b, b, w;
        prmt.b32 $0, a, m, 0x7604;
        prmt.b32 $1, b, m, 0x7604;
        prmt.b32 $2, a, m, 0x7614;
        prmt.b32 $3, b, m, 0x7614;
        prmt.b32 $4, a, m, 0x7624;
        prmt.b32 $5, b, m, 0x7624;
        prmt.b32 $6, a, m, 0x7634;
        prmt.b32 $7, b, m, 0x7634;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [w],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _raised(w, place: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    number = (w.to(tl.int32) >> (BITS * place)) & ((1 << BITS) - 1)
    if FLOATS:
        number = _level(number)
    IS_HIGH: tl.constexpr = BITS * place % 8 == 4 and not FLOATS
    return (number << 12) | 0x45000000 if IS_HIGH else (number << 8) | 0x47000000


@triton.jit
def raised_numbers(w, BITS: tl.constexpr, FLOATS: tl.constexpr, USE_PTX: tl.constexpr):
    """The numbers of each element, in a tensor each, as float32 and larger than they are by
    `height`: with a number in its mantissa a float is that much larger. Converting an integer
    takes eight times as long. FLOATS: their levels are the numbers, found in a table of bytes."""
    if BITS == 8:
        if USE_PTX:
            bits = _two_of_bytes(w)
        else:
            bits = (_raised(w, 0, BITS, FLOATS), _raised(w, 1, BITS, FLOATS))
    else:
        if USE_PTX:
            if FLOATS:
                bits = _four_of_floats(w)
            else:
                bits = _four_of_halves(w)
        else:
            bits = (
                _raised(w, 0, BITS, FLOATS),
                _raised(w, 1, BITS, FLOATS),
                _raised(w, 2, BITS, FLOATS),
                _raised(w, 3, BITS, FLOATS),
            )
    numbers = ()
    for place in tl.static_range(16 // BITS):
        numbers += (bits[place].to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    return numbers


@triton.jit
def height(place: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    """What `raised_numbers` are too large by. A float of its size has 8 or more bits of fraction:
    a group's low, that much lower, is off by 1/512 of a number's step at most."""
    return 2048.0 if BITS * place % 8 == 4 and not FLOATS else 32768.0


@triton.jit
def halves_of(pair, FLOATS: tl.constexpr):
    """A pair's scale and low, float32."""
    scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if FLOATS:
        low = scale * -FLOAT_ZERO
    else:
        low = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, low


@triton.jit
def scales_of_halves(pair):
    """The scales of a group's first 16 columns and of its last, float32."""
    first = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    last = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, last


@triton.jit
def levels_of_floats(w, USE_PTX: tl.constexpr):
    """The levels of floats in the lower halves of a word's bytes, and in the upper; int32."""
    if USE_PTX:
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, r, s, v, a, b, t;
            mov.b32 p, 0x0F0E0D0C;
            mov.b32 q, 0x18141210;
            mov.b32 r, 0x090A0B0C;
            mov.b32 s, 0x00040608;
            xor.b32 v, $2, 0x88888888;
            prmt.b32 a, p, q, $2;
            prmt.b32 t, r, s, v;
            or.b32 a, a, t;
            shr.u32 b, $2, 16;
            shr.u32 v, v, 16;
            prmt.b32 b, p, q, b;
            prmt.b32 t, r, s, v;
            or.b32 b, b, t;
            prmt.b32 $0, a, b, 0x6420;
            prmt.b32 $1, a, b, 0x7531;
            }""",
            "=&r,=&r,r",
            [w],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        lower, upper = tl.zeros_like(w), tl.zeros_like(w)
        for place in tl.static_range(8):
            level = _level((w >> (4 * place)) & 15) << (8 * (place // 2))
            if place % 2 == 0:
                lower = lower | level
            else:
                upper = upper | level
    return lower, upper


@triton.jit
def _level(code):
    # 0, 1, 2, 3, 4, 6, 8, 12
    exponent, last = (code >> 1) & 3, code & 1
    steps = tl.where(exponent > 0, (last + 2) << tl.maximum(exponent - 1, 0), last)
    return FLOAT_ZERO + tl.where(code > 7, -steps, steps)


@triton.jit
def over_elements(t, ELEMENTS: tl.constexpr):
    """[rows, groups] -> [rows, elements of the groups]"""
    wide = tl.broadcast_to(t[:, :, None], [t.shape[0], t.shape[1], ELEMENTS])
    return tl.reshape(wide, [t.shape[0], t.shape[1] * ELEMENTS])


@triton.jit
def numbers_and_scales(
    w,
    pair,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    USE_PTX: tl.constexpr,
    HALVED: tl.constexpr = False,
):
    """w [rows, elements] int16, pair [rows, groups] -> what `weight_at` takes. HALVED: in the place
    of scales and lows the scales of the halves."""
    ELEMENTS: tl.constexpr = 2 * BITS
    if HALVED:
        scale, low = scales_of_halves(pair)
    else:
        scale, low = halves_of(pair, FLOATS)
        if BITS == 4 and not FLOATS:
            scale = scale * COARSE
    numbers = raised_numbers(w, BITS, FLOATS, USE_PTX)
    return numbers, scale, low, over_elements(scale, ELEMENTS), over_elements(low, ELEMENTS)


@triton.jit
def weight_at(
    place: tl.constexpr,
    numbers,
    scale,
    low,
    wide_scale,
    wide_low,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    HALVED: tl.constexpr = False,
):
    """The weights at one place in each element, [rows, elements], without the rows' scales. One
    place after another, so that few are in registers, or in shared memory, at a time."""
    if HALVED:
        ZERO: tl.constexpr = FLOAT_ZERO if FLOATS else HALVED_ZERO
        IS_FIRST: tl.constexpr = 2 * BITS * place < 16
        if IS_FIRST:
            own, wide = scale, wide_scale
        else:
            own, wide = low, wide_low
        if dtype == tl.float32:
            weight = (numbers[place] - (height(place, BITS, FLOATS) + ZERO)) * wide
        else:
            lowered = over_elements(own * -(height(place, BITS, FLOATS) + ZERO), 2 * BITS)
            weight = (numbers[place] * wide + lowered).to(dtype)
    elif dtype == tl.float32:
        weight = (numbers[place] - height(place, BITS, FLOATS)) * wide_scale + wide_low
    else:
        # An instruction less.
        lowered = over_elements(low - scale * height(place, BITS, FLOATS), 2 * BITS)
        weight = (numbers[place] * wide_scale + lowered).to(dtype)
    return weight
