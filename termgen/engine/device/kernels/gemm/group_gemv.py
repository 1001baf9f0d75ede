"""One or two rows of x times a weight in groups of 32: integer dot products, exact but for one
rounding of x.

x of a group is 16-bit integers times a scale: its largest number is 32767, so it loses less than
bfloat16 has lost before. The bytes of a word then meet four numbers of x at once (`dp4a`), twice,
as x's lower and upper bytes; a group's sum is an integer until its scales come.

    weight = row_scale * (scale * number + low)
    y = row_scale * sum over groups of x_scale * (scale * sum(number * x) + low * sum(x))

A thread has a group: its words and those of the next groups lie in a run of memory, all it needs
of x follows, and nothing crosses threads before the last sum. Words of the first tile are loaded
before the kernel ahead has ended. The form is that of llama.cpp's `mul_mat_vec_q`, whose x has 8
bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.gemm.group_layout import (
    COARSE,
    FLOAT_ZERO,
    GROUP,
    HALVED_ZERO,
    halves_of,
    levels_of_floats,
    scales_of_halves,
)

_LARGEST: tl.constexpr = tl.constexpr(32767.0)
_EVEN: tl.constexpr = tl.constexpr(0x00FF00FF)
_ROUND: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: a float that it is added to is rounded, and lies in the sum's lowest bits as an
integer of two's complement."""


