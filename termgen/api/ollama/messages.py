"""Ollama's messages in a chat's words: images beside the text, results named by their tool."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from termgen.api.errors import unsupported
from termgen.api.fields import read, wrong_type

ROLES = ("system", "user", "assistant", "tool")


class MessageFields(Struct, frozen=True):
    role: str | None = None
    content: str = ""
    thinking: str = ""
    images: list[Any] = []
    tool_calls: list[Any] = []
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    """The older name of `tool_name`."""


class CallFields(Struct, frozen=True):
    id: str | None = None
    function: dict[str, Any] = {}


def chat_messages(given: list[Any], *, refuses_images: bool) -> list[dict[str, Any]]:
    """The messages as /v1/chat/completions takes them. refuses_images: an image is an error, where
    a line could replace it."""
    messages: list[dict[str, Any]] = []
    calls = _Calls()
    for i, value in enumerate(given):
        where = f"messages[{i}]"
        if not isinstance(value, dict):
            raise wrong_type(where, "an object", value)
        fields = read(MessageFields, value, f"{where}.")
        role = (fields.role or "").lower()
        if role not in ROLES:
            raise wrong_type(f"{where}.role", "system, user, assistant or tool", fields.role)
        message: dict[str, Any] = {"role": role, "content": fields.content}
        if fields.images:
            parts = image_parts(
                fields.images, f"{where}.images", refuses_images=refuses_images or role != "user"
            )
            message["content"] = [*parts, {"type": "text", "text": fields.content}]
        if role == "tool":
            name = fields.tool_name if fields.tool_name is not None else fields.name
            message |= calls.answered(name, fields.tool_call_id)
        elif fields.name is not None:
            message["name"] = fields.name
        if role == "assistant":
            if fields.thinking:
                message["reasoning_content"] = fields.thinking
            if fields.tool_calls:
                message["tool_calls"] = calls.made(fields.tool_calls, f"{where}.tool_calls")
        messages.append(message)
    return messages


class _Calls:
    """The calls of a conversation, whose results have the name of their tool and seldom an id."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[str, str]] = []
        """(id, name) of the calls without a result yet."""

    def made(self, given: list[Any], where: str) -> list[dict[str, Any]]:
        calls = []
        for i, value in enumerate(given):
            at = f"{where}[{i}]"
            if not isinstance(value, dict):
                raise wrong_type(at, "an object", value)
            fields = read(CallFields, value, f"{at}.")
            name = fields.function.get("name")
            if not isinstance(name, str):
                raise wrong_type(f"{at}.function.name", "a string", name)
            call_id = fields.id or f"call_{self._num_calls}"
            self._num_calls += 1
            self._open.append((call_id, name))
            function = {"name": name, "arguments": fields.function.get("arguments")}
            calls.append({"id": call_id, "type": "function", "function": function})
        return calls

    def answered(self, name: str | None, call_id: str | None) -> Mapping[str, Any]:
        """The fields of a result: of the call with this id, else of the first open one of this
        name, else of the first open one."""
        found = [call for call in self._open if call[0] == call_id] if call_id else []
        found = found or [call for call in self._open if name is None or call[1] == name]
        if found:
            self._open.remove(found[0])
            call_id, name = call_id or found[0][0], name or found[0][1]
        fields = {"tool_call_id": call_id, "name": name}
        return {key: value for key, value in fields.items() if value is not None}


def image_parts(given: list[Any], where: str, *, refuses_images: bool) -> list[dict[str, Any]]:
    """Parts of content for images, which come as base64."""
    if given and refuses_images:
        raise unsupported(where, f"{where}: this model reads no images")
    parts = []
    for i, image in enumerate(given):
        if not isinstance(image, str):
            raise wrong_type(f"{where}[{i}]", "base64", image)
        image = image.replace("\r", "").replace("\n", "")  # some encoders break lines
        try:
            binascii.a2b_base64(image, strict_mode=True)
        except ValueError:
            raise wrong_type(f"{where}[{i}]", "base64", image) from None
        parts.append({"type": "image", "data": image})
    return parts
