"""The kernels around the model in a step with drafts, against the torch code they replace."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from sampling_rows import LENGTH, NEEDS, batch_of, fill
from sampling_rows import make_state as make_sampling_state
from triton_device import DEVICES, DEVICES_AND_DTYPES, normal, require_triton

require_triton()

from termgen.engine.device.drafting.acceptance import Samples, keep_drawn  # noqa: E402
from termgen.engine.device.kernels.drafting import row_ends  # noqa: E402
from termgen.engine.device.kernels.sampling.fused import FusedSampler  # noqa: E402
from termgen.engine.device.runner.draft_steps import prepare_even  # noqa: E402
from termgen.engine.device.runner.input_batch import InputBuffers  # noqa: E402
from termgen.engine.device.runner.request_state import RequestState  # noqa: E402
from termgen.engine.device.sampling.sampler import Sampler  # noqa: E402
from termgen.engine.device.sampling.token_ring import TokenRing  # noqa: E402
from termgen.vocabulary.step import CORRUPT_TOKEN  # noqa: E402

devices = pytest.mark.parametrize("device", DEVICES)
BLOCK_SIZE, GROUPS, MAX_LEN, VOCAB = 4, 2, 120, 12
SLOTS = 12


def make_state(rng: random.Random, device: str) -> RequestState:
    """Rows that decode, at every distance from the end of the context."""
    state = RequestState(
        max_num_seqs=SLOTS,
        max_model_len=MAX_LEN,
        max_blocks=MAX_LEN // BLOCK_SIZE,
        num_groups=GROUPS,
        vocab_size=VOCAB,
        num_eos_ids=2,
        device=torch.device(device),
    )
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    state.token_ids.copy_(torch.randint(VOCAB, state.token_ids.shape, generator=generator))
    tables = state.block_tables
    tables.copy_(1 + torch.randint(9998, tables.shape, generator=generator))
    for slot in range(SLOTS):
        total = rng.choice([2, 5, MAX_LEN - 1, MAX_LEN - 3, rng.randrange(2, MAX_LEN)])
        state.total_len[slot] = total
        state.num_computed[slot] = total - 1
        state.limit[slot] = min(MAX_LEN, total + rng.choice([1, 2, 5, 30]))
        state.min_total[slot] = total + rng.choice([-5, 0, 1, 3])
        state.finished[slot] = rng.random() < 0.15
        state.num_drafts[slot] = rng.randint(0, 6)
        state.edit_kinds[slot] = rng.randrange(4)
        state.stop_ids[slot, 0] = rng.randrange(VOCAB)
    return state


def make_rows(
    rng: random.Random, state: RequestState, num_rows: int, num_queries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """slots and num_tokens of a step with two padded rows, as the host plans it: no row is to have
    more tokens than its limit allows."""
    slots = rng.sample(range(SLOTS), num_rows)
    room = (state.limit - state.total_len)[slots].tolist()
    counts = [rng.randint(1, max(1, min(num_queries, most))) for most in room]
    slots, counts = slots + [state.pad_row] * 2, counts + [0] * 2
    return torch.tensor(slots, device=state.device), torch.tensor(counts, device=state.device)


def buffers_of(device: str) -> InputBuffers:
    return InputBuffers(
        max_num_tokens=100,
        max_num_seqs=SLOTS,
        block_size=BLOCK_SIZE,
        device=torch.device(device),
        num_groups=GROUPS,
    )


@devices
@pytest.mark.parametrize("num_queries", [2, 4, 7])
def test_inputs_are_those_of_torch(device: str, num_queries: int) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    state = make_state(rng, device)
    slots, counts = make_rows(rng, state, 8, num_queries)
    sizes = {"num_queries": num_queries, "max_seq_len": MAX_LEN}
    one, other = buffers_of(device), buffers_of(device)
    ours = prepare_even(one, slots, counts, state, by_kernels=True, **sizes)
    theirs = prepare_even(other, slots, counts, state, by_kernels=False, **sizes)
    assert ours.logits_indices is None and theirs.logits_indices is not None
    assert ours.metadata[0].max_query_len == num_queries and len(ours.metadata) == GROUPS
    assert ours.metadata[0].positions is ours.positions
    places = torch.arange(num_queries, device=device)
    live = places < counts[:, None]
    at = theirs.logits_indices.view(live.shape)
    assert torch.equal(ours.input_ids.view(live.shape)[live], theirs.input_ids[at][live])
    assert torch.equal(ours.positions.view(live.shape)[live], theirs.positions[at][live])
    for mine, wanted in zip(ours.metadata, theirs.metadata, strict=True):
        assert torch.equal(mine.seq_lens, wanted.seq_lens)
        slots_of_tokens = mine.slot_mapping.view(live.shape)
        assert torch.equal(slots_of_tokens[live], wanted.slot_mapping[at][live])
        assert (slots_of_tokens[~live] < BLOCK_SIZE).all(), "the null block"
        for row, length in enumerate(wanted.seq_lens.tolist()):
            used = -(-length // BLOCK_SIZE)
            assert torch.equal(mine.block_table[row, :used], wanted.block_table[row, :used])
    firsts = ours.positions.view(live.shape)[:, :1].expand(live.shape)
    assert torch.equal(ours.positions.view(live.shape)[~live], firsts[~live])


@devices
def test_a_finished_row_may_run_past_its_end(device: str) -> None:
    state = make_state(random.Random(3), device)
    state.finished.fill_(True)
    state.num_computed.fill_(MAX_LEN)
    slots = torch.tensor([0, 1], device=device)
    counts, sizes = torch.full_like(slots, 3), {"num_queries": 3, "max_seq_len": MAX_LEN}
    batch = prepare_even(buffers_of(device), slots, counts, state, by_kernels=True, **sizes)
    assert (batch.metadata[0].slot_mapping < BLOCK_SIZE).all()
    assert batch.metadata[0].seq_lens.tolist() == [MAX_LEN, MAX_LEN]


@devices
@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("num_queries", [2, 3, 8])
def test_samples_are_taken_in_as_by_torch(device: str, with_counts: bool, num_queries: int) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    num_kept = num_over = 0
    for _ in range(16):
        fused = make_state(rng, device)
        if not with_counts:
            fused.edit_kinds.zero_()
        plain = copy.deepcopy(fused, {id(fused.masks): fused.masks})
        slots, counts = make_rows(rng, fused, 9, num_queries)
        sampled = torch.randint(VOCAB, (11, num_queries))
        for row, slot in enumerate(slots[:9].tolist()):
            start, right = int(fused.total_len[slot]), rng.randint(0, num_queries)
            ids = fused.token_ids[slot, start : start + right].long().cpu()
            sampled[row, : len(ids)] = ids
            if rng.random() < 0.1:
                sampled[row, rng.randrange(num_queries)] = CORRUPT_TOKEN
        sampled = sampled.flatten().to(device)
        rings = [TokenRing(3, 100, torch.device(device)) for _ in range(2)]
        ours = row_ends.keep_drawn(
            slots,
            counts,
            sampled,
            fused,
            num_queries=num_queries,
            has_penalties=with_counts,
            ring=rings[0],
        )
        drafts = torch.minimum(plain.num_drafts[slots], (counts - 1).clamp(min=0))
        samples = Samples.even(drafts, num_queries - 1)
        theirs = keep_drawn(plain, slots, counts.clamp(max=1), sampled, samples, rings[1])
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert torch.equal(rings[0].tokens, rings[1].tokens)
        assert torch.equal(rings[0].drafts, rings[1].drafts)
        assert torch.equal(rings[0].index, rings[1].index) and not rings[0].arrivals.any()
        for name in ("total_len", "num_computed", "finished", "token_counts"):
            assert torch.equal(getattr(fused, name), getattr(plain, name)), name
        for slot, length in enumerate(plain.total_len.tolist()):
            assert torch.equal(fused.token_ids[slot, :length], plain.token_ids[slot, :length])
        num_kept += int((ours.view(11, -1)[:, 1:] >= 0).sum())
        num_over += int(fused.finished.sum())
    assert num_kept and num_over > 10


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("num_samples", [2, 5])
def test_a_sample_behind_drafts_counts_them(
    device: str, dtype: torch.dtype, num_samples: int
) -> None:
    """Penalties, bad words, min_tokens and noise of every place, with all other features."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    vocab = 90
    state = make_sampling_state(20, vocab, device)
    kernels = FusedSampler(max_rows=18 * num_samples, vocab_size=vocab, device=torch.device(device))
    ring = TokenRing(3, 18 * num_samples, torch.device(device), num_logprobs=20)
    for step in range(3):
        fill(rng, state, vocab)
        slots, _ = batch_of(rng, state, 15, 3)
        state.num_computed[slots[:15]] = state.total_len[slots[:15]] - 1
        for slot in slots[:15].tolist():  # drafts are of the row's few tokens, so words match
            total = int(state.total_len[slot])
            ids = state.token_ids[slot, : min(total, num_samples, LENGTH - total)].clone()
            state.token_ids[slot, total : total + len(ids)] = ids
        counts = torch.tensor([1] * 15 + [0] * 3, device=device)
        size = 18 * num_samples
        logits = normal(size, vocab, dtype=dtype, device=device, seed=seed + step, scale=4.0)
        samples = Samples.even(torch.full((18,), num_samples - 1, device=device), num_samples - 1)
        at = slots[samples.rows], counts[samples.rows] + samples.places
        expected = Sampler()(logits.float(), state.sampling_metadata(*at, NEEDS, samples))
        row = int(ring.index)
        drawn, _ = kernels(logits, slots, counts, state, NEEDS, ring, num_samples=num_samples)
        live = slots[samples.rows] != state.pad_row
        assert torch.equal(drawn[live], expected.token_ids[live])
        assert expected.logprobs is not None
        for i, wanted in enumerate(state.num_logprobs[at[0]].tolist()):
            if wanted >= 0 and live[i] and drawn[i] != CORRUPT_TOKEN:
                found = ring.logprobs.token_ids[row, i, : 1 + wanted]
                assert torch.equal(found, expected.logprobs.token_ids[i, : 1 + wanted])
