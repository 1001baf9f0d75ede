"""Branching from a token with a real engine: its prompt, and the tokens read."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from termgen.client import ChatPrompt, Prompt, TokenDelta
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.tui.chat.state.answer_branch import branch_at, read_branch
from termgen.tui.chat.state.answer_tokens import (
    AnswerTokens,
    WrittenTokens,
    score_text,
    score_written,
)
from termgen.tui.chat.state.thoughts import read_answer
from termgen.vocabulary.sampling_params import SamplingParams

ASKED = ChatPrompt([{"role": "user", "content": "Hello, how are you?"}])


@pytest.fixture
async def engine(tiny_llama_dir: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", kv_cache_gib=0.01, threads=1)
    started = await AsyncEngine.start(config)
    yield started
    await started.shutdown()


async def write(engine: AsyncEngine, seed: int) -> tuple[str, WrittenTokens]:
    """A random model's answer: many of its tokens are bytes that are parts of characters."""
    book, text = AnswerTokens(), ""
    params = SamplingParams(temperature=2.0, seed=seed, max_tokens=24)
    async for news in read_answer(engine, ASKED, params, request_id="first"):
        book.take("turn", news.delta)
        text += "".join(news.pieces)
    written = book.get("turn")
    assert written is not None
    return text, written


async def test_a_branch_is_given_exactly_the_tokens(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("BRANCH_SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    generate = engine.generate

    def record(
        prompt: Prompt, params: SamplingParams, **options: Any
    ) -> AsyncGenerator[TokenDelta, None]:
        prompts.append(prompt)
        return generate(prompt, params, **options)

    for turn in range(8):
        text, written = await write(engine, seed + turn)
        ids = [*written.prompt_ids, *written.answer_ids]
        scores = await score_written(engine, written)
        assert len(scores) == len(written.answer_ids) and list(scores.ids) == ids
        shown = "".join(scores.pieces)
        assert shown.removesuffix("</s>").rstrip("\ufffd") or not text.strip("\ufffd")
        for _ in range(5):
            index = rng.randrange(len(scores))
            token = rng.choice([c for c in scores.alternatives(index) if not c.is_taken])
            branch = branch_at(scores, index, token.token_id, token.data, whole=True)
            monkeypatch.setattr(engine, "generate", record)
            prompts.clear()
            book, answer = AnswerTokens(), ""
            stop = rng.choice(((), ("e",)))
            params = SamplingParams(temperature=2.0, seed=turn, max_tokens=9, stop=stop)
            async for news in read_branch(engine, branch, params, request_id="branch"):
                book.take("branch", news.delta)
                answer += "".join(news.pieces)
            monkeypatch.setattr(engine, "generate", generate)
            expected = [*ids[: len(written.prompt_ids) + index], token.token_id]
            assert prompts[0] == expected[:-1]
            if token.data == b"</s>":
                assert len(prompts) == 1, "it ends there"
            else:
                assert prompts[1:] == [expected]
            there = book.get("branch")
            assert there is not None and there.prompt_ids == written.prompt_ids
            num_kept = index + 1
            assert there.answer_ids[:num_kept] == expected[len(written.prompt_ids) :]
            if "<s>" in await engine.token_texts(there.answer_ids):
                continue  # the text omits it, so its neighbours join
            whole = (await engine.detokenize(there.answer_ids)).removesuffix("</s>")
            assert whole.startswith(answer)
            assert answer == whole or (stop and "e" in whole[len(answer) :]), (answer, whole)


async def test_text_is_scored_as_its_tokens(engine: AsyncEngine) -> None:
    """An answer of a saved chat is scored by the tokenizer's tokens of its text."""
    said = "the scheduler decides"
    messages = [*ASKED.messages, {"role": "assistant", "content": said}]
    prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    scores = await score_text(engine, prompt, said)
    assert "".join(scores.pieces).lstrip() == said
    ids = await engine.tokenize(prompt)
    assert list(scores.ids) == ids
    exact = await score_written(
        engine, WrittenTokens(ids[: scores.start], list(scores.ids[scores.start :]))
    )
    for index in range(len(scores)):
        assert scores.probability(index) == pytest.approx(exact.probability(index), rel=1e-3)
        shares = [choice.probability for choice in scores.alternatives(index)]
        assert shares[:10] == sorted(shares[:10], reverse=True) and sum(shares) < 1.001
