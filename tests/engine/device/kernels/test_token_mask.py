"""The mask kernel against torch, and both against the bits themselves."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.token_mask import mask_tokens_, mask_tokens_reference  # noqa: E402

INF = float("inf")


def case(vocab_size: int, num_slots: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots with a grammar [R], and random bits [R, W]."""
    generator = torch.Generator().manual_seed(vocab_size)
    words = -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31, (num_slots, words), generator=generator)
    has_grammar = torch.rand(num_slots, generator=generator) < 0.5
    has_grammar[:2] = torch.tensor([True, False])
    return has_grammar.to(device), bits.to(device, torch.int32)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 31), (3, 2049), (9, 5001), (2, 49152)])
def test_rows_with_a_grammar_keep_only_what_their_mask_allows(
    device: str, dtype: torch.dtype, num_rows: int, vocab_size: int
) -> None:
    has_grammar, bits = case(vocab_size, 12, device)
    slots = torch.tensor([0, 5, 1, 7, 11, 2, 9, 3, 4][:num_rows], device=device)
    wide = normal(num_rows, vocab_size + 24, dtype=dtype, device=device, seed=3)
    logits = wide[:, :vocab_size]
    before, beyond = logits.clone(), wide[:, vocab_size:].clone()
    expected = mask_tokens_reference(logits, slots, has_grammar=has_grammar, bits=bits)
    assert torch.equal(logits, before), "the reference only reads"
    mask_tokens_(logits, slots, has_grammar=has_grammar, bits=bits)
    assert torch.equal(logits, expected)
    assert torch.equal(wide[:, vocab_size:], beyond)
    for row, slot in enumerate(slots.tolist()):
        mask = bits[slot].tolist()
        for token in {*range(min(40, vocab_size)), vocab_size - 1}:
            allowed = not has_grammar[slot] or (mask[token // 32] >> token % 32) & 1
            value = before[row, token] if allowed else torch.tensor(-INF)
            assert logits[row, token].item() == value.item(), (slot, token)


def test_no_rows() -> None:
    has_grammar, bits = case(40, 3, "cpu")
    slots = torch.zeros(0, dtype=torch.int64)
    mask_tokens_(torch.zeros(0, 40), slots, has_grammar=has_grammar, bits=bits)
