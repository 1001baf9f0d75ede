"""OpenAI-style chat messages as plain data a template can render.

Checks shape and roles, joins text parts, maps what clients send to what templates read. Every
fault is a `RequestError` on `messages` naming the place. Pure functions; the caller's messages are
never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from termgen.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names a message's reasoning travels under; templates read the first or the second."""

MAX_DEPTH = 64
"""Levels of nested values in messages and template variables."""


def _fault(message: str) -> RequestError:
    return RequestError(message, param="messages")


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Fresh, checked messages: string content, known roles, no None values."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise _fault("messages must be a list of messages")
    if not messages:
        raise _fault("messages must not be empty")
    return [_normalise(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _normalise(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _fault(f"{where} must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _fault(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}")
    out: dict[str, Any] = plain({k: v for k, v in message.items() if v is not None}, where)
    out["role"] = "system" if role == "developer" else role
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(where, out["tool_calls"], role)
        if not out["tool_calls"]:
            del out["tool_calls"]
    out["content"] = _content(where, out)
    reasoning = next((out[k] for k in REASONING_FIELDS if k in out), None)
    if reasoning is not None:
        out.setdefault("thinking", reasoning)
        out["reasoning_content"] = reasoning
    return out


def _content(where: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return ""
        raise _fault(f"{where}.content is missing")
    if not isinstance(content, list):
        raise _fault(f"{where}.content must be a string or a list of parts")
    return "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise _fault(f"{where} must be an object with a type")
    kind = part.get("type")
    if kind != "text":
        raise _fault(f"{where}: content of type {kind!r} is not supported, only 'text' is")
    text = part.get("text")
    if not isinstance(text, str):
        raise _fault(f"{where}.text must be a string")
    return text


def _tool_calls(where: str, calls: object, role: str) -> list[dict[str, Any]]:
    if role != "assistant":
        raise _fault(f"{where}.tool_calls is only allowed in assistant messages")
    if not isinstance(calls, list):
        raise _fault(f"{where}.tool_calls must be a list")
    return [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _fault(f"{where} must be an object with a function")
    if not isinstance(function.get("name"), str):
        raise _fault(f"{where}.function.name must be a string")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Clients send a JSON string, templates expect the object it stands for.
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise _fault(f"{where}.function.arguments must be a JSON object")
    return {**call, "function": {**function, "arguments": plain(arguments, where)}}


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy made of JSON types only: a template must never get hold of a live object."""
    if depth > MAX_DEPTH:
        raise _fault(f"{where} is nested more than {MAX_DEPTH} levels deep")
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):  # an enum, say
        return str.__str__(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _fault(f"{where}: keys must be strings, not {key!r}")
        return {str.__str__(k): plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where, depth + 1) for item in value]
    raise _fault(f"{where}: a value of type {type(value).__name__} is not JSON data")


def count_chars(value: Any) -> int:
    """Characters in all strings of plain data, keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(k) + count_chars(v) for k, v in value.items())
    if isinstance(value, list):
        return sum(map(count_chars, value))
    return 0
