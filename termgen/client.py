"""The engine interface for front ends: `EngineClient`, its halves, and the values that cross it.

Server, TUI and bench depend on this module, the events and the api package, but on nothing else of
the engine. `termgen.engine.loop.engine.AsyncEngine` is the in-process implementation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from termgen.errors import TermgenError
from termgen.vocabulary.device.pooling import FloatVector, PoolingParams
from termgen.vocabulary.events import EngineSnapshot, EventRing
from termgen.vocabulary.grammar_times import GrammarTotals
from termgen.vocabulary.model_info import ModelInfo as ModelInfo
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

Message = Mapping[str, Any]
"""A chat message: `role` and `content`, as in OpenAI's API."""


MAX_CHAT_TEMPLATE_CHARS = 65_536
"""Length limit of a chat template that comes with a prompt."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to render with the model's chat template."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """Replaces the model's template."""


@dataclass(frozen=True, slots=True)
class FillPrompt:
    """Text before and after a gap for the model to fill."""

    prefix: str
    suffix: str


Prompt = str | Sequence[int] | ChatPrompt | FillPrompt
"""Raw text, token ids, a conversation, or text with a gap."""


def prompt_chars(prompt: str | ChatPrompt | FillPrompt) -> int:
    """Characters of everything a chat template may render: contents, reasoning, tool calls, tools.
    Accepts any shape, as these are validated later."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, FillPrompt):
        return len(prompt.prefix) + len(prompt.suffix)
    messages = prompt.messages if isinstance(prompt.messages, Sequence) else ()
    fields = [m.items() for m in messages if isinstance(m, Mapping)]
    shown = [value for items in fields for name, value in items if name != "role"]
    return _num_chars([*shown, *prompt.template_kwargs.values()])


def _num_chars(data: object) -> int:
    """Characters in plain data, keys included; other values count 1. Depth is limited as for
    messages."""
    num_chars, level = 0, [data]
    for _ in range(64):
        texts = [value for value in level if isinstance(value, str)]
        holders = [value for value in level if isinstance(value, (dict, list, tuple))]
        num_chars += sum(map(len, texts)) + len(level) - len(texts) - len(holders)
        level = []
        for holder in holders:
            level += holder
            if isinstance(holder, dict):
                level += holder.values()
    return num_chars


PauseMode = Literal["wait", "abort", "keep"]
"""How a pause treats the engine's requests; see `AdminClient.pause`."""


