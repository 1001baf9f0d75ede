"""Recorded steps with drafts: every row has as many places, which the host fills without seeing.

A recorder that simply runs the operations again replaces CUDA graphs, as in `test_full_graphs`, and
drafts are looked up with the torch operations or with the kernels, interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from constrained_harness import FakeGrammar
from mixed_load import check_scheduler
from triton_device import require_triton

require_triton()

from termgen.config import EngineConfig  # noqa: E402
from termgen.engine.device.drafting.base import DraftedRows  # noqa: E402
from termgen.engine.device.drafting.on_device import DeviceDrafter  # noqa: E402
from termgen.engine.device.drafting.prompt_lookup import PromptLookup  # noqa: E402
from termgen.engine.device.runner.dispatch import CudaGraphDispatcher  # noqa: E402
from termgen.engine.device.runner.draft_steps import DraftSteps  # noqa: E402
from termgen.engine.loop.engine import SyncEngine  # noqa: E402
from termgen.vocabulary.events import StepRecord  # noqa: E402
from termgen.vocabulary.request import GenerationRequest, IntArray  # noqa: E402
from termgen.vocabulary.sampling_params import SamplingParams  # noqa: E402
from termgen.vocabulary.step import StepPlan  # noqa: E402

NUM_DRAFTS, MAX_NUM_SEQS, MAX_LEN = 4, 4, 96
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.3, "frequency_penalty": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.01, "min_tokens": 20},
    {"temperature": 0.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {7: 1.0}, "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": range(3, 9)},
]
BOUND: list[dict[str, Any]] = [
    {"temperature": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 9, "logit_bias": {7: 1.0}},
]
"""Parameters of requests under a grammar."""
RUNS = {*range(2, 9), 11, *range(14, 16), *range(20, 32)}
"""Indices of the tokens that it forces."""


class AlwaysDrafter(DeviceDrafter):
    """Takes all drafts that a step may have, at times half of them, whatever they cost here."""

    def places(self, plan: StepPlan, state: DraftedRows, lengths: Sequence[int]) -> IntArray:
        chosen = lengths[-1 if plan.step_id % 5 else 0] if lengths else 0
        return np.full(plan.num_rows, chosen, np.int32)


def make_engine(
    folder: Path, *, drafts: str = "", asynchronous: bool = False, recorded: bool = True
) -> SyncEngine:
    """drafts: "torch" or "kernels" for what finds and keeps them; none without."""
    engine = SyncEngine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            threads=1,
            max_num_seqs=MAX_NUM_SEQS,
            num_gpu_blocks_override=18,
            block_size=8,
            max_model_len=MAX_LEN,
            skip_tokenizer_init=True,
            async_scheduling=asynchronous,
            speculative_config='{"method": "ngram", "num_speculative_tokens": 4}'
            if drafts
            else None,
        )
    )
    runner = engine.core.executor._runner  # type: ignore[attr-defined]
    if drafts:
        by_kernels = drafts == "kernels"
        lookup = PromptLookup(
            shortest=1,
            longest=3,
            max_rows=MAX_NUM_SEQS,
            max_model_len=MAX_LEN,
            device=torch.device("cpu"),
            by_kernels=by_kernels,
        )
        drafter = AlwaysDrafter(lookup, NUM_DRAFTS, num_slots=MAX_NUM_SEQS)
        runner.drafts = DraftSteps(drafter, max_num_batched_tokens=32)
        runner.state.fused = runner.buffers.fused = by_kernels
        if by_kernels:
            runner.use_fused_sampler(32)
        dispatcher = CudaGraphDispatcher((), disabled_reason="asked for")
        if recorded:
            drafted = [(1, 2), (3, 2), (MAX_NUM_SEQS, 2), (2, 4), (MAX_NUM_SEQS, 4)]
            dispatcher = CudaGraphDispatcher(
                (2, MAX_NUM_SEQS), mixed=(24,), drafted=drafted, max_num_seqs=MAX_NUM_SEQS
            )
        runner.graphs = runner.make_graphs(dispatcher)
        runner.graphs.record_all(lambda operations: operations, lambda done: None)
    return engine


def force(engine: SyncEngine, most: int) -> None:
    """Have at most so many tokens that a grammar forces in a row's step."""
    constraints = engine.core.scheduler.constraints
    constraints.most_forced = constraints._filler.most_forced = most


