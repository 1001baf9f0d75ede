"""Chats with a model that has recurrent layers, through the chat template of Qwen3.5: each request
starts where its prompt parts from an earlier one, and says what it says without a cache."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_samples import QWEN3_5, TOOLS
from server_harness import app_client

from termgen.client import ChatPrompt
from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine, SyncEngine
from termgen.vocabulary.sampling_params import SamplingParams

BLOCK = 16
ANSWER = 8
"""Tokens of an answer."""
SYSTEM = 3600
"""Tokens of an agent's system prompt."""
TURN = (200, 600)
"""Tokens of a question or of a tool's result."""
COMPARED = (1, 9)
"""Turns that are asked without a cache, too."""
MOST_READ_AGAIN = 2 * BLOCK
"""Tokens of the next turn's beginning, and of the block in which turns part."""
WORDS = (
    "the of and to in is that it for was on are with as they at be this have from or by one had not"
    " what block token state layer cache prompt answer model request step window copy memory"
).split()
CONTROLS = ("<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
Message = dict[str, Any]
Engines = Callable[..., SyncEngine]


@pytest.fixture(scope="module")
def hybrid_dir(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny Qwen3.5 with the control tokens and a chat template in the style of the real one."""
    from tokenizers import AddedToken, Tokenizer

    made = tiny_model_dir("qwen3_5_text", vocab_size=528, max_position_embeddings=32768)
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    shutil.copytree(made, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKUP])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": QWEN3_5, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture
def engines(hybrid_dir: Path) -> Iterator[Engines]:
    made: list[SyncEngine] = []

    def make(**options: object) -> SyncEngine:
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8}
        settings |= {"block_size": BLOCK, "kv_cache_gib": 0.1, **options}
        made.append(SyncEngine(EngineConfig(model=str(hybrid_dir), **settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.fixture
async def engine(hybrid_dir: Path) -> AsyncIterator[AsyncEngine]:
    """Prewarmed, so that a process of its own tokenises long prompts, as in a server."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8}
    settings |= {"block_size": BLOCK, "kv_cache_gib": 0.1}
    engine = await AsyncEngine.start(EngineConfig(model=str(hybrid_dir), **settings), prewarm=True)
    yield engine
    await engine.shutdown()


class Asked:
    """One request: its prompt, how much of it was cached, and its answer."""

    def __init__(self, engine: SyncEngine, messages: list[Message], **variables: Any) -> None:
        prompt = ChatPrompt(tuple(messages), template_kwargs=variables)
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        request = engine.input_processor.process(prompt, params)
        self.prompt = request.prompt_token_ids
        before = engine.snapshot().prefix_hit_tokens
        engine.add(request)
        self.text = ""
        while engine.has_unfinished:
            for delta in engine.step():
                assert delta.error is None, delta.error
                self.text += delta.text
        self.num_cached = engine.snapshot().prefix_hit_tokens - before


def text(rng: random.Random, num_tokens: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_tokens * 2 // 5))


def agent(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": text(rng, SYSTEM)}]


def call_and_result(thought: str, rng: random.Random, num_tokens: int) -> list[Message]:
    """A step of an agent: what the model thought and called, and what came of it."""
    function = {"name": "get_weather", "arguments": {"place": text(rng, 20)}}
    call = {"id": "call", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "reasoning_content": thought}
    result = {"role": "tool", "tool_call_id": "call", "content": text(rng, num_tokens)}
    return [{**answer, "tool_calls": [call]}, result]


@pytest.mark.parametrize(("thinks", "num_turns", "share"), [(True, 30, 0.95), (False, 12, 0.9)])
def test_many_turns_read_only_what_is_new(
    engines: Engines, thinks: bool, num_turns: int, share: float
) -> None:
    """Thinking, one question with a call of a tool in each turn; else a question in each."""
    rng = random.Random(7)
    engine, cold = engines(), engines(enable_prefix_caching=False)
    variables = {"tools": TOOLS, "enable_thinking": thinks}
    talk = [*agent(rng), {"role": "user", "content": text(rng, 300)}]
    num_prompt = num_cached = num_known = 0
    previous: tuple[int, ...] = ()
    for turn in range(num_turns):
        asked = Asked(engine, talk, **variables)
        shared = num_shared(previous, asked.prompt)
        if turn:
            assert shared - asked.num_cached <= MOST_READ_AGAIN, turn
            num_prompt += len(asked.prompt)
            num_cached += asked.num_cached
            num_known += shared
        if turn in COMPARED:
            assert asked.text == Asked(cold, talk, **variables).text, turn
        previous = asked.prompt
        num_tokens = rng.randrange(*TURN)
        if thinks:
            talk += call_and_result(asked.text, rng, num_tokens)
        else:
            talk.append({"role": "assistant", "content": asked.text})
            talk.append({"role": "user", "content": text(rng, num_tokens)})
    print(f"{num_prompt} tokens, cached {num_cached / num_prompt:.4f} of them,", end=" ")
    print(f"{num_cached / num_known:.4f} of those that the turn before had; last {len(previous)}")
    assert num_cached >= share * num_prompt


def test_another_last_message_and_another_conversation_start_where_they_part(
    engines: Engines,
) -> None:
    rng = random.Random(8)
    engine, cold = engines(), engines(enable_prefix_caching=False)
    system = agent(rng)
    talk = [*system, {"role": "user", "content": text(rng, 200)}]
    for _ in range(2):
        asked = Asked(engine, talk, tools=TOOLS)
        talk += call_and_result(asked.text, rng, 200)
    whole = Asked(engine, talk, tools=TOOLS)

    def check(messages: list[Message], known: Asked = whole) -> Asked:
        asked = Asked(engine, messages, tools=TOOLS)
        shared = num_shared(known.prompt, asked.prompt)
        assert shared > 1000 and shared - asked.num_cached <= MOST_READ_AGAIN
        assert asked.text == Asked(cold, messages, tools=TOOLS).text
        return asked

    edited = {**talk[-1], "content": "Nothing was found. " + text(rng, 100)}
    check([*talk[:-1], edited])
    check(talk)  # the same once more
    other = check([*system, {"role": "user", "content": "Another agent: " + text(rng, 100)}])
    assert other.num_cached < len(asked.prompt) - 400, "it shares the system prompt only"
    # The next question's prompt has none of the thoughts since the last.
    after = [*talk, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Why?"}]
    question = check(after)
    assert question.num_cached < whole.num_cached, "so it starts at the last question"


def test_a_short_prompt_is_found_again(engines: Engines) -> None:
    engine = engines()
    hello = [{"role": "user", "content": "hello there, how are you today"}]
    first, again = (Asked(engine, hello, enable_thinking=False) for _ in range(2))
    assert len(first.prompt) < 3 * BLOCK and (first.num_cached, again.num_cached) == (0, BLOCK)
    assert first.text == again.text
    states = engine.snapshot().states
    assert states is not None and states.num_used == 1 <= states.num_made


def read_by(api: str, body: dict[str, Any]) -> int:
    """Cached tokens that an answer reports."""
    usage = body["usage"]
    if api == "messages":
        return int(usage["cache_read_input_tokens"])
    details = "input_tokens_details" if api == "responses" else "prompt_tokens_details"
    return int(usage[details]["cached_tokens"])


async def test_every_endpoint_says_where_turns_end(engine: AsyncEngine) -> None:
    for api in ("chat/completions", "messages", "responses"):
        first, edited = await cached_tokens(engine, api)
        assert first == 0 and edited > 2000, "all but the last message, which is another"


async def cached_tokens(engine: AsyncEngine, api: str) -> list[int]:
    """Tokens found of a chat, and of one with another last message."""
    rng = random.Random(api)
    system, question = (text(rng, num_tokens) for num_tokens in (300, 2500))
    field = "input" if api == "responses" else "messages"
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    found = []
    async with app_client(engine) as client:
        for last in ("And then?", "Why is that?"):
            talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "So."}]
            body: dict[str, Any] = {"model": engine.model.model_id, limit: 2}
            talk.append({"role": "user", "content": f"{last} {text(rng, 200)}"})
            if api == "messages":
                body["system"] = system
            else:
                talk.insert(0, {"role": "system", "content": system})
            reply = await client.post(f"/v1/{api}", json={**body, field: talk})
            assert reply.status_code == 200, reply.text
            found.append(read_by(api, reply.json()))
    return found
