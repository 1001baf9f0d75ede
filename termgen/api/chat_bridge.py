"""Shared code of the endpoints that are a chat in other words, such as /v1/messages.

They translate their body into one of /v1/chat/completions, so that there is one place where
parameters, messages and tools are checked, and translate its chunks back: `ChatNews` turns chunks
into thoughts, texts, calls and an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from termgen.api.chat import CHAT, ChatRequest, ChatStream, chat_response, parse_chat
from termgen.api.chat_prompt import TemplateFields
from termgen.api.errors import unsupported
from termgen.api.fields import (
    Check,
    Endpoint,
    declared,
    instead_of,
    is_empty,
    is_true,
    never,
    one_of,
)
from termgen.api.sampling import SharedFields
from termgen.client import TokenDelta
from termgen.errors import OverloadedError, RequestError

_OWN_FIELDS = frozenset({"stream", "temperature", "top_k", "top_p"})
"""Fields of a chat that the APIs of both endpoints have too."""
SHARED_FIELDS = {*declared(SharedFields), *declared(TemplateFields)} - {"model"} - _OWN_FIELDS
"""Fields of a chat that both endpoints take besides: none changes the shape of an answer."""

CHAT_WORDS: Mapping[str, Check] = {
    **CHAT.refused,
    **dict.fromkeys(
        ("add_generation_prompt", "parallel_tool_calls", "skip_special_tokens"), is_true
    ),
    **dict.fromkeys(("best_of", "n"), one_of(1)),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), never),
    **dict.fromkeys(("continue_final_message", "include_stop_str_in_output"), is_empty),
    **dict.fromkeys(("include_timings", "logprobs", "stop", "top_logprobs"), is_empty),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), is_empty),
    **dict.fromkeys(("max_completion_tokens", "max_tokens", "messages"), never),
    **dict.fromkeys(("prompt_logprobs", "reasoning", "reasoning_effort", "thinking"), never),
    **dict.fromkeys(("prediction", "truncate_prompt_tokens"), never),
    "response_format": one_of({"type": "text"}),
}
"""Fields that change a chat: value check -> harmless? An endpoint that does not take them, or has
another name for them, refuses them."""

_TOOL = re.compile(r"^(tools\[\d+\])\.function")
"""Both endpoints put a tool's fields at its top."""


def shared_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a body that a chat takes as they are."""
    return {name: data[name] for name in (*_OWN_FIELDS, *SHARED_FIELDS) if name in data}


def unknown_fields(
    endpoint: Endpoint, data: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[str, ...]:
    """`Endpoint.unknown`, and a RequestError for fields of a chat that this endpoint does not take.
    names: the endpoint's names for fields of a chat."""
    unknown = endpoint.unknown(data)
    for name in unknown:
        if name in CHAT_WORDS and data[name] is not None and not CHAT_WORDS[name](data[name]):
            hint = f"; its name here is {names[name]}" if name in names else ""
            advice = instead_of(name, CHAT_WORDS[name], names)
            raise unsupported(name, advice or f"{name} is not a field of this endpoint{hint}")
    return unknown


def turns_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates take them, which are stricter than these endpoints: instructions
    only at the beginning, and no two turns of one side in a row.

    Later instructions become part of the user's turn, marked as what they are.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        if role == "system" and turns and [turn["role"] for turn in turns] != ["system"]:
            text = _content_text(message)
            message, role = {"content": f"<system>\n{text}\n</system>"}, "user"
        if not turns or turns[-1]["role"] != role or role == "tool":
            turns.append({**message, "role": role})
            continue
        last = turns[-1]
        for name in ("content", "reasoning_content"):
            texts = [_content_text(m, name) for m in (last, message) if m.get(name) is not None]
            if texts:
                last[name] = "\n\n".join(filter(None, texts))
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        if calls:
            last["tool_calls"] = calls
    return turns


def _content_text(message: Mapping[str, Any], name: str = "content") -> str:
    content = message[name]
    return content if isinstance(content, str) else "\n".join(p["text"] for p in content)


