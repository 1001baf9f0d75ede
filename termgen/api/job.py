"""Shared types of the two completion endpoints: engine requests, options of the answer, token
counts."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from termgen.api.sampling import MAX_PING_INTERVAL_S, MIN_PING_INTERVAL_S, GenerationFields
from termgen.api.sse import TextTemplate
from termgen.client import Prompt, RequestTimings, TokenDelta, TokenLogprob
from termgen.errors import RequestError
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.request import check_cache_salt
from termgen.vocabulary.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One `EngineClient.generate` call. An HTTP request has one per prompt."""

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str | None
    generates: bool = True
    """False: only the prompt is wanted back (`echo` with `max_tokens` 0)."""
    pooling: PoolingParams | None = None
    """A vector of the prompt is wanted."""

    def __post_init__(self) -> None:
        if self.cache_salt is not None:
            check_cache_salt(self.cache_salt)

    @property
    def max_tokens(self) -> int | None:
        return self.params.max_tokens if self.generates else 0

    @property
    def is_computed(self) -> bool:
        """True if the engine has to compute the prompt."""
        return self.generates or self.params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """Form of the answer: streamed or whole, with which fields."""

    id: str
    model: str
    created: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    include_timings: bool
    return_token_ids: bool
    tokens_as_ids: bool
    """Name tokens `token_id:N` in logprobs instead of by text."""
    ping_interval_s: float | None = None
    """Silence in this stream before a ping, 0 for no pings; None: the server's default."""

    def head(self, kind: str) -> dict[str, Any]:
        """The first fields of a response or a chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def parse_options(
    body: GenerationFields, *, id_prefix: str, model: str, force_include_usage: bool
) -> ResponseOptions:
    wants = body.stream_options
    if wants is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    include_usage = body.stream and (
        force_include_usage or (wants is not None and wants.include_usage)
    )
    return ResponseOptions(
        id=f"{id_prefix}-{uuid.uuid4().hex}",
        model=model,
        created=int(time.time()),
        stream=body.stream,
        include_usage=include_usage,
        continuous_usage=include_usage and wants is not None and wants.continuous_usage_stats,
        include_timings=body.include_timings,
        return_token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
        ping_interval_s=_check_ping_interval(body),
    )


def _check_ping_interval(body: GenerationFields) -> float | None:
    name, seconds = "sse_ping_interval", body.sse_ping_interval
    if seconds is None:
        return None
    if not body.stream:
        raise RequestError(f"{name} needs stream: true", param=name)
    if seconds and not MIN_PING_INTERVAL_S <= seconds <= MAX_PING_INTERVAL_S:
        raise RequestError(
            f"{name} must be 0 or {MIN_PING_INTERVAL_S} to {MAX_PING_INTERVAL_S} seconds",
            param=name,
        )
    return seconds


class Tally:
    """Token counts and timings over all choices of one HTTP request."""

    __slots__ = ("_cached", "_drafts", "_n", "_output", "_prompt", "_timings")

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt: dict[int, int] = {}  # by prompt
        self._cached: dict[int, int] = {}
        self._output: dict[int, int] = {}  # by choice
        self._drafts: dict[int, tuple[int, int]] = {}
        self._timings: dict[int, tuple[RequestTimings, int]] = {}

    def add(self, choice: int, delta: TokenDelta) -> None:
        prompt = choice // self._n
        self._prompt[prompt] = delta.num_prompt_tokens
        # the completions of one prompt can hit the cache differently; the first one counts
        self._cached.setdefault(prompt, delta.num_cached_tokens)
        self._output[choice] = delta.num_output_tokens
        if delta.num_draft_tokens:
            self._drafts[choice] = (delta.num_draft_tokens, delta.num_accepted_tokens)
        if delta.timings is not None:
            self._timings[choice] = (delta.timings, delta.num_output_tokens)

    def usage(self) -> dict[str, Any]:
        prompt, output = sum(self._prompt.values()), sum(self._output.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._drafts:
            drafted, accepted = map(sum, zip(*self._drafts.values(), strict=True))
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return usage

    def timings(self) -> dict[str, Any]:
        """The `termgen` object of a response that asked for `include_timings`."""
        return {
            "timings": [
                {"index": choice, **_timing_fields(*self._timings[choice])}
                for choice in sorted(self._timings)
            ]
        }


def _timing_fields(timings: RequestTimings, num_tokens: int) -> dict[str, float | None]:
    return {
        "queue_s": timings.queue_s,
        "ttft_s": timings.ttft_s,
        "e2e_s": timings.e2e_s,
        "tokens_per_s": timings.tokens_per_s(num_tokens),
    }


def end_fields(last: TokenDelta) -> dict[str, Any]:
    """Fields of a choice that say how it ended."""
    fields: dict[str, Any] = {"stop_reason": last.stop_reason}
    if last.schema_errors is not None:
        fields["finish_details"] = {"schema_errors": last.schema_errors}
    return fields


class Choice:
    """State of one streamed choice: logprobs and ids of tokens whose text is held back."""

    def __init__(self) -> None:
        self.started = False
        self.template: TextTemplate | None = None
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []


C = TypeVar("C", bound=Choice)


class AnswerStream(ABC, Generic[C]):
    """Turns deltas into chunks. One per HTTP request."""

    def __init__(
        self, kind: str, options: ResponseOptions, choices: Sequence[C], n: int, *, is_text: bool
    ) -> None:
        """kind: the `object` of a chunk. n: completions of each prompt. is_text: chunks have only
        text of the model."""
        self._options = options
        self._head = options.head(kind)
        self._is_plain = is_text and not (options.return_token_ids or options.continuous_usage)
        self._tally = Tally(n)
        self._choices = choices
        self._num_open = len(choices)

    @abstractmethod
    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        """Chunks for one delta: none while its text is held back."""

    @abstractmethod
    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        """A chunk in the middle of a choice that is only text."""

    def frame(self, index: int, delta: TokenDelta) -> bytes | None:
        """The encoded form of what `feed` would return, for a delta in the middle that is only
        text."""
        choice = self._choices[index]
        if not self._is_plain or not choice.started or delta.finish_reason is not None:
            return None
        self._tally.add(index, delta)
        if not delta.text:
            return b""
        if choice.template is None:
            choice.template = TextTemplate(lambda text: self._text_chunk(index, text))
        return choice.template.frame(delta.text)

    def end(self) -> list[dict[str, Any]]:
        """Chunks after the last choice: the usage chunk, when the client asked for it."""
        if not self._options.include_usage:
            return []
        chunk = {**self._head, "choices": [], "usage": self._tally.usage()}
        if self._options.include_timings:
            chunk["termgen"] = self._tally.timings()
        return [chunk]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = self._tally.usage() if self._options.continuous_usage else None
        return chunk

    def _finish(self, chunk: dict[str, Any], delta: TokenDelta) -> None:
        """Add the fields of a choice's last chunk."""
        chunk["choices"][0] |= end_fields(delta)
        self._num_open -= 1
        o = self._options
        if o.include_timings and not o.include_usage and self._num_open == 0:
            chunk["termgen"] = self._tally.timings()
