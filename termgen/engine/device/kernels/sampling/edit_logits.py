"""Changes to the logits before sampling, by a request or its grammar.

`edit_logits`: allowed ids, a bias and bad words in two kernels that read the tables of the rows'
slots. The first copies the logits and hides what a row may not draw. The second has one program per
row, which a row without bias and bad words leaves at once; it adds the biases, and then forbids the
last token of every sequence whose other tokens have just been generated.

`mask_tokens_`: -inf in place for tokens that a grammar does not allow, in the rows that have a
grammar. Recorded in graphs between the model and the sampling kernels: whether a row has a grammar
is device memory, and the programs of a row without one end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import num_sms
from termgen.engine.device.sampling.logit_edits import NOTHING
from termgen.engine.device.sampling.logit_edits import edit_logits as edit_gathered
from termgen.engine.device.sampling.metadata import TokenMasks, mask_tokens

if TYPE_CHECKING:
    from termgen.engine.device.sampling.logit_edits import LogitEditTables

_BLOCK = 4096
_BIASES = 256
_WORDS = 16
_NOTHING = tl.constexpr(NOTHING)
_MASK_BLOCK = 2048
_PROGRAMS_PER_SM = 4


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _allow_kernel(
    logits_ptr,
    slots_ptr,
    allowed_bits_ptr,
    out_ptr,
    logits_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB_SIZE
    logits = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=0.0)
    bits = tl.load(allowed_bits_ptr + slot * NUM_BYTES + ids // 8, mask=inside, other=0)
    allowed = ((bits.to(tl.int32) >> (ids % 8)) & 1) != 0
    out = tl.where(allowed, logits.to(tl.float32), float("-inf"))
    tl.store(out_ptr + row * VOCAB_SIZE + ids, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _change_kernel(
    out_ptr,
    slots_ptr,
    counts_ptr,
    bias_ids_ptr,
    biases_ptr,
    bad_words_ptr,
    token_ids_ptr,
    total_len_ptr,
    prompt_len_ptr,
    VOCAB_SIZE: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    BIASES: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    num_biases = tl.load(counts_ptr + slot * 2)
    num_words = tl.load(counts_ptr + slot * 2 + 1)
    logits_ptr = out_ptr + row * VOCAB_SIZE
    for first in range(0, num_biases, BIASES):
        entry = first + tl.arange(0, BIASES)
        is_one = entry < num_biases
        ids = tl.load(bias_ids_ptr + slot * MAX_BIASES + entry, mask=is_one, other=0)
        biases = tl.load(biases_ptr + slot * MAX_BIASES + entry, mask=is_one, other=0.0)
        logits = tl.load(logits_ptr + ids, mask=is_one, other=0.0).to(tl.float32)
        tl.store(logits_ptr + ids, (logits + biases).to(out_ptr.dtype.element_ty), mask=is_one)
    if num_words > 0:
        tl.debug_barrier()  # a forbidden token stays so whatever its bias
        places = tl.arange(0, LENGTH)
        is_last = places == LENGTH - 1
        positions = tl.load(total_len_ptr + slot) - (LENGTH - 1) + places
        generated = (positions >= tl.load(prompt_len_ptr + slot)) & (is_last == 0)
        tokens_ptr = token_ids_ptr + slot * MAX_TOKENS + positions
        recent = tl.load(tokens_ptr, mask=generated, other=_NOTHING)
        for first in range(0, num_words, WORDS):
            word = first + tl.arange(0, WORDS)
            is_word = word < num_words
            at = bad_words_ptr + (slot * MAX_WORDS + word) * LENGTH
            words = tl.load(
                at[:, None] + places[None, :], mask=is_word[:, None], other=_NOTHING
            )  # [WORDS, LENGTH]
            matches = (words == _NOTHING) | (words == recent[None, :]) | is_last[None, :]
            is_written = tl.min(matches.to(tl.int32), axis=1) != 0
            last = tl.load(at + LENGTH - 1, mask=is_word, other=0)
            lowest = tl.full([WORDS], float("-inf"), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(logits_ptr + last, lowest, mask=is_written & is_word)


def edit_logits(
    logits: torch.Tensor,  # [B, V], rows dense
    slots: torch.Tensor,  # [B] int64
    tables: LogitEditTables,
    *,
    token_ids: torch.Tensor,  # [R, max_model_len] int32
    total_len: torch.Tensor,  # [R] int64
    prompt_len: torch.Tensor,  # [R] int64
) -> torch.Tensor:  # [B, V], of the same type
    """A new tensor. Sums are made in float32 and rounded to the logits' type."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and vocab_size == tables.vocab_size, logits.shape
    assert token_ids.is_contiguous()
    out = torch.empty((num_rows, vocab_size), dtype=logits.dtype, device=logits.device)
    if not num_rows:
        return out
    _allow_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        slots,
        tables.allowed_bits,
        out,
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        NUM_BYTES=tables.allowed_bits.shape[1],
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _change_kernel[(num_rows,)](
        out,
        slots,
        tables.counts,
        tables.bias_ids,
        tables.biases,
        tables.bad_words,
        token_ids,
        total_len,
        prompt_len,
        VOCAB_SIZE=vocab_size,
        MAX_TOKENS=token_ids.shape[1],
        MAX_BIASES=tables.biases.shape[1],
        MAX_WORDS=tables.bad_words.shape[1],
        LENGTH=tables.bad_words.shape[2],
        BIASES=_BIASES,
        WORDS=_WORDS,
        num_warps=4,
    )
    return out