def generate(
    engine: SyncEngine, *, with_grammars: bool = False
) -> tuple[dict[str, list[Any]], list[StepRecord]]:
    """The tokens of each request with ranks and likeliest tokens; and the steps."""
    events = engine.core.bus.subscribe()
    rng = np.random.default_rng(4)
    outputs: dict[str, list[Any]] = {}
    for i, kind in enumerate([*KINDS, *BOUND] if with_grammars else KINDS):
        params = SamplingParams(max_tokens=20 + 7 * (i % 7), seed=i, ignore_eos=i % 2 == 0, **kind)
        prompt = tuple(np.tile(rng.integers(3, 500, 5 + i), 2).tolist())
        grammar = None
        if kind in BOUND:
            grammar = FakeGrammar(27 + i, vocab=512, modulus=40 + i, forced=RUNS)
        engine.add(
            GenerationRequest(
                request_id=str(i), prompt_token_ids=prompt, params=params, grammar=grammar
            )
        )
    while engine.has_unfinished:
        deltas = engine.step()
        check_scheduler(engine.core.scheduler)
        for delta in deltas:
            assert delta.error is None, delta.error
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            for entry in delta.logprobs or ():
                top = [one[0] for one in entry.top]
                outputs.setdefault(f"{delta.request_id} likeliest", []).append((entry.rank, top))
    return outputs, [event for event in events.drain() if isinstance(event, StepRecord)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("drafts", "recorded"), [("torch", True), ("torch", False), ("kernels", True)]
)
def test_steps_with_drafts_give_the_tokens_of_those_without(
    tiny_model_dir: Callable[..., Path], drafts: str, recorded: bool, asynchronous: bool
) -> None:
    folder = tiny_model_dir("llama")
    expected, _ = generate(make_engine(folder))
    engine = make_engine(folder, drafts=drafts, asynchronous=asynchronous, recorded=recorded)
    found, steps = generate(engine)
    assert found == expected
    stats = engine.core.scheduler.stats
    assert 30 < stats.num_accepted_tokens <= stats.num_draft_tokens
    decodes = [s for s in steps if not s.num_prefill_rows]
    modes = {s.graph_mode for s in decodes if s.num_sampled_tokens > s.num_decode_rows}
    assert modes == ({"FULL"} if recorded else {"NONE"})
    assert any(s.num_preemptions for s in steps) and {s.num_prefill_rows > 0 for s in steps} == {
        True,
        False,
    }


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("drafts", "recorded"), [("torch", True), ("torch", False), ("kernels", True)]
)
def test_what_grammars_force_is_part_of_steps_with_drafts(
    tiny_model_dir: Callable[..., Path], drafts: str, recorded: bool, asynchronous: bool
) -> None:
    folder = tiny_model_dir("llama")
    plain = make_engine(folder)
    force(plain, 0)
    expected, _ = generate(plain, with_grammars=True)
    engine = make_engine(folder, drafts=drafts, asynchronous=asynchronous, recorded=recorded)
    force(engine, NUM_DRAFTS)
    found, steps = generate(engine, with_grammars=True)
    assert found == expected
    stats = engine.core.scheduler.stats
    assert stats.num_forced_tokens > 10 and stats.num_accepted_tokens > 30
    drafted = [s for s in steps if not s.num_prefill_rows]
    modes = {s.graph_mode for s in drafted if s.num_sampled_tokens > s.num_decode_rows}
    assert modes == ({"FULL"} if recorded else {"NONE"})
