"""Steps with drafts: the state takes up those that stay, as if each had come in a step of its own.

By the reference, in torch, and by Triton kernels, which are interpreted on a CPU.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from delta_case import DeltaCase, Inputs, join, make_metadata, relative_error, take
from test_gated_delta import NETS, OUT_ERROR, STATE_ERROR, THRICE, TILED, make_net
from triton_device import DEVICES

from termgen.engine.device.attention.base import AttentionMetadata
from termgen.engine.device.kernels.recurrent.layout import GatedDeltaShape
from termgen.engine.device.recurrent.base import GatedDeltaNet, GatedDeltaState, RecurrentMetadata
from termgen.engine.device.recurrent.replay import take_up

F32 = torch.float32
SLOTS = (1, 2, 3, 4, 6)
"""Slot 5 is for copies, slot 0 for padding."""
COPY = 5
with_reference = pytest.mark.parametrize(
    ("kind", "device", "dtype"), [pytest.param("reference", "cpu", F32, id="reference"), *NETS]
)


class Step(NamedTuple):
    """What a row does in a step."""

    slot: int
    own: int
    drafts: int
    kept: int
    """Drafts that stay."""


class Replayed:
    """Sequences of tokens that steps compute with drafts, and that are computed without in
    `wanted`. Right drafts are the sequence's next tokens; wrong ones are others."""

    def __init__(self, kind: str, case: DeltaCase, *, num_drafts: int, length: int) -> None:
        self.case, self.num_drafts = case, num_drafts
        self.net: GatedDeltaNet | None = None if kind == "reference" else make_net(kind, case)
        self.state, self.plain = case.state(num_drafts), case.state()
        self.inputs = {slot: case.inputs(length) for slot in SLOTS}
        self.wrong = case.inputs(num_drafts)
        self.position = dict.fromkeys(SLOTS, 0)
        self.taken_up = dict.fromkeys(SLOTS, 0)

    def step(self, steps: list[Step], *, num_decodes: int | None = None, padding: int = 0) -> None:
        """Compare outputs of all tokens that stay."""
        case, rows, parts = self.case, [], list[Inputs]()
        for slot, own, drafts, kept in steps:
            start = self.position[slot]
            rows.append((slot, start, own + drafts))
            parts.append(take(self.inputs[slot], slice(start, start + own + kept)))
            parts.append(take(self.wrong, slice(0, drafts - kept)))
        metadata = make_metadata(rows, case.device, num_decodes=num_decodes, padding=padding)
        if padding:
            parts.append(take(self.wrong, slice(0, padding)))
        pending = [self.position[one.slot] - self.taken_up[one.slot] for one in steps]
        zeros = [0] * padding

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor([*values, *zeros], dtype=torch.int32, device=case.device)

        metadata.num_pending = column(pending)
        metadata.num_drafts = column([one.drafts for one in steps])
        inputs = join(parts)
        if self.net is None:
            out = case.reference(inputs, self.state, metadata)
        else:
            out = case.run(self.net, inputs, self.state, metadata)
        first = 0
        for slot, own, drafts, kept in steps:
            self.taken_up[slot] = self.position[slot] + own
            wanted = self.wanted(slot, own + kept)
            got = out[first : first + own + kept]
            # Prompts of few tokens, whose products have operands of 16 bits, come to 1.1e-3 alone.
            most = OUT_ERROR[case.dtype] * (2 if own > 1 else 1)
            assert relative_error(got, wanted) < most, (slot, own, drafts, kept)
            first += own + drafts

    def wanted(self, slot: int, count: int) -> torch.Tensor:
        """The outputs of a row's next tokens, which advances it."""
        start = self.position[slot]
        self.position[slot] = start + count
        part = take(self.inputs[slot], slice(start, start + count))
        metadata = make_metadata([(slot, start, count)], self.case.device)
        return self.case.reference(part, self.plain, metadata)

    def check_states(self, slots: tuple[int, ...] = SLOTS) -> None:
        """Have the rows take up what is pending; then their states are those without drafts."""
        self.step([Step(slot, 1, 0, 0) for slot in slots], num_decodes=len(slots))
        for slot in slots:
            error = relative_error(self.state.delta[slot], self.plain.delta[slot])
            assert error < STATE_ERROR[self.case.dtype], slot


