"""/v1/responses, OpenAI's newer endpoint, without state: a chat's news to events or a response.

`body` has the way in.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from termgen.api import sse
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
from termgen.api.errors import reply_for
from termgen.api.fields import Served
from termgen.api.responses.body import NAMES, RESPONSES, ResponsesRequest, parse_responses
from termgen.api.responses.items import ToolName, custom_input
from termgen.api.rows import GeneratingRow
from termgen.client import TokenDelta

Piece = ThoughtNews | TextNews | CallNews
"""News that are part of an item."""


class _Items:
    """The output items of one response, built from its news."""

    def __init__(self, tool_names: Mapping[str, ToolName]) -> None:
        self._tool_names = tool_names
        self.done: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        """The open item without its text or arguments, which are in `pieces`."""
        self.pieces: list[str] = []
        self.kind: int | str = ""
        """Kind of the open item: the number of a call, `message` or `reasoning`."""
        self.end = EndNews("stop", None)

    @property
    def is_call(self) -> bool:
        return isinstance(self.kind, int)

    @property
    def is_custom(self) -> bool:
        """The open item is the call of a custom tool."""
        return self.open is not None and self.open["type"] == "custom_tool_call"

    def begins(self, news: Piece) -> bool:
        """True for news of another item than the open one."""
        return self.open is None or _kind_of(news) != self.kind

    def begin(self, news: Piece) -> dict[str, Any]:
        self.kind, self.pieces = _kind_of(news), []
        if isinstance(news, CallNews):
            tool = self._tool_names.get(news.name) or ToolName(news.name)
            self.open = {
                "type": "custom_tool_call" if tool.is_custom else "function_call",
                "id": f"{'ctc' if tool.is_custom else 'fc'}_{uuid.uuid4().hex}",
                "call_id": news.id or f"call_{uuid.uuid4().hex}",
                "name": tool.name,
                "input" if tool.is_custom else "arguments": "",
                "status": "in_progress",
            }
            if tool.namespace is not None:
                self.open["namespace"] = tool.namespace
        elif isinstance(news, ThoughtNews):
            self.open = {
                "type": "reasoning",
                "id": f"rs_{uuid.uuid4().hex}",
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
        else:
            self.open = {
                "type": "message",
                "id": f"msg_{uuid.uuid4().hex}",
                "role": "assistant",
                "content": [],
                "status": "in_progress",
            }
        return dict(self.open)

    def add(self, news: Piece) -> None:
        self.pieces.append(news.arguments if isinstance(news, CallNews) else news.text)

    def part(self, text: str) -> dict[str, Any]:
        """The one part of an open item that is not a call."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def close(self, status: str) -> dict[str, Any]:
        assert self.open is not None
        text = "".join(self.pieces)
        said: dict[str, Any] = {"content": [self.part(text)]}
        if self.is_custom:
            said = {"input": custom_input(text)}
        elif self.is_call:
            said = {"arguments": text}
        item, self.open = {**self.open, **said, "status": status}, None
        self.done.append(item)
        return item

    @property
    def status(self) -> str:
        """Status of the response, and of the item that was open when it ended."""
        return "incomplete" if self.end.finish_reason == "length" else "completed"


def _kind_of(news: Piece) -> int | str:
    if isinstance(news, CallNews):
        return news.index
    return "reasoning" if isinstance(news, ThoughtNews) else "message"


def _object(request: ResponsesRequest, status: str, **fields: Any) -> dict[str, Any]:
    """The response object. fields: those that are known by now."""
    options = request.chat.options
    return {
        "id": options.id,
        "object": "response",
        "created_at": options.created,
        "status": status,
        "background": False,
        "completed_at": int(time.time()) if status == "completed" else None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": options.model,
        "output": [],
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **request.echo,
        **fields,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.output,
    }


def response_object(request: ResponsesRequest, answers: list[TokenDelta]) -> dict[str, Any]:
    news, usage = whole_answer(request.chat, answers)
    items = _Items(request.tool_names)
    for item in news:
        if isinstance(item, EndNews):
            items.end = item
            continue
        if items.begins(item):
            if items.open is not None:
                items.close("completed")
            items.begin(item)
        items.add(item)
    if items.open is None and not items.done:
        items.begin(TextNews(""))
        items.add(TextNews(""))
    if items.open is not None:
        items.close(items.status)
    return _object(request, items.status, output=items.done, usage=_usage(usage))


