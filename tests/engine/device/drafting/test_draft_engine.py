"""Drafts in a real engine: the same tokens, in fewer steps, for every family and option."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.errors import ConfigError
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

FAMILIES = ("llama", "gemma3_text", "gemma3n_text", "gpt_oss", "qwen3_5_text", "qwen3_next")
"""Plain, with windows, with layers that share keys and values, with sinks and experts, and with
recurrent layers."""
NUM_TOKENS, NUM_DRAFTS, VOCAB = 30, 4, 512
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.95},
    {"temperature": 0.0, "logprobs": 2, "min_tokens": 20},
    {"temperature": 0.0, "logit_bias": {5: 2.0}},
    {"temperature": 0.7, "seed": 4, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 5, "stop_token_ids": tuple(range(0, 512, 37))},
)

NAMES = "ngram, mtp, eagle3, dflash, assistant, draft_model, none"
Outputs = list[tuple[list[int], list[float]]]
Engines = Callable[..., SyncEngine]


def engine_of(folder: Path, **options: Any) -> SyncEngine:
    fixed = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "skip_tokenizer_init": True}
    return SyncEngine(EngineConfig(model=str(folder), **fixed, **options))


@pytest.fixture
def engines() -> Iterator[Engines]:
    made: list[SyncEngine] = []

    def make(folder: Path, **options: Any) -> SyncEngine:
        made.append(engine_of(folder, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    shared = rng.integers(3, VOCAB, 40).tolist()
    lengths = (1, 9, 17, 33, 50, 70)
    return [shared[: n // 2] + rng.integers(3, VOCAB, n - n // 2).tolist() for n in lengths]


def run(engine: SyncEngine, kinds: Sequence[dict[str, Any]] = KINDS) -> Outputs:
    for i, (prompt, kind) in enumerate(zip(prompts(), kinds, strict=True)):
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind)
        engine.add(
            GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), params=params)
        )
    found: Outputs = [([], []) for _ in kinds]
    while engine.has_unfinished:
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens, logprobs = found[int(delta.request_id)]
            tokens += delta.token_ids
            logprobs += [entry.logprob for entry in delta.logprobs or ()]
        check_scheduler(engine.core.scheduler)
    return found


def guess_from(engine: SyncEngine, known: Outputs, num_right: Callable[[int], int]) -> None:
    """Have the engine guess what is known to follow. num_right: of the guesses behind so many
    tokens, those that are right."""
    texts = [(*prompt, *tokens) for prompt, (tokens, _) in zip(prompts(), known, strict=True)]

    def guess(tokens: np.ndarray) -> tuple[np.ndarray, int]:
        seen = tuple(tokens.tolist())
        rest = next((t[len(seen) :] for t in texts if t[: len(seen)] == seen), ())
        drafts = np.asarray(rest[:NUM_DRAFTS], np.int32)
        drafts[num_right(len(seen)) :] = (drafts[num_right(len(seen)) :] + 1) % VOCAB
        return drafts, 1

    drafter: Any = engine.core.executor._runner.drafts.drafter  # type: ignore[attr-defined]
    drafter.guess = guess
    drafter._payoff.choose = lambda slots, num_found, kinds, num_rows: num_found


@pytest.fixture(scope="module")
def answers(tiny_model_dir: Callable[..., Path]) -> Callable[[str], tuple[Path, Outputs]]:
    """A family's tiny model, and what it says without drafts."""

    @functools.cache
    def make(family: str) -> tuple[Path, Outputs]:
        folder = tiny_model_dir(family)
        engine = engine_of(folder)
        found = run(engine)
        engine.shutdown()
        return folder, found

    return make


def assert_same(found: Outputs, expected: Outputs) -> None:
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine[0] == theirs[0], i
        assert mine[1] == pytest.approx(theirs[1], abs=1e-4), i


