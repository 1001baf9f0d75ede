"""Steps wait for the masks of the rows that sample, on the host and in the kernel alike."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_rows import make_state, plan_of, post_mask, random_row
from triton_device import require_triton

from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling import posted_masks
from termgen.vocabulary.step import AddedRow
from termgen.vocabulary.token_mask import IDLE_PATIENCE_S, PATIENCE_S

VOCAB = 70
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from termgen.engine.device.kernels.sampling.await_masks import _await_kernel as kernel

types = {name: "*i64" for name in kernel.arg_names} | {"finished_ptr": "*i1", "num_rows": "i32"}
for is_even in (False, True):
    constants = {"IS_EVEN": is_even, "HAS_CLOCK": True}
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert "globaltimer" in made.asm["ptx"]
"""
"""What waits is not interpreted."""


def test_the_wait_compiles_for_a_gpu() -> None:
    require_triton()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, timeout=120)


def make_rows(state: RequestState, bound: tuple[bool, ...]) -> list[AddedRow]:
    """A row in mid-request in each slot; `bound` are those with a grammar."""
    rng = random.Random(4)
    rows = [
        replace(random_row(rng, slot, VOCAB, temperature=0.0), has_grammar=has_grammar)
        for slot, has_grammar in enumerate(bound)
    ]
    state.update(plan_of(rows))
    return rows