@triton.jit
def _bytes(a, b, c, d, USE_PTX: tl.constexpr):
    """(the lowest byte of each in one word, the second one of each in another); int32."""
    if USE_PTX:
        lows, highs = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q;
            prmt.b32 p, $2, $3, 0x5140;
            prmt.b32 q, $4, $5, 0x5140;
            prmt.b32 $0, p, q, 0x5410;
            prmt.b32 $1, p, q, 0x7632;
            }""",
            "=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        lows = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
        highs = ((a >> 8) & 255) | (b & 65280) | ((c & 65280) << 8) | ((d & 65280) << 16)
    return lows, highs


@triton.jit
def _dot(numbers, x, y, IS_SIGNED: tl.constexpr, USE_PTX: tl.constexpr):
    """y + the sum over four bytes of an unsigned number times a byte of x; int32."""
    if USE_PTX:
        y = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;" if IS_SIGNED else "dp4a.u32.u32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [numbers, x, y],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for i in tl.static_range(4):
            of_x = (x << (24 - 8 * i)) >> 24
            if not IS_SIGNED:
                of_x = of_x & 255
            y += ((numbers >> (8 * i)) & 255) * of_x
    return y


@triton.jit
def _dot_of_group(a, b, first, second, USE_PTX: tl.constexpr):
    """The sum of numbers times x: [groups] int32."""
    zero = tl.zeros_like(a)
    lower = _dot(b, second[0], _dot(a, first[0], zero, False, USE_PTX), False, USE_PTX)
    upper = _dot(b, second[1], _dot(a, first[1], zero, True, USE_PTX), True, USE_PTX)
    return (tl.sum(upper, axis=1) << 8) + tl.sum(lower, axis=1)


@triton.jit
def _eight(x_at, groups, is_group, part: tl.constexpr, k, EVEN_K: tl.constexpr):
    """x of columns 8 * part to 8 * part + 7 of each group: the even ones [groups, 4], the odd."""
    columns = groups[:, None] * GROUP + 8 * part + tl.arange(0, 8)[None, :]
    if EVEN_K:
        x = tl.load(x_at + columns, mask=is_group[:, None], other=0)
    else:
        x = tl.load(x_at + columns, mask=is_group[:, None] & (columns < k), other=0)
    return tl.split(tl.reshape(x.to(tl.float32), [groups.shape[0], 4, 2]))


@triton.jit
def _integers(even, odd, inverse):
    return (
        (even * inverse + _ROUND).to(tl.int32, bitcast=True),
        (odd * inverse + _ROUND).to(tl.int32, bitcast=True),
    )


@triton.jit
def _group_of_x(
    x_at, groups, is_group, k, EVEN_K: tl.constexpr, USE_PTX: tl.constexpr, HALVED: tl.constexpr
):
    """((lower bytes, upper bytes) of x for the first half of a group's numbers, for the second, the
    scale, the sum): [groups, 4] int32 and [groups] float32. HALVED: a sum of the first 16 columns
    and one of the last."""
    e0, o0 = _eight(x_at, groups, is_group, 0, k, EVEN_K)
    e1, o1 = _eight(x_at, groups, is_group, 1, k, EVEN_K)
    e2, o2 = _eight(x_at, groups, is_group, 2, k, EVEN_K)
    e3, o3 = _eight(x_at, groups, is_group, 3, k, EVEN_K)
    m = tl.maximum(tl.maximum(tl.abs(e0), tl.abs(o0)), tl.maximum(tl.abs(e1), tl.abs(o1)))
    n = tl.maximum(tl.maximum(tl.abs(e2), tl.abs(o2)), tl.maximum(tl.abs(e3), tl.abs(o3)))
    largest = tl.max(tl.maximum(m, n), axis=1)
    of_first, of_last = (e0 + o0) + (e1 + o1), (e2 + o2) + (e3 + o3)
    total = of_first + of_last
    # A group of zeros is divided by 1; an infinity is in the scale, a NaN in the sum.
    scale = tl.where(largest == 0, 1.0, largest) * (1 / _LARGEST)
    inverse = (1.0 / scale)[:, None]
    e0, o0 = _integers(e0, o0, inverse)
    e1, o1 = _integers(e1, o1, inverse)
    e2, o2 = _integers(e2, o2, inverse)
    e3, o3 = _integers(e3, o3, inverse)
    first = _bytes(e0, e2, o0, o2, USE_PTX)
    second = _bytes(e1, e3, o1, o3, USE_PTX)
    if HALVED:
        x_sum = (tl.sum(of_first, axis=1), tl.sum(of_last, axis=1))
    else:
        x_sum = tl.sum(total, axis=1)
    return first, second, scale, x_sum


@triton.jit
def _four(t):
    """The columns of a tile [groups, 4]."""
    even, odd = tl.split(tl.reshape(t, [t.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def words_and_pairs(
    w_ptr,
    pairs_ptr,
    first_row,
    groups,
    n,
    num_groups,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(words, [groups, 4] each: of a row, or of its first half and its second one; pairs)"""
    HALVES: tl.constexpr = BITS // 4
    groups = tl.minimum(groups, num_groups - 1)
    words = ()
    for r in tl.static_range(BLOCK_N):
        row = tl.minimum(first_row + r, n - 1).to(tl.int64)
        at = w_ptr + row * (num_groups * BITS) + groups[:, None] * BITS + tl.arange(0, 4)[None, :]
        for half in tl.static_range(HALVES):
            words += (tl.load(at + 4 * half, eviction_policy="evict_first"),)  # type: ignore[assignment]
    pairs = ()
    ROWS: tl.constexpr = 32 // BITS
    for r in tl.static_range(0, BLOCK_N, 4):
        row = tl.minimum(first_row + r, n - 1)
        at = pairs_ptr + (row // ROWS * num_groups + groups[:, None]) * ROWS
        at += row % ROWS + tl.arange(0, 4)[None, :]
        pairs += _four(tl.load(at, eviction_policy="evict_first"))
    return words, pairs


@triton.jit
def add_products(
    sums,
    words,
    pairs,
    x_ptr,
    groups,
    num_rows,
    k,
    num_groups,
    x_stride,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    USE_PTX: tl.constexpr,
    FLOATS: tl.constexpr = False,
    HALVED: tl.constexpr = False,
):
    """sums, a tensor [groups] for each row of x and each row of the weight, with these groups'."""
    ZERO: tl.constexpr = FLOAT_ZERO if FLOATS else HALVED_ZERO
    is_group = groups < num_groups
    new_sums = ()
    for token in tl.static_range(BLOCK_M):
        # A token past the last repeats it; its sums go nowhere.
        x_at = x_ptr + tl.minimum(token, num_rows - 1) * x_stride
        first, second, x_scale, x_sum = _group_of_x(
            x_at, groups, is_group, k, EVEN_K, USE_PTX, HALVED
        )
        number_scale = x_scale * COARSE if BITS == 4 and not FLOATS else x_scale
        for r in tl.static_range(BLOCK_N):
            if BITS == 4:
                if FLOATS:
                    a, b = levels_of_floats(words[r], USE_PTX)
                else:
                    a, b = words[r] & 0x0F0F0F0F, (words[r] >> 4) & 0x0F0F0F0F
            else:
                a, b = words[2 * r], words[2 * r + 1]
            if HALVED:
                y = sums[token * BLOCK_N + r]
                scales = scales_of_halves(pairs[r])
                # Every other byte of a word is a number of the first 16 columns.
                dot = _dot_of_group(a & _EVEN, b & _EVEN, first, second, USE_PTX)
                y += (dot.to(tl.float32) * number_scale - x_sum[0] * ZERO) * scales[0]
                dot = _dot_of_group(a & ~_EVEN, b & ~_EVEN, first, second, USE_PTX)
                y += (dot.to(tl.float32) * number_scale - x_sum[1] * ZERO) * scales[1]
            else:
                dot = _dot_of_group(a, b, first, second, USE_PTX)
                scale, low = halves_of(pairs[r], FLOATS)
                y = sums[token * BLOCK_N + r]
                y += dot.to(tl.float32) * scale * number_scale
                y += low * x_sum
            new_sums += (y,)  # type: ignore[assignment]
    return new_sums


@triton.jit
def no_sums(NUM: tl.constexpr, BLOCK_K: tl.constexpr):
    sums = ()
    for _ in tl.static_range(NUM):
        sums += (tl.zeros([BLOCK_K], tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def sum_of_four(sums, first: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sums over groups of four neighbours, [4]: one over threads for all."""
    a = tl.join(sums[first], sums[first + 2])
    b = tl.join(sums[first + 1], sums[first + 3])
    return tl.sum(tl.reshape(tl.join(a, b), [BLOCK_K, 4]), axis=0)


@triton.jit(do_not_specialize=["num_rows", "out_stride"])
def gemv_kernel(
    x_ptr,
    w_ptr,
    pairs_ptr,
    bias_ptr,
    row_scale_ptr,
    out_ptr,
    num_rows,
    n,
    k,
    num_groups,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    HALVED: tl.constexpr = False,
    FLOATS: tl.constexpr = False,
):
    first_row = tl.program_id(0) * BLOCK_N
    groups = tl.arange(0, BLOCK_K)
    if USE_PDL:
        gdc_launch_dependents()
    words, pairs = words_and_pairs(
        w_ptr, pairs_ptr, first_row, groups, n, num_groups, BITS, BLOCK_N
    )
    if USE_PDL:
        gdc_wait()
    sums = no_sums(BLOCK_M * BLOCK_N, BLOCK_K)
    for start in tl.range(BLOCK_K, num_groups, BLOCK_K, num_stages=1):
        ahead = start + tl.arange(0, BLOCK_K)
        next_words, next_pairs = words_and_pairs(
            w_ptr, pairs_ptr, first_row, ahead, n, num_groups, BITS, BLOCK_N
        )
        sums = add_products(
            *(sums, words, pairs, x_ptr, groups, num_rows, k, num_groups, x_stride),
            *(BITS, BLOCK_M, BLOCK_N, EVEN_K, USE_PTX, FLOATS, HALVED),
        )
        words = next_words
        pairs = next_pairs
        groups = ahead
    sums = add_products(
        *(sums, words, pairs, x_ptr, groups, num_rows, k, num_groups, x_stride),
        *(BITS, BLOCK_M, BLOCK_N, EVEN_K, USE_PTX, FLOATS, HALVED),
    )
    for r in tl.static_range(0, BLOCK_N, 4):
        rows = first_row + r + tl.arange(0, 4)
        row_scale = tl.load(row_scale_ptr + rows, mask=rows < n, other=0.0)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
        for token in tl.static_range(BLOCK_M):
            y = sum_of_four(sums, token * BLOCK_N + r, BLOCK_K) * row_scale
            if HAS_BIAS:
                y += bias
            at = out_ptr + token * out_stride + rows
            tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(rows < n) & (token < num_rows))
