"""Routes tokens to experts, and sorts the (token, expert) pairs into tiles for the products.

Two kernels, all on the device and with outputs whose sizes follow from the number of tokens alone,
so that a recorded step can hold them. Pair p is choice p % k of token p // k, where k is top_k, and
one more if every token goes through a shared expert. A padded token is routed like any other; its
pairs lie in rows of their own and change no other result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from termgen.engine.device.kernels.launch import next_power_of_2, pdl_options

_LOOK_UP_BLOCK = 128


class PairTiles(NamedTuple):
    """Pairs sorted by expert, and cut into tiles of one expert each."""

    order: torch.Tensor
    """[num_pairs] int32: the pairs, those of an expert side by side and in their own order."""
    tiles: torch.Tensor
    """[3, max_tiles] int32: a tile's expert, -1 for a tile not in use; where its pairs start in
    `order`; where its expert's pairs end."""

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[1]


class LonePairs(NamedTuple):
    """Each pair is a tile of its own: for so few that sorting them would bring few together."""

    order: torch.Tensor
    """[num_pairs] int32: each pair's expert."""
    tiles: None = None

    @property
    def num_tiles(self) -> int:
        return len(self.order)


@triton.jit
def _route_kernel(
    logits_ptr,
    scale_ptr,
    ids_ptr,
    weights_ptr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    CHOICES: tl.constexpr = TOP_K + 1 if HAS_SHARED else TOP_K
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BINS)
    logits_ptr += row * (NUM_EXPERTS if SIGMOID else NUM_EXPERTS + CHOICES - TOP_K)
    at = logits_ptr + experts
    logits = tl.load(at, mask=experts < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    # NaN comes last. Of equals the first is chosen, so an expert is always one that exists.
    rest = tl.where(logits == logits, logits, float("-inf"))
    highest = tl.max(rest, axis=0)
    slots = tl.arange(0, SLOTS)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(rest, axis=0)
        expert = tl.argmax(rest, axis=0)
        ids = tl.where(slots == slot, expert, ids)
        weight = tl.sigmoid(best) if SIGMOID else tl.exp(best - highest)
        weights = tl.where(slots == slot, weight, weights)
        rest = tl.where(experts == expert, float("-inf"), rest)
    if not SIGMOID:
        if RENORMALIZE:
            total = tl.sum(weights, axis=0)
        else:
            total = tl.sum(tl.exp(logits - highest), axis=0)
        weights = weights / total
    if HAS_SCALE:
        weights *= tl.load(scale_ptr + ids)
    if HAS_SHARED:
        shared = 1.0
        if not SIGMOID:
            shared = tl.sigmoid(tl.load(logits_ptr + NUM_EXPERTS).to(tl.float32))
        ids = tl.where(slots == TOP_K, NUM_EXPERTS, ids)
        weights = tl.where(slots == TOP_K, shared, weights)
    out = row * CHOICES + slots
    tl.store(ids_ptr + out, ids, mask=slots < CHOICES)
    tl.store(weights_ptr + out, weights, mask=slots < CHOICES)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    MISSING: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """MISSING: the bin of pairs whose expert is not here, behind those of experts; 0: there are
    none."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0) * CHUNK
    # Every program counts all pairs: that takes less time than another launch to share the counts.
    counts = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, SCAN):
        at = start + tl.arange(0, SCAN)
        scanned = tl.load(ids_ptr + at, mask=at < num_pairs, other=0)
        if MISSING > 0:
            scanned = tl.where(scanned < 0, MISSING, scanned)
        counts += tl.histogram(scanned, BINS, mask=at < num_pairs)
        if start < first:
            before += tl.histogram(scanned, BINS, mask=at < first)
    ends = tl.cumsum(counts, axis=0)
    starts = ends - counts

    within = tl.arange(0, CHUNK)
    pairs = first + within
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=BINS)
    if MISSING > 0:
        ids = tl.where(ids < 0, MISSING, ids)
    is_earlier = (ids[:, None] == ids[None, :]) & (within[None, :] < within[:, None])
    rank = tl.sum(is_earlier.to(tl.int32), axis=1)
    place = tl.gather(starts + before, tl.minimum(ids, BINS - 1), axis=0) + rank
    tl.store(order_ptr + place, pairs, mask=pairs < num_pairs)

    # There are no more tiles than pairs: the program writes those of its pairs' numbers.
    tile = pairs
    tiles = tl.cdiv(counts, BLOCK_M)
    tile_ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    is_tile = tile < num_tiles
    KNOWN: tl.constexpr = MISSING if MISSING > 0 else BINS
    tl.store(tiles_ptr + tile, tl.where(expert < KNOWN, expert, -1), mask=is_tile)
    expert = tl.minimum(expert, BINS - 1)
    first_tile = tl.gather(tile_ends - tiles, expert, axis=0)
    start = tl.gather(starts, expert, axis=0) + (tile - first_tile) * BLOCK_M
    end = tl.gather(ends, expert, axis=0)
    tl.store(tiles_ptr + num_tiles + tile, start, mask=is_tile)
    tl.store(tiles_ptr + 2 * num_tiles + tile, end, mask=is_tile)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scale: torch.Tensor | None = None,
    has_shared: bool = False,
    weighs_inputs: bool = False,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, num_experts] -> each token's experts, int32, and their weights, float32: [T, k].
    scale: [num_experts] float32, factors of the weights. has_shared: the last expert is no choice,
    but follows each token's own. weighs_inputs: weights are sigmoids, and the last expert has no
    logit, but weight one.

    The likeliest first. `layers.ops.route` is the reference.
    """
    num_tokens, num_experts = logits.shape
    num_choices = top_k
    if has_shared:
        num_choices, num_experts = top_k + 1, num_experts - (not weighs_inputs)
    assert not (weighs_inputs and (renormalize or scale is not None))
    assert logits.is_contiguous() and top_k <= num_experts, (logits.stride(), top_k)
    ids = torch.empty((num_tokens, num_choices), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, num_choices), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            scale,
            ids,
            weights,
            NUM_EXPERTS=num_experts,
            BINS=_bins(num_experts),
            TOP_K=top_k,
            SLOTS=max(2, next_power_of_2(num_choices)),
            RENORMALIZE=renormalize,
            HAS_SCALE=scale is not None,
            HAS_SHARED=has_shared,
            SIGMOID=weighs_inputs,
            num_warps=1,
            **pdl_options(logits.device, enabled=pdl),
        )
    return ids, weights


