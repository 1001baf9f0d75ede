"""A mixed load for engines that must agree: prompts of many lengths arrive while others decode,
with all kinds of sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from termgen.engine.loop.engine import SyncEngine
from termgen.engine.schedule.invariants import check_scheduler
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "logit_bias": {5: 3.0, 8: -9.0}, "allowed_token_ids": range(3, 300)},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": -0.4, "logprobs": 0},
    {"temperature": 0.8, "min_p": 0.02, "frequency_penalty": 1.0, "logprobs": 20},
    {"temperature": 1.1, "min_tokens": 1, "logit_bias": {9: 4.0}, "repetition_penalty": 1.1},
]


def run_mixed_load(
    engine: SyncEngine,
    seed: int,
    *,
    num_requests: int,
    longest_prompt: int,
    most_tokens: int,
    tells_likeliest: bool = False,
) -> tuple[dict[str, list[int]], list[StepRecord]]:
    """Return every request's tokens and every step. Checks the scheduler's integrity after each.
    tells_likeliest: also the ranks and most likely tokens of the requests that ask for them, for
    engines whose logits are the same to the bit."""
    rng = np.random.default_rng(seed)
    ring = engine.core.bus.subscribe()
    outputs: dict[str, list[int]] = {}

    def step() -> None:
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            for entry in delta.logprobs or () if tells_likeliest else ():
                told = outputs.setdefault(f"{delta.request_id} likeliest", [])
                told += [entry.rank, *(top[0] for top in entry.top)]
        check_scheduler(engine.core.scheduler)

    for i in range(num_requests):
        max_tokens = int(rng.integers(1, most_tokens + 1))
        prompt = tuple(rng.integers(3, 500, int(rng.integers(1, longest_prompt + 1))).tolist())
        params = SamplingParams(
            max_tokens=max_tokens, seed=i, ignore_eos=True, **KINDS[i % len(KINDS)]
        )
        engine.add(GenerationRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
        for _ in range(int(rng.integers(0, 5))):
            step()
    while engine.has_unfinished:
        step()
    return outputs, [e for e in ring.drain() if isinstance(e, StepRecord)]
