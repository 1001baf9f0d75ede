"""Input items and tools of /v1/responses in a chat's words.

Items are a history that may come from another server. Calls of tools that a client or an MCP server
has run become calls of functions with results; items that only OpenAI can read are left out and
named as not used. Tools may come among the items, too. A namespace becomes its functions,
`NAMESPACE__NAME` each; a custom tool, which takes any text, becomes a function with one text for an
argument; tools that only OpenAI can run are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from termgen.api.chat_prompt import (
    NOT_TEXT,
    arguments_of,
    replaced_parts,
    result_text,
    texts_of,
)
from termgen.api.errors import unsupported
from termgen.api.fields import parse_json, wrong_type
from termgen.api.tools import left_out, refuse_choice
from termgen.errors import RequestError

PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The field with the text, by type of part."""
THOUGHTS = {"reasoning_text": "text", "text": "text"}

LEFT_OUT_ITEMS = frozenset(
    {
        *("code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call"),
        *("computer_call", "computer_call_output", "program", "program_output"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("compaction", "compaction_summary", "compaction_trigger", "context_compaction"),
        *("tool_search_call", "ghost_snapshot", "item_reference"),
    }
)
"""Items that only the server which made them can read."""

CLIENT_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""The tool's name and the field with its arguments, by type of call."""

RESULTS = frozenset(
    {
        *("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
        *("shell_call_output", "apply_patch_call_output"),
    }
)
TOOL_ITEMS = frozenset({"additional_tools", "tool_search_output"})
"""Items that bring tools: those of a client, and those that a search found."""

SETTINGS_ITEM = "configuration_update"
SETTINGS = ("reasoning", "text")
"""Fields of the body that a `configuration_update` changes for the answers that follow."""

INPUT = "input"
"""The argument of a custom tool."""
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


# -- input ---------------------------------------------------------------------------------


def with_settings(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with the settings among its items in the place of its own."""
    items = data.get("input")
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict) or item.get("type") != SETTINGS_ITEM:
            continue
        for name in SETTINGS:
            given, own = item.get(name), data.get(name)
            if given is not None and not isinstance(given, dict):
                raise wrong_type(f"input[{i}].{name}", "an object", given)
            data = {**data, name: {**(own if isinstance(own, dict) else {}), **(given or {})}}
    return data


def messages_of(
    value: str | list[Any], tools: OfferedTools, *, refuses_images: bool = False
) -> list[dict[str, Any]]:
    """The input as a chat's messages.

    tools: those that the body offers; tools among the items, and the names of what is not used, are
    added. refuses_images: a part of a message that is not text is an error.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not value:
        raise RequestError("input must not be empty", param="input")
    history = _History(tools, refuses_images)
    for i, item in enumerate(value):
        history.add(item, f"input[{i}]")
    if not history.messages:
        raise RequestError("input has nothing to answer", param="input")
    return history.messages


class _History:
    """The messages of a conversation while its items are read."""

    def __init__(self, tools: OfferedTools, refuses_images: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._tools = tools
        self._not_used = tools.not_used
        self._replaced = replaced_parts(refuses_images=refuses_images)
        self._thoughts: list[str] = []
        """Thoughts that belong to the assistant's turn that follows."""
        self._unanswered: dict[str, str] = {}
        """Names of the tools whose calls have no result yet, by the id of the call."""

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise wrong_type(where, "an object", item)
        kind = item.get("type")
        if kind is None:  # references may leave it out, as messages may
            kind = "item_reference" if "id" in item and "role" not in item else "message"
        if not isinstance(kind, str):
            raise unsupported(f"{where}.type", f"{where}.type must be a string")
        if kind == "reasoning":
            self._thoughts += texts_of(item.get("content") or [], f"{where}.content", THOUGHTS)
        elif kind in LEFT_OUT_ITEMS:
            self._not_used.append(f"input.{kind}")
        elif kind in TOOL_ITEMS:
            self._tools.add_later(item.get("tools"), f"{where}.tools")
        elif kind != SETTINGS_ITEM:  # which the body has taken
            self._add_turn(item, kind, where)
            self._thoughts = []

    def _add_turn(self, item: Mapping[str, Any], kind: str, where: str) -> None:
        if kind == "message":
            self._add_message(item, where)
        elif kind == "agent_message":
            self._add_agent_message(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            _check_strings(item, where, "call_id", "name")
            name = flat_name(item["name"], _namespace(item, where))
            self._add_call(item["call_id"], name, _arguments(item, kind, where))
        elif kind in CLIENT_CALLS:
            name, place = CLIENT_CALLS[kind]
            given = item.get(place)
            if not isinstance(given, dict):
                raise wrong_type(f"{where}.{place}", "an object", given)
            given = {key: value for key, value in given.items() if value is not None}
            self._add_call(_call_id(item, where), name, arguments_of(given, f"{where}.{place}"))
        elif kind == "mcp_call":
            self._add_mcp_call(item, where)
        elif kind in RESULTS:
            call_id = _given_id(item, kind, where)
            call_id = self._call_of(item, where) if call_id is None else call_id
            self._add_result(call_id, _output(item, kind, where, self._not_used))
        else:
            raise unsupported(
                f"{where}.type", f"{where}: items of type {kind[:40]!r} are not supported here"
            )

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ("user", "assistant", "system", "developer"):
            raise wrong_type(f"{where}.role", "user, assistant, system or developer", role)
        if content is None and role == "assistant":
            content = ""
        replaced = self._replaced if role == "user" else frozenset()
        text = "\n".join(texts_of(content, f"{where}.content", PARTS, replaced, self._not_used))
        self.messages.append({"role": role, "content": text})
        if role == "assistant":
            self._take_thoughts()

    def _add_agent_message(self, item: Mapping[str, Any], where: str) -> None:
        """Add what another agent wrote: to the model, it is a user's turn."""
        _check_strings(item, where, "author")
        content = item.get("content")
        texts = texts_of(content, f"{where}.content", PARTS, NOT_TEXT.keys(), self._not_used)
        text = "\n".join([f"Message from {item['author']}:", *texts])
        self.messages.append({"role": "user", "content": text})

    def _add_mcp_call(self, item: Mapping[str, Any], where: str) -> None:
        """Add the call of an MCP server's tool, and its result, which are one item."""
        _check_strings(item, where, "name", "server_label", "arguments")
        arguments = arguments_of(item["arguments"], f"{where}.arguments")
        call_id = _call_id(item, where)
        self._add_call(call_id, flat_name(item["name"], item["server_label"]), arguments)
        output, error = item.get("output"), item.get("error")
        if error is not None:
            text = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
            self._add_result(call_id, f"Error: {text}")
        elif output is not None:
            self._add_result(call_id, result_text(output, f"{where}.output", PARTS))

    def _add_call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """Add a call to the assistant's turn, which it ends."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self._take_thoughts()
        self._unanswered[call_id] = name

    def _call_of(self, item: Mapping[str, Any], where: str) -> str:
        """The id of the call that a result without one belongs to.

        Clients also pass on what a tool has to say without a call: then there is one without
        arguments, as templates show no result without a call.
        """
        name = item.get("name")
        if name is not None and not isinstance(name, str):
            raise wrong_type(f"{where}.name", "a string", name)
        wanted = None if name is None else flat_name(name, _namespace(item, where))
        for call_id, called in self._unanswered.items():
            if wanted in (None, called):
                return call_id
        if wanted is None:
            raise wrong_type(f"{where}.call_id", "a string, or name must be given", None)
        call_id = f"call_{len(self.messages)}"
        self._add_call(call_id, wanted, {})
        return call_id

    def _add_result(self, call_id: str, text: str) -> None:
        self._unanswered.pop(call_id, None)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _take_thoughts(self) -> None:
        if self._thoughts:
            before = filter(None, [self.messages[-1].get("reasoning_content")])
            self.messages[-1]["reasoning_content"] = "\n".join([*before, *self._thoughts])
            self._thoughts = []


def _check_strings(item: Mapping[str, Any], where: str, *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise wrong_type(f"{where}.{name}", "a string", item.get(name))


def _namespace(item: Mapping[str, Any], where: str) -> str | None:
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise wrong_type(f"{where}.namespace", "a string", namespace)
    return namespace


def _arguments(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    name = "input" if kind == "custom_tool_call" else "arguments"
    _check_strings(item, where, name)
    text = item[name] if name == "arguments" else custom_arguments(item[name])
    return arguments_of(text, f"{where}.{name}")


def _call_id(item: Mapping[str, Any], where: str) -> str:
    """The id of a call that may have only that of its item."""
    found = item.get("id") if item.get("call_id") is None else item["call_id"]
    if not isinstance(found, str):
        raise wrong_type(f"{where}.call_id", "a string", found)
    return found


def _given_id(item: Mapping[str, Any], kind: str, where: str) -> str | None:
    """The id of the call that a result names."""
    found = item.get("call_id")
    if found is None and kind == "local_shell_call_output":
        found = item.get("id")
    if found is not None and not isinstance(found, str):
        raise wrong_type(f"{where}.call_id", "a string", found)
    return found


def _output(item: Mapping[str, Any], kind: str, where: str, not_used: list[str]) -> str:
    output, at = item.get("output"), f"{where}.output"
    if kind == "apply_patch_call_output" and not output:
        return str(item.get("status") or "")[:40]
    if kind != "shell_call_output" or not isinstance(output, list):
        return result_text(output, at, PARTS, not_used)
    lines = []
    for i, chunk in enumerate(output):
        if not isinstance(chunk, dict):
            raise wrong_type(f"{at}[{i}]", "an object", chunk)
        _check_strings(chunk, f"{at}[{i}]", "stdout", "stderr")
        outcome = chunk.get("outcome")
        outcome = outcome if isinstance(outcome, dict) else {}
        code = outcome.get("exit_code")
        lines += [text for text in (chunk["stdout"], chunk["stderr"]) if text]
        if outcome.get("type") == "timeout":
            lines.append("[timed out]")
        elif isinstance(code, int) and code:
            lines.append(f"[exit code {code}]")
    return "\n".join(lines)


# -- tools ---------------------------------------------------------------------------------


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

    def add_later(self, given: Any, where: str) -> None:
        """Add tools that come among the items: each takes the place of an earlier one of its
        name."""
        if not isinstance(given, list):
            raise wrong_type(where, "a list", given)
        later = OfferedTools(not_used=self.not_used)
        for i, tool in enumerate(given):
            _offer(later, tool, f"{where}[{i}]")
        places = {_tool_name(tool): i for i, tool in enumerate(self.chat)}
        for i, tool in enumerate(later.chat):
            place = places.get(_tool_name(tool), len(self.chat))
            self.chat[place : place + 1] = [tool]
            self.paths[f"tools[{place}]"] = later.paths[f"tools[{i}]"]
        self.names |= later.names


def _tool_name(tool: Mapping[str, Any]) -> Any:
    """The name that the model is shown, or the type of a tool that it is not shown."""
    name = tool["function"].get("name") if "function" in tool else tool["type"]
    return name if isinstance(name, str) else None


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
        if kind == "allowed_tools":
            tools = value.get("tools")
            if not isinstance(tools, list):
                raise wrong_type("tool_choice.tools", "a list of tools", tools)
            named = [_named(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)]
            return {"type": kind, kind: {"mode": value.get("mode"), "tools": named}}
        if kind in ("function", "custom"):
            return _named(value, "tool_choice")
        if left_out(kind):
            raise refuse_choice([kind])
    if value is not None and value not in ("auto", "none", "required"):
        raise wrong_type("tool_choice", "auto, none, required or a function", value)
    return value


def _named(value: Any, where: str) -> dict[str, Any]:
    """A tool that a choice names, in a chat's words."""
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    if value.get("type") not in ("function", "custom"):
        return {"type": value.get("type")}
    _check_strings(value, where, "name")
    name = flat_name(value["name"], _namespace(value, where))
    return {"type": "function", "function": {"name": name}}


def custom_input(arguments: str) -> str:
    """The text that a custom tool is called with."""
    try:
        given = parse_json(arguments.encode()).get(INPUT)
    except RequestError:  # cut off
        given = None
    return given if isinstance(given, str) else arguments


def custom_arguments(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)
