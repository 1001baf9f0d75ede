"""The smallest logit that the cuts of the tail keep, for each row that asks, without sorting.

Called by the sampler before `sample`. Keeps what `sampling.top_k_top_p.cut_threshold_reference`
keeps, ties included, up to the rounding of the probability mass. One program does one row:

    1  Read the row, keep the largest logit of every small piece of it. The largest of all is among
       them, and the m-th largest of them has at least m logits that are not below it: a guess
       that leaves few logits, and for top-k (m = k) one that never leaves too few.
    2  Read the row again, collect the logits that reach the guess, and sum up the mass of all.
    3  Search the collected ones by bisection. All of it happens in registers.

If too many reach the guess, or too little mass does, a bisection that reads the row in every step
takes over, which is as exact and takes longer. Logits are compared as `sample.sortable_key` sorts
them, after division by their temperature, as `sample` divides. Sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2
from termgen.engine.device.kernels.sampling.edit_logits import (
    EditedSlots,
    is_edited,
    slot_and_place,
)
from termgen.engine.device.kernels.sampling.sample import (
    _GREEDY_EPSILON,
    _INF_KEY,
    _LOWEST_KEY,
    _MINUS_INF_KEY,
    sortable_key,
)
from termgen.engine.device.sampling.top_k_top_p import Cuts, cut_threshold_reference
from termgen.vocabulary.sampling_params import GREEDY_EPSILON

_TILE = 4096
_MAX_PIECES = 2048
_MIN_PIECE = 16
_CAPACITY = 4096
_GUESS_GRAIN = tl.constexpr(1 << 10)  # keys: how exact a guess has to be


@triton.jit
def _value(key):
    """The float32 of a sortable key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_keys(
    row_ptr,
    own_ptr,
    edited,
    first,
    temperature,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    """Keys of the row, or of its own edited logits at `own_ptr` if it has any."""
    ids = first + tl.arange(0, TILE)
    inside = ids < VOCAB_SIZE
    if HAS_EDITED:
        own = tl.load(own_ptr + ids, mask=inside & edited, other=0.0)
        logits = tl.load(row_ptr + ids, mask=inside & ~edited, other=0.0).to(tl.float32)
        logits = tl.where(edited, own, logits)
    else:
        logits = tl.load(row_ptr + ids, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, sortable_key(tl.div_rn(logits, temperature)), _LOWEST_KEY)


@triton.jit
def _weights(keys, top, COUNTED: tl.constexpr):
    """Each logit's share of the sum of a search: 1, or its mass relative to the largest."""
    if COUNTED:
        return tl.where(keys > _LOWEST_KEY, 1.0, 0.0)
    return tl.where(keys > _LOWEST_KEY, tl.exp(_value(keys) - top), 0.0)


@triton.jit
def _sum_from(keys, weights, key):
    return tl.sum(tl.where(keys >= key.to(tl.int32), weights, 0.0), axis=0)


@triton.jit
def _search(keys, weights, goal, low, high, GRAIN: tl.constexpr):
    """The largest key in [low, high) from which on the weights reach the goal, or `low`; with a
    grain, a key below that by less than the grain."""
    while high - low > GRAIN:
        middle = (low + high) >> 1
        reached = _sum_from(keys, weights, middle) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _search_row(
    row_ptr,
    own_ptr,
    edited,
    temperature,
    top,
    goal,
    low,
    high,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COUNTED: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    """`_search` over a whole row, in quarters, for each of which the row is read once."""
    while high - low > 1:
        step = tl.maximum((high - low) >> 2, 1)
        first = low + step
        second = tl.minimum(first + step, high - 1)
        third = tl.minimum(second + step, high - 1)
        sums1 = tl.zeros([TILE], tl.float32)
        sums2 = tl.zeros([TILE], tl.float32)
        sums3 = tl.zeros([TILE], tl.float32)
        for start in range(0, VOCAB_SIZE, TILE):
            keys = _load_keys(
                row_ptr, own_ptr, edited, start, temperature, VOCAB_SIZE, TILE, HAS_EDITED
            )
            weights = _weights(keys, top, COUNTED)
            sums1 += tl.where(keys >= first.to(tl.int32), weights, 0.0)
            sums2 += tl.where(keys >= second.to(tl.int32), weights, 0.0)
            sums3 += tl.where(keys >= third.to(tl.int32), weights, 0.0)
        reached1 = tl.sum(sums1, axis=0) >= goal
        reached2 = tl.sum(sums2, axis=0) >= goal
        reached3 = tl.sum(sums3, axis=0) >= goal
        high = tl.where(reached3, high, tl.where(reached2, third, second))
        high = tl.where(reached1, high, first)
        low = tl.where(reached1, tl.where(reached2, second, first), low)
        low = tl.where(reached3, third, low)
    return low


@triton.jit
def _sum_row(
    row_ptr,
    own_ptr,
    edited,
    temperature,
    top,
    key,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    """Mass of the logits from `key` on."""
    sums = tl.zeros([TILE], tl.float32)
    for start in range(0, VOCAB_SIZE, TILE):
        keys = _load_keys(
            row_ptr, own_ptr, edited, start, temperature, VOCAB_SIZE, TILE, HAS_EDITED
        )
        sums += tl.where(keys >= key.to(tl.int32), _weights(keys, top, False), 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _sigma_threshold(
    row_ptr,
    own_ptr,
    edited,
    temperature,
    top,
    top_n_sigma,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    """`sampling.top_k_top_p._sigma_threshold`. Its sums in float64, so that their order leaves no
    trace."""
    counts = tl.zeros([TILE], tl.int32)
    sums = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    for start in range(0, VOCAB_SIZE, TILE):
        keys = _load_keys(
            row_ptr, own_ptr, edited, start, temperature, VOCAB_SIZE, TILE, HAS_EDITED
        )
        is_known = keys > _MINUS_INF_KEY
        below = _value(keys).to(tl.float64) - top.to(tl.float64)
        below = tl.where(is_known, below, 0.0)
        counts += is_known.to(tl.int32)
        sums += below
        squares += below * below
    count = tl.sum(counts, axis=0).to(tl.float64)
    mean = tl.sum(sums, axis=0) / count
    variance = tl.maximum(tl.sum(squares, axis=0) / count - mean * mean, 0.0)
    return (top.to(tl.float64) - top_n_sigma.to(tl.float64) * tl.sqrt(variance)).to(tl.float32)


@triton.jit
def _collect(
    row_ptr,
    own_ptr,
    edited,
    collected_ptr,
    temperature,
    top,
    min_key,
    guess,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    """Store the keys from `guess` on, in their order and as far as they fit. Returns how many
    there are, and the mass from `min_key` on."""
    num_collected = 0
    masses = tl.zeros([TILE], tl.float32)
    for start in range(0, VOCAB_SIZE, TILE):
        keys = _load_keys(
            row_ptr, own_ptr, edited, start, temperature, VOCAB_SIZE, TILE, HAS_EDITED
        )
        masses += tl.where(keys >= min_key.to(tl.int32), _weights(keys, top, False), 0.0)
        reaches = keys >= guess.to(tl.int32)
        num_new = tl.sum(reaches.to(tl.int32), axis=0)
        if (num_new > 0) & (num_collected < CAPACITY):
            at = num_collected + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
            tl.store(collected_ptr + at, keys, mask=reaches & (at < CAPACITY))
        num_collected += num_new
    return num_collected, tl.sum(masses, axis=0)


@triton.jit
def _piece_maxima(
    row_ptr,
    own_ptr,
    edited,
    pieces_ptr,
    temperature,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    NUM_PIECES: tl.constexpr = (VOCAB_SIZE + PIECE - 1) // PIECE
    PIECES_OF_TILE: tl.constexpr = TILE // PIECE
    for start in range(0, VOCAB_SIZE, TILE):
        keys = _load_keys(
            row_ptr, own_ptr, edited, start, temperature, VOCAB_SIZE, TILE, HAS_EDITED
        )
        maxima = tl.max(tl.reshape(keys, [PIECES_OF_TILE, PIECE]), axis=1)
        at = start // PIECE + tl.arange(0, PIECES_OF_TILE)
        tl.store(pieces_ptr + at, maxima, mask=at < NUM_PIECES)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "out_ptr"])
def _cut_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_n_sigma_ptr,
    edited_ptr,
    edit_kinds_ptr,
    total_len_ptr,
    min_total_ptr,
    out_ptr,
    pieces_ptr,
    collected_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLES: tl.constexpr,
    HAS_EDITED: tl.constexpr,
):
    NUM_PIECES: tl.constexpr = (VOCAB_SIZE + PIECE - 1) // PIECE
    MOST_GUESSED: tl.constexpr = (NUM_PIECES * 3 + 3) // 4
    row = tl.program_id(0).to(tl.int64)
    slot, place = slot_and_place(row, slots_ptr, SAMPLES)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    top_n_sigma = tl.load(top_n_sigma_ptr + slot)
    has_k = (top_k > 0) & (top_k < VOCAB_SIZE)
    has_p = top_p < 1.0
    tl.store(out_ptr + row, float("-inf"))
    is_cut = has_k | has_p | (min_p > 0.0) | (top_n_sigma > 0.0)
    if (temperature < _GREEDY_EPSILON) | (is_cut == 0):
        return

    row_ptr = logits_ptr + row * logits_stride
    pieces_ptr += row * BLOCK_PIECES
    own_ptr = edited_ptr + row * VOCAB_SIZE
    edited = False
    if HAS_EDITED:
        edited = is_edited(slot, place, edit_kinds_ptr, total_len_ptr, min_total_ptr)
    _piece_maxima(
        row_ptr, own_ptr, edited, pieces_ptr, temperature, VOCAB_SIZE, TILE, PIECE, HAS_EDITED
    )
    tl.debug_barrier()  # what one thread stored, another loads
    at = tl.arange(0, BLOCK_PIECES)
    pieces = tl.load(pieces_ptr + at, mask=at < NUM_PIECES, other=_LOWEST_KEY, cache_modifier=".cg")
    top_key = tl.max(pieces, axis=0)
    if (top_key >= _INF_KEY) | (top_key == _MINUS_INF_KEY):
        return  # lost to NaN or infinities: nothing is cut
    top = _value(top_key)
    high = top_key.to(tl.int64) + 1
    lowest = high * 0 + _MINUS_INF_KEY
    cut = lowest
    if min_p > 0.0:
        cut = sortable_key(top + tl.log(min_p)).to(tl.int64)
    if top_n_sigma > 0.0:
        limit = _sigma_threshold(
            row_ptr,
            own_ptr,
            edited,
            temperature,
            top,
            top_n_sigma,
            VOCAB_SIZE,
            TILE,
            HAS_EDITED,
        )
        cut = tl.maximum(cut, sortable_key(limit).to(tl.int64))
    if has_k | has_p:
        guess = lowest
        if VOCAB_SIZE > CAPACITY:
            wanted = tl.where(has_k, tl.minimum(top_k, MOST_GUESSED), MOST_GUESSED)
            ones = _weights(pieces, top, True)
            guess = _search(pieces, ones, wanted.to(tl.float32), lowest, high, _GUESS_GRAIN)
        guess = tl.maximum(guess, cut)
        collected_ptr += row * CAPACITY
        num_collected, total = _collect(
            row_ptr,
            own_ptr,
            edited,
            collected_ptr,
            temperature,
            top,
            cut,
            guess,
            VOCAB_SIZE,
            TILE,
            CAPACITY,
            HAS_EDITED,
        )
        tl.debug_barrier()
        index = tl.arange(0, CAPACITY)
        keys = tl.load(
            collected_ptr + index,
            mask=index < num_collected,
            other=_LOWEST_KEY,
            cache_modifier=".cg",
        )
        # Below the guess lies nothing that counts, if the guess is the cut itself.
        fits = num_collected <= CAPACITY
        is_all = fits & (guess == cut)
        if has_k:
            goal = top_k.to(tl.float32)
            if is_all | (fits & (num_collected >= top_k)):
                cut = _search(keys, _weights(keys, top, True), goal, guess, high, 1)
                total = _sum_from(keys, _weights(keys, top, False), cut)
                is_all = fits
            else:
                cut = _search_row(
                    row_ptr,
                    own_ptr,
                    edited,
                    temperature,
                    top,
                    goal,
                    cut,
                    high,
                    VOCAB_SIZE,
                    TILE,
                    True,
                    HAS_EDITED,
                )
                total = _sum_row(
                    row_ptr, own_ptr, edited, temperature, top, cut, VOCAB_SIZE, TILE, HAS_EDITED
                )
                is_all = fits & (guess <= cut)
        if has_p:
            goal = top_p * total
            masses = _weights(keys, top, False)
            if is_all | (fits & (tl.sum(masses, axis=0) >= goal)):
                cut = _search(keys, masses, goal, tl.maximum(guess, cut), high, 1)
            else:
                cut = _search_row(
                    row_ptr,
                    own_ptr,
                    edited,
                    temperature,
                    top,
                    goal,
                    cut,
                    high,
                    VOCAB_SIZE,
                    TILE,
                    False,
                    HAS_EDITED,
                )
    tl.store(out_ptr + row, _value(cut.to(tl.int32)))


class CutWorkspace:
    """Buffers of one engine's cuts; one launch at a time may use them."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        tile: int = _TILE,
        capacity: int = _CAPACITY,
    ) -> None:
        """capacity: how many logits of a row can be collected; a power of two, as is `tile`."""
        self.vocab_size = vocab_size
        self.tile = tile
        self.piece = max(_MIN_PIECE, next_power_of_2(-(-vocab_size // _MAX_PIECES)))
        num_pieces = next_power_of_2(-(-vocab_size // self.piece))
        self.pieces = torch.empty((max_rows, num_pieces), dtype=torch.int32, device=device)
        self.collected = torch.empty((max_rows, capacity), dtype=torch.int32, device=device)


def cut_threshold(
    logits: torch.Tensor,  # [B * num_samples, V], rows dense
    slots: torch.Tensor,  # [B] int64
    workspace: CutWorkspace,
    cuts: Cuts,  # [R]
    *,
    temperature: torch.Tensor,  # [R] float32
    edited: torch.Tensor | None = None,  # [at least as many rows, V] float32
    edits: EditedSlots | None = None,
    num_samples: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [B * num_samples] float32, of the logits over their temperature
    """Parameters are those of a row's slot; -inf for a row that asks for no cut or is greedy.
    edited: what `edit_logits` made of the logits by `edits`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size == workspace.vocab_size, logits.shape
    assert num_rows <= len(workspace.pieces), (num_rows, len(workspace.pieces))
    assert (edited is None) == (edits is None)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _cut_kernel[(num_rows,)](
            logits,
            slots,
            temperature,
            cuts.top_k,
            cuts.top_p,
            cuts.min_p,
            cuts.top_n_sigma,
            logits if edited is None else edited,
            None if edits is None else edits.edit_kinds,
            None if edits is None else edits.total_len,
            None if edits is None else edits.min_total,
            out,
            workspace.pieces,
            workspace.collected,
            logits.stride(0),
            VOCAB_SIZE=vocab_size,
            TILE=workspace.tile,
            PIECE=workspace.piece,
            BLOCK_PIECES=workspace.pieces.shape[1],
            CAPACITY=workspace.collected.shape[1],
            SAMPLES=num_samples,
            HAS_EDITED=edits is not None,
            num_warps=16,
        )
    return out


def cut_threshold_of_slots(
    logits: torch.Tensor, slots: torch.Tensor, cuts: Cuts, *, temperature: torch.Tensor
) -> torch.Tensor:
    """The reference, in `cut_threshold`'s terms."""
    temperatures = temperature[slots].unsqueeze(1)
    greedy = temperatures < GREEDY_EPSILON
    scaled = logits.float() / temperatures.masked_fill(greedy, 1.0)
    threshold = cut_threshold_reference(scaled, cuts.of(slots))
    return threshold.masked_fill(greedy, -torch.inf).squeeze(1)
