"""-inf in place for tokens that a grammar does not allow, in the rows that have a grammar.

Called between the model and the sampling kernels, recorded in graphs among them: whether a row has
a grammar is device memory, and the programs of a row without one end at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from termgen.engine.device.kernels.launch import num_sms
from termgen.engine.device.sampling.token_mask import TokenMasks, mask_tokens

_BLOCK = 2048
_PROGRAMS_PER_SM = 4


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
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
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
        BLOCK=_BLOCK,
        num_warps=4,
    )


def mask_tokens_reference(
    logits: torch.Tensor, slots: torch.Tensor, *, has_grammar: torch.Tensor, bits: torch.Tensor
) -> torch.Tensor:
    """A new tensor."""
    return mask_tokens(logits, TokenMasks(slots, has_grammar, bits))
