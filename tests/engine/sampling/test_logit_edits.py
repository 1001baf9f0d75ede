"""Allowed ids, bias and bad words on a batch of logits, against plain Python over the same rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from termgen.engine.runner.logit_edit_tables import LogitEditTables
from termgen.engine.sampling.logit_edits import edit_logits
from termgen.engine.sampling_params import SamplingParams
from termgen.engine.step import AddedRow

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, VOCAB, LENGTH = 6, 67, 40


def added(slot: int, tokens: list[int], num_prompt: int, **params: object) -> AddedRow:
    words = params.pop("bad_token_ids", ())
    return AddedRow(
        slot=slot,
        epoch=0,
        token_ids=np.asarray(tokens, np.int32),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        max_total_tokens=LENGTH,
        stop_token_ids=(),
        params=SamplingParams(**params, bad_words=("x",) if words else ()),  # type: ignore[arg-type]
        seed=0,
        bad_token_ids=words,  # type: ignore[arg-type]
    )


def random_row(rng: random.Random, slot: int) -> AddedRow:
    num_prompt, num_output = rng.randint(1, 8), rng.randint(0, 12)
    tokens = [rng.randrange(4) for _ in range(num_prompt + num_output)]  # few ids: words match
    params: dict[str, object] = {}
    if rng.random() < 0.5:
        params["allowed_token_ids"] = rng.sample(range(VOCAB), rng.randint(1, VOCAB))
    if rng.random() < 0.5:
        ids = rng.sample(range(VOCAB), rng.randint(1, VOCAB))
        params["logit_bias"] = {i: rng.uniform(-150, 150) for i in ids}
    if rng.random() < 0.7:
        lengths = [rng.choice((1, 2, 3, 32)) for _ in range(rng.randint(1, 128))]
        params["bad_token_ids"] = tuple(tuple(rng.randrange(4) for _ in range(n)) for n in lengths)
    return added(slot, tokens, num_prompt, **params)


def edited_by_hand(logits: list[float], row: AddedRow) -> list[float]:
    allowed = row.params.allowed_token_ids
    result = [x if allowed is None or i in allowed else -math.inf for i, x in enumerate(logits)]
    for token_id, bias in row.params.bias_pairs:
        result[token_id] = float(np.float32(result[token_id]) + np.float32(bias))
    output = row.token_ids[row.num_prompt_tokens :].tolist()
    for *before, last in row.bad_token_ids:
        if not before or output[-len(before) :] == before:
            result[last] = -math.inf
    return result


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_edited_as_by_hand(
    device: str, random_logits: Callable[..., torch.Tensor]
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    tables = LogitEditTables(ROWS, VOCAB, torch.device(device))
    token_ids = torch.full((ROWS, LENGTH), 1, dtype=torch.int32)  # what lay there before
    for _ in range(12):
        rows = [random_row(rng, slot) for slot in range(ROWS)]  # over those of the round before
        for row in rows:
            tables.take_over(row)
            token_ids[row.slot, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        slots = rng.sample(range(ROWS), 4)
        edits = tables.gather(
            torch.tensor(slots, device=device),
            token_ids=token_ids.to(device),
            total_len=torch.tensor([len(r.token_ids) for r in rows], device=device),
            prompt_len=torch.tensor([r.num_prompt_tokens for r in rows], device=device),
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
