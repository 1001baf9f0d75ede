"""What both completion endpoints share: engine requests, wire options, counting."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from termgen.api.fields import Fields
from termgen.client import Prompt, RequestTimings, TokenDelta
from termgen.errors import RequestError
from termgen.vocabulary.request import MAX_PRIORITY, check_cache_salt
from termgen.vocabulary.sampling_params import SamplingParams

MIN_PING_INTERVAL_S = 1
MAX_PING_INTERVAL_S = 3600


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

    @property
    def max_tokens(self) -> int | None:
        return self.params.max_tokens if self.generates else 0

    @property
    def is_computed(self) -> bool:
        """Whether the engine has to read the prompt."""
        return self.generates or self.params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """How the answer is to be put on the wire."""

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
    """Of silence in this stream before a ping, 0 for never; None: as the server has it."""


def parse_options(
    body: Fields, *, id_prefix: str, model: str, force_include_usage: bool
) -> ResponseOptions:
    stream = body.boolean("stream")
    stream_options = body.object("stream_options")
    include_usage = continuous_usage = False
    if stream_options is not None:
        if not stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        include_usage = stream_options.boolean("include_usage")
        continuous_usage = stream_options.boolean("continuous_usage_stats")
        stream_options.boolean("include_obfuscation")  # padding against eavesdroppers: never sent
    include_usage = stream and (include_usage or force_include_usage)
    return ResponseOptions(
        id=f"{id_prefix}-{uuid.uuid4().hex}",
        model=model,
        created=int(time.time()),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        include_timings=body.boolean("include_timings"),
        return_token_ids=body.boolean("return_token_ids"),
        tokens_as_ids=body.boolean("return_tokens_as_token_ids"),
        ping_interval_s=_parse_ping_interval(body, stream=stream),
    )


def _parse_ping_interval(body: Fields, *, stream: bool) -> float | None:
    name = "sse_ping_interval"
    seconds = body.number(name)
    if seconds is None:
        return None
    if not stream:
        raise RequestError(f"{name} needs stream: true", param=name)
    if seconds and not MIN_PING_INTERVAL_S <= seconds <= MAX_PING_INTERVAL_S:
        raise RequestError(
            f"{name} must be 0 or {MIN_PING_INTERVAL_S} to {MAX_PING_INTERVAL_S} seconds",
            param=name,
        )
    return float(seconds)


def parse_priority(body: Fields) -> int:
    return body.integer("priority", low=-MAX_PRIORITY, high=MAX_PRIORITY) or 0


def parse_cache_salt(body: Fields) -> str | None:
    salt = body.string("cache_salt")
    if salt is not None:
        check_cache_salt(salt)
    return salt


class Tally:
    """Token counts and timings over all choices of one HTTP request."""

    __slots__ = ("_cached", "_n", "_output", "_prompt", "_timings")

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt: dict[int, int] = {}  # by prompt
        self._cached: dict[int, int] = {}
        self._output: dict[int, int] = {}  # by choice
        self._timings: dict[int, tuple[RequestTimings, int]] = {}

    def add(self, choice: int, delta: TokenDelta) -> None:
        prompt = choice // self._n
        self._prompt[prompt] = delta.num_prompt_tokens
        # the completions of one prompt can hit the cache differently; the first one tells
        self._cached.setdefault(prompt, delta.num_cached_tokens)
        self._output[choice] = delta.num_output_tokens
        if delta.timings is not None:
            self._timings[choice] = (delta.timings, delta.num_output_tokens)

    def usage(self) -> dict[str, Any]:
        prompt, output = sum(self._prompt.values()), sum(self._output.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

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
