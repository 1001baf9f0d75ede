"""Tools of /v1/responses in a chat's words, and calls of them by their own names again.

A namespace becomes its functions, `NAMESPACE__NAME` each. A custom tool, which takes any text,
becomes a function with one text for an argument. Tools that only OpenAI can run are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from termgen.api.errors import unsupported
from termgen.api.fields import parse_json, wrong_type
from termgen.api.tools import left_out, refuse_choice
from termgen.errors import RequestError

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
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class OfferedTools:
    """The tools of one request."""

    chat: list[dict[str, Any]] = field(default_factory=list)
    """In a chat's words."""
    paths: dict[str, str] = field(default_factory=dict)
    """Places in the request by places in `chat`, for errors."""
    names: dict[str, ToolName] = field(default_factory=dict)
    """By the name that the model is shown."""
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
    """A tool without its envelope."""
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
    if given is not None and given.get("type") == "grammar":  # told, not enforced
        definition = given.get("definition")
        if not isinstance(definition, str):
            raise wrong_type(f"{where}.format.definition", "a string", definition)
        parts.append(f"The input must match this grammar ({given.get('syntax')}):\n{definition}")
        offered.not_used.append("tools.custom.format")
    elif given is not None and given.get("type") != "text":
        raise wrong_type(f"{where}.format.type", "text or grammar", given.get("type"))
    return {"name": tool.get("name"), "description": "\n\n".join(parts), "parameters": INPUT_SCHEMA}


def tool_choice_of(value: Any) -> Any:
    """In a chat's words."""
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