SleepLevel = Literal[1, 2]
"""Memory that a sleeping engine releases. 1: the KV cache, and GPU weights, which move to main
memory; 2: all weights, which are read from disk again."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token and the most likely alternatives at its position."""

    token_id: int
    token: str
    """The token's text; replacement characters stand for a partial character."""
    token_bytes: bytes
    logprob: float
    rank: int
    """1 = most likely."""
    top: Sequence[tuple[int, str, bytes, float]] = ()
    """(token id, text, bytes, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """perf_counter_ns stamps of one request; 0 for a stage it never reached."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0

    @property
    def queue_s(self) -> float:
        return max(0, self.first_scheduled_ns - self.arrival_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return max(0, self.first_token_ns - self.arrival_ns) / 1e9

    @property
    def e2e_s(self) -> float:
        return max(0, self.finished_ns - self.arrival_ns) / 1e9

    def tokens_per_s(self, num_tokens: int) -> float | None:
        """Decode rate after the first of `num_tokens`; None if that took no time."""
        decode_ns = self.finished_ns - self.first_token_ns if self.first_token_ns else 0
        return (num_tokens - 1) / (decode_ns / 1e9) if num_tokens > 1 and decode_ns > 0 else None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next piece of a tool call: its beginning, which has the name, or more arguments."""

    index: int
    """Which call of the answer, from 0."""
    name: str = ""
    """Set at the beginning of a call only."""
    arguments: str = ""
    """Text of a JSON object, as far as the model keeps to that."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The text and tokens of one completion since its previous delta.

    The last delta of a completion has a `finish_reason`. `text` never ends inside a character and
    may lag `token_ids` while a stop string could still be completing. When the engine failed the
    request, `finish_reason` is ERROR and `error` holds the cause.
    """

    request_id: str
    index: int
    """Index among the `n` completions."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    """Output tokens of the completion so far."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Set on the first delta of completion 0."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """One per prompt token, set on a delta of completion 0 no later than its first token. The first
    token has no probability: logprob NaN, rank 0."""
    timings: RequestTimings | None = None
    """Set on the last delta."""
    error: TermgenError | None = None
    num_draft_tokens: int = 0
    """Tokens that were guessed for the completion so far."""
    num_accepted_tokens: int = 0
    """Those of them that became output tokens."""
    drafted: tuple[tuple[int, int], ...] = ()
    """(start, end) of the parts of `text` that came as guessed tokens which stayed, where the
    engine runs in this process. A character of several tokens counts for its last one."""
    vector: FloatVector | None = field(default=None, compare=False)
    """Set on the last and only delta of a request with `pooling`."""
    schema_errors: tuple[str, ...] | None = None
    """Set on the last delta of a whole answer whose schema no grammar enforces in full: what it
    does not satisfy, one line each; empty if it satisfies all."""
    calls: tuple[CallPiece, ...] = ()
    """Tool calls, where a remote server takes them out of the text; else they are in `text`."""


def _joined_drafts(deltas: Sequence[TokenDelta]) -> tuple[tuple[int, int], ...]:
    """Places of the guessed parts in the text of these deltas together."""
    found, start = [], 0
    for delta in deltas:
        found += [(start + first, start + end) for first, end in delta.drafted]
        start += len(delta.text)
    return tuple(found)


def merge_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """One delta equivalent to these consecutive deltas of one completion."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [d.logprobs for d in deltas if d.logprobs is not None]
    return replace(
        deltas[-1],
        text="".join(d.text for d in deltas),
        drafted=_joined_drafts(deltas),
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        logprobs=tuple(lp for part in logprobs for lp in part) if logprobs else None,
        calls=tuple(piece for d in deltas for piece in d.calls),
        prompt_token_ids=deltas[0].prompt_token_ids,
        prompt_logprobs=next(
            (d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None
        ),
    )


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Facts a client needs to build prompts as this engine's tokenizer does."""

    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` and so on, those that the model has."""
    chat_template: str | None = None


class GenerationClient(Protocol):
    """The half of an engine that requests use: generation, and tokens of text and back."""

    @property
    def model(self) -> ModelInfo: ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        pooling: PoolingParams | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Stream one request's deltas; with `params.n` > 1 the completions are interleaved.

        pooling: no tokens are wanted, but a vector of the prompt, which one delta brings. Of the
        parameters only `truncate_prompt_tokens` counts then.

        client: an id for fairness: clients of one process take turns when grammars are compiled. A
        remote engine ignores it, as its server identifies its clients.

        Closing the generator (or cancelling the task that reads it) aborts the request. Raises
        `RequestError` on the first iteration for a bad request, before anything is queued.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """Stop a request; its stream ends with finish_reason ABORT. False if it is unknown."""
        ...

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids that `generate` would use; `add_special_tokens` applies to raw text only."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of these tokens, special tokens included. `RequestError` for ids out of range."""
        ...

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone. `RequestError` for ids out of range."""
        ...

    @property
    def tokenizer_info(self) -> TokenizerInfo: ...


class AdminClient(Protocol):
    """The half of an engine that its owner uses: what it does, pause, sleep, and caches."""

    @property
    def model(self) -> ModelInfo: ...

    def grammar_totals(self) -> GrammarTotals:
        """Count and time of grammar compilations since the start."""
        ...

    async def snapshot(self) -> EngineSnapshot:
        """The engine's current state, built between two steps."""
        ...

    def events(self, capacity: int = 4096) -> EventRing:
        """Subscribe to step and request events. The caller drains the ring at its own pace."""
        ...

    def close_events(self, ring: EventRing) -> None: ...

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Start no new request until `resume`; returns when the engine is idle.

        `wait`: running requests finish. `abort`: running and waiting requests end now with
        finish_reason ABORT. `keep`: running requests are suspended until `resume`. New requests
        wait in the queue. A second pause changes the mode. Raises `RequestError` for an unknown
        mode, `EngineError` if `resume` comes before the engine is idle.
        """
        ...

    async def resume(self) -> None:
        """Continue after `pause`; a no-op if not paused."""
        ...

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Drop the cached prefixes that no request uses; returns True if the cache is then empty.

        `force`: running requests are preempted and recomputed, so that all of it can be dropped.
        """
        ...

    async def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> None:
        """Pause, then release memory until `wake_up`; returns when it has been released.

        New requests wait, as do those kept by `mode`, which are recomputed later. Raises
        `RequestError` for an unknown level or mode, or if the engine is already asleep.
        """
        ...

    async def wake_up(self) -> None:
        """Allocate the memory and resume. On failure raises `EngineError` and stays asleep."""
        ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def sleep_level(self) -> int:
        """0: awake."""
        ...

    @property
    def is_healthy(self) -> bool:
        """False if the engine thread has died, or makes no progress with work queued."""
        ...

    async def why_unhealthy(self) -> str | None:
        """Probe the engine: the reason it cannot serve; None if it answers or makes progress.

        Unlike `is_healthy` this detects an idle engine that no longer responds.
        """
        ...


class EngineClient(GenerationClient, AdminClient, Protocol):
    """An engine seen from outside. Use all coroutines on one asyncio loop, whichever it is."""


class GenerationOnly:
    """The generating half of an engine, for code that must not reach the other half."""

    __slots__ = ("_engine",)

    def __init__(self, engine: GenerationClient) -> None:
        self._engine = engine

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        return self._engine.tokenizer_info

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str = "",
        pooling: PoolingParams | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        return self._engine.generate(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
            pooling=pooling,
        )

    async def abort(self, request_id: str) -> bool:
        return await self._engine.abort(request_id)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        return await self._engine.tokenize(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._engine.detokenize(token_ids)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return await self._engine.token_texts(token_ids)
