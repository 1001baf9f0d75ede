"""The body of /v1/messages, Anthropic's endpoint, in a chat's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from termgen.api.chat import ChatRequest
from termgen.api.chat_bridge import parse_as_chat, shared_fields, turns_of, unknown_fields
from termgen.api.errors import unsupported
from termgen.api.fields import Check, Fields, is_empty, one_of, wrong_type
from termgen.api.parts import arguments_of, parts_of, result_text, texts_of, unsupported_part
from termgen.api.sampling import MAX_INT
from termgen.api.tools import left_out, refuse_choice
from termgen.errors import RequestError

HARMLESS = frozenset(
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
)


def _only_drops_thoughts(value: Any) -> bool:
    """Edits of the history that concern what templates do not show in any case."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking")
        for edit in edits
    )


REFUSED: dict[str, Check] = {
    "container": is_empty,
    "context_management": _only_drops_thoughts,
    "mcp_servers": is_empty,
    "speed": one_of("standard"),
}

NAMES = {
    "max_completion_tokens": "max_tokens",
    "parameters": "input_schema",
    "reasoning": "output_config.effort",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
}
"""Fields of the chat by the names they have here."""

_STAMP = re.compile(r"\bcch=[^;\s]*")


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    chat: ChatRequest
    ignored: tuple[str, ...]
    shows_thoughts: bool = True
    """What the model thinks is part of the answer."""


def parse_messages(
    data: Mapping[str, Any], *, only_counts: bool = False, **context: Any
) -> MessagesRequest:
    """Check a body. only_counts: of count_tokens, which asks for no answer. Raises RequestError."""
    body = Fields(data)
    body.take("model")
    max_tokens = body.integer("max_tokens", low=1, high=MAX_INT)
    if max_tokens is None and not only_counts:
        raise RequestError("max_tokens must be given", param="max_tokens")
    chat: dict[str, Any] = {
        "max_tokens": max_tokens,
        "messages": turns_of([*_system(body), *_messages(body.take("messages"))]),
        "thinking": _thinking(body.take("thinking")),
        "stop": body.take("stop_sequences"),
        "stream": body.boolean("stream"),
        **{name: body.take(name) for name in ("temperature", "top_p")},
        "top_k": body.integer("top_k", low=0, high=MAX_INT),
        **shared_fields(body),
        **_tools(body),
        **_output(body.object("output_config")),
    }
    if chat["messages"][-1]["role"] == "assistant":  # the answer is to go on from these words
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if chat["stop"] is not None and not isinstance(chat["stop"], list):
        raise wrong_type("stop_sequences", "a list of strings", chat["stop"])
    ignored = unknown_fields(body, data, harmless=HARMLESS, refused=REFUSED, names=NAMES)
    context.pop("force_include_usage", None)  # this endpoint always tells
    thinking = chat["thinking"]
    return MessagesRequest(
        chat=_thoughtless(parse_as_chat(chat, id_prefix="msg_", names=NAMES, **context), thinking),
        ignored=ignored,
        shows_thoughts=thinking is None or thinking["type"] != "disabled",
    )


def _thinking(value: Any) -> Any:
    """What this endpoint takes of what a chat does."""
    if value is not None and not isinstance(value, dict):
        raise wrong_type("thinking", "an object with a type", value)
    return value


def _thoughtless(chat: ChatRequest, thinking: Mapping[str, Any] | None) -> ChatRequest:
    """Thoughts that are not wanted are left out of the answer, whatever the template reads."""
    if thinking is None or thinking["type"] != "disabled":
        return chat
    return replace(chat, not_used=tuple(name for name in chat.not_used if name != "thinking"))


def _system(body: Fields) -> list[dict[str, Any]]:
    """Instructions, one message.

    A client stamps its first block anew for every request; left in, no prompt would ever be found
    in the prefix cache.
    """
    given = body.take("system")
    texts = [
        _STAMP.sub("cch=", text) if text.startswith("x-anthropic-billing-header:") else text
        for text in texts_of(given if given is not None else [], "system")
    ]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong_type("messages", "a list of messages", value)
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
            messages += _user(content, f"{where}.content")
        else:
            messages.append(_assistant(content, f"{where}.content"))
    return messages


def _blocks(value: Any, where: str) -> list[tuple[str, dict[str, Any], str]]:
    """(type, block, its name) of each content block; a string is a block of text."""
    if isinstance(value, str):
        return [("text", {"text": value}, where)]
    blocks = []
    for at, block in parts_of(value, where, "a string or a list of blocks"):
        kind = block.get("type")
        if kind == "text" and not isinstance(block.get("text"), str):
            raise wrong_type(f"{at}.text", "a string", block.get("text"))
        blocks.append((kind if isinstance(kind, str) else "", block, at))
    return blocks


def _user(content: Any, where: str) -> list[dict[str, Any]]:
    """A user's turn: results of tools, each a message of its own, and text."""
    messages: list[dict[str, Any]] = []
    texts = []
    for kind, block, at in _blocks(content, where):
        if kind == "text":
            texts.append({"type": "text", "text": block["text"]})
        elif kind == "tool_result":
            call_id = block.get("tool_use_id")
            if not isinstance(call_id, str):
                raise wrong_type(f"{at}.tool_use_id", "a string", call_id)
            text = result_text(block.get("content"), f"{at}.content")
            if block.get("is_error") is True:
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise unsupported_part(kind, at)
    if texts or not messages:
        messages.append({"role": "user", "content": texts})
    return messages


def _assistant(content: Any, where: str) -> dict[str, Any]:
    """An assistant's turn. What it thought is for its template, if that shows it."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts, calls, thoughts = [], [], []
    for kind, block, at in _blocks(content, where):
        if kind == "text":
            texts.append({"type": "text", "text": block["text"]})
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            raise unsupported_part(kind, at)
    if texts or not calls:
        message["content"] = texts
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _call(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    given = arguments_of(block.get("input"), f"{at}.input")
    for name in ("id", "name"):
        if not isinstance(block.get(name), str):
            raise wrong_type(f"{at}.{name}", "a string", block.get(name))
    function = {"name": block["name"], "arguments": given}
    return {"id": block["id"], "type": "function", "function": function}


def _tools(body: Fields) -> dict[str, Any]:
    """`tools` and `tool_choice` in a chat's words."""
    given = body.take("tools")
    if given is None or given == []:
        given = None
    elif not isinstance(given, list):
        raise wrong_type("tools", "a list", given)
    tools: list[dict[str, Any]] = []
    hosted: dict[str, str] = {}
    """Types of tools that are left out, by their names."""
    for i, tool in enumerate(given or ()):
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
    choice = body.object("tool_choice")
    if choice is None:
        return fields
    kind, name = choice.string("type"), choice.string("name")
    if choice.boolean("disable_parallel_tool_use"):
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


def _output(config: Fields | None) -> dict[str, Any]:
    """What the answer is to look like, in a chat's words."""
    if config is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": config.string("effort")}
    wanted = config.object("format")
    if wanted is not None:
        if wanted.string("type") != "json_schema":
            raise wrong_type("output_config.format.type", "json_schema", wanted.take("type"))
        schema = {"name": "output", "schema": wanted.take("schema"), "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
