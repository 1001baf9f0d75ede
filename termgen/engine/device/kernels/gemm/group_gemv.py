"""One or two rows of x times a weight in groups of 32: integer dot products, exact but for one
rounding of x.

x of a group is 16-bit integers times a scale: its largest number is 32767, so it loses less than
bfloat16 has lost before. The bytes of a word then meet four numbers of x at once (`dp4a`), twice,
as x's lower and upper bytes; a group's sum is an integer until its scales come.

    weight = row_scale * (scale * number + low)
    y = row_scale * sum over groups of x_scale * (scale * sum(number * x) + low * sum(x))

A thread has a group: its words and those of the next groups lie in a run of memory, all it needs
of x follows, and nothing crosses threads before the last sum. Words of the first tile are loaded
before the kernel ahead has ended. Where all of x fits the threads of a program, it may keep x as
integers, which take as long to make as products with five rows, and take tile after tile. The
form is that of llama.cpp's `mul_mat_vec_q`, whose x has 8 bits.
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
from termgen.engine.device.kernels.rows.gated_activation import activate

_LARGEST: tl.constexpr = tl.constexpr(32767.0)
_ALL: tl.constexpr = tl.constexpr(-1)
_EVEN: tl.constexpr = tl.constexpr(0x00FF00FF)
_ODD: tl.constexpr = tl.constexpr(-0x00FF0100)
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
def _dot_of_half(words, x, lower, upper, MASK: tl.constexpr, USE_PTX: tl.constexpr):
    """lower, upper: sums with x's lower and upper bytes, to which those of four words are added."""
    for i in tl.static_range(4):
        numbers = words[i] & MASK if MASK != -1 else words[i]
        lower = _dot(numbers, x[0][i], lower, False, USE_PTX)
        upper = _dot(numbers, x[1][i], upper, True, USE_PTX)
    return lower, upper


@triton.jit
def _dot_of_group(
    a, b, first, second, MASK: tl.constexpr, PACKED: tl.constexpr, USE_PTX: tl.constexpr
):
    """The sum of numbers times x: [groups] int32. a, b: four words each, of which bits in MASK are
    numbers. PACKED: a and b are the same words, with a number of 4 bits of each in a byte; the sum
    is 16 times as much, for those of b are as they lie."""
    zero = tl.zeros_like(a[0])
    if PACKED:
        lower, upper = _dot_of_half(a, first, zero, zero, MASK & 0x0F0F0F0F, USE_PTX)
        lower, upper = lower << 4, upper << 4
        lower, upper = _dot_of_half(b, second, lower, upper, MASK & -0x0F0F0F10, USE_PTX)
    else:
        lower, upper = _dot_of_half(a, first, zero, zero, MASK, USE_PTX)
        lower, upper = _dot_of_half(b, second, lower, upper, MASK, USE_PTX)
    return (upper << 8) + lower


