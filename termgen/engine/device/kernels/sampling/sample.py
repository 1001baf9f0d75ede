"""Logits to token ids in one kernel: temperature, cut, Gumbel noise and argmax.

A row that `edit_logits` has edited is read from its buffer. Reproduces `gumbel.gumbel_argmax`:
the random bits are those of `sampling.gumbel` bit for bit, the noise is theirs to float32 rounding.
A row is divided among several programs. Each leaves its best (score, id) in a workspace, and the
last to arrive takes the best of them; ids break ties, so the result does not depend on timing.

Scores are compared as integers that sort like floats, NaN above everything. One 64-bit integer
holds a score above and its id, reversed, below: the largest one names the lowest id that wins.

A NaN, or an infinity above all else, therefore wins its row: whether logits are numbers is seen in
the winner alone, and costs one load where the winner's score is not finite. The model's own logits
are judged, not what penalties make of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2, num_sms, register_limit
from termgen.engine.device.kernels.sampling.edit_logits import (
    EditedSlots,
    is_early,
    is_edited,
    slot_and_place,
)
from termgen.engine.device.sampling.gumbel import Stream, gumbel_argmax, mark_corrupt
from termgen.engine.device.sampling.metadata import HAS_EDITS, HAS_GRAMMAR
from termgen.vocabulary.sampling_params import GREEDY_EPSILON
from termgen.vocabulary.step import CORRUPT_TOKEN

_BLOCK = 1024
_PROGRAMS_PER_SM = 8
_NUM_WARPS = 4
_REGISTERS = 2**16 // (_PROGRAMS_PER_SM * _NUM_WARPS * 32)
"""Most of a thread, so that a multiprocessor has enough for all its programs at once: with a few
more, the last ones would wait for the others to end."""
_GREEDY_EPSILON = tl.constexpr(GREEDY_EPSILON)
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)  # `sampling.gumbel`
_ROOM = tl.constexpr(0.999)
_LOWEST_KEY = tl.constexpr(-(2**31))  # below the key of every float, -inf included
_LARGEST_KEY = tl.constexpr(2**31 - 1)
_INF_KEY = tl.constexpr(0x7F800000)
_MINUS_INF_KEY = tl.constexpr(-0x7F800001)  # sortable_key(-inf), the lowest of a float
_CORRUPT_TOKEN = tl.constexpr(CORRUPT_TOKEN)
_MAY_HIDE_ALL = tl.constexpr(HAS_EDITS | HAS_GRAMMAR)


@triton.jit
def sortable_key(values):
    """float32 -> int32 that sorts as the values do: -0.0 as 0.0, NaN above everything."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(values != values, _LARGEST_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def uniform_from_bits(bits):
    """`sampling.gumbel.uniform_from_bits` of uint32 bits."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_UNIFORM)


@triton.jit
def gumbel_from_uniform(uniform):
    """`sampling.gumbel.gumbel_from_bits`, from the uniforms of the bits."""
    # log1p(-u) is log(1 - u), less what rounding took from 1 - u.
    rest = 1.0 - uniform
    lost = (rest - 1.0) + uniform
    return -tl.log(lost - tl.log(rest))


@triton.jit
def random_bits(seed, position, first_counter, STREAM: tl.constexpr, NUM_COUNTERS: tl.constexpr):
    """uint32 [4 * NUM_COUNTERS]: `sampling.gumbel.random_bits` from index 4 * first_counter on."""
    index = first_counter + tl.arange(0, NUM_COUNTERS)
    zero = index * 0
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    stream = (zero + STREAM).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox(seed, index.to(tl.uint32), zero + low, zero + high, stream)
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def _any(mask):
    return tl.max(mask.to(tl.int32), axis=0) > 0


@triton.jit
def _keep_better(best_key, best_id, scores, ids, inside):
    """Lane by lane. Ids rise from call to call, so an equal score does not replace an earlier."""
    key = tl.where(inside, sortable_key(scores), _LOWEST_KEY)
    better = key > best_key
    return tl.where(better, key, best_key), tl.where(better, ids, best_id)


@triton.jit
def _store_winner(out_ptr, row_ptr, best, may_be_empty):
    """The id of the best (score, id), or CORRUPT_TOKEN where the logit it stands for is NaN or
    infinite. A finite logit may have an infinite score, by its temperature."""
    token = (best & 0xFFFFFFFF) ^ _LARGEST_KEY
    key = (best >> 32).to(tl.int32)
    if (key >= _INF_KEY) | (key <= _MINUS_INF_KEY):
        logit = tl.load(row_ptr + token).to(tl.float32)
        is_empty = logit == float("-inf")
        is_number = (logit == logit) & (logit != float("inf"))
        if (is_number == 0) | (is_empty & (may_be_empty == 0)):
            token = token * 0 + _CORRUPT_TOKEN
    tl.store(out_ptr, token)


@triton.jit(
    do_not_specialize=["num_blocks_each"],
    do_not_specialize_on_alignment=["slots_ptr", "counts_ptr"],
)
def _sample_kernel(
    logits_ptr,
    slots_ptr,
    counts_ptr,
    num_computed_ptr,
    temperature_ptr,
    seeds_ptr,
    threshold_ptr,
    edited_ptr,
    edit_kinds_ptr,
    total_len_ptr,
    min_total_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    logits_stride,
    num_blocks_each,
    VOCAB_SIZE: tl.constexpr,
    STREAM: tl.constexpr,
    SAMPLES: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    slot, place = slot_and_place(row, slots_ptr, SAMPLES)
    if SAMPLES == 1:
        position = tl.load(num_computed_ptr + slot) + tl.load(counts_ptr + row)
    else:
        position = tl.load(num_computed_ptr + slot) + 1 + place
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    if HAS_THRESHOLD:
        threshold = tl.load(threshold_ptr + row)
    row_ptr = logits_ptr + row * logits_stride
    if HAS_EDITED:
        edited = is_edited(slot, place, edit_kinds_ptr, total_len_ptr, min_total_ptr)

    best_key = tl.full([BLOCK], _LOWEST_KEY, tl.int32)
    best_id = tl.zeros([BLOCK], tl.int32)
    best_score = float("-inf")
    first = part * num_blocks_each
    last = tl.minimum(first + num_blocks_each, tl.cdiv(VOCAB_SIZE, BLOCK))
    for block in range(first, last):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        inside = ids < VOCAB_SIZE
        if HAS_EDITED:  # no memory is read for the one that is not wanted
            own = tl.load(edited_ptr + row * VOCAB_SIZE + ids, mask=inside & edited, other=0.0)
            scores = tl.load(row_ptr + ids, mask=inside & ~edited, other=0.0).to(tl.float32)
            scores = tl.where(inside, tl.where(edited, own, scores), float("-inf"))
        else:
            scores = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
        if temperature >= _GREEDY_EPSILON:
            scores = tl.div_rn(scores, temperature)
            wanted = inside
            some_wanted = True
            if HAS_THRESHOLD:
                wanted = inside & ~(scores < threshold)
                some_wanted = _any(wanted)
                scores = tl.where(wanted, scores, float("-inf"))
            if some_wanted:
                first_counter = block * (BLOCK // 4)
                bits = random_bits(seed, position, first_counter, STREAM, BLOCK // 4)
                uniform = uniform_from_bits(bits)
                # Noise is at most -log(u). After the first block, a comparison of that bound, with
                # room for its rounding, spares nearly all others the exact noise.
                if _any(wanted & ~(uniform * _ROOM > tl.exp(scores - best_score))):
                    scores += gumbel_from_uniform(uniform)
                    best_score = tl.maximum(best_score, tl.max(scores, axis=0))
                    best_key, best_id = _keep_better(best_key, best_id, scores, ids, inside)
        else:
            best_key, best_id = _keep_better(best_key, best_id, scores, ids, inside)

    may_be_empty = False
    if HAS_EDITED:
        may_be_empty = (tl.load(edit_kinds_ptr + slot) & _MAY_HIDE_ALL) != 0
        may_be_empty |= is_early(slot, place, total_len_ptr, min_total_ptr)
    best = tl.max((best_key.to(tl.int64) << 32) | (_LARGEST_KEY - best_id), axis=0)
    if num_parts == 1:
        _store_winner(out_ptr + row, row_ptr, best, may_be_empty)
    else:
        parts = partial_ptr + row * num_parts
        tl.store(parts + part, best)
        tl.debug_barrier()  # the store comes before the arrival
        arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
        if arrived == num_parts - 1:
            tl.store(arrivals_ptr + row, 0)  # ready for the next launch
            others = tl.arange(0, MAX_PARTS)
            # L1 may hold what an earlier launch left in the workspace: read past it.
            all_best = tl.load(
                parts + others, mask=others < num_parts, other=-(2**63), cache_modifier=".cg"
            )
            best = tl.max(all_best, axis=0)
            _store_winner(out_ptr + row, row_ptr, best, may_be_empty)


class SampleWorkspace:
    """Buffers of one engine's sampling; one launch at a time may use them."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.num_blocks = -(-vocab_size // _BLOCK)
        self.num_programs = num_sms(device) * _PROGRAMS_PER_SM
        # Rows times their parts never exceed this: see `num_blocks_each`.
        size = max(self.num_programs, max_rows)
        self.partial = torch.empty(size, dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def num_blocks_each(self, num_rows: int) -> int:
        """Blocks of the vocabulary that one program takes, so that the device is just filled."""
        most_parts = max(1, self.num_programs // num_rows)
        return -(-self.num_blocks // most_parts)


def sample(
    logits: torch.Tensor,  # [B * num_samples, V], rows dense
    slots: torch.Tensor,  # [B] int64
    num_tokens: torch.Tensor,  # [B] int64, this step's tokens of each row
    workspace: SampleWorkspace,
    *,
    num_computed: torch.Tensor,  # [R] int64, before this step's tokens
    temperature: torch.Tensor,  # [R] float32
    seeds: torch.Tensor,  # [R] int64
    threshold: torch.Tensor | None = None,  # by row, float32, of the logits over their temperature
    edited: torch.Tensor | None = None,  # [at least as many rows, V] float32
    edits: EditedSlots | None = None,
    num_samples: int = 1,
    stream: Stream = Stream.TARGET,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [B * num_samples] int64
    """Parameters are those of a row's slot. A token is drawn for the position after the row's
    last one: num_computed + num_tokens. CORRUPT_TOKEN for a row that holds a NaN or +inf, and for
    one that holds nothing but -inf, unless an edit or a mask of its own may have left it nothing.
    edited: what `edit_logits` made of the logits by `edits`. With several samples of a row, the
    first is for the position after its first token of this step, and so on; num_tokens is not
    read."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size == workspace.vocab_size, logits.shape
    assert num_rows <= workspace.max_rows, (num_rows, workspace.max_rows)
    assert (edited is None) == (edits is None)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    is_plain = threshold is None and edits is None  # which takes fewer by itself
    num_blocks_each = workspace.num_blocks_each(num_rows)
    _sample_kernel[(num_rows, triton.cdiv(workspace.num_blocks, num_blocks_each))](
        logits,
        slots,
        num_tokens,
        num_computed,
        temperature,
        seeds,
        threshold,
        edited,
        None if edits is None else edits.edit_kinds,
        None if edits is None else edits.total_len,
        None if edits is None else edits.min_total,
        out,
        workspace.partial,
        workspace.arrivals,
        logits.stride(0),
        num_blocks_each,
        VOCAB_SIZE=vocab_size,
        STREAM=int(stream),
        SAMPLES=num_samples,
        HAS_THRESHOLD=threshold is not None,
        HAS_EDITED=edits is not None,
        BLOCK=_BLOCK,
        MAX_PARTS=next_power_of_2(workspace.num_blocks),
        num_warps=_NUM_WARPS,
        **({} if is_plain else register_limit(logits.device, _REGISTERS)),
    )
    return out


def sample_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    num_computed: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    threshold: torch.Tensor | None = None,
    stream: Stream = Stream.TARGET,
) -> torch.Tensor:
    temperatures = temperature[slots]
    greedy = temperatures < GREEDY_EPSILON
    drawn = gumbel_argmax(
        logits.float() / temperatures.masked_fill(greedy, 1.0).unsqueeze(1),
        seeds=seeds[slots],
        positions=num_computed[slots] + num_tokens,
        greedy=greedy,
        stream=stream,
        threshold=None if threshold is None else threshold.unsqueeze(1),
    )
    return mark_corrupt(drawn, logits.float(), may_be_empty=False)
