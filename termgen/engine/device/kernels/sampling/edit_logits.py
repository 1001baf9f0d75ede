"""Changes to the logits before sampling, by a request or its grammar.

The mask of a grammar, or the token that it forces, allowed ids, a bias, bad words, stop tokens
before `min_tokens` and penalties in one kernel, which reads the tables of the rows' slots. It
leaves the logits as they are, for log-probabilities, and writes float32 to a buffer: only the rows
that `is_edited`, so that sampling reads a row from one of the two. A program takes a part of a row:
at first all of its logits, with what is known of each by its place in a table; then, a barrier
later each, the few ids of lists that fall into its part, for which it computes the same again with
their bias, or the lowest logit. It is recorded in graphs: what a row asks for is device memory, and
the programs of a row that asks for nothing end at once. Where a slot has several rows, one behind
each of its drafts, a row counts the drafts before it as the slot's tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import next_power_of_2, num_sms
from termgen.engine.device.sampling.logit_edits import NOTHING
from termgen.engine.device.sampling.metadata import (
    COUNT_MASK,
    HAS_EDITS,
    HAS_GRAMMAR,
    HAS_PENALTIES,
)
from termgen.engine.device.sampling.posted_masks import FORCED_SHIFT, MASKED

if TYPE_CHECKING:
    from termgen.engine.device.sampling.logit_edits import LogitEditTables
    from termgen.engine.device.sampling.penalties import Penalties
    from termgen.engine.device.sampling.posted_masks import PostedMasks

_BLOCK = 2048
_BIASES = 256
_WORDS = 16
_NOTHING = tl.constexpr(NOTHING)
_HAS_PENALTIES = tl.constexpr(HAS_PENALTIES)
_HAS_EDITS = tl.constexpr(HAS_EDITS)
_HAS_GRAMMAR = tl.constexpr(HAS_GRAMMAR)
_COUNT_MASK = tl.constexpr(COUNT_MASK)
_FORCED_SHIFT = tl.constexpr(FORCED_SHIFT)
_MASKED = tl.constexpr(MASKED)
_PROGRAMS_PER_SM = 4


class EditedSlots(Protocol):
    """What the kernel reads of every slot. R slots, vocabulary of V."""

    edit_kinds: torch.Tensor  # [R] int64, bits HAS_PENALTIES, HAS_EDITS and HAS_GRAMMAR
    total_len: torch.Tensor  # [R] int64
    min_total: torch.Tensor  # [R] int64
    prompt_len: torch.Tensor  # [R] int64
    token_ids: torch.Tensor  # [R, max_model_len] int32
    token_counts: torch.Tensor  # [R, V] int32, see `metadata`
    penalties: Penalties  # [R]
    stop_ids: torch.Tensor  # [R, K] int64, padded with -1
    edits: LogitEditTables
    masks: PostedMasks


@triton.jit
def slot_and_place(row, slots_ptr, SAMPLES: tl.constexpr):
    """The slot of a row of logits, and the drafts before it, with SAMPLES rows of each slot."""
    if SAMPLES == 1:
        index, place = row, 0
    else:
        index = row // SAMPLES
        place = row - index * SAMPLES
    return tl.load(slots_ptr + index), place


@triton.jit
def is_early(slot, place, total_len_ptr, min_total_ptr):
    """True if a row may not stop yet."""
    return tl.load(total_len_ptr + slot) + place < tl.load(min_total_ptr + slot)


@triton.jit
def is_edited(slot, place, edit_kinds_ptr, total_len_ptr, min_total_ptr):
    """True if `edit_logits` writes this row of the slot."""
    kinds = tl.load(edit_kinds_ptr + slot)
    return (kinds != 0) | is_early(slot, place, total_len_ptr, min_total_ptr)


@triton.jit
def _load_counts(packed_ptr, ids, mask, drafts_ptr, num_drafts, SAMPLES: tl.constexpr):
    """Entries of the table of counts, with the drafts before a row."""
    packed = tl.load(packed_ptr + ids, mask=mask, other=0)
    if SAMPLES > 1:
        for i in range(0, num_drafts):
            packed += (ids == tl.load(drafts_ptr + i)).to(tl.int32)
    return packed


@triton.jit
def _penalise(logits, packed, repetition, presence, frequency):
    """`sampling.penalties.apply_penalties` of logits with their entries of the table of counts."""
    count = packed & _COUNT_MASK
    scaled = tl.where(logits < 0, logits * repetition, tl.div_rn(logits, repetition))
    logits = tl.where(packed != 0, scaled, logits)
    logits -= frequency * count.to(tl.float32)
    return tl.where(count > 0, logits - presence, logits)


@triton.jit
def _is_allowed(bits_ptr, ids, mask):
    bits = tl.load(bits_ptr + ids // 8, mask=mask, other=0)
    return ((bits.to(tl.int32) >> (ids % 8)) & 1) != 0


@triton.jit
def _fits(masks_ptr, ids, mask, forced):
    """True for ids that a grammar allows. forced: see `_forced_token`."""
    words = tl.load(masks_ptr + ids // 32, mask=mask & (forced < 0), other=0)
    return tl.where(forced < 0, ((words >> (ids % 32)) & 1) != 0, ids == forced)


@triton.jit
def _fits_block(masks_ptr, block, forced, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """The same of all ids of a block, [BLOCK]. Reads each word once: it may be the host's."""
    word_ids = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    words = tl.load(masks_ptr + word_ids, mask=(word_ids < NUM_WORDS) & (forced < 0), other=0)
    bits = tl.reshape(((words[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0, [BLOCK])
    return tl.where(forced < 0, bits, block * BLOCK + tl.arange(0, BLOCK) == forced)


@triton.jit
def _forced_token(has_grammar, slot, position, positions_ptr, forced_ptr, MOST: tl.constexpr):
    """The only token that a row's grammar allows at this position; -1: those that the bits of its
    mask say, which is for a position behind such tokens."""
    posted = tl.load(positions_ptr + slot, mask=has_grammar, other=-1)
    count = posted >> _FORCED_SHIFT  # negative where nothing is posted
    place = position - ((posted & _MASKED) - count)
    is_forced = (place >= 0) & (place < count)
    return tl.load(forced_ptr + slot * MOST + place, mask=is_forced, other=-1)


@triton.jit(do_not_specialize=["num_blocks_each"], do_not_specialize_on_alignment=["slots_ptr"])
def _edit_kernel(
    logits_ptr,
    slots_ptr,
    out_ptr,
    edit_kinds_ptr,
    total_len_ptr,
    min_total_ptr,
    prompt_len_ptr,
    token_ids_ptr,
    token_counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    stop_ids_ptr,
    edit_counts_ptr,
    allowed_bits_ptr,
    bias_ids_ptr,
    biases_ptr,
    bad_words_ptr,
    masks_ptr,
    mask_positions_ptr,
    forced_ptr,
    logits_stride,
    num_blocks_each,
    VOCAB_SIZE: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    MOST_FORCED: tl.constexpr,
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASES: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, place = slot_and_place(row, slots_ptr, SAMPLES)
    kinds = tl.load(edit_kinds_ptr + slot)
    early = is_early(slot, place, total_len_ptr, min_total_ptr)
    if (kinds == 0) & (early == 0):
        return
    total = tl.load(total_len_ptr + slot)
    drafts_ptr = token_ids_ptr + slot * MAX_TOKENS + total
    num_drafts = tl.minimum(total + place, MAX_TOKENS) - total
    has_penalties = (kinds & _HAS_PENALTIES) != 0
    repetition = tl.load(repetition_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    has_edits = (kinds & _HAS_EDITS) != 0
    num_biases = tl.load(edit_counts_ptr + slot * 3, mask=has_edits, other=0)
    num_words = tl.load(edit_counts_ptr + slot * 3 + 1, mask=has_edits, other=0)
    is_limited = tl.load(edit_counts_ptr + slot * 3 + 2, mask=has_edits, other=0) != 0
    row_ptr = logits_ptr + row * logits_stride
    out_ptr += row * VOCAB_SIZE
    packed_ptr = token_counts_ptr + slot * VOCAB_SIZE
    bits_ptr = allowed_bits_ptr + slot * NUM_BYTES
    has_grammar = (kinds & _HAS_GRAMMAR) != 0
    forced = _forced_token(
        has_grammar, slot, total + place, mask_positions_ptr, forced_ptr, MOST_FORCED
    )
    masks_ptr += slot * NUM_WORDS
    first = tl.program_id(1) * num_blocks_each
    last = tl.minimum(first + num_blocks_each, tl.cdiv(VOCAB_SIZE, BLOCK))

    for block in range(first, last):
        ids = block * BLOCK + tl.arange(0, BLOCK)
        inside = ids < VOCAB_SIZE
        logits = tl.load(row_ptr + ids, mask=inside, other=0.0).to(tl.float32)
        if has_grammar:
            fits = _fits_block(masks_ptr, block, forced, NUM_WORDS, BLOCK)
            logits = tl.where(fits, logits, float("-inf"))
        if is_limited:
            logits = tl.where(_is_allowed(bits_ptr, ids, inside), logits, float("-inf"))
        if has_penalties:
            packed = _load_counts(packed_ptr, ids, inside, drafts_ptr, num_drafts, SAMPLES)
            logits = _penalise(logits, packed, repetition, presence, frequency)
        tl.store(out_ptr + ids, logits, mask=inside)

    low, high = first * BLOCK, tl.minimum(last * BLOCK, VOCAB_SIZE)
    if num_biases > 0:
        tl.debug_barrier()  # over what other threads of the program have just stored
        for start in range(0, num_biases, BIASES):
            entry = start + tl.arange(0, BIASES)
            at = slot * MAX_BIASES + entry
            ids = tl.load(bias_ids_ptr + at, mask=entry < num_biases, other=-1)
            mine = (ids >= low) & (ids < high)
            logits = tl.load(row_ptr + ids, mask=mine, other=0.0).to(tl.float32)
            logits = tl.where(_is_allowed(bits_ptr, ids, mine), logits, float("-inf"))
            if has_grammar:
                logits = tl.where(_fits(masks_ptr, ids, mine, forced), logits, float("-inf"))
            logits += tl.load(biases_ptr + at, mask=mine, other=0.0)
            if has_penalties:
                packed = _load_counts(packed_ptr, ids, mine, drafts_ptr, num_drafts, SAMPLES)
                logits = _penalise(logits, packed, repetition, presence, frequency)
            tl.store(out_ptr + ids, logits, mask=mine)
    if num_words > 0:
        tl.debug_barrier()  # a forbidden token stays so whatever its bias
        places = tl.arange(0, LENGTH)
        is_last = places == LENGTH - 1
        positions = total + place - (LENGTH - 1) + places
        generated = (positions >= tl.load(prompt_len_ptr + slot)) & (is_last == 0)
        generated = generated & (positions < MAX_TOKENS)  # drafts may reach beyond the context
        tokens_ptr = token_ids_ptr + slot * MAX_TOKENS + positions
        recent = tl.load(tokens_ptr, mask=generated, other=_NOTHING)
        for start in range(0, num_words, WORDS):
            word = start + tl.arange(0, WORDS)
            at = bad_words_ptr + (slot * MAX_WORDS + word) * LENGTH
            ids = tl.load(at + LENGTH - 1, mask=word < num_words, other=-1)
            mine = (ids >= low) & (ids < high)
            words = tl.load(
                at[:, None] + places[None, :], mask=mine[:, None], other=_NOTHING
            )  # [WORDS, LENGTH]
            matches = (words == _NOTHING) | (words == recent[None, :]) | is_last[None, :]
            is_written = mine & (tl.min(matches.to(tl.int32), axis=1) != 0)
            # NaN stays NaN, as where the lowest logit is added.
            logits = tl.load(row_ptr + ids, mask=is_written, other=0.0).to(tl.float32)
            logits = tl.where(_is_allowed(bits_ptr, ids, is_written), logits, float("-inf"))
            if has_grammar:
                logits = tl.where(_fits(masks_ptr, ids, is_written, forced), logits, float("-inf"))
            tl.store(out_ptr + ids, logits + float("-inf"), mask=is_written)
    if early:
        tl.debug_barrier()  # and a stop token, whatever else is said of it
        places = tl.arange(0, BLOCK_STOPS)
        ids = tl.load(stop_ids_ptr + slot * NUM_STOPS + places, mask=places < NUM_STOPS, other=-1)
        lowest = tl.full([BLOCK_STOPS], float("-inf"), tl.float32)
        tl.store(out_ptr + ids, lowest, mask=(ids >= low) & (ids < high))


def edit_logits(
    logits: torch.Tensor,  # [B * num_samples, V], rows dense
    slots: torch.Tensor,  # [B] int64
    state: EditedSlots,
    out: torch.Tensor,  # [at least B * num_samples, V] float32
    *,
    num_samples: int = 1,
) -> None:
    """Write the rows that are edited to the front of `out`; the others keep what is there. Values
    are those of the torch sampler bit for bit: products are rounded before they are subtracted.
    num_samples: rows of each slot, one behind its newest token and one behind each of its drafts,
    which lie behind its tokens."""
    num_rows, vocab_size = logits.shape
    tables = state.edits
    assert logits.stride(1) == 1 and vocab_size == tables.vocab_size, logits.shape
    assert out.is_contiguous() and out.dtype == torch.float32 and len(out) >= num_rows
    assert out.shape[1] == state.token_counts.shape[1] == vocab_size, out.shape
    assert state.token_ids.is_contiguous() and state.stop_ids.is_contiguous()
    masks = state.masks.bits
    assert masks.is_contiguous() and 32 * masks.shape[1] >= vocab_size, masks.shape
    if not num_rows:
        return
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    most_parts = max(1, num_sms(logits.device) * _PROGRAMS_PER_SM // num_rows)
    num_blocks_each = triton.cdiv(num_blocks, most_parts)
    _edit_kernel[(num_rows, triton.cdiv(num_blocks, num_blocks_each))](
        logits,
        slots,
        out,
        state.edit_kinds,
        state.total_len,
        state.min_total,
        state.prompt_len,
        state.token_ids,
        state.token_counts,
        state.penalties.repetition_penalty,
        state.penalties.presence_penalty,
        state.penalties.frequency_penalty,
        state.stop_ids,
        tables.counts,
        tables.allowed_bits,
        tables.bias_ids,
        tables.biases,
        tables.bad_words,
        masks,
        state.masks.positions,
        state.masks.forced,
        logits.stride(0),
        num_blocks_each,
        VOCAB_SIZE=vocab_size,
        MAX_TOKENS=state.token_ids.shape[1],
        NUM_STOPS=state.stop_ids.shape[1],
        BLOCK_STOPS=next_power_of_2(state.stop_ids.shape[1]),
        NUM_BYTES=tables.allowed_bits.shape[1],
        NUM_WORDS=masks.shape[1],
        MAX_BIASES=tables.biases.shape[1],
        MAX_WORDS=tables.bad_words.shape[1],
        LENGTH=tables.bad_words.shape[2],
        MOST_FORCED=state.masks.forced.shape[1],
        SAMPLES=num_samples,
        BLOCK=_BLOCK,
        BIASES=_BIASES,
        WORDS=_WORDS,
        num_warps=8,
        enable_fp_fusion=False,
    )
