"""Allowed ids, bias and bad words on a batch of logits, against plain Python over the same rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from logit_edit_rows import LENGTH, added, edited_by_hand, random_row

from termgen.engine.device.sampling.logit_edits import LogitEditTables, edit_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, VOCAB = 6, 67


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_edited_as_by_hand(
    device: str, random_logits: Callable[..., torch.Tensor]
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    tables = LogitEditTables(ROWS, VOCAB, torch.device(device))
    token_ids = torch.full((ROWS, LENGTH), 1, dtype=torch.int32)  # leftovers
    for _ in range(12):
        rows = [random_row(rng, slot, VOCAB) for slot in range(ROWS)]  # over old ones
        for row in rows:
            tables.take_over(row)
            token_ids[row.slot, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        slots = rng.sample(range(ROWS), 4)
        edits = tables.gather(
            torch.tensor(slots, device=device),
            torch.tensor([len(rows[slot].token_ids) for slot in slots], device=device),
            torch.tensor([rows[slot].num_prompt_tokens for slot in slots], device=device),
            token_ids=token_ids.to(device),
        )
        logits = random_logits(4, VOCAB, seed=rng.randrange(2**31))
        before = logits.clone()
        got = edit_logits(logits.to(device), edits).cpu()
        wanted = [edited_by_hand(before[i].tolist(), rows[slot]) for i, slot in enumerate(slots)]
        assert torch.equal(got, torch.tensor(wanted)), "every number, to the last bit"
        assert torch.equal(logits, before), "log-probabilities are taken from what came in"


def test_a_row_without_edits_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = LogitEditTables(2, VOCAB, torch.device("cpu"))
    writes: list[int] = []
    monkeypatch.setattr(tables, "_set", lambda row: writes.append(row.slot))
    for row in (added(0, [1], 1), added(1, [1], 1, logit_bias={3: 1.0}), added(1, [1], 1)):
        tables.take_over(row)
    assert writes == [1, 1], "the second to make the row neutral again"
    tables.take_over(added(1, [1], 1))
    assert writes == [1, 1]
