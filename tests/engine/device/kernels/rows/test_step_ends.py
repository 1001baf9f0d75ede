"""The kernels before and after a decode step's model, against the torch code they replace."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from triton_device import DEVICES, require_triton

require_triton()

from termgen.engine.device.attention.base import AttentionMetadata  # noqa: E402
from termgen.engine.device.runner.input_batch import InputBatch, InputBuffers  # noqa: E402
from termgen.engine.device.runner.request_state import RequestState  # noqa: E402
from termgen.engine.device.sampling.metadata import HAS_PENALTIES  # noqa: E402
from termgen.engine.device.sampling.token_ring import TokenRing  # noqa: E402
from termgen.vocabulary.step import CORRUPT_TOKEN  # noqa: E402

devices = pytest.mark.parametrize("device", DEVICES)
BLOCK_SIZE = 4
GROUPS = 2
MAX_LEN = 2500
VOCAB_SIZE = 60


def make_state(rng: random.Random, max_num_seqs: int, *, device: str) -> RequestState:
    """Rows in mid-request, with every column drawn at random."""
    state = RequestState(
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_LEN,
        max_blocks=MAX_LEN // BLOCK_SIZE,
        num_groups=GROUPS,
        vocab_size=VOCAB_SIZE,
        num_eos_ids=2,
        device=torch.device(device),
    )
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    state.token_ids.copy_(torch.randint(VOCAB_SIZE, state.token_ids.shape, generator=generator))
    tables = state.block_tables
    tables.copy_(torch.randint(9999, tables.shape, generator=generator))
    for slot in range(max_num_seqs):
        computed = rng.choice([0, 3, 4, 5, MAX_LEN - 1, rng.randrange(MAX_LEN)])
        state.num_computed[slot] = computed
        total = min(MAX_LEN, computed + rng.choice([1, 1, 1, 2, 9]))
        state.total_len[slot] = total
        state.limit[slot] = min(MAX_LEN, total + rng.choice([1, 2, 30]))
        state.min_total[slot] = total + rng.choice([-5, 0, 1, 2])
        state.finished[slot] = rng.random() < 0.2
        for column in rng.sample(range(state.stop_ids.shape[1]), 3):
            state.stop_ids[slot, column] = rng.randrange(VOCAB_SIZE)
    return state


def make_rows(
    rng: random.Random, state: RequestState, num_rows: int, num_padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """slots and num_tokens of a step, the padded rows last."""
    slots = rng.sample(range(state.pad_row), num_rows) + [state.pad_row] * num_padded
    counts = [1] * num_rows + [0] * num_padded
    return (
        torch.tensor(slots, device=state.device),
        torch.tensor(counts, device=state.device),
    )


def poisoned_buffers(max_num_seqs: int, *, device: str, fused: bool) -> InputBuffers:
    buffers = InputBuffers(
        max_num_tokens=64,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK_SIZE,
        device=torch.device(device),
        num_groups=GROUPS,
    )
    buffers.fused = fused
    for name in ("input_ids", "positions", "slot_mappings", "seq_lens", "query_start_loc"):
        getattr(buffers, name).fill_(-77)
    return buffers


def assert_same_inputs(actual: InputBatch, expected: InputBatch) -> None:
    assert torch.equal(actual.input_ids, expected.input_ids)
    assert torch.equal(actual.positions, expected.positions)
    assert actual.logits_indices is None and expected.logits_indices is None
    assert len(actual.metadata) == len(expected.metadata) == GROUPS
    for ours, theirs in zip(actual.metadata, expected.metadata, strict=True):
        assert_same_metadata(ours, theirs)


def assert_same_metadata(ours: AttentionMetadata, theirs: AttentionMetadata) -> None:
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.block_table.shape == theirs.block_table.shape
    for row, length in enumerate(theirs.seq_lens.tolist()):
        used = -(-length // BLOCK_SIZE)
        assert torch.equal(ours.block_table[row, :used], theirs.block_table[row, :used]), row
    for name in ("num_rows", "num_tokens", "num_decodes", "max_query_len", "max_seq_len"):
        assert getattr(ours, name) == getattr(theirs, name), name


@devices
@pytest.mark.parametrize(("num_rows", "num_padded"), [(1, 0), (0, 3), (5, 3), (17, 0)])
def test_inputs_are_those_of_torch(device: str, num_rows: int, num_padded: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    state = make_state(rng, 20, device=device)
    slots, counts = make_rows(rng, state, num_rows, num_padded)
    batches = []
    for fused in (True, False):
        buffers = poisoned_buffers(20, device=device, fused=fused)
        batches.append(buffers.prepare_decode(slots, counts, state, max_seq_len=MAX_LEN))
        size = num_rows + num_padded
        for name in ("input_ids", "positions", "slot_mappings", "seq_lens"):
            assert (getattr(buffers, name)[..., size:] == -77).all(), name
        assert (buffers.query_start_loc[size + 1 :] == -77).all()
    assert_same_inputs(*batches)
    for ours in batches[0].metadata:
        assert (ours.slot_mapping[num_rows:] < BLOCK_SIZE).all()
        assert (ours.slot_mapping[state.finished[slots]] < BLOCK_SIZE).all()


@devices
def test_a_longer_step_after_a_shorter_one_uses_the_same_memory(device: str) -> None:
    rng = random.Random(8)
    state = make_state(rng, 6, device=device)
    buffers = poisoned_buffers(6, device=device, fused=True)
    reference = poisoned_buffers(6, device=device, fused=False)
    places = set()
    for computed in (2, 9, 1999, 3):
        state.num_computed.fill_(computed)
        slots, counts = make_rows(rng, state, 5, 1)
        batch = buffers.prepare_decode(slots, counts, state, max_seq_len=2000)
        places.add(batch.metadata[0].block_table.data_ptr())
        expected = reference.prepare_decode(slots, counts, state, max_seq_len=2000)
        assert_same_inputs(batch, expected)
    assert len(places) == 1


@devices
def test_a_finished_row_may_run_past_its_end(device: str) -> None:
    state = make_state(random.Random(3), 2, device=device)
    state.finished.fill_(True)
    state.num_computed.fill_(MAX_LEN)
    slots, counts = make_rows(random.Random(3), state, 2, 1)
    buffers = poisoned_buffers(3, device=device, fused=True)
    batch = buffers.prepare_decode(slots, counts, state, max_seq_len=MAX_LEN)
    assert batch.metadata[0].slot_mapping.tolist() == [MAX_LEN % BLOCK_SIZE] * 3
    assert batch.positions.tolist() == [MAX_LEN] * 3


def columns(state: RequestState) -> dict[str, torch.Tensor]:
    return {n: v for n, v in vars(state).items() if isinstance(v, torch.Tensor)}


@devices
@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize(("num_rows", "num_padded"), [(1, 0), (0, 2), (14, 2)])
def test_samples_are_taken_in_as_by_torch(
    device: str, with_counts: bool, num_rows: int, num_padded: int
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    fused = make_state(rng, 16, device=device)
    fused.edit_kinds[:16] = torch.tensor([rng.randrange(4) for _ in range(16)])
    fused.fused = True
    plain = copy.deepcopy(fused, {id(fused.masks): fused.masks})
    plain.fused = False
    rings = [TokenRing(3, 20, torch.device(device)) for _ in range(2)]
    took = set()
    for _ in range(5):
        slots, counts = make_rows(rng, fused, num_rows, num_padded)
        if rng.random() < 0.3:  # a prompt step computes more tokens, and may still be too short
            counts[:num_rows] = torch.tensor([rng.randint(1, 5) for _ in range(num_rows)])
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(num_rows + num_padded)]
        for row in range(0, num_rows, 2):  # often a stop id
            stops = fused.stop_ids[int(slots[row])]
            ids[row] = int(stops[stops >= 0][0])
        for row in range(num_rows):
            if rng.random() < 0.1:
                ids[row] = CORRUPT_TOKEN
        sampled = torch.tensor(ids, device=device)
        ours = fused.append_sampled(slots, counts, sampled, rings[0], has_penalties=with_counts)
        theirs = plain.append_sampled(slots, counts, sampled, rings[1], has_penalties=with_counts)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        expected = columns(plain)
        for name, column in columns(fused).items():
            assert torch.equal(column, expected[name]), name
        assert torch.equal(rings[0].tokens, rings[1].tokens)
        assert torch.equal(rings[0].index, rings[1].index) and not rings[0].arrivals.any()
        took |= set(ours.tolist())
    assert num_rows < 2 or (-1 in took and len(took) > 2)
    counted = fused.token_counts.sum(dim=1) > 0
    assert num_rows < 2 or counted.any() == with_counts
    assert not (counted & (fused.edit_kinds & HAS_PENALTIES == 0)).any()


@devices
@pytest.mark.parametrize("fused", [True, False])
def test_a_corrupt_row_ends_and_what_runs_it_on_reads_an_id_that_exists(
    device: str, fused: bool
) -> None:
    state = make_state(random.Random(2), 4, device=device)
    state.fused = fused
    state.edit_kinds.fill_(HAS_PENALTIES)
    state.finished.fill_(False)
    state.total_len.fill_(7)
    state.num_computed.fill_(6)
    state.limit.fill_(50)
    ring = TokenRing(3, 4, torch.device(device))
    slots = torch.arange(4, device=device)
    sampled = torch.tensor([33, CORRUPT_TOKEN, 34, CORRUPT_TOKEN], device=device)
    state.finished[3] = True
    state.stop_ids.fill_(-1)
    for to in (ring, None):
        state.total_len.fill_(7)
        state.num_computed.fill_(6)
        state.finished[:3] = False
        tokens = state.append_sampled(slots, torch.ones_like(slots), sampled, to)
        assert tokens.tolist() == [33, CORRUPT_TOKEN, 34, -1]
        assert state.finished[:4].tolist() == [False, True, False, True]
        assert (state.token_ids >= 0).all()
        assert int(state.token_counts.sum()) == 2
        state.token_counts.zero_()
        tokens = state.append_sampled(slots, torch.ones_like(slots), sampled.clamp(min=0), to)
        assert tokens.tolist() == [33, -1, 34, -1], "nothing more of a row that ended"
        state.token_counts.zero_()


@devices
def test_without_a_ring_only_the_state_changes(device: str) -> None:
    state = make_state(random.Random(2), 4, device=device)
    state.fused = True
    state.finished[0] = False
    state.total_len[0], state.num_computed[0], state.limit[0] = 7, 6, 50
    one = torch.ones(1, dtype=torch.int64, device=device)
    tokens = state.append_sampled(one - 1, one, one * 33)
    assert tokens.tolist() == [33] and int(state.token_ids[0, 7]) == 33
    assert (int(state.total_len[0]), int(state.num_computed[0])) == (8, 7)
