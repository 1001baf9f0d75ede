"""Constrained rows on the device: every way of running a step gives the tokens of every other.

The grammar is a rule over token ids, so no tokenizer and no grammar engine is needed; on a GPU the
same requests run through real recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constrained_harness import FakeGrammar, make_late

from termgen.config import EngineConfig
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

VOCAB = 512
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 2, "logit_bias": {40: 2.0}},
    {"temperature": 0.0, "logprobs": 2, "min_tokens": 3},
]
Answers = dict[str, list[int]]


def make_engine(folder: Path, **options: Any) -> SyncEngine:
    return SyncEngine(
        EngineConfig(
            **{
                "model": str(folder),
                "device": "cpu",
                "threads": 1,
                "dtype": "float32",
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "max_model_len": 128,
                "num_gpu_blocks_override": 60,
                "block_size": 16,
                "skip_tokenizer_init": True,
                **options,
            }
        )
    )


def record(engine: SyncEngine, **sizes: tuple[int, ...]) -> SyncEngine:
    """Run steps as recordings of these sizes."""
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    dispatcher = CudaGraphDispatcher(
        sizes.get("full", ()), piecewise=sizes.get("piecewise", ()), max_num_seqs=8
    )
    runner.graphs = runner.make_graphs(dispatcher)
    runner.graphs.record_all(lambda operations: operations, lambda done: None)
    return engine


def use_kernels(engine: SyncEngine) -> SyncEngine:
    engine.core.executor._runner.use_fused_sampler(8)  # type: ignore[attr-defined]
    return engine


def run(engine: SyncEngine, *, on_time: float = 1.0) -> tuple[Answers, list[StepRecord]]:
    """Run 18 requests, two of three with a grammar. Returns their tokens, and every step. on_time:
    the share of masks that arrive in time for steps ahead."""
    rng = np.random.default_rng(7)
    make_late(engine.core, 8, on_time)
    ring = engine.core.bus.subscribe()
    answers: Answers = {}
    grammars: dict[str, FakeGrammar] = {}

    def step() -> None:
        for delta in engine.step():
            assert delta.error is None, delta.error
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        check_scheduler(engine.core.scheduler)

    for i in range(18):
        grammar = FakeGrammar(int(rng.integers(2, 14)), vocab=VOCAB, modulus=40 + i)
        grammars[str(i)] = grammar
        kind = {**KINDS[i % len(KINDS)], "seed": i, "ignore_eos": True}
        engine.add(
            GenerationRequest(
                request_id=str(i),
                prompt_token_ids=tuple(rng.integers(3, 500, int(rng.integers(1, 40))).tolist()),
                params=SamplingParams(max_tokens=int(rng.integers(3, 20)), **kind),
                grammar=grammar if i % 3 else None,
            )
        )
        for _ in range(int(rng.integers(0, 4))):
            step()
    while engine.has_unfinished:
        step()
    for name, tokens in answers.items():
        if int(name) % 3:
            assert len(tokens) <= grammars[name].length
            for end, token in enumerate(tokens):
                assert token in grammars[name].allowed(tokens[:end]), (name, end)
    assert engine.snapshot().num_used_blocks == 0
    num_late = engine.core.scheduler.stats.num_late_masks
    assert on_time == 1.0 or num_late > 5, "hardly any mask was late"
    engine.shutdown()
    return answers, [e for e in ring.drain() if isinstance(e, StepRecord)]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[[str], Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    answers, _ = run(make_engine(folder, async_scheduling=False))
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"max_num_batched_tokens": 9, "async_scheduling": True},
        {"num_gpu_blocks_override": 8, "max_model_len": 64, "async_scheduling": True},
        {"enable_prefix_caching": False, "max_num_seqs": 1},
    ],
    ids=["async", "chunked", "preempted", "alone"],
)
def test_however_steps_are_planned_the_answers_are_the_same(
    folder: Path, expected: Answers, options: dict[str, Any]
) -> None:
    answers, steps = run(make_engine(folder, **options))
    assert answers == expected
    assert (steps[-1].num_preemptions > 0) == ("num_gpu_blocks_override" in options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_recorded_steps_give_the_answers_of_eager_ones(
    folder: Path, expected: Answers, asynchronous: bool
) -> None:
    """Rows under a grammar are part of whole recorded steps."""
    full = record(make_engine(folder, async_scheduling=asynchronous), full=(1, 2, 4, 8))
    answers, steps = run(full)
    assert answers == expected
    assert {s.graph_reason for s in steps if s.graph_mode != "FULL"} == {
        "a prompt is being computed"
    }
    assert sum(s.graph_mode == "FULL" for s in steps) > 20
    pieces = record(make_engine(folder, async_scheduling=asynchronous), piecewise=(8, 16, 64))
    answers, steps = run(pieces)
    assert answers == expected and "PIECEWISE" in {s.graph_mode for s in steps}


@pytest.mark.parametrize("sizes", [{}, {"full": (1, 2, 4, 8)}, {"piecewise": (8, 16, 64)}])
def test_rows_whose_masks_are_late_say_what_they_say_in_time(
    folder: Path, expected: Answers, sizes: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine(folder, async_scheduling=True)
    answers, _ = run(record(engine, **sizes) if sizes else engine, on_time=0.7)
    assert answers == expected


def test_the_kernels_give_the_answers_of_torch(folder: Path, expected: Answers) -> None:
    pytest.importorskip("triton")
    from triton_device import IS_INTERPRETED, require_triton

    require_triton()
    if IS_INTERPRETED:
        recorded = record(use_kernels(make_engine(folder, async_scheduling=True)), full=(2, 8))
        assert run(recorded)[0] == expected


@pytest.mark.gpu
def test_on_a_gpu_graphs_steps_ahead_and_preemption_change_nothing(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cuda"}
    eager = make_engine(folder, **options, enforce_eager=True, async_scheduling=False)
    expected, _ = run(eager)
    answers, steps = run(make_engine(folder, **options))
    assert answers == expected
    late, late_steps = run(make_engine(folder, **options), on_time=0.7)
    assert late == expected and late_steps[-1].num_late_compiles == 0
    assert steps[-1].num_late_compiles == 0
    assert "FULL" in {s.graph_mode for s in steps}
    small = make_engine(folder, **options, num_gpu_blocks_override=8, max_model_len=64)
    answers, steps = run(small)
    assert answers == expected and steps[-1].num_preemptions > 0


@pytest.mark.gpu
def test_a_gpu_without_kernels_gets_masks_before_its_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch samples there, which cannot wait for masks: rows join when all their tokens landed."""
    for module in ("request_state", "model_runner"):
        name = f"termgen.engine.device.runner.{module}.why_unusable"
        monkeypatch.setattr(name, lambda device, dtype=None: "not in this test")
    options: dict[str, Any] = {"device": "cuda", "enforce_eager": True}
    expected, _ = run(make_engine(folder, **options, async_scheduling=False))
    engine = make_engine(folder, **options)
    assert not engine.core.executor.waits_for_masks
    answers, _ = run(engine)
    assert answers == expected
    recorded, steps = run(make_engine(folder, device="cuda"))
    assert recorded == expected and "FULL" in {step.graph_mode for step in steps}
