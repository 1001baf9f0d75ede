"""A conversation of 200 turns in a context of 1,024 tokens, under each policy for a full one.

    python benchmarks/long_chat.py [--model smollm2-135m] [--turns 200] [--output-json FILE]

The chat in lines (`termgen chat --plain`) over a real engine. After each turn what was sent is
compared with the last line that said what is left out. Nothing may be refused, a turn that leaves
out nothing new reads its own tokens only, and one that does at most half of the context.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from machine import parser_of, percentiles, print_rows, write_report

from termgen.client import ChatPrompt, Prompt, TokenDelta
from termgen.commands.launch import EngineHolder
from termgen.commands.plain_chat import run_plain
from termgen.commands.shelf.local_shelf import LocalShelf
from termgen.config import EngineConfig, UIConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.library.catalog import DEFAULT_MODEL
from termgen.system.cpu_slices import share_lock_quickly
from termgen.vocabulary.sampling_params import SamplingParams

POLICIES = ("drop", "ends", "summarise")
CONTEXT = 1024
MAX_TOKENS = 8
SYSTEM = "Answer briefly."
WORDS = "river stone cloud paper green seven music under table often winter bread light".split()
LEFT_OUT = re.compile(r"^Turns? (\d+)(?:-(\d+))? (?:is|are) no longer sent", re.MULTILINE)
SUMMARY_SENT = re.compile(r"summary of turns? .* (?:is sent instead:|still is sent\.)")
SUMMARISES = "The model summarises"
SUMMARY_USED = " is sent instead:"
NO_ANSWER = (
    "Not sent:",
    "No answer:",
    "This message is too long",
    "has filled the model's context",
)
"""What the chat in lines says where a question is not answered."""


@dataclass
class Request:
    """A request of the chat and its figures."""

    prompt: ChatPrompt
    num_tokens: int = 0
    num_cached: int = 0

    @property
    def num_read(self) -> int:
        """Tokens of the prompt that the engine computed."""
        return self.num_tokens - self.num_cached


class Watched:
    """The engine, with a record of each request."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.requests: list[Request] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        assert isinstance(prompt, ChatPrompt)
        request = Request(prompt)
        self.requests.append(request)
        stream = self._engine.generate(prompt, params, request_id=request_id)
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                request.num_tokens = delta.num_prompt_tokens or request.num_tokens
                request.num_cached = delta.num_cached_tokens or request.num_cached
                yield delta


@dataclass
class Course:
    """What the turns of one conversation read, checked against what the chat says."""

    context: int
    block_size: int
    max_tokens: int
    printed: io.StringIO
    reads: list[int] = field(default_factory=list)
    """Tokens that were computed of the prompts of each turn."""
    num_cuts: int = 0
    """Turns that left out more than the one before."""
    num_summaries: int = 0
    num_orders: int = 0
    """Summaries that the model was asked for."""
    _before: int = 0
    """Tokens of the last prompt."""
    _words: str = ""
    """The last line that said what is left out."""
    _seen: int = 0

    def check(self, number: int, requests: list[Request]) -> None:
        """Take a turn that has ended; raises AssertionError for what should not be."""
        said = self.printed.getvalue()[self._seen :]
        self._seen += len(said)
        assert not any(words in said for words in NO_ANSWER), said
        is_cut = LEFT_OUT.search(said) is not None
        self._words = said if is_cut else self._words
        *orders, asked = requests
        assert len(orders) == said.count(SUMMARISES), said
        assert sent_numbers(asked.prompt) == said_numbers(self._words, number), (number, said)
        has_summary = "Summary of turns" in asked.prompt.messages[0]["content"]
        assert has_summary == bool(SUMMARY_SENT.search(self._words)), (number, said)
        assert asked.num_tokens <= self.context - self.max_tokens
        read = asked.num_read
        own = asked.num_tokens - self._before + 2 * self.block_size
        assert read <= (self.context // 2 if is_cut else own), (number, read, own)
        self._before = asked.num_tokens
        self.reads.append(read + sum(order.num_read for order in orders))
        self.num_cuts += is_cut
        self.num_orders += len(orders)
        self.num_summaries += said.count(SUMMARY_USED)

    def row(self, policy: str, seconds: float) -> dict[str, Any]:
        shares = percentiles(self.reads)
        return {
            "policy": policy,
            "turns": len(self.reads),
            "left out": self.num_cuts,
            "summaries": f"{self.num_summaries} of {self.num_orders}",
            "read, median": shares["p50"],
            "read, largest": shares["max"],
            "read, all": sum(self.reads),
            "seconds": round(seconds),
        }


class Questions(io.StringIO):
    """Standard input: a question a line, and after each answer a check of it."""

    def __init__(self, turns: int, course: Course, watched: Watched, seed: int) -> None:
        super().__init__()
        self._lines = lines_of(turns, seed)
        self._course = course
        self._requests = watched.requests
        self._asked = 0

    def readline(self, size: int | None = -1, /) -> str:
        if self._asked:
            self._course.check(self._asked, [*self._requests])
            self._requests.clear()
        self._asked += 1
        return next(self._lines, "")


def lines_of(turns: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for number in range(1, turns + 1):
        yield f"q{number}: {' '.join(rng.choices(WORDS, k=rng.randrange(4, 40)))}?\n"


def sent_numbers(prompt: ChatPrompt) -> list[int]:
    """Numbers of the questions in a prompt. Those without an answer share a message."""
    texts = (message["content"] for message in prompt.messages if message["role"] == "user")
    return [int(number) for text in texts for number in re.findall(r"^q(\d+):", text, re.MULTILINE)]


def said_numbers(words: str, last: int) -> list[int]:
    """The same as a line of the chat says it."""
    found = LEFT_OUT.search(words)
    if found is None:
        return [*range(1, last + 1)]
    first, until = int(found[1]), int(found[2] or found[1])
    return [number for number in range(1, last + 1) if not first <= number <= until]


def converse(
    config: EngineConfig, policy: str, *, turns: int, seed: int, max_tokens: int = MAX_TOKENS
) -> dict[str, Any]:
    """Hold one conversation, each turn of it checked. Returns its figures."""
    assert config.max_model_len is not None and config.block_size is not None
    printed = io.StringIO()
    course = Course(config.max_model_len, config.block_size, max_tokens, printed)
    engines: list[AsyncEngine] = []
    ui = UIConfig(system_prompt=SYSTEM, max_tokens=max_tokens, context_policy=policy)

    async def start() -> Any:
        engines.append(await AsyncEngine.start(config))
        watched = Watched(engines[0])
        sys.stdin = Questions(turns, course, watched, seed)
        return watched

    async def stop() -> None:
        await engines[0].shutdown()

    began = time.monotonic()
    with patch("sys.stdin", None), patch("sys.stdout", printed):
        run_plain(start, stop, ui, LocalShelf(EngineHolder(config)))
    assert len(course.reads) == turns
    return course.row(policy, time.monotonic() - began)


def chat_config(model: str, context: int = CONTEXT) -> EngineConfig:
    return EngineConfig(
        model=model, device="cpu", max_model_len=context, block_size=16, kv_cache_gib=0.25
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    args = parser.parse_args()
    share_lock_quickly()  # as the command line does
    config = chat_config(args.model)
    rows = [converse(config, policy, turns=args.turns, seed=0) for policy in args.policies]
    print_rows(rows)
    write_report(args, rows)


if __name__ == "__main__":
    main()
