"""/v1/messages, Anthropic's endpoint: a chat's news to events or to a message; its errors.

`anthropic_input` has the way in.
"""

from __future__ import annotations

from typing import Any

from termgen.api import sse
from termgen.api.anthropic_input import MessagesRequest
from termgen.api.chat import ChatRequest
from termgen.api.chat_bridge import (
    CallNews,
    ChatNews,
    EndNews,
    News,
    TextNews,
    ThoughtNews,
    Usage,
    whole_answer,
)
from termgen.api.errors import ErrorReply, reply_for
from termgen.api.fields import parse_json
from termgen.client import TokenDelta
from termgen.errors import RequestError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


EMPTY_TEXT = {"type": "text", "text": ""}
EMPTY_THOUGHT = {"type": "thinking", "thinking": "", "signature": ""}
"""Clients want a signature; nobody here checks one."""


def message_response(request: MessagesRequest, answers: list[TokenDelta]) -> dict[str, Any]:
    """The whole message."""
    news, usage = whole_answer(request.chat, answers)
    content: list[dict[str, Any]] = []
    end = EndNews("stop", None)
    for item in news:
        match item:
            case ThoughtNews(text):
                if request.shows_thoughts:
                    content.append({**EMPTY_THOUGHT, "thinking": text})
            case TextNews(text):
                content.append({"type": "text", "text": text})
            case CallNews(_, call_id, name, arguments):
                use = {"id": call_id, "name": name, "input": _input_of(arguments)}
                content.append({"type": "tool_use", **use})
            case EndNews():
                end = item
    return {
        **_empty_message(request.chat),
        "content": content or [EMPTY_TEXT],
        **_stop_fields(end, has_calls=any(block["type"] == "tool_use" for block in content)),
        "usage": _usage(usage),
    }


def _input_of(arguments: str) -> Any:
    """An object with finite numbers, as clients take it and send it back."""
    try:
        return parse_json((arguments or "{}").encode())
    except RequestError:  # cut off by max_tokens: `stop_reason` says so
        return {}


def _empty_message(chat: ChatRequest) -> dict[str, Any]:
    return {
        "id": chat.options.id,
        "type": "message",
        "role": "assistant",
        "model": chat.options.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop_fields(end: EndNews, *, has_calls: bool) -> dict[str, Any]:
    """has_calls: a chat that was made to call by name ends with `stop`, a message never does."""
    if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    if has_calls and end.finish_reason != "length":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reasons = {"stop": "end_turn", "length": "max_tokens"}
    return {"stop_reason": reasons.get(end.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Here the tokens found in the cache are not among the input's."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


class MessageStream:
    """A chat's deltas to Anthropic's events, in their order.

    message_start, then each block's start, deltas and stop, then message_delta, message_stop.
    """

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request
        self._news = ChatNews(request.chat)
        self._has_started = False
        self._index = -1
        """Of the newest block."""
        self._open: int | str | None = None
        """The open block: `text`, `thinking`, or the number of its call."""
        self._template: sse.TextTemplate | None = None
        self._has_calls = False
        self._end = EndNews("stop", None)

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for news in self._news.feed(delta):
            events += self._start()
            events += self._events_of(news)
        return events

    def frame(self, index: int, delta: TokenDelta) -> bytes | None:
        """What `feed` would say, encoded, for a delta in the middle that is only text."""
        text = self._news.plain_text(delta) if self._open == "text" else None
        if not text:
            return None if text is None else b""
        if self._template is None:  # where text is all that comes, it is in one block
            self._template = sse.TextTemplate(self._text_delta, sse.named_frame)
        return self._template.frame(text)

    def end(self) -> list[dict[str, Any]]:
        events = self._start()
        if self._index < 0:  # clients look at the first block
            events += self._begin("text", EMPTY_TEXT)
        events += self._stop_block()
        usage = _usage(self._news.usage)
        stop = _stop_fields(self._end, has_calls=self._has_calls)
        events.append({"type": "message_delta", "delta": stop, "usage": usage})
        return [*events, {"type": "message_stop"}]

    def _start(self) -> list[dict[str, Any]]:
        if self._has_started:
            return []
        self._has_started = True
        usage = _usage(self._news.usage)
        message = {**_empty_message(self._request.chat), "usage": usage}
        return [{"type": "message_start", "message": message}]

    def _events_of(self, news: News) -> list[dict[str, Any]]:
        match news:
            case ThoughtNews(text):
                if not self._request.shows_thoughts:
                    return []
                events = self._begin("thinking", EMPTY_THOUGHT)
                return [*events, self._delta({"type": "thinking_delta", "thinking": text})]
            case TextNews(text):
                events = self._begin("text", EMPTY_TEXT)
                return [*events, self._text_delta(text)]
            case CallNews(number, call_id, name, arguments):
                self._has_calls = True
                block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name}
                block["input"] = {}
                events = self._begin(number, block)
                if arguments:
                    delta = {"type": "input_json_delta", "partial_json": arguments}
                    events.append(self._delta(delta))
                return events
            case EndNews():
                self._end = news
        return []

    def _begin(self, block: int | str, content: dict[str, Any]) -> list[dict[str, Any]]:
        """Open a block, unless it is the one that is open."""
        if self._open == block:
            return []
        events = self._stop_block()
        self._index += 1
        self._open = block
        start = {"type": "content_block_start", "index": self._index, "content_block": content}
        return [*events, start]

    def _text_delta(self, text: str) -> dict[str, Any]:
        return self._delta({"type": "text_delta", "text": text})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop_block(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]


# -- errors --------------------------------------------------------------------------------


def is_messages_path(path: str) -> bool:
    """Whether errors are to have Anthropic's shape."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_reply(reply: ErrorReply, request_id: str) -> ErrorReply:
    """The same failure in Anthropic's shape. The slug follows the message, in brackets."""
    return ErrorReply(reply.status, {**_error(reply), "request_id": request_id}, reply.headers)


def _error(reply: ErrorReply) -> dict[str, Any]:
    error = reply.body["error"]
    message, code = error["message"], error["code"]
    if code and code not in message:
        message = f"{message} ({code})"
    kind = ERROR_TYPES.get(reply.status, "api_error")
    if reply.status < 500:
        kind = ERROR_TYPES.get(reply.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES_WIRE = sse.Wire(
    frame=sse.named_frame,
    done=b"",
    ping=sse.named_frame({"type": "ping"}),
    error_frames=lambda exc: sse.named_frame(_error(reply_for(exc))),
)
