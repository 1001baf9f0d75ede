"""A paged KV cache as kernels see it: where a token's keys and values lie, and in which type.

A cache is taken as a view [num_blocks, block_size, 2 (k, v), num_kv_heads, head_dim] whatever its
layout in memory: only the last dimension must be dense.

fp8 is e4m3: four bits of exponent, three of mantissa, up to 448, no infinity. Values are kept as
they are, or divided by two numbers of the layer (`LayerScales`): what is larger becomes the
largest, the rest is rounded to nearest even.

int8 has a float16 scale for each head of a token. A block's scales lie behind its numbers in the
same page, in the numbers' order, so whatever moves, shares or gives up pages takes them along.
They are found from the view of the numbers (`scales_of`), which is all that is passed on: such a
view must be one that `kv_cache_view` made, never a copy.

int4 has an offset beside the scale, in a second plane behind the first, and two numbers a byte, d
and d + head_dim / 2, so that each half of a head is multiplied by half of a query.

The keys of both are spread over their heads before they are rounded, and so are queries, which
changes no product of the two (`spread`); whatever is read from such a cache is as it was stored.

Kernels do the same in `rows.store_heads` and `rows.spread_heads`. Imports no triton.
"""

from __future__ import annotations

import math

import torch

from termgen.vocabulary.device.kv_cache_types import LayerScales as LayerScales  # for layers
from termgen.vocabulary.device.kv_cache_types import head_bytes

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
INT4 = torch.uint8
"""Two numbers a byte."""
FP8_MAX = 448.0
FP8_NAN_BYTE = 0x7F
LARGEST_SCALE = 65504.0
SCALED = {INT8: "int8", INT4: "int4"}
"""Types with scales, by the setting's names."""


def kv_cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The setting's type: `auto` is the model's."""
    if name == "auto":
        return model_dtype
    return next((dtype for dtype, known in SCALED.items() if known == name), FP8)


def setting_of(dtype: torch.dtype) -> str:
    """The setting that gives a type other than the model's."""
    return SCALED.get(dtype, "fp8")


