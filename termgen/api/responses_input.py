"""The body of /v1/responses in a chat's words.

Nothing is stored, so whatever refers to an earlier response is refused by name. Tools get a chat's
words, and calls of them their own names again: a namespace becomes its functions, `NAMESPACE__NAME`
each; a custom tool, which takes any text, becomes a function with one text for an argument; tools
that only OpenAI can run are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from termgen.api.chat import ChatRequest
from termgen.api.chat_bridge import parse_as_chat, shared_fields, turns_of, unknown_fields
from termgen.api.chat_prompt import TemplateFields, arguments_of, result_text, texts_of
from termgen.api.errors import unsupported
from termgen.api.fields import Endpoint, is_empty, one_of, parse_json, read, wanted, wrong_type
from termgen.api.sampling import PositiveInt, SharedFields
from termgen.api.tools import left_out, refuse_choice
from termgen.errors import RequestError
from termgen.vocabulary.tool_format import ToolFormat

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
"""Requests for parts that an answer here never has."""

STYLE_WISHES: Mapping[str, tuple[str, ...]] = {
    "reasoning.summary": ("auto", "concise", "detailed", "none"),
    "reasoning.generate_summary": ("auto", "concise", "detailed"),
    "text.verbosity": ("low", "medium", "high"),
}
"""Style wishes that this server cannot meet, and their values."""


class ReasoningFields(Struct, frozen=True):
    effort: Any = None
    summary: Any = None
    generate_summary: Any = None


class TextFields(Struct, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class ResponsesFields(SharedFields, frozen=True, kw_only=True):
    """The body of /v1/responses, beside its `TemplateFields`."""

    include: list[Any] = []
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    tools: list[Any] = []
    input: Annotated[str | list[Any], wanted("a string or a list of items")]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    stop: str | list[str] = []
    parallel_tool_calls: bool = True
    tool_choice: Annotated[Any, Meta(extra_json_schema={"type": ["string", "object"]})] = None


RESPONSES = Endpoint(
    (ResponsesFields, TemplateFields),
    harmless=frozenset(
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
    ),
    refused={
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
    },
)

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.effort",
}
"""Names of a chat's fields on this endpoint."""


PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The field with the text, by type of part."""
THOUGHTS = {"reasoning_text": "text", "text": "text"}
LEFT_OUT_ITEMS = frozenset(
    {
        *("code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call"),
        *("tool_search_call", "tool_search_output", "compaction", "ghost_snapshot"),
    }
)
"""Items of a history about tools that another server ran: this model cannot read them."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    chat: ChatRequest
    echo: dict[str, Any]
    """Fields of the request that the response repeats."""
    ignored: tuple[str, ...]
    tool_names: Mapping[str, ToolName] = field(default_factory=dict)
    """The client's names of its tools, by the names that the model knows."""


def parse_responses(data: Mapping[str, Any], **context: Any) -> ResponsesRequest:
    """Check a body. Raises RequestError."""
    body = read(ResponsesFields, data)
    _check_includes(body.include)
    tools = offered_tools(body.tools)
    not_used = [*_style_wishes(body), *tools.not_used]
    messages = _messages(body.input, not_used)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    chat: dict[str, Any] = {
        "messages": turns_of(messages),
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        **shared_fields(data),
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tools": tools.chat or None,
        "tool_choice": tool_choice_of(body.tool_choice),
    }
    output_format = body.text.format if body.text is not None else None
    if output_format is not None:
        chat["response_format"] = _response_format(output_format)
    ignored = unknown_fields(RESPONSES, data, NAMES)
    # Strict is the default here, unlike in a chat; but some models cannot where calls are optional.
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
    """A tool as the response repeats it: a function says whether it is strict."""
    if tool["type"] != "function" or tool.get("strict") is not None:
        return tool
    return {**tool, "strict": strict}


def _style_wishes(body: ResponsesFields) -> list[str]:
    """Names of the style wishes in a body, their values checked."""
    found = []
    for where, words in STYLE_WISHES.items():
        struct, _, name = where.partition(".")
        fields = getattr(body, struct)
        value = getattr(fields, name) if fields is not None else None
        if value is None:
            continue
        if value not in words:
            raise wrong_type(where, " or ".join(words), value)
        found.append(where)
    return found


