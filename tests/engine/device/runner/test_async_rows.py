"""Duties of the device half while the host is steps behind: its rows, and results in flight.

Runs on the CPU; streams and events are stand-ins that record their calls.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from termgen.engine.device.runner.async_output import (
    AsyncOutput,
    HostRows,
    Launch,
    RecordedOutput,
    StepTensors,
)
from termgen.engine.device.runner.dispatch import Dispatch, GraphMode
from termgen.engine.device.runner.request_state import RequestState
from termgen.engine.device.sampling.metadata import COUNT_MASK, SamplingMetadata
from termgen.engine.device.sampling.sampler import Sampler
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.step import (
    CORRUPT_TOKEN,
    AddedRow,
    SamplingNeeds,
    StepLogprobs,
    StepPlan,
)


def plan(num_rows: int, *, added: tuple[AddedRow, ...] = ()) -> StepPlan:
    """One token of each of the first slots."""
    rows, nothing = np.arange(num_rows, dtype=np.int32), np.zeros(0, np.int32)
    ones = np.ones_like(rows)
    return StepPlan(
        step_id=5,
        slots=rows,
        epochs=rows * 0,
        num_tokens=ones,
        num_draft_tokens=rows * 0,
        num_computed=ones,
        num_decode_rows=0,
        released_slots=(),
        added=added,
        block_slots=nothing,
        block_positions=nothing,
        block_ids=nothing,
        sampling=SamplingNeeds(all_greedy=True, penalties=True),
    )


class Stream:
    """A copy stream that records its calls, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def wait_stream(self, other: object) -> None:
        self.log.append("wait for the compute stream")


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: Stream) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait for the event")


class DeviceTensor:
    """Stands for device memory, which a later step would reuse if nothing held it."""

    def __init__(self, values: list[int], log: list[str]) -> None:
        self._values = values
        self._log = log
        self._host = torch.full((len(values),), -99, dtype=torch.int32)

    def to(self, device: str, *, non_blocking: bool) -> torch.Tensor:
        assert device == "cpu" and non_blocking, "the engine thread may not wait here"
        self._log.append("copy")
        return self._host

    def arrive(self) -> None:
        self._host.copy_(torch.tensor(self._values))


def test_a_result_on_its_way_holds_its_device_memory_until_it_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(stream.log))
    tokens: Any = DeviceTensor([7, -1, 9, CORRUPT_TOKEN], stream.log)
    alive = weakref.ref(tokens)
    dispatch = Dispatch(GraphMode.NONE, reason="nothing is recorded")
    copy_stream: Any = stream
    output = AsyncOutput(Launch(plan(4), dispatch, 0), StepTensors(tokens), copy_stream)
    tokens.arrive()
    del tokens
    gc.collect()
    assert alive() is not None, "the copy may still read it"
    assert stream.log == ["wait for the compute stream", "copy", "record"]
    result = output.result()
    assert stream.log[3:] == ["wait for the event"]
    assert (result.num_sampled.tolist(), result.token_ids.tolist()) == ([1, 0, 1, 0], [7, 9])
    assert result.corrupt is not None and result.corrupt.tolist() == [3]


def test_penalties_of_the_next_step_count_the_token_that_no_host_has_seen() -> None:
    """Steps follow each other on the device alone: the host never updates the row in between."""
    vocab = 12
    state = RequestState(
        max_num_seqs=2,
        max_model_len=16,
        max_blocks=4,
        vocab_size=vocab,
        num_eos_ids=1,
        device=torch.device("cpu"),
    )
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, ignore_eos=True, max_tokens=8)
    row = AddedRow(
        slot=0,
        epoch=0,
        token_ids=np.asarray([3, 4], np.int32),
        num_prompt_tokens=2,
        num_computed_tokens=1,
        max_total_tokens=10,
        stop_token_ids=(),
        params=params,
        seed=1,
    )
    state.update(plan(1, added=(row,)))
    slots, ones = torch.tensor([0]), torch.tensor([1])
    logits = torch.zeros(1, vocab)
    logits[0, [5, 6, 7]] = torch.tensor([2.5, 2.0, 1.75])
    sampler, drawn = Sampler(), []
    for _ in range(6):  # six steps in flight
        metadata = SamplingMetadata(
            temperature=state.temperature[slots],
            cuts=state.cuts.of(slots),
            seeds=state.seeds[slots],
            positions=state.total_len[slots],
            penalties=state.penalties.of(slots),
            output_counts=state.token_counts[slots] & COUNT_MASK,
            prompt_mask=state.token_counts[slots] < 0,
            stop_token_ids=state.stop_ids[slots],
            suppress_stop=state.total_len[slots] < state.min_total[slots],
            needs=SamplingNeeds(all_greedy=True, penalties=True),
        )
        sampled = sampler(logits.clone(), metadata).token_ids
        drawn += state.append_sampled(slots, ones, sampled).tolist()
    # 5: 2.5 -> 1.5 -> 0.5; 6: 2 -> 1 -> 0; 7: 1.75 -> 0.75. Each step takes the largest.
    assert drawn == [5, 6, 7, 5, 6, 7]


def test_a_result_read_keeps_its_tokens_when_the_ring_comes_round() -> None:
    """A reader may be many steps behind: its result does not alias the ring's memory."""
    tokens = np.asarray([7, 8], np.int32)
    dispatch, decodes = Dispatch(GraphMode.FULL), plan(2)._replace(num_decode_rows=2)
    logprobs = StepLogprobs(np.full((2, 3), 5, np.int32), np.ones((2, 3), np.float32), tokens + 1)
    result = RecordedOutput(Launch(decodes, dispatch, 0), HostRows(tokens, logprobs)).result()
    tokens[:] = 30
    for kept in (logprobs.token_ids, logprobs.logprobs, logprobs.ranks):
        kept[:] = 30
    assert result.token_ids.tolist() == [7, 8] and result.logprobs is not None
    assert result.logprobs.token_ids.tolist() == [[5] * 3] * 2
    assert (result.logprobs.logprobs == 1).all() and result.logprobs.ranks.tolist() == [8, 9]
