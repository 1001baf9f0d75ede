"""`keep_drawn` against as many steps of one token each, and against plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from termgen.engine.device.drafting.acceptance import Samples, keep_drawn
from termgen.engine.device.runner.request_state import RequestState
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import CORRUPT_TOKEN, AddedRow, SamplingNeeds, StepPlan

MAX_LEN, VOCAB, SLOTS = 40, 12, 6
STATE = ("token_ids", "total_len", "num_computed", "finished", "token_counts")
_NONE = np.zeros(0, np.int32)


def plan_of(slots: list[int], counts: list[int], drafts: list[int]) -> StepPlan:
    columns = [np.asarray(values, np.int32) for values in (slots, counts, drafts)]
    return StepPlan(
        step_id=0,
        slots=columns[0],
        epochs=np.zeros_like(columns[0]),
        num_tokens=columns[1],
        num_draft_tokens=columns[2],
        num_computed=np.zeros_like(columns[0]),
        num_decode_rows=len(slots),
        released_slots=(),
        added=(),
        block_slots=_NONE,
        block_positions=_NONE,
        block_ids=_NONE,
        sampling=SamplingNeeds(),
        num_drafts=sum(drafts),
    )


def state_of(rows: list[AddedRow]) -> RequestState:
    state = RequestState(
        max_num_seqs=SLOTS,
        max_model_len=MAX_LEN,
        max_blocks=8,
        vocab_size=VOCAB,
        num_eos_ids=2,
        device=torch.device("cpu"),
    )
    state.fused = False
    state._add(rows)
    return state


def random_row(rng: random.Random, slot: int) -> AddedRow:
    num_prompt = rng.randrange(1, MAX_LEN - 4)
    length = num_prompt + rng.randrange(0, MAX_LEN - num_prompt - 1)
    return AddedRow(
        slot=slot,
        epoch=0,
        token_ids=np.asarray([rng.randrange(VOCAB) for _ in range(length)], np.int32),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=length - 1 if rng.random() < 0.8 else rng.randrange(length),
        max_total_tokens=rng.randrange(length + 1, MAX_LEN + 1),
        stop_token_ids=tuple(sorted(rng.sample(range(VOCAB), rng.choice([0, 1, 3])))),
        params=SamplingParams(
            min_tokens=rng.choice([0, 0, 5]), presence_penalty=rng.choice([0.0, 0.5])
        ),
        seed=1,
    )


@pytest.mark.parametrize("is_even", [False, True])
def test_a_step_with_drafts_is_as_many_steps_of_one_token(is_even: bool) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    num_kept = num_ended = num_corrupt = 0
    for _ in range(200):
        rows = [random_row(rng, slot) for slot in rng.sample(range(SLOTS), rng.randrange(1, 5))]
        state, alone = state_of(rows), state_of(rows)
        slots = [row.slot for row in rows]
        counts, drafts, drawn, guesses = [], [], [], []
        for row in rows:
            missing = len(row.token_ids) - row.num_computed_tokens
            room = row.max_total_tokens - len(row.token_ids) - 1
            is_last = missing == 1
            drafts.append(rng.randint(0, min(5, room)) if is_last else 0)
            counts.append((missing if rng.random() < 0.5 or is_last else 1) + drafts[-1])
            guesses.append([rng.randrange(VOCAB) for _ in range(drafts[-1])])
            right = rng.randint(0, drafts[-1])
            draws = [*guesses[-1][:right]]
            draws += [rng.randrange(VOCAB) for _ in range(1 + drafts[-1] - right)]
            if rng.random() < 0.1:
                draws[rng.randrange(len(draws))] = CORRUPT_TOKEN
            drawn.append(draws)
        for row, guess in zip(rows, guesses, strict=True):
            length = len(row.token_ids)
            state.token_ids[row.slot, length : length + len(guess)] = torch.tensor(
                guess, dtype=torch.int32
            )
        plan = plan_of(slots, counts, drafts)
        where = torch.tensor(slots)
        num_tokens = torch.tensor(counts) - torch.tensor(drafts)
        samples = Samples.of_plan(plan, torch.device("cpu"))
        most = rng.randint(max(drafts), 6)
        if is_even:
            samples = Samples.even(torch.tensor(drafts), most)
            drawn = [
                [*draws, *(rng.randrange(VOCAB) for _ in range(1 + most - len(draws)))]
                for draws in drawn
            ]
        flat = torch.tensor([token for draws in drawn for token in draws])
        tokens = keep_drawn(state, where, num_tokens, flat, samples).tolist()

        for row, count, num, guess, draws in zip(rows, counts, drafts, guesses, drawn, strict=True):
            slot = torch.tensor([row.slot])
            taken: list[int] = []
            for place, token in enumerate(draws):
                step = torch.tensor([count - num if not place else 1])
                taken += alone.append_sampled(slot, step, torch.tensor([token])).tolist()
                if taken[-1] < 0 or place == num or guess[place] != token:
                    break
                if alone.finished[row.slot]:
                    break
            width = len(draws)
            mine, tokens = tokens[:width], tokens[width:]
            assert mine == taken + [-1] * (width - len(taken))
            num_kept += len(taken) > 1
            num_ended += bool(alone.finished[row.slot]) and len(taken) > 1
            num_corrupt += CORRUPT_TOKEN in taken
            # What lies behind a row's own tokens is anything.
            length = int(alone.total_len[row.slot])
            for name in STATE:
                one, two = getattr(state, name)[row.slot], getattr(alone, name)[row.slot]
                if name == "token_ids":
                    one, two = one[:length], two[:length]
                assert torch.equal(one, two), name
    assert min(num_kept, num_ended, num_corrupt) > 10


def test_samples_lie_side_by_side() -> None:
    samples = Samples.of_plan(plan_of([4, 1, 2], [1, 4, 3], [0, 3, 1]), torch.device("cpu"))
    assert samples.rows.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert samples.places.tolist() == [0, 0, 1, 2, 3, 0, 1]
    assert samples.drafts.tolist() == [0, 3, 1] and samples.most_drafts == 3
    even = Samples.even(torch.tensor([0, 2]), 2)
    assert even.rows.tolist() == [0, 0, 0, 1, 1, 1] and even.places.tolist() == [0, 1, 2] * 2


@pytest.mark.parametrize(
    ("there", "left"), [([0, 0], [0, 0]), ([9, 1], [3, 1]), ([1, 0], [1, 0]), ([3, 2], [3, 2])]
)
def test_a_plan_is_cut_to_the_drafts_that_there_are(there: list[int], left: list[int]) -> None:
    plan = plan_of([0, 3], [4, 3], [3, 2]).with_drafts(np.asarray(there))
    assert plan.num_draft_tokens.tolist() == left and plan.num_drafts == sum(left)
    assert plan.num_tokens.tolist() == [1 + left[0], 1 + left[1]]
    assert plan.total_tokens == plan.num_samples == 2 + sum(left)
