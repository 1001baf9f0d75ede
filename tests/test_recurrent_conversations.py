"""Conversations that grow turn by turn with a model that has recurrent layers: each turn reads only
what is new, and says what it says without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from termgen.config import EngineConfig
from termgen.engine.loop.engine import SyncEngine
from termgen.vocabulary.request import GenerationRequest
from termgen.vocabulary.sampling_params import SamplingParams

TURNS = 12
TOOLS = 700
"""Tokens of the system prompt and the tools of an agent."""
RESULT = 25
"""Tokens of what a tool answers, or a user asks."""
ANSWER = 20
NUM_DRAFTS = 4
GENERATION_PROMPT = [7, 8, 9]
"""What asks for an answer, and is not in the next prompt."""

Engines = Callable[..., SyncEngine]


@pytest.fixture
def engines(tiny_model_dir: Callable[..., Path]) -> Iterator[Engines]:
    folder = tiny_model_dir("qwen3_5_text", max_position_embeddings=4096)
    made: list[SyncEngine] = []

    def make(**options: object) -> SyncEngine:
        settings = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 16}
        settings |= {"skip_tokenizer_init": True, "kv_cache_gib": 0.05, **options}
        made.append(SyncEngine(EngineConfig(model=str(folder), **settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


class Talk:
    """One conversation. Two of the same seed say the same as long as their engines do."""

    def __init__(self, engine: SyncEngine, name: str, seed: int) -> None:
        self.engine, self.name = engine, name
        self.rng = np.random.default_rng(seed)
        self.tokens: list[int] = np.random.default_rng(1).integers(10, 500, TOOLS).tolist()
        self.num_prompt = self.num_cached = 0
        self.answers: list[list[int]] = []

    def turn(self, *, stop: tuple[int, ...] = ()) -> None:
        self.tokens += self.rng.integers(10, 500, RESULT).tolist()
        prompt = self.tokens + GENERATION_PROMPT
        params = SamplingParams(
            temperature=0.0, max_tokens=ANSWER, ignore_eos=True, stop_token_ids=stop
        )
        request_id = f"{self.name} {len(self.answers)}"
        before = self.engine.snapshot()
        self.engine.add(
            GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params)
        )
        answer: list[int] = []
        while self.engine.has_unfinished:
            for delta in self.engine.step():
                assert delta.error is None, delta.error
                answer += delta.token_ids
        after = self.engine.snapshot()
        self.num_prompt += len(prompt)
        self.num_cached += after.prefix_hit_tokens - before.prefix_hit_tokens
        self.answers.append(answer)
        self.tokens += answer


def test_a_long_conversation_reads_only_what_is_new(engines: Engines) -> None:
    talk = Talk(engines(async_scheduling=True), "cached", 3)
    cold = Talk(engines(enable_prefix_caching=False), "cold", 3)
    for turn in range(TURNS):
        # Some answers end in the middle, by a token that was said before.
        stop = tuple(cold.answers[-1][5:6]) if turn % 5 == 4 else ()
        for each in (talk, cold):
            each.turn(stop=stop)
        assert talk.answers == cold.answers, turn
    assert cold.num_cached == 0
    assert talk.num_cached >= 0.9 * talk.num_prompt - TOOLS, "the tools are read once"
    print("cached", talk.num_cached / talk.num_prompt)


def guess_from(engine: SyncEngine, cold: Talk) -> None:
    """Have an engine guess what another one said, some tokens rightly."""

    def guess(tokens: np.ndarray) -> tuple[np.ndarray, int]:
        behind = len(tokens) - len(GENERATION_PROMPT)
        rest = np.asarray(cold.tokens[behind : behind + NUM_DRAFTS], np.int32)
        rest[len(tokens) % 4 :] ^= 1
        return rest, 1

    drafter: Any = engine.core.executor._runner.drafts.drafter  # type: ignore[attr-defined]
    drafter.guess = guess
    drafter._payoff.choose = lambda slots, num_found, kinds, num_rows: num_found


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_conversation_with_drafts_reads_only_what_is_new(
    engines: Engines, is_async: bool
) -> None:
    drafts = f'{{"num_speculative_tokens": {NUM_DRAFTS}}}'
    engine = engines(async_scheduling=is_async, speculative_config=drafts)
    talk, cold = Talk(engine, "cached", 3), Talk(engines(enable_prefix_caching=False), "cold", 3)
    guess_from(engine, cold)
    for turn in range(TURNS):
        stop = tuple(cold.answers[-1][5:6]) if turn % 5 == 4 else ()
        for each in (cold, talk):
            each.turn(stop=stop)
        assert talk.answers == cold.answers, turn
        if turn == TURNS // 2:  # its states and copies are gone, and made again
            engine.sleep()
            engine.wake_up()
    assert talk.num_cached >= 0.9 * talk.num_prompt - 2 * TOOLS, "the tools are read twice"
    stats = engine.core.scheduler.stats
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8


def test_two_agents_in_turns_and_an_edited_question(engines: Engines) -> None:
    engine = engines()
    one, two = Talk(engine, "one", 4), Talk(engine, "two", 5)
    for _ in range(6):
        one.turn()
        two.turn()
    kept = list(one.tokens)
    one.turn()
    first = one.num_cached
    one.tokens, one.rng = kept, np.random.default_rng(9)
    one.turn()
    assert one.num_cached - first >= len(kept) - ANSWER - RESULT - 32, "up to where they part"
    cold = Talk(engines(enable_prefix_caching=False), "cold", 4)
    for _ in range(7):
        cold.turn()
    assert one.answers[:7] == cold.answers