def batch(state: RequestState, *slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A decode of these slots, with a padded row behind."""
    device = state.device
    padded = torch.tensor([*slots, state.pad_row], device=device)
    return padded, torch.tensor([1] * len(slots) + [0], device=device)


def await_by_kernel(
    state: RequestState, slots: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    require_triton()
    from termgen.engine.device.kernels.sampling.await_masks import await_masks

    return await_masks(slots, num_tokens, state)


ways = pytest.mark.parametrize("by_kernel", [False, True], ids=["host", "kernel"])


def await_masks(state: RequestState, by_kernel: bool, *slots: int) -> list[int]:
    if by_kernel:
        return await_by_kernel(state, *batch(state, *slots)).tolist()
    return state.masks.wait_on_host(*batch(state, *slots), state).tolist()


@ways
def test_a_row_samples_under_the_mask_of_its_next_token_alone(by_kernel: bool) -> None:
    state = make_state(4, VOCAB, "cpu")
    rows = make_rows(state, (True, True, False, True))
    post_mask(state, rows[0], [5])
    post_mask(state, replace(rows[1], token_ids=rows[1].token_ids[:-1]), [5])  # that of the last
    state.masks.withhold(np.asarray([3]))
    assert await_masks(state, by_kernel, 0, 1, 2, 3) == [1, 0, 1, 0, 0]
    state.finished[1] = True  # samples nothing anyway
    state.num_computed[3] -= 1  # as one that has not computed all its tokens
    assert await_masks(state, by_kernel, 0, 1, 2, 3) == [1, 1, 1, 1, 0]
    post_mask(state, rows[3], [6])
    state.num_computed[3] += 1
    assert await_masks(state, by_kernel, 3, 0) == [1, 1, 0]


def test_masks_that_come_during_the_wait_are_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted_masks, "IDLE_PATIENCE_S", 20.0)
    state = make_state(4, VOCAB, "cpu")
    rows = make_rows(state, (True, True))
    post_mask(state, rows[0], [5])
    timer = threading.Timer(0.05, post_mask, (state, rows[1], [7]))
    timer.start()
    assert await_masks(state, False, 0, 1) == [1, 1, 0]
    timer = threading.Timer(0.05, state.masks.withhold, (np.asarray([0]),))
    state.total_len[0] += 1
    state.num_computed[0] += 1
    timer.start()
    assert await_masks(state, False, 0, 1) == [0, 1, 0]


@pytest.mark.parametrize("has_company", [False, True])
def test_the_wait_is_bounded_and_shorter_beside_free_rows(
    monkeypatch: pytest.MonkeyPatch, has_company: bool
) -> None:
    monkeypatch.setattr(posted_masks, "PATIENCE_S", 0.02)
    monkeypatch.setattr(posted_masks, "IDLE_PATIENCE_S", 0.1)
    state = make_state(4, VOCAB, "cpu")
    make_rows(state, (True, not has_company))
    began = time.perf_counter()
    late = await_masks(state, False, 0, 1)
    assert late == ([0, 1, 0] if has_company else [0, 0, 0])
    took_s = time.perf_counter() - began
    assert took_s >= (0.02 if has_company else 0.1)
    assert not has_company or took_s < 0.1


def test_masks_are_cut_to_the_vocabulary_and_belong_to_their_slots() -> None:
    state = make_state(4, VOCAB, "cpu")
    make_rows(state, (True, True))
    bits = np.arange(10, dtype=np.int32).reshape(2, 5)
    state.masks.post(np.asarray([1, 0]), np.asarray([3, 9]), bits)
    assert state.masks.bits[:3].tolist() == [[5, 6, 7], [0, 1, 2], [0, 0, 0]]
    assert state.masks.positions[:3].tolist() == [9, 3, -1]


@pytest.mark.gpu
def test_a_gpu_waits_for_masks_while_the_host_is_elsewhere() -> None:
    state = make_state(4, VOCAB, "cuda")
    rows = make_rows(state, (True, True, False))
    assert state.masks.is_awaited
    post_mask(state, rows[0], [5])
    arguments = batch(state, 0, 1)
    await_by_kernel(state, *arguments)  # compiles
    torch.cuda.synchronize()
    state.masks.given_up.fill_(-1)

    def timed(*slots: int, after_s: float | None) -> tuple[list[int], float]:
        """What the kernel returns, and the seconds it took."""
        places = batch(state, *slots)
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = await_by_kernel(state, *places)
        if after_s is not None:
            time.sleep(after_s)
            post_mask(state, rows[1], [7])
        torch.cuda.synchronize()
        return out.tolist(), time.perf_counter() - began

    late, took_s = timed(0, 1, after_s=None)
    assert late == [1, 0, 0] and IDLE_PATIENCE_S <= took_s < 3 * IDLE_PATIENCE_S
    again, took_s = timed(0, 1, after_s=None)
    assert again == [1, 0, 0] and took_s < IDLE_PATIENCE_S / 2, "it is waited for once"
    state.masks.given_up.fill_(-1)
    late, took_s = timed(0, 1, 2, after_s=None)
    assert late == [1, 0, 1, 0] and PATIENCE_S <= took_s < IDLE_PATIENCE_S
    state.masks.given_up.fill_(-1)
    in_time, took_s = timed(0, 1, after_s=IDLE_PATIENCE_S / 4)
    assert in_time == [1, 1, 0] and took_s >= IDLE_PATIENCE_S / 4


def test_where_no_token_may_be_computed_twice_masks_are_there_first() -> None:
    state = RequestState(
        max_num_seqs=2,
        max_model_len=32,
        max_blocks=2,
        is_recurrent=True,
        vocab_size=VOCAB,
        num_eos_ids=1,
        device=torch.device("cpu"),
    )
    assert not state.masks.is_awaited
    make_rows(state, (True, False))
    slots, num_tokens = batch(state, 0, 1)
    began = time.perf_counter()
    assert state.await_masks(slots, num_tokens).tolist() == [1, 1, 0]
    assert time.perf_counter() - began < IDLE_PATIENCE_S
    bits = np.full((1, -(-VOCAB // 32)), 5, np.int32)
    state.masks.post(np.asarray([0]), np.asarray([9]), bits)
    state.masks.upload(np.asarray([0], np.int32))
    masks = state.masks.of(slots, state.edit_kinds[slots], state.total_len[slots])
    assert masks.bits[0].tolist() == [5, 5, 5] and not masks.bits[1].any()


@pytest.mark.parametrize("by_kernels", [False, True])
def test_masks_that_no_step_waits_for_lie_on_the_device(by_kernels: bool) -> None:
    masks = posted_masks.PostedMasks(
        3, VOCAB, torch.device("meta"), by_kernels=by_kernels, may_be_late=False
    )
    assert not masks.is_awaited
    read = (masks.bits, masks.positions, masks.forced)
    assert {tensor.device.type for tensor in read} == {"meta"}


@ways
def test_what_is_posted_behind_forced_tokens_is_for_all_their_places(by_kernel: bool) -> None:
    state = make_state(4, VOCAB, "cpu")
    rows = make_rows(state, (True, True))
    post_mask(state, rows[0], [5], forced=(7, 8, 9))
    for _ in range(4):
        assert await_masks(state, by_kernel, 0, 1) == [1, 0, 0]
        state.total_len[0] += 1
        state.num_computed[0] += 1
    assert await_masks(state, by_kernel, 0, 1) == [0, 0, 0]
    state.total_len[0] -= 5
    state.num_computed[0] -= 5
    assert await_masks(state, by_kernel, 0, 1) == [0, 0, 0]


@ways
@pytest.mark.parametrize("is_even", [False, True])
def test_a_row_with_drafts_needs_masks_for_all_its_samples(by_kernel: bool, is_even: bool) -> None:
    """In an even step there are places for four drafts; a row has as many as its state says."""
    state = make_state(4, VOCAB, "cpu")
    rows = make_rows(state, (True, True, True))
    for row, num_drafts in zip(rows, (3, 4, 2), strict=True):
        post_mask(state, row, [5], forced=(7, 8, 9))
        state.num_drafts[row.slot] = num_drafts
    slots, counts = batch(state, 0, 1, 2)
    counts[:3] = 5 if is_even else state.num_drafts[:3] + 1
    if by_kernel:
        from termgen.engine.device.kernels.sampling.await_masks import await_masks

        found = await_masks(slots, counts, state, is_even=is_even)
    else:
        found = state.masks.wait_on_host(slots, counts, state, is_even=is_even)
    assert found.tolist() == ([5, 0, 5, 0] if is_even else [4, 4, 3, 0])


def test_forced_tokens_become_the_drafts_of_the_places_they_are_for() -> None:
    state = make_state(8, VOCAB, "cpu")
    rows = make_rows(state, (True,) * 6)
    lengths = [len(row.token_ids) for row in rows]
    for row in rows[:5]:
        post_mask(state, row, [5], forced=(7, 8, 9))
    state.masks.withhold(np.asarray([4]))
    state.total_len[1] += 1  # a token of them is in flight
    state.total_len[2] += 4  # and all, with the one behind
    state.total_len[3] -= 1  # the posted ones are for later
    state.num_drafts.fill_(5)
    before = state.token_ids.clone()
    slots = np.arange(6, dtype=np.int32)
    state.masks.take_forced(slots, np.asarray([2, 9, 9, 9, 9, 9], np.int32), state)
    assert state.num_drafts[:6].tolist() == [2, 2, 0, 0, 0, 0]
    before[0, lengths[0] : lengths[0] + 2] = torch.tensor([7, 8])
    before[1, lengths[1] + 1 : lengths[1] + 3] = torch.tensor([8, 9])
    assert torch.equal(state.token_ids, before)


def test_forced_tokens_at_the_end_of_the_context_write_nothing_else() -> None:
    state = make_state(4, VOCAB, "cpu")
    (row,) = make_rows(state, (True,))
    state.total_len[0] = end = state.token_ids.shape[1] - 2
    state.masks.post(
        np.asarray([0]), np.asarray([end]), np.ones((1, 3), np.int32), [tuple(range(40, 50))]
    )
    state.masks.take_forced(np.asarray([row.slot]), np.asarray([2]), state)
    assert state.num_drafts[0] == 2 and state.token_ids[0, -2:].tolist() == [40, 41]
