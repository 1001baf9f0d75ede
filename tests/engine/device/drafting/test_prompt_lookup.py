"""Lookups on the device find what the host's search does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from triton_device import DEVICES, require_triton

require_triton()

from termgen.engine.device.drafting.base import TargetStates  # noqa: E402
from termgen.engine.device.drafting.ngram import NgramDrafter  # noqa: E402
from termgen.engine.device.drafting.prompt_lookup import (  # noqa: E402
    PromptLookup,
    look_up_with_torch,
)
from termgen.engine.device.kernels.drafting import prompt_lookup as kernel  # noqa: E402
from termgen.engine.device.runner.request_state import RequestState  # noqa: E402
from termgen.engine.device.sampling.metadata import HAS_GRAMMAR  # noqa: E402

ROWS = 9


@dataclass
class Batch:
    """What the lookup reads of a step's inputs."""

    slots: torch.Tensor
    num_tokens: Any = None
    positions: Any = None
    metadata: Any = None


def make_state(rng: random.Random, max_len: int, device: str) -> RequestState:
    state = RequestState(
        max_num_seqs=ROWS,
        max_model_len=max_len,
        max_blocks=4,
        vocab_size=50,
        num_eos_ids=1,
        device=torch.device(device),
    )
    for slot in range(ROWS):
        vocab = rng.choice([2, 3, 20, 10000]) if slot % 2 else 2
        ids = np.asarray([rng.randrange(vocab) for _ in range(max_len)], np.int32)
        state.token_ids[slot] = torch.from_numpy(ids)
        total = rng.choice([1, 2, 3, max_len, max_len - 2, rng.randint(1, max_len)])
        state.total_len[slot] = total
        state.finished[slot] = rng.random() < 0.1
        state.edit_kinds[slot] = HAS_GRAMMAR if rng.random() < 0.1 else 1
        state.num_drafts[slot] = 99
    return state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(("max_len", "rounds"), [(7, 40), (40, 12), (5000, 3)])
def test_drafts_are_those_of_the_host(
    device: str, by_kernel: bool, max_len: int, rounds: int
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    num_found = 0
    for _ in range(rounds):
        most, shortest = rng.randint(1, 9), rng.randint(1, 4)
        sizes = {"shortest": shortest, "longest": shortest + rng.randint(0, 5)}
        state = make_state(rng, max_len, device)
        before = state.token_ids.clone()
        slots = torch.tensor(
            [*rng.sample(range(ROWS), 6), state.pad_row, state.pad_row], device=device
        )
        if by_kernel:
            lookup = PromptLookup(
                max_rows=8,
                max_model_len=max_len,
                device=torch.device(device),
                by_kernels=True,
                **sizes,
            )
            lookup.draft(Batch(slots), TargetStates(slots), [], state, most)
            assert lookup._workspace is not None and not lookup._workspace.arrivals.any()
        else:
            look_up_with_torch(slots, state, num_drafts=most, **sizes)
        host = NgramDrafter(most, num_slots=ROWS, **sizes)
        expected = before.clone()
        for slot in slots[:6].tolist():
            total, number = int(state.total_len[slot]), 0
            if not state.finished[slot] and state.edit_kinds[slot] == 1:
                tokens, _ = host.guess(before[slot, :total].cpu().numpy())
                tokens = tokens[: max_len - total]
                number = len(tokens)
                expected[slot, total : total + number] = torch.from_numpy(tokens.copy())
            assert int(state.num_drafts[slot]) == number
            num_found += number
        assert torch.equal(state.token_ids, expected)
        assert int(state.num_drafts[state.pad_row]) == 0
        others = [slot for slot in range(ROWS) if slot not in slots.tolist()]
        assert (state.num_drafts[others] == 99).all()
    assert num_found


def test_long_contexts_are_divided() -> None:
    device = torch.device("cpu")
    sizes = {
        length: kernel.LookupWorkspace(max_rows=1, max_model_len=length, device=device).num_parts
        for length in (100, 4096, 4097, 10**6)
    }
    assert sizes == {100: 1, 4096: 1, 4097: 2, 10**6: 32}
