"""The body of /v1/responses in a chat's words.

Nothing is stored, so whatever refers to an earlier response is refused by name. `items` has the
way in of the items and the tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from termgen.api.chat import ChatRequest
from termgen.api.chat_bridge import parse_as_chat, shared_fields, turns_of, unknown_fields
from termgen.api.chat_prompt import TemplateFields
from termgen.api.errors import unsupported
from termgen.api.fields import Endpoint, is_empty, one_of, read, wanted, wrong_type
from termgen.api.job import Job, ResponseOptions
from termgen.api.responses.items import (
    ToolName,
    messages_of,
    offered_tools,
    tool_choice_of,
    with_settings,
)
from termgen.api.sampling import PositiveInt, SharedFields
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

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Names of a chat's fields on this endpoint."""


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


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    chat: ChatRequest
    echo: dict[str, Any]
    """Fields of the request that the response repeats."""
    ignored: tuple[str, ...]
    tool_names: Mapping[str, ToolName] = field(default_factory=dict)
    """The client's names of its tools, by the names that the model knows."""

    @property
    def jobs(self) -> tuple[Job]:
        return self.chat.jobs

    @property
    def options(self) -> ResponseOptions:
        return self.chat.options

    @property
    def not_used(self) -> tuple[str, ...]:
        return self.chat.not_used


def parse_responses(data: Mapping[str, Any], **context: Any) -> ResponsesRequest:
    """Check a body. Raises RequestError."""
    data = with_settings(data)
    body = read(ResponsesFields, data)
    _check_includes(body.include)
    tools = offered_tools(body.tools)
    refuses_images = context.get("refuses_images", False)
    messages = messages_of(body.input, tools, refuses_images=refuses_images)
    not_used = [*_style_wishes(body), *tools.not_used]
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
    given = {name: value[name] for name in names if name in value}
    # An answer has no place for what it does not satisfy.
    return {"type": "json_schema", "json_schema": {**given, "strict": True}}
