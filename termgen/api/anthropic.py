"""/v1/messages, Anthropic's endpoint: its body in a chat's words, its answers, its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from termgen.api import sse
from termgen.api.chat import ChatRequest
from termgen.api.chat_bridge import (
    CallNews,
    ChatNews,
    EndNews,
    News,
    TextNews,
    ThoughtNews,
    Usage,
    parse_as_chat,
    shared_fields,
    turns_of,
    unknown_fields,
    whole_answer,
)
from termgen.api.chat_prompt import (
    TemplateFields,
    arguments_of,
    line_for,
    parts_of,
    replaced_parts,
    result_text,
    texts_of,
    unsupported_part,
)
from termgen.api.errors import ErrorReply, ErrorShape, reply_for, unsupported
from termgen.api.fields import (
    Endpoint,
    Served,
    is_empty,
    one_of,
    parse_json,
    read,
    wanted,
    wrong_type,
)
from termgen.api.job import Job, ResponseOptions
from termgen.api.rows import AskingRow, GeneratingRow, TokenRow
from termgen.api.sampling import PositiveInt, SharedFields
from termgen.api.tools import left_out, refuse_choice
from termgen.client import GenerationClient, Prompt, TokenDelta
from termgen.errors import RequestError
from termgen.vocabulary.sampling.row import MAX_INT

NAMES = {
    "max_completion_tokens": "max_tokens",
    "parameters": "input_schema",
    "reasoning": "output_config.effort",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
}
"""Names of a chat's fields on this endpoint."""

MESSAGES_PATH = re.compile(r"/v1/messages(/.*)?", re.DOTALL)
"""Paths whose errors have Anthropic's shape."""

ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}

CALLS = frozenset({"tool_use", "mcp_tool_use"})
RESULTS = frozenset({"tool_result", "mcp_tool_result"})
LEFT_OUT_BLOCKS = frozenset(
    {
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("advisor_tool_result", "mcp_tool_listing", "container_upload", "fallback"),
        *("compaction", "tool_addition", "tool_removal"),
    }
)
"""Blocks that only Anthropic's server can read: of tools that it ran, for example."""

_STAMP = re.compile(r"\bcch=[^;\s]*")

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
"""The signature is there because clients expect the field; this server checks none."""


