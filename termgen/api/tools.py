"""`tools` and `tool_choice` of a chat: what the template shows, and the form of the answer.

Calls that must come (`required`, or one function by name) are enforced by a grammar in the model's
own style. Where calls may come, a grammar is needed only for a `strict` function or a limit of one
call; it leaves the text free up to a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from termgen.api.errors import unsupported
from termgen.api.fields import check_depth, read, wrong_type
from termgen.api.tool_calls import CallParser, DeclaredParser, StyleParser
from termgen.api.tool_grammar import ANY_OBJECT, Function, calls_or_json, forced_calls, free_calls
from termgen.errors import RequestError
from termgen.vocabulary.structured_outputs import StructuredOutputsParams
from termgen.vocabulary.tool_format import ToolFormat

MAX_TOOLS = 128
MAX_NAME_CHARS = 128
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


HOSTED = re.compile(
    r"(web_search|web_fetch|file_search|code_interpreter|code_execution|computer|computer_use"
    r"|image_generation|local_shell|shell|bash|apply_patch|text_editor|memory|mcp|mcp_toolset"
    r"|custom|tool_search|tool_search_tool(_regex|_bm25)?|advisor|programmatic_tool_calling)"
    r"(_preview)?(_\d{4}_?\d{2}_?\d{2})?"
)
"""Types of tools that OpenAI or Anthropic run, or describe without a schema."""

PREAMBLE = """You may call these functions, given by their JSON schemas:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""


def left_out(kind: Any) -> bool:
    """True for a type of tool that only OpenAI or Anthropic can run."""
    return isinstance(kind, str) and HOSTED.fullmatch(kind.replace("-", "_")) is not None


def refuse_choice(kinds: Sequence[str], param: str = "tool_choice") -> RequestError:
    """Refusal of a choice that asks for tools which have been left out."""
    names = ", ".join(dict.fromkeys(kinds))[:200]
    return unsupported(param, f"{param} asks for a tool that is not offered here: {names}")


class _FunctionFields(Struct, frozen=True):
    """A function among the tools."""

    name: str = ""
    description: str = ""
    strict: bool | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one chat, and how the model's text is parsed."""

    functions: tuple[Function, ...] = ()
    shown: tuple[dict[str, Any], ...] = ()
    """The tools as templates get them."""
    choice: str = "none"
    """none, auto, required or named."""
    parallel: bool = True
    """More than one call may come."""
    format: ToolFormat = field(default_factory=ToolFormat)
    is_formed: bool = False
    """True: a grammar limits the text to calls in the style of `format`, or to JSON, so the parser
    that the model's files declare does not apply."""
    left_out: tuple[str, ...] = ()
    """Names for the header of the tools that the model is not shown."""

    @property
    def needs_parser(self) -> bool:
        """True where the text has more than content: calls, or parts that the model's files
        declare."""
        return self.may_call or self.format.new_parser is not None

    @property
    def needs_prompt(self) -> bool:
        """True where the end of the prompt decides how the text begins."""
        return self.format.new_parser is not None and not self.is_formed

    @property
    def may_call(self) -> bool:
        return self.choice != "none"

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def needs_special_tokens(self) -> bool:
        """True where special tokens, which are usually left out, separate the parts of the text."""
        return self.needs_prompt or (self.may_call and bool(self.format.special_tokens))


def parse_tools(
    given: list[Any], choice: Any, tool_format: ToolFormat, *, parallel: bool, strict: bool
) -> Tools:
    """Check `tools` and `tool_choice`. Where functions are named, the model is shown only those.

    strict: for functions that do not say. Their schemas are enforced as far as they can be.
    """
    kinds = [tool["type"] for tool in given if _is_left_out(tool)]
    missing = tuple(f"tools.{kind}" for kind in dict.fromkeys(kinds))
    listed = [pair for pair in enumerate(given) if not _is_left_out(pair[1])]
    if isinstance(choice, dict) and left_out(choice.get("type")):
        raise refuse_choice([choice["type"]])
    if not listed:
        if choice not in (None, "none", "auto"):
            if kinds:
                raise refuse_choice(kinds)
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return Tools(format=tool_format, left_out=missing)
    if len(listed) > MAX_TOOLS:
        raise RequestError(f"at most {MAX_TOOLS} tools are allowed", param="tools")
    pairs = [_function(tool, f"tools[{i}]", strict) for i, tool in listed]
    if len({function.name for function, _ in pairs}) < len(pairs):
        raise RequestError("two tools have the same name", param="tools")
    kind, names = _choice(choice)
    if kind == "none":
        return Tools(format=tool_format, left_out=missing)
    if names is not None:
        known = {function.name for function, _ in pairs}
        for name in names:
            if name not in known:
                raise RequestError(
                    f"tool_choice: there is no tool {name!r:.80}", param="tool_choice"
                )
        pairs = [pair for pair in pairs if pair[0].name in names]
    return Tools(
        functions=tuple(function for function, _ in pairs),
        shown=tuple(shown for _, shown in pairs),
        choice=kind,
        parallel=parallel and kind != "named",
        format=tool_format,
        left_out=missing,
    )


def _is_left_out(tool: Any) -> bool:
    return isinstance(tool, dict) and left_out(tool.get("type"))