def random_steps(rng: random.Random, replayed: Replayed) -> list[Step]:
    """Some rows, those that read a prompt last; a row that begins reads one."""
    steps = []
    for slot in rng.sample(SLOTS, rng.randint(1, len(SLOTS))):
        drafts = rng.randint(0, replayed.num_drafts)
        if replayed.position[slot] == 0 or rng.random() < 0.1:
            steps.append(Step(slot, rng.choice([1, 2, 3, 5, 12]), 0, 0))
        else:
            steps.append(Step(slot, 1, drafts, rng.randint(0, drafts)))
    return sorted(steps, key=lambda one: one.own + one.drafts > 1)


@with_reference
@pytest.mark.parametrize(
    ("num_drafts", "shape"), [(1, THRICE), (3, TILED), (7, THRICE)], ids=["1", "3-tiled", "7"]
)
def test_random_drafts_leave_the_states_of_steps_without(
    kind: str, device: str, dtype: torch.dtype, num_drafts: int, shape: GatedDeltaShape
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    case = DeltaCase(shape, dtype=dtype, device=device, seed=seed)
    replayed = Replayed(kind, case, num_drafts=num_drafts, length=400)
    num_steps = num_kept = 0
    while num_steps < 14 or num_kept < 6:
        steps = random_steps(rng, replayed)
        num_singles = sum(one.own + one.drafts == 1 for one in steps)
        is_recorded = rng.random() < 0.5
        padding = rng.randint(1, min(2, num_drafts)) if is_recorded else 0
        replayed.step(steps, num_decodes=None if is_recorded else num_singles, padding=padding)
        num_steps += 1
        num_kept += sum(one.kept for one in steps)
    replayed.check_states()


@with_reference
def test_drafts_that_all_stay_or_none(kind: str, device: str, dtype: torch.dtype) -> None:
    """Twice round the ring, then a step without drafts, then one with."""
    case = DeltaCase(dtype=dtype, device=device)
    replayed = Replayed(kind, case, num_drafts=4, length=200)
    replayed.step([Step(1, 2, 0, 0), Step(2, 3, 0, 0)], num_decodes=0)
    for turn in range(8):
        replayed.step([Step(1, 1, 4, 4), Step(2, 1, 4, 4 * (turn == 5))], num_decodes=0)
    replayed.step([Step(2, 1, 0, 0), Step(1, 1, 0, 0)], num_decodes=2)
    replayed.step([Step(1, 1, 0, 0), Step(2, 1, 2, 1)], num_decodes=1)
    replayed.check_states((1, 2))


@with_reference
@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_a_copy_goes_on_from_any_pending_token(
    kind: str, device: str, dtype: torch.dtype, at: int
) -> None:
    """With the rest of a prompt, or a token with drafts. The row itself goes on as it would."""
    for own, drafts in ((70, 0), (1, 3)):
        case = DeltaCase(dtype=dtype, device=device)
        replayed = Replayed(kind, case, num_drafts=4, length=200)
        replayed.step([Step(1, 6, 0, 0)], num_decodes=0)
        replayed.step([Step(1, 1, 4, 4)], num_decodes=0)
        for tensor in replayed.state.tensors():
            tensor[COPY] = tensor[1]
        replayed.step([Step(1, 1, 2, 2)], num_decodes=0)
        replayed.inputs[COPY] = replayed.inputs[1]
        replayed.position[COPY] = 0
        replayed.wanted(COPY, 6 + at)
        replayed.taken_up[COPY] = 7
        replayed.step([Step(COPY, own, drafts, drafts)], num_decodes=0)
        replayed.check_states((1, COPY))


@with_reference
def test_a_slot_used_again_has_nothing_pending(kind: str, device: str, dtype: torch.dtype) -> None:
    case = DeltaCase(dtype=dtype, device=device)
    replayed = Replayed(kind, case, num_drafts=3, length=100)
    replayed.step([Step(1, 3, 0, 0)], num_decodes=0)
    replayed.step([Step(1, 1, 3, 3)], num_decodes=0)
    for tensor in replayed.state.tensors():
        tensor[1] = float("nan")  # what a sequence before left must reach no result
    replayed.position[1] = replayed.taken_up[1] = 0
    replayed.step([Step(1, 2, 0, 0)], num_decodes=0)
    replayed.step([Step(1, 1, 3, 2)], num_decodes=0)
    replayed.check_states((1,))


class Rows:
    """The columns of the request state that `take_up` reads."""

    def __init__(self, num_rows: int, num_slots: int, device: str) -> None:
        self.total_len = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_taken_up = torch.zeros(num_slots, dtype=torch.int64, device=device)


def take_up_of(slots: list[int], counts: list[int], state: Rows, device: str) -> RecurrentMetadata:
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    of_step = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=starts[1:],
        block_table=starts[None],
        slot_mapping=starts.long(),
        num_rows=len(slots),
        num_tokens=sum(counts),
        num_decodes=None,
        max_query_len=max(counts),
        max_seq_len=99,
        block_size=16,
    )
    rows = torch.tensor([slots, counts], device=device)
    return take_up(rows[0], rows[1], state, of_step)