def parse_as_chat(
    body: Mapping[str, Any],
    *,
    id_prefix: str,
    names: Mapping[str, str],
    **context: Any,
) -> ChatRequest:
    """The chat request for a translated body. names: the client's names of its fields."""
    try:
        chat = parse_chat(body, **context)
    except RequestError as error:
        raise renamed(error, names) from None
    answer_id = id_prefix + chat.options.id.partition("-")[2]
    return replace(
        chat,
        not_used=tuple(_renamed_name(name, names) for name in chat.not_used),
        options=replace(chat.options, id=answer_id),
        job=replace(chat.job, request_id=answer_id),
    )


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with the client's name of the field; the longest name that fits wins. With
    `function` among the names, a tool keeps its fields in an object of that name."""
    param = error.param or ""
    param = _renamed_name(param if "function" in names else _TOOL.sub(r"\1", param), names)
    if "parameters" in names:
        param = param.replace("].parameters", f"].{names['parameters']}")
    message = str(error).replace(error.param, param, 1) if error.param else str(error)
    if isinstance(error, OverloadedError):
        after_s = error.retry_after_s
        return OverloadedError(message, param=param, code=error.code, retry_after_s=after_s)
    return RequestError(
        message, param=param or None, code=error.code, status=error.status, type=error.type
    )


def _renamed_name(name: str, names: Mapping[str, str]) -> str:
    for ours, theirs in sorted(names.items(), key=lambda pair: -len(pair[0])):
        if name == ours or name.startswith((f"{ours}.", f"{ours}[")):
            return theirs + name[len(ours) :]
    return name


@dataclass(frozen=True, slots=True)
class ThoughtNews:
    """The next piece of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class TextNews:
    """The next piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallNews:
    """The beginning of a call, when it has an id, or its next piece."""

    index: int
    id: str | None
    name: str
    arguments: str
    """The next piece of the JSON text."""


@dataclass(frozen=True, slots=True)
class EndNews:
    """The answer is complete."""

    finish_reason: str
    stop_reason: int | str | None


News = ThoughtNews | TextNews | CallNews | EndNews


class Usage(NamedTuple):
    prompt: int
    cached: int
    output: int


class ChatNews:
    """Turns the one choice of a chat's stream into news."""

    def __init__(self, request: ChatRequest) -> None:
        assert request.job.params.n == 1, "these endpoints have one answer"
        self._chat = ChatStream(request)
        self._is_plain = not request.tools.needs_parser
        self.usage = Usage(0, 0, 0)

    def plain_text(self, delta: TokenDelta) -> str | None:
        """The text of a delta that is nothing else; None where `feed` has to be used. For use after
        `feed` has returned the first text."""
        if not self._is_plain or delta.finish_reason is not None:
            return None
        self._count(delta)
        return delta.text

    def _count(self, delta: TokenDelta) -> None:
        self.usage = Usage(
            delta.num_prompt_tokens, delta.num_cached_tokens, delta.num_output_tokens
        )

    def feed(self, delta: TokenDelta) -> Iterator[News]:
        self._count(delta)
        for chunk in self._chat.feed(0, delta):
            for choice in chunk["choices"]:
                yield from _news_of(choice)


def _news_of(choice: Mapping[str, Any]) -> Iterator[News]:
    delta = choice["delta"]
    if delta.get("reasoning_content"):
        yield ThoughtNews(delta["reasoning_content"])
    if delta.get("content"):
        yield TextNews(delta["content"])
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        yield CallNews(
            call["index"],
            call.get("id"),
            function.get("name") or "",
            function.get("arguments") or "",
        )
    if choice["finish_reason"] is not None:
        yield EndNews(choice["finish_reason"], choice.get("stop_reason"))


def whole_answer(request: ChatRequest, answers: list[TokenDelta]) -> tuple[list[News], Usage]:
    """The news and the usage of a whole answer."""
    response = chat_response(request, answers)
    choice, usage = response["choices"][0], response["usage"]
    message = dict(choice["message"])
    message["tool_calls"] = [
        {"index": i, **call} for i, call in enumerate(message.get("tool_calls") or ())
    ]
    news = list(_news_of({**choice, "delta": message}))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return news, Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])
