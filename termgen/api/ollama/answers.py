"""Answers of /api/chat and /api/generate: a line for each piece, or one object."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from termgen.api import sse
from termgen.api.chat import ChatStream, chat_response
from termgen.api.fields import parse_json
from termgen.api.ollama.errors import WIRE, line
from termgen.api.ollama.parser import OllamaRequest
from termgen.client import RequestTimings, TokenDelta
from termgen.errors import RequestError

DONE_REASONS = {"length": "length"}
"""Every other finish reason is `stop`, that of a call too."""


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _head(asked: OllamaRequest) -> dict[str, Any]:
    return {"model": asked.model, "created_at": now()}


def _piece(asked: OllamaRequest, text: str, thoughts: str = "", calls: Sequence[Any] = ()) -> Any:
    """The fields of an answer that hold its content."""
    thinking = {"thinking": thoughts} if thoughts else {}
    if not asked.is_chat:
        return {"response": text, **thinking}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thinking}
    return {"message": {**message, "tool_calls": list(calls)} if calls else message}


def _end(finish_reason: str, delta: TokenDelta) -> dict[str, Any]:
    """The last fields of an answer. Times are nanoseconds; the model is loaded all the time."""
    timings = delta.timings or RequestTimings()
    first_ns = timings.first_token_ns or timings.finished_ns
    errors = delta.schema_errors
    return {
        "done": True,
        **({} if errors is None else {"schema_errors": errors}),
        "done_reason": DONE_REASONS.get(finish_reason, "stop"),
        "total_duration": max(0, timings.finished_ns - timings.arrival_ns),
        "load_duration": 0,
        "prompt_eval_count": delta.num_prompt_tokens,
        "prompt_eval_duration": max(0, first_ns - timings.first_scheduled_ns),
        "eval_count": delta.num_output_tokens,
        "eval_duration": max(0, timings.finished_ns - first_ns),
    }


def _logprobs(asked: OllamaRequest, choice: Mapping[str, Any]) -> dict[str, Any]:
    """The `logprobs` of a chunk, which has a list where chats have an object with one."""
    found = (choice.get("logprobs") or {}).get("content")
    if not found:
        return {}
    entries = [dict(entry) for entry in found]
    if not asked.shows_top:
        for entry in entries:
            del entry["top_logprobs"]
    return {"logprobs": entries}


def _call(index: int, call_id: str, name: str, arguments: str) -> dict[str, Any] | None:
    """A call, with its arguments as an object; None for one that is not whole."""
    try:
        parsed = parse_json((arguments or "{}").encode())
    except RequestError:
        return None
    return {"id": call_id, "function": {"index": index, "name": name, "arguments": parsed}}


def _text_of_call(name: str, arguments: str) -> str:
    """What there is of a call that was cut off, as text."""
    return f'{{"name": {sse.dumps(name).decode()}, "arguments": {arguments}'


def answer(asked: OllamaRequest, answers: list[TokenDelta]) -> dict[str, Any]:
    """The whole answer, or that of a request which only loads the model."""
    if asked.only_loads:
        return {**_head(asked), **_piece(asked, ""), "done": True, "done_reason": "load"}
    choice = chat_response(asked.chat, answers)["choices"][0]
    message = choice["message"]
    text, calls = message["content"] or "", []
    for index, given in enumerate(message.get("tool_calls") or ()):
        name, arguments = given["function"]["name"], given["function"]["arguments"]
        call = _call(index, given["id"], name, arguments)
        if call is None:
            text += _text_of_call(name, arguments)
        else:
            calls.append(call)
    thoughts = message.get("reasoning_content", "") if asked.shows_thoughts else ""
    return {
        **_head(asked),
        **_piece(asked, text, thoughts, calls),
        **_end(choice["finish_reason"], answers[0]),
        **_logprobs(asked, choice),
    }


class AnswerLines:
    """Turns a chat's deltas into Ollama's lines: pieces of thoughts and text, whole calls, and a
    last line with counts and times."""

    wire = WIRE

    def __init__(self, asked: OllamaRequest) -> None:
        self._asked = asked
        self._chat = ChatStream(asked.chat)
        params, tools = asked.chat.job.params, asked.chat.tools
        self._is_plain = params.logprobs is None and not tools.needs_parser
        self._has_text = False
        self._call: tuple[int, str, str] | None = None
        """Index, id and name of the call that is being written."""
        self._arguments: list[str] = []
        self._last: TokenDelta | None = None
        self._finish_reason = "stop"
        self._template: _TextTemplate | None = None

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for chunk in self._chat.feed(0, delta):
            for choice in chunk["choices"]:
                lines += self._lines_of(choice)
        if delta.finish_reason is not None:
            self._last = delta
        return lines

    def frame(self, index: int, delta: TokenDelta) -> bytes | None:
        """The encoded form of what `feed` would return, for a delta in the middle that is only
        text."""
        if not (self._is_plain and self._has_text) or delta.finish_reason is not None:
            return None
        if not delta.text:
            return b""
        if self._template is None:
            self._template = _TextTemplate(self._asked)
        return self._template.frame(delta.text)

    def end(self) -> list[dict[str, Any]]:
        assert self._last is not None, "an answer ends with a finish reason"
        end = _end(self._finish_reason, self._last)
        return [*self._end_call(), {**_head(self._asked), **_piece(self._asked, ""), **end}]

    def _lines_of(self, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
        delta, lines = choice["delta"], []
        for call in delta.get("tool_calls") or ():
            lines += self._begin_call(call) if call.get("id") else []
            self._arguments.append((call.get("function") or {}).get("arguments") or "")
        text, thoughts = delta.get("content") or "", delta.get("reasoning_content") or ""
        thoughts = thoughts if self._asked.shows_thoughts else ""
        logprobs = _logprobs(self._asked, choice)
        if text or thoughts:
            lines += self._end_call()
        if text or thoughts or logprobs:
            self._has_text |= bool(text)
            lines.append(self._line(_piece(self._asked, text, thoughts), logprobs))
        if choice["finish_reason"] is not None:
            self._finish_reason = choice["finish_reason"]
        return lines

    def _begin_call(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        lines = self._end_call()
        self._call = (call["index"], call["id"], call["function"]["name"])
        return lines

    def _end_call(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        (index, call_id, name), arguments = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        call = _call(index, call_id, name, arguments)
        if call is None:
            return [self._line(_piece(self._asked, _text_of_call(name, arguments)))]
        return [self._line(_piece(self._asked, "", calls=[call]))]

    def _line(self, piece: Mapping[str, Any], more: Mapping[str, Any] = {}) -> dict[str, Any]:
        return {**_head(self._asked), **piece, "done": False, **more}


class _TextTemplate:
    """Lines that differ in one text and their time: the rest is encoded once."""

    __slots__ = ("_after", "_before", "_between")

    def __init__(self, asked: OllamaRequest) -> None:
        time, text = secrets.token_hex(16), secrets.token_hex(16)
        made = {"model": asked.model, "created_at": time, **_piece(asked, text), "done": False}
        self._before, rest = line(made).split(sse.dumps(time))
        self._between, self._after = rest.split(sse.dumps(text))

    def frame(self, text: str) -> bytes:
        parts = self._before, b'"%b"' % now().encode(), self._between, sse.dumps(text), self._after
        return b"".join(parts)
