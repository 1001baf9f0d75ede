"""An answer's event stream -> `TokenDelta`s. Pure: bytes in, split anywhere; no I/O.

A server may send anything: an event that is not of an OpenAI stream is an `EngineError`, as is a
stream that breaks off. Token counts come from the server if it sends them; otherwise every piece of
text counts as one token until the final usage corrects that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from termgen.client import CallPiece, RequestTimings, TokenDelta, TokenLogprob
from termgen.errors import EngineError
from termgen.remote.failures import frame_failure, short
from termgen.vocabulary.request import FinishReason

MAX_EVENT_BYTES = 16 * 2**20
"""Limit of an event; the token ids of a long prompt come in one."""
MAX_CALLS = 256
"""Tool calls of one answer."""
UNKNOWN_ID = -1
"""Token id of a log-probability if the server sends no ids."""
THINK_OPEN, THINK_CLOSE = "<think>\n", "\n</think>\n\n"
"""Put around separately sent reasoning, as models themselves write it."""

_NO_EVENT = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)
"""Exceptions of reading a malformed event; the last: an infinite count."""

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


class EventReader:
    """Splits bytes into the payloads of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                yield from self._event()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EngineError("the server sends an event without an end")

    def end(self) -> Iterator[bytes]:
        """The last payload, whose blank line may be missing."""
        yield from self.feed(b"\n\n")

    def _event(self) -> Iterator[bytes]:
        if self._data:
            payload, self._data = b"\n".join(self._data), []
            yield payload


@dataclass(slots=True)
class _Choice:
    """One completion so far."""

    num_tokens: int = 0
    is_thinking: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_ns: int = 0
    call_places: dict[int, int] = field(default_factory=dict)
    """The server's index of a tool call -> its place in the answer."""