def _check_includes(names: list[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or name not in HARMLESS_INCLUDES:
            raise unsupported("include", f"include: {str(name)[:60]!r} is not supported here")


def _response_format(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") != "json_schema":
        return value
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {n: value[n] for n in names if n in value}}


# -- input ---------------------------------------------------------------------------------


def _messages(value: str | list[Any], not_used: list[str]) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
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
        if thoughts and messages[-1]["role"] == "assistant":  # they belong to the turn that follows
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
    """Add a call to the assistant's turn, which it ends."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _result(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str):
        raise wrong_type(f"{where}.call_id", "a string", item.get("call_id"))
    text = result_text(item.get("output"), f"{where}.output", PARTS)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


# -- tools ---------------------------------------------------------------------------------

INPUT = "input"
"""The argument of a custom tool."""
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """The client's name of a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class OfferedTools:
    """The tools of one request."""

    chat: list[dict[str, Any]] = field(default_factory=list)
    """The tools in a chat's words."""
    paths: dict[str, str] = field(default_factory=dict)
    """Paths in the request by paths in `chat`, for errors."""
    names: dict[str, ToolName] = field(default_factory=dict)
    """The client's names by the names that the model is shown."""
    not_used: list[str] = field(default_factory=list)


def flat_name(name: str, namespace: str | None) -> str:
    if namespace is None:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def offered_tools(given: list[Any]) -> OfferedTools:
    offered = OfferedTools()
    for i, tool in enumerate(given):
        _offer(offered, tool, f"tools[{i}]")
    return offered


def _offer(offered: OfferedTools, tool: Any, where: str, namespace: str | None = None) -> None:
    if not isinstance(tool, dict):
        raise wrong_type(where, "an object", tool)
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        name, tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name:
            raise wrong_type(f"{where}.name", "a string", name)
        if not isinstance(tools, list):
            raise wrong_type(f"{where}.tools", "a list", tools)
        for i, inner in enumerate(tools):
            _offer(offered, inner, f"{where}.tools[{i}]", name)
        return
    if kind in ("function", "custom"):
        function = _custom(offered, tool, where) if kind == "custom" else _function(tool)
        name = tool.get("name")
        if isinstance(name, str):
            function["name"] = flat_name(name, namespace)
            known = ToolName(name, namespace, is_custom=kind == "custom")
            offered.names[function["name"]] = known
        offered.paths[f"tools[{len(offered.chat)}]"] = where
        offered.chat.append({"type": "function", "function": function})
    elif left_out(kind):
        offered.paths[f"tools[{len(offered.chat)}]"] = where
        offered.chat.append({"type": kind})
    else:
        raise unsupported(
            f"{where}.type", f"{where}: tools of type {str(kind)[:40]!r} are not supported here"
        )


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a tool, without the tool's other fields."""
    names = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in names if tool.get(name) is not None}


def _custom(offered: OfferedTools, tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise wrong_type(f"{where}.description", "a string", description)
    given = tool.get("format")
    if given is not None and not isinstance(given, dict):
        raise wrong_type(f"{where}.format", "an object", given)
    parts = [description] if description else []
    if given is not None and given.get("type") == "grammar":  # described, not enforced
        definition = given.get("definition")
        if not isinstance(definition, str):
            raise wrong_type(f"{where}.format.definition", "a string", definition)
        parts.append(f"The input must match this grammar ({given.get('syntax')}):\n{definition}")
        offered.not_used.append("tools.custom.format")
    elif given is not None and given.get("type") != "text":
        raise wrong_type(f"{where}.format.type", "text or grammar", given.get("type"))
    return {"name": tool.get("name"), "description": "\n\n".join(parts), "parameters": INPUT_SCHEMA}


def tool_choice_of(value: Any) -> Any:
    """`tool_choice` in a chat's words."""
    if isinstance(value, dict):
        kind: Any = value.get("type")
        name, namespace = value.get("name"), value.get("namespace")
        if kind in ("function", "custom"):
            if not isinstance(name, str):
                raise wrong_type("tool_choice.name", "a string", name)
            if namespace is not None and not isinstance(namespace, str):
                raise wrong_type("tool_choice.namespace", "a string", namespace)
            return {"type": "function", "function": {"name": flat_name(name, namespace)}}
        if left_out(kind):
            raise refuse_choice([kind])
    if value is not None and value not in ("auto", "none", "required"):
        raise wrong_type("tool_choice", "auto, none, required or a function", value)
    return value


def custom_input(arguments: str) -> str:
    """The text that a custom tool is called with."""
    try:
        given = parse_json(arguments.encode()).get(INPUT)
    except RequestError:  # cut off
        given = None
    return given if isinstance(given, str) else arguments


def custom_arguments(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)
