"""The course of a request to `FakeEngine`, and the deltas it yields."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from termgen.client import (
    Prompt,
    RequestTimings,
    TokenDelta,
    TokenLogprob,
)
from termgen.errors import EngineError
from termgen.vocabulary.device.pooling import PoolingParams
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

DEFAULT_PIECES = ("Hello", ",", " wor", "ld", "! ", "Ça", " va", "? ", "👋", "🏽", ".")


@dataclass(frozen=True, kw_only=True)
class Script:
    """The course of one request."""

    pieces: Sequence[str] = DEFAULT_PIECES
    """Text of each token. "" is a token whose text is still held back."""
    first_delay_s: float = 0.0
    """Prefill: silence before the first token."""
    waits_in_queue: bool = False
    """Stays in the queue until `FakeEngine.release` is set."""
    delay_s: float = 0.0
    """Time between tokens."""
    hold_after: int | None = None
    """After this many tokens, wait until `FakeEngine.release` is set."""
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    raises: Exception | None = None
    """Raised on the first iteration, as for a bad request."""
    fail_after: int | None = None
    """The number of tokens after which the request fails in the engine: finish_reason ERROR."""
    error: EngineError = field(default_factory=lambda: EngineError("the step failed"))
    raise_after: int | None = None
    """The number of tokens after which the stream raises `error`, as it does when the engine thread
    is dead."""


@dataclass(frozen=True, kw_only=True)
class GenerateCall:
    """Arguments of one `generate` call."""

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str | None
    pooling: PoolingParams | None = None


async def play(
    script: Script,
    call: GenerateCall,
    prompt_ids: list[int],
    stop: asyncio.Event,
    release: asyncio.Event,
) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of one request; with n > 1 the completions take turns token by token."""
    params = call.params
    if call.pooling is not None:  # one delta, whose vector goes by the prompt
        script = replace(script, pieces=("",))
    arrival = time.perf_counter_ns()
    pieces, finish, stop_reason = _cut(script, params)
    if script.first_delay_s:
        await _sleep(script.first_delay_s, stop)
    first = time.perf_counter_ns()
    for i, piece in enumerate(pieces):
        if i == script.hold_after:
            await either(release, stop)
        elif i:
            await _sleep(script.delay_s, stop)
        if i == script.raise_after:
            raise script.error
        failed = i == script.fail_after
        last = i == len(pieces) - 1 or failed or stop.is_set()
        for index in range(params.n):
            reason = finish
            if failed:
                reason = FinishReason.ERROR
            elif stop.is_set():
                reason = FinishReason.ABORT
            token, vector, is_over = _token_id(piece), None, failed or stop.is_set()
            if call.pooling is not None and not is_over:
                noise = np.random.default_rng(prompt_ids).standard_normal(8)
                vector, is_over = call.pooling.finish(noise.astype(np.float32)), True
            ended = time.perf_counter_ns() if last else 0
            yield TokenDelta(
                request_id=call.request_id,
                index=index,
                text="" if is_over else piece,
                token_ids=() if is_over else (token,),
                logprobs=_logprobs(piece, token, params),
                finish_reason=reason if last else None,
                stop_reason=stop_reason if last and reason is FinishReason.STOP else None,
                num_prompt_tokens=len(prompt_ids),
                num_cached_tokens=script.num_cached_tokens,
                num_output_tokens=i if is_over else i + 1,
                vector=vector,
                prompt_token_ids=tuple(prompt_ids) if i == 0 and index == 0 else None,
                timings=RequestTimings(arrival, arrival + 1000, first, ended) if last else None,
                error=script.error if failed else None,
            )
        if last:
            return


def _cut(
    script: Script, params: SamplingParams
) -> tuple[list[str], FinishReason, int | str | None]:
    """Apply max_tokens and stop strings to the scripted pieces."""
    pieces = list(script.pieces)
    finish, stop_reason = script.finish_reason, script.stop_reason
    if params.max_tokens is not None and params.max_tokens < len(pieces):
        pieces, finish = pieces[: params.max_tokens], FinishReason.LENGTH
    if not params.stop:
        return pieces, finish, stop_reason
    text = "".join(pieces)
    found = [(text.index(s), s) for s in params.stop if s in text]
    if not found:
        return pieces, finish, stop_reason
    at, matched = min(found)
    keep = at + (len(matched) if params.include_stop_str_in_output else 0)
    cut: list[str] = []
    used = 0
    for piece in pieces:
        cut.append(piece[: max(0, keep - used)])
        used += len(piece)
        if used >= at + len(matched):
            break
    return cut, FinishReason.STOP, matched


def _token_id(piece: str) -> int:
    return zlib.crc32(piece.encode()) % 40_000 + 1_000


def _logprobs(piece: str, token: int, params: SamplingParams) -> tuple[TokenLogprob, ...] | None:
    if params.logprobs is None:
        return None
    chosen = (token, piece, piece.encode(), -0.25)
    others = [(k, f"alt{k}", f"alt{k}".encode(), -1.5 - k) for k in range(1, params.logprobs)]
    return (
        TokenLogprob(
            token_id=token,
            token=piece,
            token_bytes=piece.encode(),
            logprob=-0.25,
            rank=1,
            top=(chosen, *others) if params.logprobs else (),
        ),
    )


async def _sleep(delay_s: float, stop: asyncio.Event) -> None:
    if delay_s == 0:
        await asyncio.sleep(0)
        return
    try:
        await asyncio.wait_for(stop.wait(), delay_s)
    except TimeoutError:
        return


async def either(release: asyncio.Event, stop: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(release.wait()), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