@dataclass(slots=True)
class _Usage:
    prompt: int = 0
    cached: int = 0
    output: int | None = None


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer. The last delta of each completion is held back until the usage arrives."""

    request_id: str
    num_choices: int
    is_chat: bool
    sent_ns: int
    clock: Callable[[], int] = time.perf_counter_ns
    is_done: bool = False
    _events: EventReader = field(default_factory=EventReader)
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _usage: _Usage = field(default_factory=_Usage)
    _timings: dict[int, RequestTimings] = field(default_factory=dict)
    _prompt_ids: tuple[int, ...] | None = None

    def feed(self, data: bytes) -> list[TokenDelta]:
        return [delta for payload in self._events.feed(data) for delta in self._take(payload)]

    def end(self) -> list[TokenDelta]:
        """The last deltas, with token counts. Raises `EngineError` if the answer broke off."""
        deltas = [delta for payload in self._events.end() for delta in self._take(payload)]
        open_ones = [i for i in range(self.num_choices) if not self._has_ended(i)]
        if open_ones:
            raise EngineError("the server broke the answer off in the middle")
        return deltas + [self._last(index) for index in range(self.num_choices)]

    def abort(self) -> list[TokenDelta]:
        """The last deltas of an answer that this client has aborted."""
        for index in range(self.num_choices):
            if not self._has_ended(index):
                self._choice(index).finish_reason = FinishReason.ABORT
        return [self._last(index) for index in range(self.num_choices)]

    def _has_ended(self, index: int) -> bool:
        return self._choice(index).finish_reason is not None

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    def _take(self, payload: bytes) -> list[TokenDelta]:
        if payload.strip() == b"[DONE]":
            self.is_done = True
            return []
        try:
            event = json.loads(payload)
            if event.get("error"):
                raise frame_failure(event["error"])
            self._take_counts(event)
            return [d for choice in event.get("choices") or () for d in self._take_choice(choice)]
        except _NO_EVENT:
            words = f"the server sent what is no event of a chat: {short(payload)}"
            raise EngineError(words) from None

    def _take_counts(self, event: Mapping[str, Any]) -> None:
        usage = event.get("usage")
        if usage:
            self._usage.prompt = int(usage.get("prompt_tokens") or 0)
            if self.num_choices == 1:
                self._usage.output = int(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            self._usage.cached = int(details.get("cached_tokens") or 0)
        for times in (event.get("termgen") or {}).get("timings") or ():
            self._timings[int(times["index"])] = self._stamps(
                queue_s=times["queue_s"], ttft_s=times["ttft_s"], e2e_s=times["e2e_s"]
            )
        times = event.get("timings")  # llama.cpp's
        if times and "prompt_ms" in times:
            ttft_s, rest_s = times["prompt_ms"] / 1e3, times.get("predicted_ms", 0.0) / 1e3
            self._timings[0] = self._stamps(queue_s=0.0, ttft_s=ttft_s, e2e_s=ttft_s + rest_s)

    def _stamps(self, *, queue_s: float, ttft_s: float, e2e_s: float) -> RequestTimings:
        """The server's durations as stamps of this process's clock."""
        queued, first, end = (self.sent_ns + int(s * 1e9) for s in (queue_s, ttft_s, e2e_s))
        return RequestTimings(self.sent_ns, queued, first, end)

    def _take_choice(self, choice: Mapping[str, Any]) -> list[TokenDelta]:
        index = int(choice.get("index") or 0)
        if not 0 <= index < self.num_choices:
            raise ValueError(f"choice {index} was not asked for")
        state = self._choice(index)
        text = self._text(state, choice)
        calls = self._calls(state, choice) if self.is_chat else ()
        ids = tuple(int(token_id) for token_id in choice.get("token_ids") or ())
        logprobs = _logprobs((choice.get("logprobs") or {}).get("content"), ids)
        prompt_ids = choice.get("prompt_token_ids")
        if prompt_ids and index == 0:
            self._prompt_ids = tuple(map(int, prompt_ids))
        reason = choice.get("finish_reason")
        if reason is not None:
            state.finish_reason = _FINISH.get(reason, FinishReason.STOP)
            known = reason in _FINISH or reason in ("tool_calls", "function_call")
            state.stop_reason = choice.get("stop_reason") if known else str(reason)
        if not (text or ids or logprobs or calls):
            return []
        self._count(state, ids)
        return [self._delta(index, state, text, ids, logprobs, calls)]

    def _count(self, state: _Choice, ids: Sequence[int]) -> None:
        state.first_ns = state.first_ns or self.clock()
        state.num_tokens += len(ids) or 1
        if self._usage.output is not None:
            state.num_tokens = max(self._usage.output, len(ids))

    def _text(self, state: _Choice, choice: Mapping[str, Any]) -> str:
        if not self.is_chat:
            return _string(choice.get("text"))
        delta = choice.get("delta") or {}
        text = ""
        thought = _string(delta.get("reasoning_content") or delta.get("reasoning"))
        if thought:
            text, state.is_thinking = ("" if state.is_thinking else THINK_OPEN) + thought, True
        said = _string(delta.get("content")) + _string(delta.get("refusal"))
        if state.is_thinking and (said or choice.get("finish_reason") is not None):
            text, state.is_thinking = text + THINK_CLOSE, False
        return text + said

    def _calls(self, state: _Choice, choice: Mapping[str, Any]) -> tuple[CallPiece, ...]:
        """Pieces of tool calls. A call without an index is a whole one, as some servers send it."""
        pieces = []
        for call in (choice.get("delta") or {}).get("tool_calls") or ():
            function = call.get("function") or {}
            name, arguments = _string(function.get("name")), _string(function.get("arguments"))
            given = call.get("index")
            key = len(state.call_places) if given is None else int(given)
            if key not in state.call_places:
                if len(state.call_places) >= MAX_CALLS or not name:
                    raise ValueError("a call without a name, or too many calls")
                state.call_places[key] = len(state.call_places)
                pieces.append(CallPiece(state.call_places[key], name, arguments))
            elif arguments:
                pieces.append(CallPiece(state.call_places[key], "", arguments))
        return tuple(pieces)

    def _delta(
        self,
        index: int,
        state: _Choice,
        text: str,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        calls: tuple[CallPiece, ...],
    ) -> TokenDelta:
        prompt_ids, self._prompt_ids = (self._prompt_ids, None) if index == 0 else (None, None)
        return TokenDelta(
            request_id=self.request_id,
            index=index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=None,
            stop_reason=None,
            num_prompt_tokens=self._usage.prompt,
            num_cached_tokens=self._usage.cached,
            num_output_tokens=state.num_tokens,
            prompt_token_ids=prompt_ids,
            calls=calls,
        )

    def _last(self, index: int) -> TokenDelta:
        state = self._choice(index)
        failed = state.finish_reason is FinishReason.ERROR
        output = state.num_tokens if self._usage.output is None else self._usage.output
        measured = RequestTimings(self.sent_ns, 0, state.first_ns, self.clock())
        return TokenDelta(
            request_id=self.request_id,
            index=index,
            text="",
            token_ids=(),
            logprobs=None,
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            num_prompt_tokens=self._usage.prompt,
            num_cached_tokens=self._usage.cached,
            num_output_tokens=output,
            timings=self._timings.get(index, measured),
            error=EngineError("the server failed this answer") if failed else None,
        )


def _string(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("text is not a string")
    return value.encode(errors="replace").decode()  # a lone surrogate is not valid text


def _logprobs(
    content: Sequence[Mapping[str, Any]] | None, ids: Sequence[int]
) -> tuple[TokenLogprob, ...] | None:
    if not content:
        return None
    known = ids if len(ids) == len(content) else [UNKNOWN_ID] * len(content)
    return tuple(_logprob(entry, token_id) for entry, token_id in zip(content, known, strict=True))


def _logprob(entry: Mapping[str, Any], token_id: int) -> TokenLogprob:
    """The logprob of an entry; its rank is the one among the alternatives sent."""
    token, raw, logprob = _token(entry)
    tops = [_token(top) for top in entry.get("top_logprobs") or ()]
    rank = 1 + sum(top[2] > logprob for top in tops)
    return TokenLogprob(
        token_id, token, raw, logprob, rank, tuple((UNKNOWN_ID, *top) for top in tops)
    )


def _token(entry: Mapping[str, Any]) -> tuple[str, bytes, float]:
    token = _string(entry["token"])
    raw = entry.get("bytes")
    return token, bytes(list(raw)) if raw is not None else token.encode(), float(entry["logprob"])