def _only_drops_thoughts(value: Any) -> bool:
    """True for edits of the history that only drop thoughts, which templates do not show anyway."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking")
        for edit in edits
    )


class ToolChoice(Struct, frozen=True):
    type: str | None = None
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Struct, frozen=True):
    type: str | None = None
    schema: Any = None


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountFields(SharedFields, frozen=True, kw_only=True):
    """The body of /v1/messages/count_tokens, beside its `TemplateFields`."""

    max_tokens: PositiveInt | None = None
    messages: Annotated[list[Any], wanted("a list of messages")]
    system: Annotated[Any, Meta(extra_json_schema={"type": ["string", "array"]})] = []
    thinking: Annotated[dict[str, Any] | None, wanted("an object with a type")] = None
    stop_sequences: Annotated[list[Any] | None, wanted("a list of strings")] = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    tools: list[Any] = []
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesFields(CountFields, frozen=True, kw_only=True):
    """The body of /v1/messages, beside its `TemplateFields`."""

    max_tokens: PositiveInt


MESSAGES = Endpoint(
    (MessagesFields, TemplateFields),
    harmless=frozenset(
        {
            "anthropic_version",
            "betas",
            "cache_control",  # prefixes are cached anyway
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "user_profile_id",
            "workspace_id",
        }
    ),
    refused={
        "container": is_empty,
        "context_management": _only_drops_thoughts,
        "mcp_servers": is_empty,
        "speed": one_of("standard"),
    },
)


COUNT_TOKENS = replace(MESSAGES, structs=(CountFields, TemplateFields))


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    chat: ChatRequest
    ignored: tuple[str, ...]
    shows_thoughts: bool = True
    """False: the client asked for answers without thoughts."""

    @property
    def jobs(self) -> tuple[Job]:
        return self.chat.jobs

    @property
    def options(self) -> ResponseOptions:
        return self.chat.options

    @property
    def not_used(self) -> tuple[str, ...]:
        return self.chat.not_used


def parse_messages(
    data: Mapping[str, Any], *, only_counts: bool = False, **context: Any
) -> MessagesRequest:
    """Check a body. only_counts: the body of count_tokens, which asks for no answer. Raises
    RequestError."""
    body = read(CountFields if only_counts else MessagesFields, data)
    thinking = body.thinking
    turns = _Turns(refuses_images=context.get("refuses_images", False))
    messages = turns.messages_of(body.messages)
    chat: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "messages": turns_of([*_system(body.system), *messages]),
        "thinking": thinking,
        "stop": body.stop_sequences,
        **shared_fields(data),
        **_tools(body),
        **_output(body.output_config),
    }
    if chat["messages"][-1]["role"] == "assistant":  # the answer is to go on from these words
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    ignored = unknown_fields(MESSAGES, data, NAMES)
    request = _thoughtless(parse_as_chat(chat, id_prefix="msg_", names=NAMES, **context), thinking)
    not_used = dict.fromkeys((*request.not_used, *turns.not_used))
    return MessagesRequest(
        chat=replace(request, not_used=tuple(not_used)),
        ignored=ignored,
        shows_thoughts=thinking is None or thinking["type"] != "disabled",
    )


def _thoughtless(chat: ChatRequest, thinking: Mapping[str, Any] | None) -> ChatRequest:
    """Leave thoughts that the client does not want out of the answer, whatever the template
    reads."""
    if thinking is None or thinking["type"] != "disabled":
        return chat
    return replace(chat, not_used=tuple(name for name in chat.not_used if name != "thinking"))


def _system(given: Any) -> list[dict[str, Any]]:
    """The instructions as one message.

    A client stamps its first block anew for every request; left in, no prompt would ever be found
    in the prefix cache.
    """
    texts = [
        _STAMP.sub("cch=", text) if text.startswith("x-anthropic-billing-header:") else text
        for text in texts_of(given, "system")
    ]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


class _Turns:
    """The messages of a conversation while its turns are read."""

    def __init__(self, *, refuses_images: bool) -> None:
        self._replaced = replaced_parts(refuses_images=refuses_images)
        self.not_used: list[str] = []
        """Names of parts that the model is not shown."""

    def messages_of(self, value: list[Any]) -> list[dict[str, Any]]:
        if not value:
            raise RequestError("messages must not be empty", param="messages")
        messages: list[dict[str, Any]] = []
        for i, message in enumerate(value):
            where = f"messages[{i}]"
            if not isinstance(message, dict):
                raise wrong_type(where, "an object", message)
            role, content = message.get("role"), message.get("content")
            if role not in ("user", "assistant", "system"):
                raise wrong_type(f"{where}.role", "user, assistant or system", role)
            if role == "system":
                text = "\n".join(texts_of(content, f"{where}.content"))
                messages.append({"role": "system", "content": text})
            elif role == "user":
                messages += self._user(content, f"{where}.content")
            else:
                messages += self._assistant(content, f"{where}.content")
        return messages

    def _user(self, content: Any, where: str) -> list[dict[str, Any]]:
        """Messages of a user's turn: one for each result of a tool, and one for the text."""
        messages: list[dict[str, Any]] = []
        texts = []
        for kind, block, at in _blocks(content, where):
            if kind == "text":
                texts.append({"type": "text", "text": block["text"]})
            elif kind in RESULTS:
                messages.append(self._result(block, at))
            elif kind in self._replaced:
                texts.append({"type": "text", "text": line_for(block, kind)})
                self.not_used.append(f"messages.{kind}")
            elif kind in LEFT_OUT_BLOCKS:
                self.not_used.append(f"messages.{kind}")
            else:
                raise unsupported_part(kind, at)
        if texts or not messages:
            messages.append({"role": "user", "content": texts})
        return messages

    def _assistant(self, content: Any, where: str) -> list[dict[str, Any]]:
        """Messages of an assistant's turn: one, unless a tool's result stands in its middle. Its
        thoughts are for the template, if that shows them."""
        messages: list[dict[str, Any]] = []
        texts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []

        def end() -> None:
            message: dict[str, Any] = {"role": "assistant", "content": None}
            if texts or not calls:
                message["content"] = list(texts)
            if calls:
                message["tool_calls"] = list(calls)
            if thoughts:
                message["reasoning_content"] = "\n".join(thoughts)
            messages.append(message)
            for pieces in (texts, calls, thoughts):
                pieces.clear()

        for kind, block, at in _blocks(content, where):
            if kind == "text":
                texts.append({"type": "text", "text": block["text"]})
            elif kind in CALLS:
                calls.append(_call(block, at))
            elif kind == "thinking":
                thoughts.append(str(block.get("thinking", "")))
            elif kind == "mcp_tool_result":
                end()
                messages.append(self._result(block, at))
            elif kind in LEFT_OUT_BLOCKS:
                self.not_used.append(f"messages.{kind}")
            elif kind != "redacted_thinking":
                raise unsupported_part(kind, at)
        if texts or calls or thoughts or not messages:
            end()
        return messages

    def _result(self, block: Mapping[str, Any], at: str) -> dict[str, Any]:
        call_id, content = block.get("tool_use_id"), block.get("content")
        if not isinstance(call_id, str):
            raise wrong_type(f"{at}.tool_use_id", "a string", call_id)
        if isinstance(content, list):
            content = [_as_text(part) for part in content]
        text = result_text(content, f"{at}.content", not_used=self.not_used)
        if block.get("is_error") is True:
            text = f"Error: {text}"
        return {"role": "tool", "tool_call_id": call_id, "content": text}