def edit_logits_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: LogitEditTables,
    *,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
) -> torch.Tensor:
    edits = tables.gather(slots, token_ids=token_ids, total_len=total_len, prompt_len=prompt_len)
    return edit_gathered(logits.float(), edits).to(logits.dtype)


@triton.jit(do_not_specialize=["num_blocks_each"], do_not_specialize_on_alignment=["slots_ptr"])
def _mask_kernel(
    logits_ptr,
    slots_ptr,
    has_grammar_ptr,
    bits_ptr,
    logits_stride,
    bits_stride,
    num_blocks_each,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if tl.load(has_grammar_ptr + slot):
        first = tl.program_id(1) * num_blocks_each
        last = tl.minimum(first + num_blocks_each, tl.cdiv(VOCAB_SIZE, BLOCK))
        for block in range(first, last):
            word_ids = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
            # Each word once: they may lie in the host's memory.
            has_word = word_ids < tl.cdiv(VOCAB_SIZE, 32)
            words = tl.load(bits_ptr + slot * bits_stride + word_ids, mask=has_word, other=-1)
            places = tl.arange(0, 32)[None, :]
            is_allowed = ((words[:, None] >> places) & 1) != 0
            ids = word_ids[:, None] * 32 + places
            nothing = tl.full([BLOCK // 32, 32], float("-inf"), logits_ptr.dtype.element_ty)
            forbidden = (ids < VOCAB_SIZE) & ~is_allowed
            tl.store(logits_ptr + row * logits_stride + ids, nothing, mask=forbidden)


def mask_tokens_(
    logits: torch.Tensor,  # [B, V], rows dense; changed in place
    slots: torch.Tensor,  # [B] int64
    *,
    has_grammar: torch.Tensor,  # [R] bool
    bits: torch.Tensor,  # [R, W] int32, on the device or in pinned memory of the host
) -> None:
    """The masks are those of a row's slot."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and bits.stride(1) == 1, (logits.stride(), bits.stride())
    assert 32 * bits.shape[1] >= vocab_size, (bits.shape, vocab_size)
    if not num_rows:
        return
    num_blocks = triton.cdiv(vocab_size, _MASK_BLOCK)
    most_parts = max(1, num_sms(logits.device) * _PROGRAMS_PER_SM // num_rows)
    num_blocks_each = triton.cdiv(num_blocks, most_parts)
    _mask_kernel[(num_rows, triton.cdiv(num_blocks, num_blocks_each))](
        logits,
        slots,
        has_grammar,
        bits,
        logits.stride(0),
        bits.stride(0),
        num_blocks_each,
        VOCAB_SIZE=vocab_size,
        BLOCK=_MASK_BLOCK,
        num_warps=4,
    )


def mask_tokens_reference(
    logits: torch.Tensor, slots: torch.Tensor, *, has_grammar: torch.Tensor, bits: torch.Tensor
) -> torch.Tensor:
    """A new tensor."""
    return mask_tokens(logits, TokenMasks(slots, has_grammar, bits))