@pytest.mark.parametrize("device", DEVICES)
def test_counts_of_pending_tokens_and_drafts(device: str) -> None:
    state = Rows(4, 6, device)

    def take(slots: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
        found = take_up_of(slots, counts, state, device)
        assert found.num_pending is not None and found.num_drafts is not None
        return found.num_pending.tolist(), found.num_drafts.tolist()

    state.total_len[:] = torch.tensor([9, 5, 5, 0])
    state.num_computed[:] = torch.tensor([0, 4, 0, 0])
    state.num_taken_up[:4] = torch.tensor([0, 4, 0, 0])
    # A part of a prompt, a row with drafts, a whole prompt, and padding.
    assert take([0, 1, 2, 3, 3], [6, 4, 5, 0, 0]) == ([0] * 5, [0, 3, 0, 0, 0])
    assert state.num_taken_up.tolist() == [6, 5, 5, 0, 0, 0]
    state.num_computed[:] = torch.tensor([6, 7, 5, 0])  # two drafts stayed
    state.total_len[:] = torch.tensor([9, 8, 5, 0])  # the last is finished
    assert take([1, 2, 0], [1, 3, 3]) == ([2, 0, 0], [0, 2, 0])
    assert state.num_taken_up.tolist() == [9, 8, 6, 0, 0, 0]


def test_without_drafts_there_are_no_counts() -> None:
    state = Rows(2, 0, "cpu")
    state.num_computed[1] = 7
    found = take_up_of([1, 0], [1, 1], state, "cpu")
    assert found.num_pending is None and found.num_drafts is None
    assert found.positions.tolist() == [7, 0] and found.has_state.tolist() == [True, False]


def test_a_state_without_drafts_has_no_more_than_before() -> None:
    state: GatedDeltaState = DeltaCase().state()
    assert state.gates is None and state.conv.shape[1] == 4 and len(state.tensors()) == 2


def test_rows_of_an_even_step_take_up_their_newest_token() -> None:
    """What stands behind it counts as drafts, also where a row has fewer; padding has nothing."""
    state = Rows(3, 4, "cpu")
    state.num_computed += torch.tensor([6, 8, 0])
    state.num_taken_up += torch.tensor([4, 8, 0, 77])
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 4, 8, 12], dtype=torch.int32),
        seq_lens=torch.tensor([10, 10, 0]),
        block_table=torch.zeros(3, 1),
        slot_mapping=torch.zeros(12),
        num_rows=3,
        num_tokens=12,
        num_decodes=0,
        max_query_len=4,
        max_seq_len=10,
        block_size=16,
    )
    slots, counts = torch.tensor([1, 0, 2]), torch.tensor([2, 4, 0])
    found = take_up(slots, counts, state, metadata, is_even=True)
    assert found.num_pending is not None and found.num_drafts is not None
    assert found.num_pending.tolist() == [0, 2, 0] and found.num_drafts.tolist() == [3] * 3
    assert found.num_decodes == 3 and found.positions.tolist() == [8, 6, 0]
    assert state.num_taken_up.tolist() == [7, 9, 0, 77]
