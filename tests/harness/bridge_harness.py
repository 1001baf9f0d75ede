"""Bodies of the bridged endpoints, and streams fed with made-up chat news."""

from __future__ import annotations

from typing import Any

import pytest

from termgen.api import anthropic
from termgen.api.chat_bridge import CallNews, ChatNews, EndNews, News, TextNews, Usage
from termgen.api.responses import body as responses_body
from termgen.client import ChatPrompt
from termgen.vocabulary.tool_format import ToolFormat

CONTEXT: dict[str, Any] = {
    "model": "m",
    "defaults": {},
    "tool_format": ToolFormat(knows_tools=True),
}
HI = [{"role": "user", "content": "hi"}]
USAGE = Usage(prompt=20, cached=16, output=7)

CALLS: list[News] = [
    TextNews("I will "),
    TextNews("look."),
    CallNews(0, "call_a", "weather", ""),
    CallNews(0, None, "", '{"city":'),
    CallNews(0, None, "", ' "Köln"}'),
    CallNews(1, "call_b", "time", "{}"),
    EndNews("tool_calls", None),
]


def messages(**fields: Any) -> anthropic.MessagesRequest:
    return anthropic.parse_messages({"max_tokens": 9, "messages": HI, **fields}, **CONTEXT)


def prompt_of(chat: Any) -> ChatPrompt:
    prompt = chat.job.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def play(stream: Any, news: list[News], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The events of a stream fed with this chat news, one delta for each."""

    def feed(self: ChatNews, delta: Any) -> list[News]:
        self.usage = USAGE
        return [delta]

    monkeypatch.setattr(ChatNews, "feed", feed)
    events = [event for item in news for event in stream.feed(0, item)]
    return [*events, *stream.end()]


def ask(**fields: Any) -> responses_body.ResponsesRequest:
    return responses_body.parse_responses({"input": "hi", **fields}, **CONTEXT)