@triton.jit
def _four(t):
    """The columns of a tile [groups, 4]."""
    even, odd = tl.split(tl.reshape(t, [t.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


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
    scale, the sum): four int32 each and float32, all [groups]. HALVED: a sum of the first 16
    columns and one of the last."""
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
    lows, highs = _bytes(e0, e2, o0, o2, USE_PTX)
    first = (_four(lows), _four(highs))
    lows, highs = _bytes(e1, e3, o1, o3, USE_PTX)
    second = (_four(lows), _four(highs))
    if HALVED:
        x_sum = (tl.sum(of_first, axis=1), tl.sum(of_last, axis=1))
    else:
        x_sum = tl.sum(total, axis=1)
    return first, second, scale, x_sum


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
def _tile(
    w_ptr,
    pairs_ptr,
    first_row,
    groups,
    n,
    num_groups,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):
    """`words_and_pairs` of BLOCK_N rows. GATED: half of them of gate, then those of up, which begin
    n rows further on."""
    if GATED:
        ROWS: tl.constexpr = BLOCK_N // 2
        words, pairs = words_and_pairs(
            w_ptr, pairs_ptr, first_row, groups, n, num_groups, BITS, ROWS
        )
        up_words, up_pairs = words_and_pairs(
            w_ptr, pairs_ptr, n + first_row, groups, 2 * n, num_groups, BITS, ROWS
        )
        return words + up_words, pairs + up_pairs
    else:
        return words_and_pairs(w_ptr, pairs_ptr, first_row, groups, n, num_groups, BITS, BLOCK_N)


@triton.jit
def _groups_of_x(
    x_ptr,
    groups,
    num_rows,
    k,
    num_groups,
    x_stride,
    BLOCK_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    USE_PTX: tl.constexpr,
    HALVED: tl.constexpr,
):
    """What `_group_of_x` gives for each row of x, one after another."""
    is_group = groups < num_groups
    found = ()
    for token in tl.static_range(BLOCK_M):
        # A token past the last repeats it; its sums go nowhere.
        x_at = x_ptr + tl.minimum(token, num_rows - 1) * x_stride
        found += _group_of_x(x_at, groups, is_group, k, EVEN_K, USE_PTX, HALVED)
    return found


@triton.jit
def _add_rows(
    sums,
    words,
    pairs,
    x,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PTX: tl.constexpr,
    FLOATS: tl.constexpr,
    HALVED: tl.constexpr,
):
    """x: from `_groups_of_x`."""
    ZERO: tl.constexpr = FLOAT_ZERO if FLOATS else HALVED_ZERO
    PACKED: tl.constexpr = BITS == 4 and not FLOATS
    new_sums = ()
    for token in tl.static_range(BLOCK_M):
        first, second, x_scale, x_sum = (
            x[4 * token], x[4 * token + 1], x[4 * token + 2], x[4 * token + 3],
        )  # fmt: skip
        number_scale = x_scale * (COARSE / 16) if PACKED else x_scale
        for r in tl.static_range(BLOCK_N):
            if FLOATS:
                a, b = levels_of_floats(words[r], USE_PTX)
                a, b = _four(a), _four(b)
            elif PACKED:
                a = _four(words[r])
                b = a
            else:
                a, b = _four(words[2 * r]), _four(words[2 * r + 1])
            if HALVED:
                y = sums[token * BLOCK_N + r]
                scales = scales_of_halves(pairs[r])
                # Every other byte of a word is a number of the first 16 columns.
                dot = _dot_of_group(a, b, first, second, _EVEN, PACKED, USE_PTX)
                y += (dot.to(tl.float32) * number_scale - x_sum[0] * ZERO) * scales[0]
                dot = _dot_of_group(a, b, first, second, _ODD, PACKED, USE_PTX)
                y += (dot.to(tl.float32) * number_scale - x_sum[1] * ZERO) * scales[1]
            else:
                dot = _dot_of_group(a, b, first, second, _ALL, PACKED, USE_PTX)
                scale, low = halves_of(pairs[r], FLOATS)
                y = sums[token * BLOCK_N + r]
                y += dot.to(tl.float32) * scale * number_scale
                y += low * x_sum
            new_sums += (y,)  # type: ignore[assignment]
    return new_sums


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
    x = _groups_of_x(
        *(x_ptr, groups, num_rows, k, num_groups, x_stride, BLOCK_M, EVEN_K, USE_PTX, HALVED)
    )
    return _add_rows(sums, words, pairs, x, BITS, BLOCK_M, BLOCK_N, USE_PTX, FLOATS, HALVED)


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


@triton.jit
def _four_values(
    sums,
    first: tl.constexpr,
    bias_ptr,
    row_scale_ptr,
    rows,
    n,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    y = sum_of_four(sums, first, BLOCK_K)
    y *= tl.load(row_scale_ptr + rows, mask=rows < n, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    return y


@triton.jit
def _store_rows(
    sums,
    bias_ptr,
    row_scale_ptr,
    out_ptr,
    first_row,
    num_rows,
    n,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """ACTIVATION: of the gate; None: there is none. Rounds where `gated_activation` does."""
    GATED: tl.constexpr = ACTIVATION is not None
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    for r in tl.static_range(0, ROWS, 4):
        rows = first_row + r + tl.arange(0, 4)
        for token in tl.static_range(BLOCK_M):
            y = _four_values(
                sums, token * BLOCK_N + r, bias_ptr, row_scale_ptr, rows, n, BLOCK_K, HAS_BIAS
            )
            y = y.to(dtype)
            if GATED:
                up = _four_values(
                    *(sums, token * BLOCK_N + ROWS + r, bias_ptr, row_scale_ptr, rows + n, 2 * n),
                    *(BLOCK_K, HAS_BIAS),
                )
                activated = activate(y.to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
                y = (activated * up.to(dtype).to(tl.float32)).to(dtype)
            at = out_ptr + token * out_stride + rows
            tl.store(at, y, mask=(rows < n) & (token < num_rows))


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
    WALKS: tl.constexpr,
    ACTIVATION: tl.constexpr = None,
    HALVED: tl.constexpr = False,
    FLOATS: tl.constexpr = False,
):
    """WALKS: x has BLOCK_K groups at most, and a program keeps its integers for many tiles.
    ACTIVATION: the weight is [gate, up], n rows each, and so is a tile; out is act(gate) * up."""
    GATED: tl.constexpr = ACTIVATION is not None
    ROWS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_row = tl.program_id(0) * ROWS
    groups = tl.arange(0, BLOCK_K)
    if USE_PDL:
        gdc_launch_dependents()
    words, pairs = _tile(w_ptr, pairs_ptr, first_row, groups, n, num_groups, BITS, BLOCK_N, GATED)
    if USE_PDL:
        gdc_wait()
    if WALKS:
        x = _groups_of_x(
            *(x_ptr, groups, num_rows, k, num_groups, x_stride, BLOCK_M, EVEN_K, USE_PTX, HALVED)
        )
        step = tl.num_programs(0) * ROWS
        for ahead in tl.range(first_row + step, n, step, num_stages=1):
            next_words, next_pairs = _tile(
                w_ptr, pairs_ptr, ahead, groups, n, num_groups, BITS, BLOCK_N, GATED
            )
            sums = _add_rows(
                *(no_sums(BLOCK_M * BLOCK_N, BLOCK_K), words, pairs, x),
                *(BITS, BLOCK_M, BLOCK_N, USE_PTX, FLOATS, HALVED),
            )
            _store_rows(
                *(sums, bias_ptr, row_scale_ptr, out_ptr, first_row, num_rows, n, out_stride),
                *(BLOCK_M, BLOCK_N, BLOCK_K, HAS_BIAS, ACTIVATION),
            )
            words = next_words
            pairs = next_pairs
            first_row = ahead
        sums = _add_rows(
            *(no_sums(BLOCK_M * BLOCK_N, BLOCK_K), words, pairs, x),
            *(BITS, BLOCK_M, BLOCK_N, USE_PTX, FLOATS, HALVED),
        )
    else:
        sums = no_sums(BLOCK_M * BLOCK_N, BLOCK_K)
        for start in tl.range(BLOCK_K, num_groups, BLOCK_K, num_stages=1):
            ahead = start + tl.arange(0, BLOCK_K)
            next_words, next_pairs = _tile(
                w_ptr, pairs_ptr, first_row, ahead, n, num_groups, BITS, BLOCK_N, GATED
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
    _store_rows(
        *(sums, bias_ptr, row_scale_ptr, out_ptr, first_row, num_rows, n, out_stride),
        *(BLOCK_M, BLOCK_N, BLOCK_K, HAS_BIAS, ACTIVATION),
    )
