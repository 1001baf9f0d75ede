"""Logit edits in two kernels against plain Python and against their torch reference."""

from __future__ import annotations

import random

import pytest
import torch
from logit_edit_rows import LENGTH, added, edited_by_hand, random_row
from triton_device import DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.kernels.edit_logits import edit_logits, edit_logits_reference  # noqa: E402
from termgen.engine.device.sampling.logit_edits import LogitEditTables  # noqa: E402

devices_and_dtypes = pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
ROWS = 7


@devices_and_dtypes
@pytest.mark.parametrize("vocab", [67, 5001])
def test_rows_are_edited_as_by_hand(device: str, dtype: torch.dtype, vocab: int) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    tables = LogitEditTables(ROWS, vocab, torch.device(device))
    token_ids = torch.full((ROWS, LENGTH), 1, dtype=torch.int32)  # leftovers
    for _ in range(4):
        rows = [random_row(rng, slot, vocab) for slot in range(ROWS - 1)]
        rows.append(added(ROWS - 1, [1, 2], 1))  # one without edits
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
