"""The body of /v1/responses in a chat's words.

Nothing is stored, so whatever refers to an earlier response is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from termgen.api.chat import ChatRequest
from termgen.api.chat_bridge import parse_as_chat, shared_fields, turns_of, unknown_fields
from termgen.api.errors import unsupported
from termgen.api.fields import Check, Fields, is_empty, one_of, wrong_type
from termgen.api.parts import arguments_of, result_text, texts_of
from termgen.api.responses_tools import (
    ToolName,
    custom_arguments,
    flat_name,
    offered_tools,
    tool_choice_of,
)
from termgen.api.sampling import MAX_INT
from termgen.errors import RequestError
from termgen.vocabulary.tool_format import ToolFormat

HARMLESS = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)
REFUSED: dict[str, Check] = {
    "background": is_empty,
    "context_management": is_empty,
    "conversation": is_empty,
    "max_tool_calls": is_empty,
    "moderation": is_empty,
    "previous_response_id": is_empty,
    "prompt": is_empty,
    "store": is_empty,
    "top_logprobs": is_empty,
    "truncation": one_of("disabled"),
}
HARMLESS_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""What asks for parts that an answer here never has."""

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.effort",
}
"""Fields of the chat by the names they have here."""


PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts, and the field that has their text."""
THOUGHTS = {"reasoning_text": "text", "text": "text"}
LEFT_OUT_ITEMS = frozenset(
    {
        *("code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call"),
        *("tool_search_call", "tool_search_output", "compaction", "ghost_snapshot"),
    }
)
"""Items of a history that tell of tools which another server ran: this one cannot read them."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    chat: ChatRequest
    echo: dict[str, Any]
    """What a response repeats of its request."""
    ignored: tuple[str, ...]
    tool_names: Mapping[str, ToolName] = field(default_factory=dict)
    """What the client calls its tools, by the names that the model knows."""


def parse_responses(data: Mapping[str, Any], **context: Any) -> ResponsesRequest:
    """Check a body. Raises RequestError."""
    body = Fields(data)
    body.take("model")
    _check_includes(body.take("include"))
    reasoning, text = body.object("reasoning"), body.object("text")
    tools = offered_tools(body.take("tools"))
    not_used = [*_style_wishes(reasoning, text), *tools.not_used]
    messages = _messages(body.take("input"), not_used)
    if instructions := body.string("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    chat: dict[str, Any] = {
        "messages": turns_of(messages),
        "max_tokens": body.integer("max_output_tokens", low=1, high=MAX_INT),
        "stream": body.boolean("stream"),
        **{name: body.take(name) for name in ("temperature", "top_p", "top_k", "stop")},
        **shared_fields(body),
        "reasoning_effort": reasoning.take("effort") if reasoning else None,
        "parallel_tool_calls": body.boolean("parallel_tool_calls", True),
        "tools": tools.chat or None,
        "tool_choice": tool_choice_of(body.take("tool_choice")),
    }
    output_format = text.take("format") if text else None
    if output_format is not None:
        chat["response_format"] = _response_format(output_format)
    ignored = unknown_fields(body, data, harmless=HARMLESS, refused=REFUSED, names=NAMES)
    context.pop("force_include_usage", None)  # this endpoint always tells
    # The rule here, where a chat must ask for it; but not all models can where calls are free.
    strict = context.get("tool_format", ToolFormat()).new_parser is None
    names = {**NAMES, **tools.paths}
    request = parse_as_chat(chat, id_prefix="resp_", names=names, strict_tools=strict, **context)
    request = replace(request, not_used=tuple(dict.fromkeys((*request.not_used, *not_used))))
    params = request.job.params
    echo = {
        "instructions": data.get("instructions"),
        "max_output_tokens": data.get("max_output_tokens"),
        "metadata": data.get("metadata") or {},
        "parallel_tool_calls": chat["parallel_tool_calls"],
        "reasoning": {"effort": chat["reasoning_effort"], "summary": None},
        "temperature": params.temperature,
        "text": {"format": output_format or {"type": "text"}},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": [_echoed(tool, strict) for tool in data.get("tools") or ()],
        "top_p": params.top_p,
        "user": data.get("user"),
    }
    return ResponsesRequest(request, echo, ignored, tools.names)


