"""Keys and values in the type of a cache: `kv_cache.quantized` for the kernels that write them."""

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to a smaller number and taken away again, it leaves the nearest integer."""


@triton.jit
def normed_head(x, scale, weight, ROUND_TWICE: tl.constexpr):
    """x * scale * weight (float32) in x's type, rounded before the weight too or not."""
    normed = x.to(tl.float32) * scale
    if ROUND_TWICE:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight).to(x.dtype)


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """x in the type of a cache without scales; eight bits hold up to 448, no infinity."""
    if dtype.primitive_bitwidth == 8:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def in_cache_units(x, is_value, key_factor, value_factor):
    """x times the factor of keys or values, float32; as it is where there are none."""
    if key_factor is not None:
        x = x.to(tl.float32) * tl.where(is_value, value_factor, key_factor)
    return x


@triton.jit
def largest_of(x):
    """[H, D] -> [H] float32: the largest size of each row's numbers, NaN if there is one."""
    x = x.to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    return tl.where(has_nan, float("nan"), tl.max(tl.abs(x), axis=1))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(largest):
    """float16, as it is kept; the division is that of torch to the last bit."""
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    return tl.clamp(scale, 0.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def rounded_steps(x, scale, least: tl.constexpr, most: tl.constexpr):
    """x [H, D] in units of scale [H], float32 integers; zeros where a scale is zero or NaN."""
    scale = tl.broadcast_to(scale.to(tl.float32)[:, None], x.shape)
    is_usable = scale > 0.0
    steps = tl.div_rn(x.to(tl.float32), tl.where(is_usable, scale, 1.0))
    steps = tl.clamp(tl.where(is_usable, steps, 0.0), least, most)
    return (steps + _ROUNDING) - _ROUNDING


@triton.jit
def to_int8(x, scale):
    return rounded_steps(x, scale, -127.0, 127.0).to(tl.int8)


@triton.constexpr_function
def _width(is_4bit: bool, head_dim: int) -> int:
    return head_dim // 2 if is_4bit else head_dim


@triton.jit
def scales_pointer(cache_ptr, SCALES: tl.constexpr):
    """Where the scales of block 0 begin."""
    return (cache_ptr + SCALES).to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def split_halves(q):
    """[M, D] -> the first and the second half of each row, [M, D / 2]"""
    halves = tl.reshape(q, [q.shape[0], 2, q.shape[1] // 2])
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def span_of(x, mask):
    """[H, D] -> the smallest and the largest of each row's numbers under the mask, [H] float32;
    NaN if there is one."""
    x = x.to(tl.float32)
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    least = tl.min(tl.where(mask, x, float("inf")), axis=1)
    most = tl.max(tl.where(mask, x, float("-inf")), axis=1)
    return tl.where(has_nan, float("nan"), least), tl.where(has_nan, float("nan"), most)


@triton.jit
def store_in_four_bits(to, at_scale, low, high, is_head, mask, OFFSETS: tl.constexpr):
    """The two halves of heads [H, D / 2], a number of each in a byte, with scales and offsets."""
    low_least, low_most = span_of(low, mask)
    high_least, high_most = span_of(high, mask)
    least = tl.minimum(low_least, high_least, propagate_nan=tl.PropagateNan.ALL)
    span = larger(low_most, high_most) - least
    span = tl.where(least == float("inf"), 0.0, span)  # a row that is no head
    scale = tl.div_rn(span, tl.full(span.shape, 15.0, tl.float32))
    scale = tl.clamp(scale, 0.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)
    offset = least + 8.0 * scale.to(tl.float32)
    offset = tl.clamp(offset, -65504.0, 65504.0, tl.PropagateNan.ALL).to(tl.float16)
    tl.store(at_scale, scale[:, None], mask=is_head)
    tl.store(at_scale + OFFSETS, offset[:, None], mask=is_head)
    zero = offset.to(tl.float32)[:, None]
    low_steps = rounded_steps(low.to(tl.float32) - zero, scale, -8.0, 7.0) + 8.0
    high_steps = rounded_steps(high.to(tl.float32) - zero, scale, -8.0, 7.0) + 8.0
    packed = low_steps.to(tl.int32) | (high_steps.to(tl.int32) << 4)
    tl.store(to, packed.to(tl.uint8), mask=mask)


@triton.jit
def scale_pointer(
    cache_ptr,
    slot,
    kv_head,
    kv_offset,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Where a slot's scales of heads lie: their numbers' places, in heads. kv_offset: 0 for keys,
    V_OFFSET for values."""
    WIDTH: tl.constexpr = _width(cache_ptr.dtype.element_ty == tl.uint8, HEAD_DIM)
    inner = slot % BLOCK_SIZE * TOKEN_STRIDE + kv_head * HEAD_STRIDE + kv_offset
    of_block = slot // BLOCK_SIZE * (BLOCK_STRIDE // 2)
    return scales_pointer(cache_ptr, SCALES) + of_block + inner // WIDTH


@triton.jit
def store_head(to, at_scale, x, dims, is_head, mask, SCALES: tl.constexpr, HEAD_DIM: tl.constexpr):
    """x [H, D], zero beyond a head, at `to` [H, 1] in a cache with SCALES, and its scales at
    `at_scale` [H, 1]."""
    if to.dtype.element_ty == tl.uint8:
        low, high = split_halves(x)
        halves = tl.arange(0, HEAD_DIM // 2)[None, :]
        in_head = is_head & (halves < HEAD_DIM)
        store_in_four_bits(
            to + halves, at_scale, low, high, is_head, in_head, SCALES // (HEAD_DIM // 2)
        )
    else:
        scale = scale_of(largest_of(x))
        tl.store(at_scale, scale[:, None], mask=is_head)
        tl.store(to + dims, to_int8(x, scale), mask=mask)


@triton.jit
def store_parts(
    to,
    first,
    second,
    rest,
    halves,
    rests,
    half_mask,
    rest_mask,
    HALF: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Heads in their two rotated halves and, where they have one, the rest, at `to` [H, 1] in a
    cache without scales."""
    dtype: tl.constexpr = to.dtype.element_ty
    tl.store(to + halves, to_cache(first, dtype), mask=half_mask)
    tl.store(to + HALF + halves, to_cache(second, dtype), mask=half_mask)
    if HAS_REST:
        tl.store(to + rests, to_cache(rest, dtype), mask=rest_mask)