def sort_pairs(
    ids: torch.Tensor,
    *,
    num_experts: int,
    block_m: int,
    chunk: int,
    scan: int,
    may_miss: bool = False,
    pdl: bool = True,
) -> PairTiles:
    """ids [T, top_k] int32, contiguous; may_miss: negative for an expert that is not here, whose
    pairs come last and are in no tile. A program sorts `chunk` pairs, each compared with each, and
    counts all pairs, `scan` at a time: these change the time it takes, and nothing else."""
    assert ids.is_contiguous() and ids.numel(), ids.shape
    num_pairs = ids.numel()
    num_bins = num_experts + may_miss
    num_tiles = max_tiles(num_pairs, num_bins, block_m)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=ids.device)
    _sort_kernel[(triton.cdiv(num_pairs, chunk),)](
        ids,
        order,
        tiles,
        num_pairs,
        num_tiles,
        BINS=_bins(num_bins),
        BLOCK_M=block_m,
        CHUNK=chunk,
        SCAN=scan,
        MISSING=num_experts if may_miss else 0,
        num_warps=4,
        **pdl_options(ids.device, enabled=pdl),
    )
    return PairTiles(order, tiles)


@triton.jit(do_not_specialize=["num_pairs"])
def _look_up_kernel(
    ids_ptr,
    slots_ptr,
    codes_ptr,
    slots_out_ptr,
    codes_out_ptr,
    num_pairs,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_pairs
    ids = tl.load(ids_ptr + at, mask=inside, other=0)
    tl.store(slots_out_ptr + at, tl.load(slots_ptr + ids, mask=inside, other=0), mask=inside)
    tl.store(codes_out_ptr + at, tl.load(codes_ptr + ids, mask=inside, other=0), mask=inside)


def look_up(
    ids: torch.Tensor, slots: torch.Tensor, codes: torch.Tensor, *, pdl: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, k] int32 -> slots[ids] and codes[ids], int32, of the same shape."""
    assert ids.is_contiguous(), ids.stride()
    of_slots, of_codes = torch.empty_like(ids), torch.empty_like(ids)
    _look_up_kernel[(triton.cdiv(ids.numel(), _LOOK_UP_BLOCK),)](
        *(ids, slots, codes, of_slots, of_codes, ids.numel()),
        BLOCK=_LOOK_UP_BLOCK,
        num_warps=1,
        **pdl_options(ids.device, enabled=pdl),
    )
    return of_slots, of_codes


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles of tokens that `num_pairs` can fill, in any distribution to experts."""
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


def _bins(num_experts: int) -> int:
    return max(2, next_power_of_2(num_experts))


def sort_pairs_reference(ids: torch.Tensor, *, num_experts: int, block_m: int) -> PairTiles:
    flat = ids.flatten()
    num_tiles = max_tiles(flat.numel(), num_experts, block_m)
    tiles, start = [], 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        end = start + count
        tiles += [(expert, first, end) for first in range(start, end, block_m)]
        start = end
    tiles += [(-1, 0, 0)] * (num_tiles - len(tiles))
    order = flat.argsort(stable=True).int()
    return PairTiles(order, torch.tensor(tiles, dtype=torch.int32, device=ids.device).T)