def _blocks(value: Any, where: str) -> list[tuple[str, Mapping[str, Any], str]]:
    """(type, block, path) of each content block; a string is a block of text."""
    if isinstance(value, str):
        return [("text", {"text": value}, where)]
    blocks = []
    for at, given in parts_of(value, where, "a string or a list of blocks"):
        block = _as_text(given)
        kind = block.get("type")
        if kind == "text" and not isinstance(block.get("text"), str):
            raise wrong_type(f"{at}.text", "a string", block.get("text"))
        blocks.append((kind if isinstance(kind, str) else "", block, at))
    return blocks


def _as_text(block: Any) -> Any:
    """The block as one of text, if text is all that it has."""
    if not isinstance(block, dict):
        return block
    kind, source = block.get("type"), block.get("source")
    if kind in ("compaction", "search_result"):
        texts = block.get("content")
    elif kind == "document" and isinstance(source, dict):
        texts = source.get("data") if source.get("type") == "text" else source.get("content")
    else:
        return block
    if isinstance(texts, list) and all(_is_text(part) for part in texts):
        texts = "\n".join(part["text"] for part in texts)
    if not isinstance(texts, str):
        return block
    head = [block[name] for name in ("title", "source") if isinstance(block.get(name), str)]
    return {"type": "text", "text": "\n".join([*head, texts])}


