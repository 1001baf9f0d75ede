"""Tells a model's thoughts and tool calls from its answer, while they arrive.

Where the model's files declare how its responses are read, the parser of the server does it. Other
models write `<think>...</think>` before the answer, or their template has opened it in the prompt.
Used by the chat. No Textual.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from termgen.api.tool_calls import CallParser, DeclaredParser, Part
from termgen.client import CallPiece, EngineClient, Prompt, TokenDelta
from termgen.errors import EngineError, RequestError
from termgen.tools.request import ToolRequest, divided
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.tool_format import ResponseParser

OPEN, CLOSE = "<think>", "</think>"
NUM_LAST_TOKENS = 8
"""The end of a prompt that is looked at: enough for `OPEN` and white space behind it."""

Pieces = tuple[str, str]
"""A piece of text, divided into thoughts and answer."""


@dataclass(slots=True)
class Thought:
    """The model's thoughts before one answer."""

    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    is_over: bool = False
    """The answer itself has begun, or there will be none."""

    def take(self, pieces: Pieces, *, num_tokens: int, seconds: float) -> None:
        """num_tokens and seconds: of everything the model has written so far."""
        thought, answer = pieces
        if self.is_over:
            return
        self.text += thought if self.text else thought.lstrip()
        if thought:
            self.num_tokens = max(self.num_tokens, num_tokens)
            self.seconds = max(self.seconds, seconds)
        self.is_over = bool(answer)


@dataclass(frozen=True, slots=True)
class AnswerNews:
    """A delta of the engine's, its text taken apart."""

    delta: TokenDelta
    pieces: Pieces
    calls: tuple[CallPiece, ...] = ()
    """Pieces of tool calls."""


class Reader(Protocol):
    def feed(self, text: str) -> Pieces: ...

    def finish(self) -> Pieces: ...

    def take_calls(self) -> tuple[CallPiece, ...]:
        """Pieces of calls that were in the text since the last time."""
        ...


async def read_answer(
    client: EngineClient,
    prompt: Prompt,
    params: SamplingParams,
    *,
    request_id: str,
    tools: ToolRequest | None = None,
) -> AsyncGenerator[AnswerNews, None]:
    """Stream one answer. Closing the generator aborts the request, as with the client's own.

    tools: those that the prompt shows to the model.
    """
    asked = reading_params(client, params)
    if tools is not None:
        asked = tools.params(asked)
    reader: Reader | None = None
    stream = client.generate(prompt, asked, request_id=request_id)
    async with contextlib.aclosing(stream) as deltas:
        async for delta in deltas:
            if reader is None:
                reader = await open_reader(client, params, delta.prompt_token_ids or (), tools)
            pieces = reader.feed(delta.text)
            if delta.finish_reason is not None:
                pieces = joined([pieces, reader.finish()])
            calls = (*delta.calls, *reader.take_calls())
            yield AnswerNews(delta, pieces, calls)


def reading_params(client: EngineClient, params: SamplingParams) -> SamplingParams:
    """The marks that a model's files declare are special tokens, which text usually leaves out."""
    is_declared = client.model.tool_format.new_parser is not None
    if is_declared and params.structured_outputs is None:
        return replace(params, skip_special_tokens=False)
    return params


async def open_reader(
    client: EngineClient,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    tools: ToolRequest | None = None,
) -> Reader:
    """A reader for an answer from its beginning."""
    if params.structured_outputs is not None:
        return PlainReader()
    if tools is not None and tools.reads_text:
        thoughts: ThinkReader | None = None
        if not tools.tools.needs_prompt:  # else the parser tells thoughts as well
            thoughts = ThinkReader(is_open=await _opens_a_thought(client, prompt_ids))
        return CallingReader(tools.parser(prompt_ids), thoughts)
    declared = client.model.tool_format.new_parser
    if declared is not None:
        return DeclaredReader(declared(prompt_ids))
    return ThinkReader(is_open=await _opens_a_thought(client, prompt_ids))