def _echoed(tool: dict[str, Any], strict: bool) -> dict[str, Any]:
    """A tool as a response repeats it: a function says whether it is strict."""
    if tool["type"] != "function" or tool.get("strict") is not None:
        return tool
    return {**tool, "strict": strict}


def _style_wishes(reasoning: Fields | None, text: Fields | None) -> list[str]:
    """Names of wishes that nothing here can meet, their values checked."""
    found = []
    for fields, name, words in (
        (reasoning, "summary", ("auto", "concise", "detailed", "none")),
        (reasoning, "generate_summary", ("auto", "concise", "detailed")),
        (text, "verbosity", ("low", "medium", "high")),
    ):
        value = fields.take(name) if fields is not None else None
        if value is None:
            continue
        where = f"{'text' if fields is text else 'reasoning'}.{name}"
        if value not in words:
            raise wrong_type(where, " or ".join(words), value)
        found.append(where)
    return found


def _check_includes(value: Any) -> None:
    if value is not None and not isinstance(value, list):
        raise wrong_type("include", "a list", value)
    for name in value or ():
        if not isinstance(name, str) or name not in HARMLESS_INCLUDES:
            raise unsupported("include", f"include: {str(name)[:60]!r} is not supported here")


def _response_format(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type("text.format", "an object", value)
    if value.get("type") != "json_schema":
        return value
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {n: value[n] for n in names if n in value}}


# -- input ---------------------------------------------------------------------------------


def _messages(value: Any, not_used: list[str]) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or a list of items", value)
    if not value:
        raise RequestError("input must not be empty", param="input")
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, item in enumerate(value):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise wrong_type(where, "an object", item)
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise unsupported(f"{where}.type", f"{where}.type must be a string")
        if kind == "reasoning":
            thoughts += texts_of(item.get("content") or [], f"{where}.content", THOUGHTS)
            continue
        if kind in LEFT_OUT_ITEMS:
            not_used.append(f"input.{kind}")
            continue
        _add_item(messages, item, kind, where)
        if thoughts and messages[-1]["role"] == "assistant":  # of the turn that follows them
            thoughts[:0] = filter(None, [messages[-1].get("reasoning_content")])
            messages[-1]["reasoning_content"] = "\n".join(thoughts)
        thoughts = []
    if not messages:
        raise RequestError("input has nothing to answer", param="input")
    return messages


def _add_item(
    messages: list[dict[str, Any]], item: Mapping[str, Any], kind: str, where: str
) -> None:
    if kind == "message":
        messages.append(_message(item, where))
    elif kind == "function_call":
        _add_call(messages, _call(item, where))
    elif kind == "custom_tool_call":
        _add_call(messages, _custom_call(item, where))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append(_result(item, where))
    else:
        raise unsupported(
            f"{where}.type", f"{where}: items of type {kind[:40]!r} are not supported here"
        )


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise wrong_type(f"{where}.role", "user, assistant, system or developer", role)
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": role, "content": _text(content, f"{where}.content")}


def _text(value: Any, where: str) -> str:
    return "\n".join(texts_of(value, where, PARTS))


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise wrong_type(f"{where}.{name}", "a string", item.get(name))
    arguments = arguments_of(item["arguments"], f"{where}.arguments")
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise wrong_type(f"{where}.namespace", "a string", namespace)
    function = {"name": flat_name(item["name"], namespace), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _custom_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = item.get("input")
    if not isinstance(given, str):
        raise wrong_type(f"{where}.input", "a string", given)
    return _call({**item, "arguments": custom_arguments(given)}, where)


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Calls are part of the assistant's turn that they end."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _result(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str):
        raise wrong_type(f"{where}.call_id", "a string", item.get("call_id"))
    text = result_text(item.get("output"), f"{where}.output", PARTS)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}
