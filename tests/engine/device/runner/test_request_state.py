"""Device rows and the inputs computed from them, against plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from termgen.engine.device.runner.input_batch import InputBuffers
from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling.metadata import COUNT_MASK, HAS_EDITS, HAS_PENALTIES
from termgen.vocabulary.sampling_params import COLUMNS, SamplingParams
from termgen.vocabulary.step import AddedRow, SamplingNeeds, StepPlan

BLOCK = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_state(device: str) -> RequestState:
    return RequestState(
        max_num_seqs=4,
        max_model_len=32,
        max_blocks=8,
        vocab_size=50,
        num_eos_ids=2,
        device=torch.device(device),
    )


def added(
    slot: int,
    tokens: Sequence[int],
    *,
    num_prompt: int | None = None,
    computed: int = 0,
    limit: int = 30,
    stops: tuple[int, ...] = (),
    **params: object,
) -> AddedRow:
    return AddedRow(
        slot=slot,
        epoch=0,
        token_ids=np.asarray(tokens, np.int32),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        num_computed_tokens=computed,
        max_total_tokens=limit,
        stop_token_ids=stops,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=7,
    )


def plan(
    rows: Sequence[tuple[int, int, int]],
    *,
    add: Sequence[AddedRow] = (),
    blocks: Sequence[tuple[int, int, int]] = (),
    released: tuple[int, ...] = (),
) -> StepPlan:
    """rows: (slot, tokens, computed before); blocks: (slot, position, block)."""
    columns = np.asarray(rows, np.int32).reshape(-1, 3).T
    new = np.asarray(blocks, np.int32).reshape(-1, 3).T
    return StepPlan(
        step_id=0,
        slots=columns[0],
        epochs=np.zeros_like(columns[0]),
        num_tokens=columns[1],
        num_draft_tokens=np.zeros_like(columns[1]),
        num_computed=columns[2],
        num_decode_rows=0,
        released_slots=released,
        added=tuple(add),
        block_slots=new[0],
        block_positions=new[1],
        block_ids=new[2],
        sampling=SamplingNeeds(all_greedy=True),
    )


def sample(state: RequestState, slots: Sequence[int], counts: Sequence[int], ids: Sequence[int]):
    device = state.device
    takes = state.append_sampled(
        torch.tensor(slots, device=device),
        torch.tensor(counts, device=device),
        torch.tensor(ids, device=device),
    )
    return [token >= 0 for token in takes.tolist()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_mixed_batch_is_laid_out_from_the_rows(device: str) -> None:
    state = make_state(device)
    buffers = InputBuffers(max_num_tokens=16, max_num_seqs=4, block_size=BLOCK, device=state.device)
    first = plan(
        [(2, 1, 5), (0, 3, 2)],
        add=[
            added(2, [10, 11, 12, 13, 14, 15], num_prompt=4, computed=5),
            added(0, [20, 21, 22, 23, 24, 25, 26], computed=2),
        ],
        blocks=[(2, 0, 9), (2, 1, 3), (0, 0, 5), (0, 1, 6)],
    )
    state.update(first)
    batch = buffers.prepare(first, state)
    assert batch.input_ids.tolist() == [15, 22, 23, 24]
    assert batch.positions.tolist() == [5, 2, 3, 4]
    # block * 4 + offset, blocks by position // 4
    assert batch.metadata[0].slot_mapping.tolist() == [3 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 6 * 4]
    assert batch.metadata[0].query_start_loc.tolist() == [0, 1, 4]
    assert batch.metadata[0].seq_lens.tolist() == [6, 5]
    assert batch.logits_indices is not None
    assert batch.logits_indices.tolist() == [0, 3]
    assert batch.metadata[0].num_decodes == 1
    assert batch.metadata[0].block_table.tolist() == [[9, 3], [5, 6]]


@pytest.mark.parametrize("device", DEVICES)
def test_only_rows_that_reach_their_newest_token_take_a_sample(device: str) -> None:
    state = make_state(device)
    state.update(plan([], add=[added(0, [1, 2, 3, 4]), added(1, [5, 6])]))
    assert sample(state, [0, 1], [2, 2], [40, 41]) == [False, True]
    assert state.total_len[:2].tolist() == [4, 3]
    assert state.token_ids[1, :3].tolist() == [5, 6, 41]
    assert state.token_ids[0, :4].tolist() == [1, 2, 3, 4]
    assert sample(state, [0, 1], [2, 1], [42, 43]) == [True, True]
    assert state.token_ids[0, :5].tolist() == [1, 2, 3, 4, 42]
    assert state.num_computed[:2].tolist() == [4, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_stops_on_the_device_and_later_steps_change_nothing_that_matters(
    device: str,
) -> None:
    state = make_state(device)
    buffers = InputBuffers(max_num_tokens=16, max_num_seqs=4, block_size=BLOCK, device=state.device)
    state.update(plan([], add=[added(0, [1, 2], stops=(9,))], blocks=[(0, 0, 7)]))
    assert sample(state, [0], [2], [9]) == [True]
    assert bool(state.finished[0])
    ahead = plan([(0, 1, 2)])
    batch = buffers.prepare(ahead, state)
    assert batch.metadata[0].slot_mapping.tolist() == [2], "it writes to the null block"
    assert sample(state, [0], [1], [11]) == [False]
    assert int(state.total_len[0]) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_stop_ids_count_only_after_min_tokens_and_length_always(device: str) -> None:
    state = make_state(device)
    state.update(plan([], add=[added(0, [1, 2], stops=(9,), min_tokens=1, limit=5)]))
    sample(state, [0], [2], [9])
    assert not bool(state.finished[0]), "the first token is below the minimum"
    sample(state, [0], [1], [9])
    assert bool(state.finished[0])
    state.update(plan([], add=[added(1, [1, 2, 3, 4], limit=5)]))
    sample(state, [1], [4], [30])
    assert bool(state.finished[1]), "the length limit ends it"


@pytest.mark.parametrize("device", DEVICES)
def test_a_reused_slot_keeps_nothing_of_its_last_owner(device: str) -> None:
    state = make_state(device)
    penal = {"frequency_penalty": 1.0}
    state.update(plan([], add=[added(0, [1, 2, 2], stops=(9,), temperature=0.7, **penal)]))
    sample(state, [0], [3], [9])
    assert int(state.token_counts[0, 9]) == 1
    state.update(plan([], released=(0,)))
    state.update(plan([], add=[added(0, [4, 5, 6, 6], num_prompt=2, temperature=0.0, **penal)]))
    counts = state.token_counts[0] & COUNT_MASK
    assert counts.nonzero().flatten().tolist() == [5 + 1]
    assert int(counts[6]) == 2, "tokens generated before a preemption count"
    assert (state.token_counts[0] < 0).nonzero().flatten().tolist() == [4, 5]
    assert not bool(state.finished[0]) and float(state.temperature[0]) == 0.0
    assert (state.stop_ids[0] == -1).all()
    assert (int(state.total_len[0]), int(state.num_computed[0])) == (4, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_every_column_of_every_added_row(device: str) -> None:
    state = make_state(device)
    kinds: list[dict[str, float]] = [
        {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "min_tokens": 2},
        {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": -0.5},
        {"temperature": 1.0, "frequency_penalty": 0.75, "logprobs": 3, "logit_bias": {4: 1.0}},
    ]
    rows = [
        added(slot, range(slot, slot + 3 + slot), num_prompt=2, computed=1, limit=20 + slot, **kind)
        for slot, kind in zip((3, 0, 2), kinds, strict=True)
    ]
    uploads: list[int] = []
    upload = state.upload
    state.upload = lambda values: (uploads.append(1), upload(values))[1]  # type: ignore[method-assign]
    state.update(plan([], add=rows, blocks=[(0, 0, 5), (2, 1, 6)], released=(1,)))
    assert len(uploads) <= 6, "all rows together"
    for row in rows:
        p, at = row.params, row.slot
        tokens = row.token_ids.tolist()
        assert state.token_ids[at].tolist() == tokens + [0] * (32 - len(tokens))
        found = {
            name: getattr(state, name)[at].item()
            for name in (
                "total_len num_computed prompt_len limit min_total seeds finished num_logprobs"
                " edit_kinds"
            ).split()
        } | {name: column[at].item() for name, column in state.params.items()}
        assert found == {
            "total_len": len(tokens),
            "num_computed": 1,
            "prompt_len": 2,
            "limit": 20 + at,
            "min_total": 2 + p.min_tokens,
            "seeds": 7,
            **{name: getattr(p, name) for name in COLUMNS},
            "finished": False,
            "num_logprobs": -1 if p.logprobs is None else p.logprobs,
            "edit_kinds": HAS_PENALTIES * p.has_penalties + HAS_EDITS * p.edits_logits,
        }
    assert (state.num_logprobs[1], state.edit_kinds[1]) == (-1, 0)
    assert state.total_len[1] == 0 and state.cuts.top_p[1] == 1.0, "another row was written"
    assert state.block_tables[0, 0, 0] == 5 and state.block_tables[0, 2, 1] == 6
