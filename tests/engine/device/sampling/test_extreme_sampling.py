"""The most extreme sampling parameters, through the whole engine on the CPU.

Each batch is one step's rows together: none of them may fail, sample a token that it forbade
itself, or change a token of its neighbour's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.errors import RequestError
from termgen.vocabulary.request import FinishReason, GenerationRequest
from termgen.vocabulary.sampling.row import SMALLEST_POSITIVE
from termgen.vocabulary.sampling_params import GREEDY_EPSILON, SamplingParams

VOCAB = 512
NUM_BATCHES = 60
ROWS = 5
BARELY_BELOW_ONE = 1 - 2.0**-24
EXTREMES: dict[str, list[Any]] = {
    "temperature": [0.0, 5e-324, 9.9999999e-6, GREEDY_EPSILON, 1.0, 2.0],
    "top_p": [SMALLEST_POSITIVE, 1e-30, 1e-8, 0.5, BARELY_BELOW_ONE, 1 - 2.0**-53, 1.0],
    "top_k": [0, 1, 40, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1],
    "min_p": [0.0, 5e-324, 1e-46, 1e-45, 1e-30, BARELY_BELOW_ONE, 1.0],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "repetition_penalty": [SMALLEST_POSITIVE, 1e-30, 0.5, 1.0, 10.0],
    "presence_penalty": [-2.0, -5e-324, 0.0, 2.0],
    "frequency_penalty": [-2.0, 5e-324, 0.0, 2.0],
    "min_tokens": [0, 1, 4],
    "stop_token_ids": [(), (0,), tuple(range(VOCAB - 128, VOCAB))],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "logit_bias": [{}, {3: -1e300}, {5: 1e300, 6: 5e-324}, dict.fromkeys(range(VOCAB), -100.0)],
    "allowed_token_ids": [None, (7,), (0, VOCAB - 1), tuple(range(3, 60)), tuple(range(VOCAB))],
}


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[SyncEngine]:
    started = SyncEngine(
        EngineConfig(
            model=str(tiny_llama_dir),
            device="cpu",
            dtype="float32",
            threads=1,
            kv_cache_gib=0.01,
            max_num_seqs=ROWS + 1,
            max_model_len=128,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
    )
    yield started
    started.shutdown()


def answers(engine: SyncEngine, rows: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """The tokens of each row; all rows must end regularly."""
    for i, (prompt, params) in enumerate(rows):
        engine.add(
            GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), params=params)
        )
    tokens: list[list[int]] = [[] for _ in rows]
    ends: dict[int, FinishReason] = {}
    while engine.has_unfinished:
        for delta in engine.step():
            index = int(delta.request_id)
            assert delta.error is None, (rows[index][1], delta.error)
            tokens[index] += delta.token_ids
            if delta.finish_reason is not None:
                ends[index] = delta.finish_reason
    assert set(ends.values()) <= {FinishReason.STOP, FinishReason.LENGTH}, ends
    assert len(ends) == len(rows)
    return tokens


def test_no_extreme_fails_or_changes_a_neighbour(engine: SyncEngine) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))]

    def extremes() -> SamplingParams:
        names = rng.sample(sorted(EXTREMES), rng.randint(1, 5))
        wanted = {name: rng.choice(EXTREMES[name]) for name in names}
        return SamplingParams(max_tokens=4, ignore_eos=True, **wanted)

    for _ in range(NUM_BATCHES):
        neighbour = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(1000),
            max_tokens=4,
            ignore_eos=True,
        )
        row = (prompt(), neighbour)
        [alone] = answers(engine, [row])
        batch = [row, *((prompt(), extremes()) for _ in range(ROWS))]
        together = answers(engine, batch)
        assert together[0] == alone, [params.describe() for _, params in batch]
        for (_, params), tokens in zip(batch, together, strict=True):
            allowed = params.allowed_token_ids
            # If no token is allowed at all, one is sampled anyway: its stop tokens too soon.
            if allowed is not None and not set(allowed) <= set(params.stop_token_ids):
                assert set(tokens) <= set(allowed), params


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-46, 1e-45, SMALLEST_POSITIVE / 2])
def test_what_a_device_may_take_for_zero_is_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=rf"{name} must be in \(0, ") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
