"""Logit bias, allowed ids, bad words and prompt log-probabilities through the whole engine.

Compared with transformers, token by token, with the edits made by hand: however the steps are cut,
under preemption, with steps in flight, beside requests without edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from termgen.client import TokenLogprob
from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

NUM_TOKENS = 12


@dataclass
class Case:
    """A request and its expected answer."""

    prompt: list[int]
    params: SamplingParams
    bad: tuple[tuple[int, ...], ...] = ()
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None


def answer(model: PreTrainedModel, case: Case) -> None:
    """Greedy decoding with the edits made on a list of logits."""
    for _ in range(NUM_TOKENS):
        known = torch.tensor([case.prompt + case.tokens])
        logits = model(known).logits[0]
        if case.prompt_logprobs is None and case.params.prompt_logprobs is not None:
            scores = logits.log_softmax(-1)[:-1].gather(1, known[0, 1:, None])
            case.prompt_logprobs = scores[:, 0].tolist()
        last = logits[-1]
        if case.params.allowed_token_ids is not None:
            may = torch.zeros_like(last, dtype=torch.bool)
            may[list(case.params.allowed_token_ids)] = True
            last = last.masked_fill(~may, -torch.inf)
        for token_id, bias in case.params.bias_pairs:
            last[token_id] += bias
        for *before, forbidden in case.bad:
            if not before or case.tokens[-len(before) :] == before:
                last[forbidden] = -torch.inf
        case.tokens.append(int(last.argmax()))


@pytest.fixture(scope="module")
def cases(tiny_llama_dir: Path) -> list[Case]:
    rng = np.random.default_rng(7)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()
    vocab = model.config.vocab_size

    def prompt(length: int) -> list[int]:
        ids: list[int] = rng.integers(3, vocab, length).tolist()
        return ids

    def case(length: int, **params: Any) -> Case:
        bad = params.pop("bad", ())
        words = {"bad_words": ("as ids",)} if bad else {}
        common = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        return Case(prompt(length), SamplingParams(**common, **params, **words), bad)

    made = [
        case(9),
        case(33, allowed_token_ids=rng.integers(3, vocab, 20).tolist()),
        case(40, logit_bias={int(i): float(rng.normal(0, 4)) for i in rng.integers(3, vocab, 300)}),
        case(50, prompt_logprobs=3),
        case(17),
        case(21, prompt_logprobs=0, logit_bias={8: 5.0}),
        case(1, prompt_logprobs=1),
    ]
    with torch.inference_mode():
        for one in made:
            answer(model, one)
        # Forbid the model's choice: one token, and two that follow each other.
        for length in (12, 34):
            plain = case(length)
            answer(model, plain)
            wrote = plain.tokens
            bad = ((wrote[0],), tuple(wrote[3:5]), tuple(wrote[1:4]))
            again = case(1, bad=bad)
            again.prompt = plain.prompt
            answer(model, again)
            assert again.tokens != wrote
            made += [plain, again]
    twin = case(1)
    twin.prompt, twin.tokens = made[3].prompt, made[3].tokens
    return [twin, *made]  # the twin leaves its prompt in the prefix cache


@pytest.fixture
def engines(tiny_llama_dir: Path) -> Iterator[Callable[..., SyncEngine]]:
    made: list[SyncEngine] = []

    def make(**options: Any) -> SyncEngine:
        options = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 128, **options}
        options.setdefault("num_gpu_blocks_override", 200)
        model = str(tiny_llama_dir)
        made.append(SyncEngine(EngineConfig(model=model, skip_tokenizer_init=True, **options)))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def check(engine: SyncEngine, cases: list[Case]) -> None:
    for i, case in enumerate(cases):
        engine.add(
            GenerationRequest(
                request_id=str(i),
                prompt_token_ids=tuple(case.prompt),
                params=case.params,
                bad_token_ids=case.bad,
            )
        )
    tokens: list[list[int]] = [[] for _ in cases]
    scores: dict[int, tuple[TokenLogprob, ...]] = {}
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            index = int(delta.request_id)
            if delta.prompt_logprobs is not None:
                assert index not in scores, "they come once"
                assert not tokens[index], "and not after the first token"
                scores[index] = delta.prompt_logprobs
            tokens[index] += delta.token_ids
        check_scheduler(engine.core.scheduler)
    assert tokens == [case.tokens for case in cases]
    wanted = {i for i, case in enumerate(cases) if case.params.prompt_logprobs is not None}
    assert scores.keys() == wanted
    for i, entries in scores.items():
        case = cases[i]
        assert [e.token_id for e in entries] == case.prompt
        assert np.isnan(entries[0].logprob) and entries[0].rank == 0 and not entries[0].top
        got = [e.logprob for e in entries[1:]]
        np.testing.assert_allclose(got, case.prompt_logprobs, atol=1e-3)
        for entry in entries[1:]:
            assert len(entry.top) == case.params.prompt_logprobs
            best = [value for *_, value in entry.top]
            assert best == sorted(best, reverse=True)
            if entry.rank <= len(best):
                assert best[entry.rank - 1] == entry.logprob, "the very same number"
    assert engine.snapshot().num_used_blocks == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True},
    "chunked": {"max_num_batched_tokens": 16, "async_scheduling": True},
    "preempted": {"num_gpu_blocks_override": 9, "block_size": 16},
    "async-preempted": {
        "num_gpu_blocks_override": 9,
        "block_size": 16,
        "async_scheduling": True,
    },
    "no-cache": {"enable_prefix_caching": False, "long_prefill_token_threshold": 10},
}
ON_A_GPU = ("async", "async-preempted", "no-cache")  # each start records graphs


@pytest.mark.parametrize(
    ("device", "options"),
    [
        *(pytest.param("cpu", options, id=f"cpu-{name}") for name, options in OPTIONS.items()),
        *(
            pytest.param("cuda", OPTIONS[name], id=f"cuda-{name}", marks=pytest.mark.gpu)
            for name in ON_A_GPU
        ),
    ],
)
def test_edits_and_prompt_logprobs_equal_transformers(
    engines: Callable[..., SyncEngine], cases: list[Case], device: str, options: dict[str, Any]
) -> None:
    engine = engines(device=device, **options)
    check(engine, cases)
    check(engine, cases[::-1])  # other slots, and a warm prefix cache
    if options.get("num_gpu_blocks_override") == 9:
        assert engine.snapshot().num_preemptions > 0


def test_completions_of_one_prompt_compute_it_once(engines: Callable[..., SyncEngine]) -> None:
    """Each completion samples with a seed of its own, the same one every time."""
    engine = engines(device="cpu", block_size=16, async_scheduling=True)
    prompt = tuple(range(3, 103))
    params = SamplingParams(n=6, seed=11, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    request = GenerationRequest(request_id="a", prompt_token_ids=prompt, params=params)

    def run(request: GenerationRequest) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in range(request.params.n)]
        engine.add(request)
        while engine.has_unfinished:
            for delta in engine.step():
                outputs[delta.index] += delta.token_ids
        return outputs

    first = run(request)
    assert engine.core.scheduler.stats.prompt_tokens == 100 + 5 * 4, "4 of a block that is not full"
    assert len({tuple(tokens) for tokens in first}) == 6
    assert run(request) == first
    alone = SamplingParams(seed=14, max_tokens=8, ignore_eos=True)
    fourth = run(GenerationRequest(request_id="b", prompt_token_ids=prompt, params=alone))
    assert fourth == [first[3]], "completion i draws as seed + i does alone"