def _function(tool: Any, where: str, strict: bool) -> tuple[Function, dict[str, Any]]:
    if not isinstance(tool, dict):
        raise wrong_type(where, "an object", tool)
    if tool.get("type", "function") != "function":
        raise unsupported(f"{where}.type", f"{where}.type must be function")
    given = tool.get("function")
    where += ".function"
    if not isinstance(given, dict):
        raise wrong_type(where, "an object", given)
    check_depth(where, given, limit=64)
    fields = read(_FunctionFields, given, f"{where}.")
    name = fields.name
    if not name or len(name) > MAX_NAME_CHARS or not _NAME_CHARS.issuperset(name):
        raise RequestError(
            f"{where}.name must have 1 to {MAX_NAME_CHARS} letters, digits, _, - or .",
            param=f"{where}.name",
        )
    is_rule = fields.strict is None
    strict = strict if fields.strict is None else fields.strict
    parameters = fields.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    StructuredOutputsParams(json=parameters, param=f"{where}.parameters")  # for its limits
    function = Function(name, parameters, strict, lenient=strict and is_rule)
    return function, {"type": "function", "function": given}


def _choice(value: Any) -> tuple[str, tuple[str, ...] | None]:
    """(none, auto, required or named; the names of the functions, if not all are meant)."""
    if value is None:
        return "auto", None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value, None
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"))
    is_function = isinstance(value, dict) and value.get("type", "function") == "function"
    name = _name_of(value) if is_function else None
    if name is None:
        wanted = 'none, auto, required or {"type": "function", "function": {"name": NAME}}'
        raise wrong_type("tool_choice", wanted, value)
    return "named", (name,)


def _allowed(value: Any) -> tuple[str, tuple[str, ...]]:
    """The choice of type `allowed_tools`: some of the tools, and whether one must be called."""
    where = "tool_choice.allowed_tools"
    if not isinstance(value, dict):
        raise wrong_type(where, "an object", value)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise wrong_type(f"{where}.mode", "auto or required", mode)
    if not isinstance(tools, list) or not tools:
        raise wrong_type(f"{where}.tools", "a list of tools", tools)
    names, hosted = [], []
    for i, tool in enumerate(tools):
        if _is_left_out(tool):
            hosted.append(tool["type"])
            continue
        name = _name_of(tool)
        if name is None:
            raise wrong_type(f"{where}.tools[{i}]", "an object with function.name", tool)
        names.append(name)
    if not names:
        raise refuse_choice(hosted)
    return mode, tuple(names)


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def constrain(
    tools: Tools, wanted: StructuredOutputsParams | None
) -> StructuredOutputsParams | None:
    """The form of the text: the one the client wants, calls, or either. Calls that must come are
    all of the answer, so the client's form has no text to hold for."""
    if not tools.may_call:
        return wanted
    functions, parallel = tools.functions, tools.parallel
    if tools.must_call:
        return _of_tools(forced_calls(functions, tools.format, parallel=parallel))
    if wanted is not None:
        if wanted.kind not in ("json", "json_object"):
            raise RequestError(
                f"{wanted.param}: only JSON can be asked for where tools may be called",
                param=wanted.param,
            )
        schema = ANY_OBJECT if wanted.json_object else json.loads(str(wanted.json))
        return _of_tools(calls_or_json(functions, tools.format, schema, parallel=parallel))
    if parallel and not any(function.strict for function in functions):
        return None
    if tools.format.new_parser is not None:
        raise unsupported(
            "tools",
            "tools: this model's calls can be made strict, or one at most, only with a tool_choice"
            " of required or of a function",
        )
    return _of_tools(free_calls(functions, tools.format, parallel=parallel))


def _of_tools(grammar: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=grammar, param="tools", is_own_grammar=True)


# -- what the model writes -----------------------------------------------------------------


def new_parser(tools: Tools, prompt_ids: Sequence[int] = ()) -> CallParser:
    """The parser for the text of one choice. prompt_ids: a prompt that may have begun the
    answer."""
    names = frozenset(function.name for function in tools.functions)
    if tools.format.new_parser is not None and not tools.is_formed:
        parser = tools.format.new_parser(prompt_ids, tools.shown)
        return DeclaredParser(parser, reads_calls=tools.may_call)
    return StyleParser(tools.format.style, names)


# -- what the model sees -------------------------------------------------------------------


def show_tools(
    messages: Sequence[dict[str, Any]], tools: Tools, tool_format: ToolFormat
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """The messages as the template gets them, and its variables.

    For a template that knows no tools, the system message describes them, and calls and their
    results become text.
    """
    if tool_format.knows_tools:
        if tool_format.joins_results:
            messages = _with_results(messages)
        return tuple(messages), {"tools": list(tools.shown)} if tools.shown else {}
    texts = [_as_text(message) for message in messages]
    if tools.shown:
        preamble = PREAMBLE.format(tools="\n".join(json.dumps(t) for t in tools.shown))
        if texts[0]["role"] == "system":
            texts[0] = {**texts[0], "content": f"{texts[0]['content']}\n\n{preamble}"}
        else:
            texts.insert(0, {"role": "system", "content": preamble})
    return tuple(texts), {}


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the results of calls in the messages that made these. A result of no such
    call stays a message."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] != "tool" or not last.get("tool_calls"):
            joined.append(message)
            continue
        results = [*last.get("tool_responses", ()), _result(message, last["tool_calls"])]
        joined[-1] = {**last, "tool_responses": results}
    return joined


def _result(message: dict[str, Any], calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A result as templates take it: an object, if its text is one."""
    call_id = message.get("tool_call_id")
    name = next((call["function"]["name"] for call in calls if call.get("id") == call_id), None)
    response = message["content"]
    try:
        decoded = json.loads(response)
    except (TypeError, ValueError):
        decoded = None
    return {
        "name": name or message.get("name") or calls[0]["function"]["name"],
        "response": decoded if isinstance(decoded, dict) else response,
    }


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    parts += [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def _call_text(function: Mapping[str, Any]) -> str:
    return json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
