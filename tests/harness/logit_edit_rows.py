"""Rows with random logit edits, and the expected logits in plain Python."""

from __future__ import annotations

import math
import random

import numpy as np

from termgen.vocabulary.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from termgen.vocabulary.step import AddedRow

LENGTH = 40
"""Maximum tokens of a row."""


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


def random_row(rng: random.Random, slot: int, vocab: int) -> AddedRow:
    num_prompt, num_output = rng.randint(1, 8), rng.randint(0, 12)
    # few ids, so that bad words match
    tokens = [rng.randrange(4) for _ in range(num_prompt + num_output)]
    params: dict[str, object] = {}
    if rng.random() < 0.5:
        params["allowed_token_ids"] = rng.sample(range(vocab), rng.randint(1, vocab))
    if rng.random() < 0.5:
        ids = rng.sample(range(vocab), rng.randint(1, min(vocab, MAX_LOGIT_BIAS)))
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