def head_items(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of the cache's type that one head of a token takes, its scales included."""
    return head_bytes(SCALED[dtype], head_dim, 1) if dtype in SCALED else head_dim


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """The last dimension of a cache."""
    return head_dim // 2 if dtype == INT4 else head_dim


def heads_of(cache: torch.Tensor) -> tuple[int, int]:
    """(number of key heads, their size)"""
    return cache.shape[3], cache.shape[4] * (2 if cache.dtype == INT4 else 1)


def scales_of(cache: torch.Tensor) -> torch.Tensor:
    """The scales of a cache that has them: a view [1, num_blocks, block_size, 2, num_kv_heads] of
    float16, [2, ...] with the offsets of int4."""
    planes, numbers = 2 if cache.dtype == INT4 else 1, math.prod(cache.shape[1:])
    heads = numbers // cache.shape[4]
    strides = [stride // cache.shape[4] for stride in cache.stride()[1:4]]
    return torch.empty(0, dtype=torch.float16, device=cache.device).set_(
        cache.untyped_storage(),
        (cache.storage_offset() + numbers) // 2,
        (planes, *cache.shape[:4]),
        (heads, cache.stride(0) // 2, *strides),
    )


def quantized(heads: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """heads [..., head_dim] -> their numbers [..., stored width] and scales [1 or 2, ...]. A head
    with a NaN has a scale that is NaN."""
    x = heads.float()
    if dtype == INT4:
        return _in_four_bits(x)
    largest = x.abs().amax(-1)
    scale = (largest / 127).clamp(max=LARGEST_SCALE).half()
    steps = x / scale.float()[..., None]
    # A head of zeros, or of next to nothing, has a scale of zero.
    steps = steps.nan_to_num(0.0, 127.0, -127.0).round_().clamp_(-127, 127)
    return (steps * (scale != 0)[..., None]).to(INT8), scale[None]


def spread_width(head_dim: int) -> int:
    """Numbers of a head that are spread over each other: the largest power of two that divides
    it."""
    return head_dim & -head_dim


def spread(heads: torch.Tensor) -> torch.Tensor:
    """heads [..., head_dim] -> float32, or float64 as they are: each part of `spread_width` numbers
    in the orthonormal basis of Hadamard, which is its own inverse. Sums are in one order for every
    shape, as in the kernel."""
    span = spread_width(heads.shape[-1])
    x = (heads if heads.dtype == torch.float64 else heads.float()).reshape(-1, span)
    for _ in range(span.bit_length() - 1):
        first, second = x.view(-1, 2, span // 2).unbind(1)
        x = torch.stack((first + second, first - second), -1).view(-1, span)
    return (x * math.sqrt(1 / span)).view(heads.shape)


def queries_for(cache: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """q [T, num_heads, head_dim] as attention to this cache takes it, in its type."""
    return spread(q).to(q.dtype) if cache.dtype in SCALED else q


def _in_four_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    least, most = x.amin(-1), x.amax(-1)
    scale = ((most - least) / 15).clamp(max=LARGEST_SCALE).half()
    # Numbers are from -8 to 7, which is the largest. What differs little is all offset.
    offset = (least + 8 * scale.float()).clamp(-LARGEST_SCALE, LARGEST_SCALE).half()
    steps = (x - offset.float()[..., None]) / scale.float()[..., None]
    steps = steps.nan_to_num(0.0, 7.0, -8.0).round_().clamp_(-8, 7)
    low, high = ((steps * (scale != 0)[..., None]) + 8).to(torch.uint8).chunk(2, -1)
    return low | high << 4, torch.stack((scale, offset))


def dequantized(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """numbers [..., stored width] and scales [1 or 2, ...] -> float32 heads [..., head_dim]"""
    if numbers.dtype == INT4:
        steps = torch.cat((numbers & 15, numbers >> 4), -1).float() - 8
        return steps * scales[0].float()[..., None] + scales[1].float()[..., None]
    return numbers.float() * scales[0].float()[..., None]


def to_cache_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the type of a cache without scales. Some releases of torch turn what is too large into
    NaN."""
    if dtype == FP8:
        x = x.clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def movable(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch can copy by index: bytes, for an 8-bit cache."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def read_slots(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """slots: [N] int64 -> their keys and values, [N, 2, num_kv_heads, head_dim] of a type"""
    if cache.is_contiguous() and cache.dtype not in SCALED:
        return movable(cache).flatten(0, 1).index_select(0, slots).view(cache.dtype).to(dtype)
    # Slots have no view where blocks lie apart.
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    found = movable(cache)[blocks, offsets]
    if cache.dtype in SCALED:
        return dequantized(found, scales_of(cache)[:, blocks, offsets]).to(dtype)
    return found.view(cache.dtype).to(dtype)


def fill_with_nan(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """blocks: [N] int64"""
    if cache.dtype in SCALED:
        scales_of(cache).index_fill_(1, blocks, float("nan"))
        return
    nan = FP8_NAN_BYTE if cache.dtype == FP8 else float("nan")
    movable(cache).index_fill_(0, blocks, nan)


def cache_constants(cache: torch.Tensor) -> dict[str, int]:
    """The layout of a cache, as constants by which every kernel finds a head of a token."""
    block, token, kv, head, dim = cache.stride()
    assert dim == 1, "a head of a token must be dense"
    num_kv_heads, head_dim = heads_of(cache)
    return {
        "BLOCK_STRIDE": block,
        "TOKEN_STRIDE": token,
        "V_OFFSET": kv,
        "HEAD_STRIDE": head,
        "BLOCK_SIZE": cache.shape[1],
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
    }


def scales_at(cache: torch.Tensor) -> int:
    """Bytes from a block's numbers to its scales; 0: it has none."""
    return math.prod(cache.shape[1:]) if cache.dtype in SCALED else 0


def kv_store_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: LayerScales | None = None,
) -> None:
    write_heads(spread(k) if cache.dtype in SCALED else k, v, cache, slot_mapping, scales)


def write_heads(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: LayerScales | None = None,
) -> None:
    """The same of keys that are spread already where the cache has them so."""
    if scales is not None:
        assert cache.dtype == FP8, "other types have none, or scales of their own"
        k, v = (heads.float() * (1 / scale) for heads, scale in zip((k, v), scales, strict=True))
    block_size = cache.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for place, heads in enumerate((k, v)):
        if cache.dtype in SCALED:
            numbers, own_scales = quantized(heads, cache.dtype)
            scales_of(cache)[:, blocks, offsets, place] = own_scales
        else:
            numbers = to_cache_dtype(heads, cache.dtype)
        movable(cache)[blocks, offsets, place] = movable(numbers)
