"""Graphs recorded in idle moments: their order, their substitutes, and their tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_load import run_mixed_load

from termgen.config import EngineConfig
from termgen.engine.device.runner.cuda_graphs import (
    USEFUL_DECODES,
    USEFUL_TOKENS,
    RecordingError,
    next_larger,
    split_by_use,
    split_pieces_by_use,
)
from termgen.engine.device.runner.dispatch import (
    BatchDescriptor,
    CudaGraphDispatcher,
    SamplingVariant,
    decode_sizes,
    mixed_sizes,
    piecewise_sizes,
)
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

ModelDir = Callable[..., Path]
PLAIN, FILTERED = SamplingVariant


def test_the_largest_of_each_kind_come_first_then_the_most_useful() -> None:
    dispatcher = CudaGraphDispatcher(decode_sizes(256), mixed=mixed_sizes(8192), max_num_seqs=256)
    everything = dispatcher.descriptors()
    first, later = split_by_use(everything)
    assert sorted(map(repr, first + later)) == sorted(map(repr, everything))
    kinds = [(d.num_tokens, d.is_decode, d.sampling) for d in first]
    assert kinds[:4] == [
        (8192, False, FILTERED),
        (256, True, PLAIN),
        (256, True, FILTERED),
        (64, False, PLAIN),
    ]
    assert kinds[4][:2] == (1, True)
    for d in first[4:]:
        assert d.num_tokens <= (USEFUL_DECODES if d.is_decode else USEFUL_TOKENS)
    sizes = [d.num_tokens for d in later]
    assert sizes == sorted(sizes)
    assert len(first) < len(later)
    assert split_by_use([]) == ([], [])


def test_of_pieces_the_largest_comes_first_then_all_that_short_steps_need() -> None:
    sizes = piecewise_sizes(256, 8192)
    first, later = split_pieces_by_use(sizes)
    assert first == [2048, 1, 2, 4, 8, 16, 32, 64, 128]
    assert later == sorted(later) and sorted(first + later) == sorted(sizes)
    assert split_pieces_by_use([]) == ([], [])


def test_what_stands_in_for_a_missing_recording() -> None:
    def decode(size: int, sampling: SamplingVariant = PLAIN) -> BatchDescriptor:
        return BatchDescriptor(size, size, True, sampling)

    def mixed(size: int, rows: int) -> BatchDescriptor:
        return BatchDescriptor(size, rows, False, PLAIN)

    recorded = [decode(64), decode(32, FILTERED), decode(256), mixed(512, 20), mixed(256, 8)]
    assert next_larger(decode(16), recorded, most_padding=2) == decode(64)
    assert next_larger(decode(65), recorded, most_padding=2) == decode(256)
    assert next_larger(decode(257), recorded, most_padding=2) is None
    assert next_larger(decode(33, FILTERED), recorded, most_padding=2) is None
    assert next_larger(mixed(128, 8), recorded, most_padding=2) == mixed(256, 8)
    assert next_larger(mixed(256, 9), recorded, most_padding=2) == mixed(512, 20)
    assert next_larger(mixed(127, 8), recorded, most_padding=2) is None


def make_engine(
    folder: Path, recorder: Callable[..., Any] | None, *, asynchronous: bool = False
) -> SyncEngine:
    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            threads=1,
            max_num_seqs=16,
            num_gpu_blocks_override=60,
            max_model_len=128,
            skip_tokenizer_init=True,
            async_scheduling=asynchronous,
        )
    )
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    if recorder is not None:
        sizes = (1, 2, 4, 8, 12, 16)
        dispatcher = CudaGraphDispatcher(sizes, mixed=(16, 192, 512), max_num_seqs=16)
        runner.graphs = runner.make_graphs(dispatcher)
        runner.graphs.record_useful(recorder, lambda done: None)
    return engine


def run(engine: SyncEngine, seed: int) -> tuple[dict[str, list[int]], list[StepRecord]]:
    return run_mixed_load(engine, seed, num_requests=14, longest_prompt=60, most_tokens=20)


def test_steps_are_right_before_during_and_after(tiny_model_dir: ModelDir) -> None:
    folder = tiny_model_dir("llama")
    made = 0

    def recorder(operations: Callable[[], None]) -> Callable[[], None]:
        nonlocal made
        made += 1
        operations()  # as the real recorder does: it must touch no request's rows
        return operations

    engine = make_engine(folder, recorder, asynchronous=True)
    num_first = made
    expected = {seed: run(make_engine(folder, None), seed)[0] for seed in (1, 2)}
    snapshot = engine.snapshot()
    assert (snapshot.num_graphs_recorded, snapshot.num_graphs) == (num_first, 16)

    tokens, steps = run(engine, 1)
    assert tokens == expected[1]
    assert made == num_first, "a recording was made while requests ran"
    assert "not recorded yet" in {s.graph_reason for s in steps}
    assert any(s.graph_mode == "FULL" and s.num_padded_tokens >= 3 for s in steps)

    engine.step()  # idle: one recording at a time
    assert made == num_first + 1
    engine.core.scheduler.reset_prefix_cache()
    tokens, _ = run(engine, 2)
    assert tokens == expected[2]

    while engine.core.use_idle_time():
        pass
    assert made == 16
    snapshot = engine.snapshot()
    assert (snapshot.num_graphs_recorded, snapshot.num_graphs) == (16, 16)
    engine.core.scheduler.reset_prefix_cache()
    tokens, steps = run(engine, 1)
    assert tokens == expected[1]
    assert {(s.graph_mode, s.graph_reason) for s in steps} == {("FULL", "")}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("no memory"), "not recorded for lack of memory"),
        # The driver's own memory, as torch reports it.
        (RuntimeError("CUDA error: out of memory"), "not recorded for lack of memory"),
        (RecordingError("it waits"), "cannot be recorded: it waits"),
    ],
)
def test_recordings_that_cannot_be_made_leave_steps_eager(
    error: Exception, reason: str, tiny_model_dir: ModelDir
) -> None:
    fails = False

    def recorder(operations: Callable[[], None]) -> Callable[[], None]:
        if fails:
            raise error
        return operations

    folder = tiny_model_dir("llama")
    engine = make_engine(folder, recorder)
    fails = True
    engine.step()
    assert gc.isenabled()
    assert not engine.core.use_idle_time()
    status = engine.core.executor.graph_status()
    assert status.num_recorded == status.num_graphs < 16
    tokens, steps = run(engine, 1)
    assert tokens == run(make_engine(folder, None), 1)[0]
    assert reason in {s.graph_reason for s in steps}


def test_any_other_failure_of_a_recording_is_raised(tiny_model_dir: ModelDir) -> None:
    fails = False

    def recorder(operations: Callable[[], None]) -> Callable[[], None]:
        if fails:
            raise RuntimeError("device-side assert triggered")
        return operations

    engine = make_engine(tiny_model_dir("llama"), recorder)
    fails = True
    with pytest.raises(RuntimeError, match="assert triggered"):
        engine.step()


@pytest.mark.gpu
def test_graphs_recorded_in_idle_moments_give_the_same_tokens(tiny_model_dir: ModelDir) -> None:
    def make(in_background: bool) -> SyncEngine:
        return SyncEngine(
            EngineConfig(
                model=str(tiny_model_dir("llama")),
                device="cuda",
                dtype="float32",
                max_num_seqs=20,
                max_num_batched_tokens=512,
                num_gpu_blocks_override=200,
                max_model_len=128,
                skip_tokenizer_init=True,
                capture_in_background=in_background,
            )
        )

    expected, _ = run(make(False), 1)
    engine = make(True)
    status = engine.core.executor.graph_status()
    assert 0 < status.num_recorded < status.num_graphs
    tokens, steps = run(engine, 1)
    assert tokens == expected
    assert {s.graph_mode for s in steps} == {"FULL"}, "larger recordings stand in"
    while engine.core.use_idle_time():
        engine.core.scheduler.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=2)
        engine.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6), params=params))
        while engine.has_unfinished:
            engine.step()
    status = engine.core.executor.graph_status()
    assert status.num_recorded == status.num_graphs
    engine.core.scheduler.reset_prefix_cache()
    tokens, steps = run(engine, 1)
    assert tokens == expected
    assert steps[-1].num_late_compiles == 0