async def _opens_a_thought(client: EngineClient, prompt_ids: Sequence[int]) -> bool:
    if not prompt_ids:
        return False
    try:
        end = await client.detokenize(prompt_ids[-NUM_LAST_TOKENS:])
    except (RequestError, EngineError):  # a server elsewhere that answers but does not tell this
        return False
    return end.rstrip().endswith(OPEN)


class _Callless:
    """A reader that takes no calls out of the text."""

    def take_calls(self) -> tuple[CallPiece, ...]:
        return ()


class PlainReader(_Callless):
    """A reader for models without thoughts: all text is answer."""

    def feed(self, text: str) -> Pieces:
        return "", text

    def finish(self) -> Pieces:
        return "", ""


class _At(enum.Enum):
    START = enum.auto()
    THOUGHT = enum.auto()
    GAP = enum.auto()
    ANSWER = enum.auto()


class ThinkReader(_Callless):
    """Thoughts stand between `<think>`, at the very start, and the first `</think>`."""

    def __init__(self, *, is_open: bool = False) -> None:
        """is_open: the prompt ended with `<think>`."""
        self._at = _At.THOUGHT if is_open else _At.START
        self._held = ""

    def feed(self, text: str) -> Pieces:
        self._held += text
        thought = answer = ""
        if self._at is _At.START:
            self._begin()
        if self._at is _At.THOUGHT:
            thought = self._take_thought()
        if self._at is _At.GAP:
            self._held = self._held.lstrip()
            self._at = _At.ANSWER if self._held else _At.GAP
        if self._at is _At.ANSWER:
            answer, self._held = self._held, ""
        return thought, answer

    def finish(self) -> Pieces:
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._at is _At.THOUGHT else ("", held)

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._at, self._held = _At.THOUGHT, text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._at = _At.ANSWER

    def _take_thought(self) -> str:
        """White space and what may be the mark wait for what comes behind them."""
        thought, mark, rest = self._held.partition(CLOSE)
        if mark:
            self._at, self._held = _At.GAP, rest
            return thought.rstrip()
        kept = thought[: len(thought) - _overlap(thought, CLOSE)].rstrip()
        self._held = thought[len(kept) :]
        return kept


class DeclaredReader(_Callless):
    """Reader for the format that the model's files declare. Tool calls are shown as text."""

    def __init__(self, parser: ResponseParser) -> None:
        self._parser = DeclaredParser(parser, reads_calls=False)

    def feed(self, text: str) -> Pieces:
        return _pieces(self._parser.feed(text))

    def finish(self) -> Pieces:
        return _pieces(self._parser.finish())


class CallingReader:
    """Reader for an answer that may have tool calls."""

    def __init__(self, parser: CallParser, thoughts: ThinkReader | None) -> None:
        """thoughts: takes them out before the parser sees the text; None: the parser does."""
        self._parser = parser
        self._thoughts = thoughts
        self._calls: list[CallPiece] = []

    def feed(self, text: str) -> Pieces:
        thought = ""
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text)
        return self._taken(thought, self._parser.feed(text))

    def finish(self) -> Pieces:
        thought, text = self._thoughts.finish() if self._thoughts is not None else ("", "")
        parts = [*self._parser.feed(text), *self._parser.finish()]
        return self._taken(thought, parts)

    def take_calls(self) -> tuple[CallPiece, ...]:
        calls, self._calls = tuple(self._calls), []
        return calls

    def _taken(self, thought: str, parts: Sequence[Part]) -> Pieces:
        more, text, calls = divided(parts)
        self._calls += calls
        return thought + more, text


def _pieces(parts: Sequence[Part]) -> Pieces:
    thought, text, _ = divided(parts)
    return thought, text


def joined(pieces: Sequence[Pieces]) -> Pieces:
    return "".join(thought for thought, _ in pieces), "".join(answer for _, answer in pieces)


def _overlap(text: str, word: str) -> int:
    """Characters at the end of a text that may be the beginning of a word."""
    most = min(len(text), len(word) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(word[:n])), 0)
