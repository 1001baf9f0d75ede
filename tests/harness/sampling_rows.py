"""Rows of request state that ask for random mixes of everything that sampling can do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from termgen.engine.device.runner.dispatch import EVERYTHING
from termgen.engine.device.runner.request_state import RequestState
from termgen.vocabulary.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from termgen.vocabulary.step import AddedRow, StepPlan

LENGTH = 60
NEEDS = EVERYTHING
"""What the steps of these rows need."""


def make_state(num_slots: int, vocab_size: int, device: str) -> RequestState:
    return RequestState(
        max_num_seqs=num_slots,
        max_model_len=LENGTH,
        max_blocks=LENGTH,
        vocab_size=vocab_size,
        num_eos_ids=3,
        device=torch.device(device),
    )


def random_params(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Each feature in about a third of the rows; nothing at all in some."""
    if rng.random() < 0.15:
        return {"temperature": rng.choice([0.0, 0.8])}
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": rng.choice([0.5, 1.1, 2.0, 10.0, 1e-3])},
        {"presence_penalty": rng.uniform(-2, 2)},
        {"frequency_penalty": rng.uniform(-2, 2)},
        {"min_tokens": rng.choice([1, 15])},
        {"logit_bias": _biases(rng, vocab)},
        {"allowed_token_ids": rng.sample(range(vocab), rng.randint(1, vocab))},
        {"logprobs": rng.choice([0, 1, 5, 20])},
        {"top_k": rng.randint(1, vocab)},
        {"top_p": rng.uniform(0.1, 1.0)},
        {"min_p": rng.uniform(0.0, 0.5)},
    ]
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.3, 1.0, 1.7])}
    for kind in kinds:
        if rng.random() < 0.35:
            params |= kind
    return params


def _biases(rng: random.Random, vocab: int) -> dict[int, float]:
    most = min(vocab, rng.choice([8, MAX_LOGIT_BIAS]))
    return {i: rng.uniform(-120, 120) for i in rng.sample(range(vocab), rng.randint(1, most))}


def random_row(rng: random.Random, slot: int, vocab: int, **fixed: Any) -> AddedRow:
    """A row in mid-request, of few different tokens, so that they repeat and bad words match."""
    num_prompt, num_output = rng.randint(1, 9), rng.randint(0, 40)
    few = [rng.randrange(vocab) for _ in range(5)]
    tokens = [rng.choice(few) for _ in range(num_prompt + num_output)]
    words: tuple[tuple[int, ...], ...] = ()
    if not fixed and rng.random() < 0.3:
        lengths = [rng.choice((1, 2, 3, 32)) for _ in range(rng.randint(1, 128))]
        words = tuple(tuple(rng.choice(few) for _ in range(n)) for n in lengths)
    params = fixed or random_params(rng, vocab)
    num_stops = rng.choice([0, 1, 9])
    return AddedRow(
        slot=slot,
        epoch=0,
        token_ids=np.asarray(tokens, np.int32),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=len(tokens) - 1,
        max_total_tokens=LENGTH,
        stop_token_ids=tuple(sorted({rng.randrange(vocab) for _ in range(num_stops)})),
        params=SamplingParams(**params, bad_words=("x",) if words else ()),
        has_grammar=not fixed and rng.random() < 0.3,
        seed=rng.randint(-(2**63), 2**63 - 1),
        bad_token_ids=words,
    )


def plan_of(rows: list[AddedRow], *, released: tuple[int, ...] = ()) -> StepPlan:
    """A plan that only changes rows."""
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step_id=0,
        slots=nothing,
        epochs=nothing,
        num_tokens=nothing,
        num_draft_tokens=nothing,
        num_computed=nothing,
        num_decode_rows=0,
        released_slots=released,
        added=tuple(rows),
        block_slots=nothing,
        block_positions=nothing,
        block_ids=nothing,
        sampling=NEEDS,
    )


def fill(rng: random.Random, state: RequestState, vocab: int) -> list[AddedRow]:
    """A request in every slot but the last two, one after another as they come and go."""
    rows = [random_row(rng, slot, vocab) for slot in range(state.pad_row - 2)]
    state.update(plan_of(rows))
    for row in rows:
        if row.has_grammar:
            forced = [rng.randrange(vocab) for _ in range(rng.choice([0, 0, 1, 3, 7]))]
            post_mask(state, row, rng.sample(range(vocab), rng.randint(1, vocab)), forced)
    return rows


def post_mask(
    state: RequestState, row: AddedRow, allowed: list[int], forced: Sequence[int] = ()
) -> None:
    """Post a mask for a row's next token, or for the one behind these that are forced."""
    flags = np.zeros(32 * state.masks.bits.shape[1], np.uint8)
    flags[allowed] = 1
    bits = np.packbits(flags, bitorder="little").view(np.int32)
    slots, positions = ([number] for number in (row.slot, len(row.token_ids)))
    state.masks.post(np.asarray(slots), np.asarray(positions), bits[None], [forced])


def batch_of(
    rng: random.Random, state: RequestState, num_rows: int, num_padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """slots and num_tokens of a decode step, its padded rows last. Not aligned."""
    slots = [0, *rng.sample(range(state.pad_row - 2), num_rows), *[state.pad_row] * num_padded]
    counts = [1] * num_rows + [0] * num_padded
    return (
        torch.tensor(slots, device=state.device)[1:],
        torch.tensor(counts, device=state.device),
    )