class ResponseStream:
    """Turns a chat's deltas into the events of a response, each with its sequence number: created,
    in_progress; for each item added, its deltas, done; then completed, incomplete or failed."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._news = ChatNews(request.chat)
        self._items = _Items(request.tool_names)
        self._sequence = 0
        self._template: sse.NumberedTextTemplate | None = None

    @property
    def wire(self) -> sse.Wire:
        return sse.Wire(frame=sse.named_frame, done=b"", error_frames=self._error_frames)

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for news in self._news.feed(delta):
            events += self._start()
            events += self._events_of(news)
        return events

    def frame(self, index: int, delta: TokenDelta) -> bytes | None:
        """The encoded form of what `feed` would return, for a delta in the middle that is only
        text."""
        text = self._news.plain_text(delta) if self._items.open is not None else None
        if not text:
            return None if text is None else b""
        if self._template is None:  # where text is all that comes, it is in one item
            place = self._place()
            self._template = sse.NumberedTextTemplate(
                lambda number, text: _text_delta(number, place, text)
            )
        self._items.pieces.append(text)
        self._sequence += 1
        return self._template.frame(self._sequence - 1, text)

    def end(self) -> list[dict[str, Any]]:
        events = self._start()
        items = self._items
        if items.open is None and not items.done:
            events += self._events_of(TextNews(""))
        if items.open is not None:
            events += self._close(items.status)
        response = _object(
            self._request, items.status, output=items.done, usage=_usage(self._news.usage)
        )
        return [*events, self._event(f"response.{items.status}", response=response)]

    def failure(self, error: BaseException) -> list[dict[str, Any]]:
        """The events that end a stream with an error."""
        body = reply_for(error).body["error"]
        fault = {"code": body["code"] or "server_error", "message": body["message"]}
        response = _object(self._request, "failed", output=self._items.done, error=fault)
        return [*self._start(), self._event("response.failed", response=response)]

    def _error_frames(self, error: BaseException) -> bytes:
        return b"".join(sse.named_frame(event) for event in self.failure(error))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _start(self) -> list[dict[str, Any]]:
        if self._sequence:
            return []
        response = _object(self._request, "in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def _events_of(self, news: News) -> list[dict[str, Any]]:
        items = self._items
        if isinstance(news, EndNews):
            items.end = news
            return []
        events: list[dict[str, Any]] = []
        if items.begins(news):
            if items.open is not None:
                events += self._close("completed")
            item = items.begin(news)
            at = {"output_index": len(items.done)}
            events.append(self._event("response.output_item.added", item=item, **at))
            if not items.is_call:
                part = {**self._place(), "part": items.part("")}
                events.append(self._event("response.content_part.added", **part))
        items.add(news)
        if isinstance(news, CallNews):
            if news.arguments and not items.is_custom:  # a custom tool gets its input whole
                kind = "response.function_call_arguments.delta"
                events.append(self._event(kind, **self._place(), delta=news.arguments))
        elif isinstance(news, ThoughtNews):
            kind = "response.reasoning_text.delta"
            events.append(self._event(kind, **self._place(), delta=news.text))
        elif news.text:
            events.append(_text_delta(self._sequence, self._place(), news.text))
            self._sequence += 1
        return events

    def _place(self) -> dict[str, Any]:
        """Position of the open item, and of its one part, if it is a message."""
        items = self._items
        assert items.open is not None
        place = {"item_id": items.open["id"], "output_index": len(items.done)}
        return place if items.is_call else {**place, "content_index": 0}

    def _close(self, status: str) -> list[dict[str, Any]]:
        place, kind = self._place(), self._items.kind
        number = place["output_index"]
        item = self._items.close(status)
        events = []
        if item["type"] == "custom_tool_call":
            name = "response.custom_tool_call_input"
            events.append(self._event(f"{name}.delta", **place, delta=item["input"]))
            events.append(self._event(f"{name}.done", **place, input=item["input"]))
        elif isinstance(kind, int):
            body = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **place, **body))
        else:
            part = item["content"][0]
            done = {**place, "text": part["text"]}
            if kind == "reasoning":
                events.append(self._event("response.reasoning_text.done", **done))
            else:
                events.append(self._event("response.output_text.done", **done, logprobs=[]))
            events.append(self._event("response.content_part.done", **place, part=part))
        done = {"output_index": number, "item": item}
        return [*events, self._event("response.output_item.done", **done)]


def _text_delta(number: int, place: dict[str, Any], text: str) -> dict[str, Any]:
    kind = "response.output_text.delta"
    return {"type": kind, "sequence_number": number, **place, "delta": text, "logprobs": []}


def _parse(served: Served, data: Mapping[str, Any]) -> ResponsesRequest:
    return parse_responses(data, **served.answering, **served.conversing)


ROW = GeneratingRow(
    path="/v1/responses",
    summary="responses",
    body=RESPONSES,
    parse=_parse,
    stream=ResponseStream,
    whole=response_object,
    names=NAMES,
)