DRAFTS = {"speculative_config": f'{{"num_speculative_tokens": {NUM_DRAFTS}}}'}
OPTIONS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 24},
    "async": {"async_scheduling": True, "max_num_batched_tokens": 64},
    "no cache": {"enable_prefix_caching": False, "debug": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same(
    answers: Callable[[str], tuple[Path, Outputs]], engines: Engines, family: str
) -> None:
    folder, expected = answers(family)
    engine = engines(folder, **DRAFTS)
    guess_from(engine, expected, lambda length: length % (NUM_DRAFTS + 1))
    for _ in range(2):  # the second time over a warm cache
        assert_same(run(engine), expected)
    stats = engine.core.scheduler.stats
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_nothing(
    answers: Callable[[str], tuple[Path, Outputs]], engines: Engines, name: str, family: str
) -> None:
    folder, expected = answers(family)
    engine = engines(folder, **DRAFTS, **OPTIONS[name])
    guess_from(engine, expected, lambda length: length % 3)
    assert_same(run(engine), expected)
    assert engine.core.scheduler.stats.num_accepted_tokens > 50


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_preempted_requests_say_the_same(
    answers: Callable[[str], tuple[Path, Outputs]], engines: Engines, family: str
) -> None:
    folder, expected = answers(family)
    few = {"num_gpu_blocks_override": 12, "block_size": 16, "max_model_len": 128}
    engine = engines(folder, **DRAFTS, **few, async_scheduling=True)
    guess_from(engine, expected, lambda length: length % 3)
    assert_same(run(engine), expected)
    stats = engine.core.scheduler.stats
    assert stats.num_preemptions > 0 and stats.num_accepted_tokens > 20


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_right_guesses_all_stay(
    tiny_model_dir: Callable[..., Path], engines: Engines, family: str
) -> None:
    """An answer given before, as drafts of itself: what a wrong position, mask, KV or state would
    show."""
    folder = tiny_model_dir(family)
    kinds = [kind for kind in KINDS if "presence_penalty" not in kind]
    kinds += [{"temperature": 0.0}] * (len(KINDS) - len(kinds))
    expected = run(engines(folder), kinds)
    engine = engines(folder, **DRAFTS)
    guess_from(engine, expected, lambda length: NUM_DRAFTS)
    assert_same(run(engine, kinds), expected)
    stats = engine.core.scheduler.stats
    # A draft that is the answer's end counts as drawn: nothing is behind it.
    assert stats.num_draft_tokens - 1 <= stats.num_accepted_tokens
    assert stats.num_accepted_tokens > 100


def test_the_engines_own_guesses_find_text_that_repeats(
    tiny_llama_dir: Path, engines: Engines
) -> None:
    """A bias makes a small model say the same few tokens over and over."""
    kinds = [{"temperature": 0.0, "logit_bias": {i: 8.0 for i in range(20, 23)}}] * len(KINDS)
    expected = run(engines(tiny_llama_dir), kinds)
    engine = engines(tiny_llama_dir, speculative_config="ngram")
    drafter: Any = engine.core.executor._runner.drafts.drafter  # type: ignore[attr-defined]
    drafter._payoff.note_step = lambda num_tokens, took_ns: None  # whatever else the machine does
    assert_same(run(engine, kinds), expected)
    stats = engine.core.scheduler.stats
    assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", f"JSON object or one of {NAMES}"),
        ("[3]", "JSON object"),
        (
            '{"method": "medusa"}',
            f"method must be one of {NAMES}, not 'medusa'",
        ),
        ('{"method": "eagle3"}', "method eagle3 needs model, the place of its files"),
        ("eagle3", "JSON object"),
        ('{"method": "dflash"}', "method dflash needs model, the place of its files"),
        ('{"method": "eagle3", "model": 3}', "model must be the place of a drafter, not 3"),
        ('{"num_speculative_tokens": 0}', "between 1 and 16, not 0"),
        ('{"num_speculative_tokens": true}', "an integer between 1 and 16"),
        ('{"num_speculative_tokens": 99}', "between 1 and 16, not 99"),
        (
            '{"method": "ngram", "model": "x"}',
            "model is for eagle3, dflash, assistant, draft_model; ngram has none",
        ),
        ('{"draft_tp": 2}', "'draft_tp' is not known"),
        ('{"prompt_lookup_min": 9}', "prompt_lookup_min (9) is more than prompt_lookup_max (8)"),
    ],
)
def test_a_wrong_setting_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(speculative_config=text)
    assert words in str(refused.value) and refused.value.param == "speculative_config"
