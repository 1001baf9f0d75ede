"""Logit edits and grammar masks in kernels against plain Python and their torch references."""

from __future__ import annotations

import random

import pytest
import torch
from logit_edit_rows import LENGTH, added, edited_by_hand, random_row
from triton_device import DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.sampling.edit_logits import (  # noqa: E402
    edit_logits,
    edit_logits_reference,
    mask_tokens_,
    mask_tokens_reference,
)
from termgen.engine.device.sampling.logit_edits import LogitEditTables  # noqa: E402

devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
ROWS = 7
INF = float("inf")


@devices_and_dtypes
@pytest.mark.parametrize("vocab", [67, 5001])
def test_rows_are_edited_as_by_hand(device: str, dtype: torch.dtype, vocab: int) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    tables = LogitEditTables(ROWS, vocab, torch.device(device))
    token_ids = torch.full((ROWS, LENGTH), 1, dtype=torch.int32)  # what lay there before
    for _ in range(4):
        rows = [random_row(rng, slot, vocab) for slot in range(ROWS - 1)]
        rows.append(added(ROWS - 1, [1, 2], 1))  # one that asks for nothing
        for row in rows:
            tables.take_over(row)
            token_ids[row.slot, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        chosen = [*rng.sample(range(ROWS - 1), 4), ROWS - 1]
        slots = torch.tensor([0, *chosen], device=device)[1:]  # not aligned
        lengths = {
            "token_ids": token_ids.to(device),
            "total_len": torch.tensor([len(r.token_ids) for r in rows], device=device),
            "prompt_len": torch.tensor([r.num_prompt_tokens for r in rows], device=device),
        }
        wide = normal(5, vocab + 9, dtype=dtype, device=device, seed=rng.randrange(10**6), scale=9)
        logits = wide[:, :vocab]  # rows apart
        before = logits.clone()
        got = edit_logits(logits, slots, tables, **lengths)
        reference = edit_logits_reference(logits, slots, tables, **lengths)
        assert got.dtype == dtype and torch.equal(got, reference)
        by_hand = [
            edited_by_hand(before[i].float().tolist(), rows[slot]) for i, slot in enumerate(chosen)
        ]
        assert torch.equal(got.cpu(), torch.tensor(by_hand).to(dtype))
        assert torch.equal(logits, before), "log-probabilities are taken from what came in"
        assert torch.equal(got[-1], before[-1])


def mask_case(vocab_size: int, num_slots: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots that have a grammar [R], random bits [R, W])."""
    generator = torch.Generator().manual_seed(vocab_size)
    words = -(-vocab_size // 32)
    bits = torch.randint(-(2**31), 2**31, (num_slots, words), generator=generator)
    has_grammar = torch.rand(num_slots, generator=generator) < 0.5
    has_grammar[:2] = torch.tensor([True, False])
    return has_grammar.to(device), bits.to(device, torch.int32)


@devices_and_dtypes
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 31), (3, 2049), (9, 5001), (2, 49152)])
def test_rows_with_a_grammar_keep_only_what_their_mask_allows(
    device: str, dtype: torch.dtype, num_rows: int, vocab_size: int
) -> None:
    has_grammar, bits = mask_case(vocab_size, 12, device)
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


def test_no_rows_to_mask() -> None:
    has_grammar, bits = mask_case(40, 3, "cpu")
    slots = torch.zeros(0, dtype=torch.int64)
    mask_tokens_(torch.zeros(0, 40), slots, has_grammar=has_grammar, bits=bits)