def _is_text(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.get("type") == "text"
    return is_part and isinstance(part.get("text"), str)


def _call(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    given = arguments_of(block.get("input"), f"{at}.input")
    is_mcp = block.get("type") == "mcp_tool_use"
    for name in ("id", "name", "server_name") if is_mcp else ("id", "name"):
        if not isinstance(block.get(name), str):
            raise wrong_type(f"{at}.{name}", "a string", block.get(name))
    called = f"{block['server_name']}__{block['name']}" if is_mcp else block["name"]
    function = {"name": called, "arguments": given}
    return {"id": block["id"], "type": "function", "function": function}


def _tools(body: CountFields) -> dict[str, Any]:
    """`tools` and `tool_choice` in a chat's words."""
    tools: list[dict[str, Any]] = []
    hosted: dict[str, str] = {}
    """Types of the tools that are left out, by their names."""
    for i, tool in enumerate(body.tools):
        if not isinstance(tool, dict):
            raise wrong_type(f"tools[{i}]", "an object", tool)
        kind = tool.get("type")
        if kind not in (None, "custom"):
            if not left_out(kind):
                raise unsupported(f"tools[{i}].type", f"tools[{i}]: there is no type {kind!r:.60}")
            hosted[str(tool.get("name"))] = kind
            tools.append({"type": kind})
            continue
        function = {k: tool[k] for k in ("name", "description", "strict") if k in tool}
        function["parameters"] = tool.get("input_schema")
        tools.append({"type": "function", "function": function})
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    choice = body.tool_choice
    if choice is None:
        return fields
    kind, name = choice.type, choice.name
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        if name is None:
            raise wrong_type("tool_choice.name", "a string", name)
        if name in hosted:
            raise refuse_choice([hosted[name]], "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind in ("auto", "any", "none"):
        fields["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise wrong_type("tool_choice.type", "auto, any, tool or none", kind)
    return fields


def _output(config: OutputConfig | None) -> dict[str, Any]:
    """The form of the answer in a chat's words."""
    if config is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": config.effort}
    if config.format is not None:
        if config.format.type != "json_schema":
            raise wrong_type("output_config.format.type", "json_schema", config.format.type)
        schema = {"name": "output", "schema": config.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


# -- errors --------------------------------------------------------------------------------


def _reshape(reply: ErrorReply, request_id: str) -> ErrorReply:
    """The same failure in Anthropic's shape. The error code follows the message, in brackets."""
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
ERRORS = ErrorShape(
    "AnthropicError", ERROR_SCHEMA, _reshape, paths=MESSAGES_PATH, id_header="request-id"
)


# -- answers -------------------------------------------------------------------------------


def message_response(request: MessagesRequest, answers: list[TokenDelta]) -> dict[str, Any]:
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
    """Why the answer ended. has_calls: a chat with a named tool choice ends with `stop`, a message
    with `tool_use`."""
    if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    if has_calls and end.finish_reason != "length":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reasons = {"stop": "end_turn", "length": "max_tokens"}
    return {"stop_reason": reasons.get(end.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts; unlike OpenAI's, those of the input leave out what was found in the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


class MessageStream:
    """Turns a chat's deltas into Anthropic's events: message_start, then each block's start, deltas
    and stop, then message_delta, message_stop."""

    wire = MESSAGES_WIRE

    def __init__(self, request: MessagesRequest) -> None:
        self._request = request
        self._news = ChatNews(request.chat)
        self._has_started = False
        self._index = -1
        """Index of the newest block."""
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
        """The encoded form of what `feed` would return, for a delta in the middle that is only
        text."""
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
        """Open a block, unless it is open already."""
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


# -- rows ----------------------------------------------------------------------------------


def _parse(served: Served, data: Mapping[str, Any]) -> MessagesRequest:
    return parse_messages(data, **served.answering, **served.conversing)


def _parse_count(served: Served, data: Mapping[str, Any]) -> MessagesRequest:
    context = {**served.answering, **served.conversing}
    return parse_messages(data, only_counts=True, **context)


def _prompt_of(asked: MessagesRequest) -> Prompt:
    return asked.chat.job.prompt


async def _count(asked: MessagesRequest, engine: GenerationClient) -> dict[str, Any]:
    return {"input_tokens": len(await engine.tokenize(_prompt_of(asked)))}


ROWS: tuple[AskingRow[MessagesRequest], ...] = (
    GeneratingRow(
        path="/v1/messages",
        summary="messages",
        body=MESSAGES,
        parse=_parse,
        stream=MessageStream,
        whole=message_response,
        errors=ERRORS,
        names=NAMES,
    ),
    TokenRow(
        path="/v1/messages/count_tokens",
        summary="count tokens",
        body=COUNT_TOKENS,
        parse=_parse_count,
        measured=_prompt_of,
        work=_count,
        errors=ERRORS,
    ),
)
