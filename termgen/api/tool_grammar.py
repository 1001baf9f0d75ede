"""The grammar of tool calls in a model's own style, in llguidance's Lark.

A rule for each function, `any_call` of them, and a start that says how many come and what else may
be said. Schemas stand in rules of their own, so that `$ref` in them means what it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from termgen.vocabulary.schemas.enforced import enforced
from termgen.vocabulary.tool_format import ToolFormat, ToolStyle

ANY_OBJECT = {"type": "object"}
MARKERS = {
    ToolStyle.HERMES: "<tool_call>",
    ToolStyle.LLAMA: "",
    ToolStyle.MISTRAL: "[TOOL_CALLS]",
    ToolStyle.MISTRAL_ARGS: "[TOOL_CALLS]",
}
"""Beginning of a call, or of the list of calls."""
_LEXEME = re.compile(r'"[^"]*"|[{}]|: |, ')


@dataclass(frozen=True, slots=True)
class Function:
    """One function the model may call."""

    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments."""
    strict: bool
    lenient: bool = False
    """True: parts of the schema that cannot be enforced are passed over, not refused."""


def forced_calls(functions: Sequence[Function], tool_format: ToolFormat, *, parallel: bool) -> str:
    """A grammar of one call, or with `parallel` one or more, and nothing else."""
    return _grammar(f"start: {_calls(tool_format, parallel)}", functions, tool_format, all_=True)


def calls_or_json(
    functions: Sequence[Function],
    tool_format: ToolFormat,
    schema: dict[str, Any],
    *,
    parallel: bool,
) -> str:
    """A grammar of such calls, or of JSON that satisfies a schema."""
    is_plain = tool_format.style is ToolStyle.LLAMA  # a call begins as the JSON may
    answer = _json(schema, is_spaced=is_plain)
    start = f"start: {_calls(tool_format, parallel)} | answer\nanswer: {answer}"
    return _grammar(start, functions, tool_format, all_=False, by_lexeme=is_plain)


def free_calls(functions: Sequence[Function], tool_format: ToolFormat, *, parallel: bool) -> str:
    """A grammar of any text in which calls are well formed and strict functions get valid
    arguments."""
    style, marker = tool_format.style, MARKERS[tool_format.style]
    if style is ToolStyle.LLAMA:
        start = "start: any_call | other\nother: /[^{](.|\\n)*/"
        return _grammar(start, functions, tool_format, all_=False)
    rules = "text: /(.|\\n)*/\n"
    if marker in tool_format.special_tokens:
        rules += f"opening: text {_words(marker, tool_format)}"
    else:
        rules += f"opening[lazy]: /(.|\\n)*/ {_words(marker, tool_format)}"
    calls = _calls(tool_format, parallel).removeprefix(_words(marker, tool_format))
    if style is ToolStyle.HERMES and parallel:
        start = f"start: (opening any_call)* text\n{rules}"
    else:
        start = f"start: text | opening {calls}\n{rules}"
    return _grammar(start, functions, tool_format, all_=False)


def _calls(tool_format: ToolFormat, parallel: bool) -> str:
    style = tool_format.style
    marker = _words(MARKERS[style], tool_format)
    if style is ToolStyle.MISTRAL:
        more = ' ("," any_call)*' if parallel else ""
        return f'{marker} "[" any_call{more} "]"'
    if not parallel or style is ToolStyle.LLAMA:  # whose models give one call
        return f"{marker} any_call"
    between = '"\\n" ' if style is ToolStyle.HERMES else ""
    return f"{marker} any_call ({between}{marker} any_call)*"


def _grammar(
    start: str,
    functions: Sequence[Function],
    tool_format: ToolFormat,
    *,
    all_: bool,
    by_lexeme: bool = False,
) -> str:
    """all_: functions that are not strict get valid arguments too. by_lexeme: the text around the
    arguments is in the lexemes of JSON, so that the lexer can still take it for other JSON."""
    names = [f"call_{i}" for i in range(len(functions))]
    lines = [start, f"any_call: {' | '.join(names)}"]
    for name, function in zip(names, functions, strict=True):
        before, after = _around(function.name, tool_format.style)
        schema = function.parameters if all_ or function.strict else ANY_OBJECT
        opening, closing = (
            _lexemes(text) if by_lexeme else _words(text, tool_format) for text in (before, after)
        )
        lines.append(f"{name}: {opening} {name}_arguments {closing}")
        lines.append(f"{name}_arguments: {_json(schema, lenient=function.lenient)}")
    return "\n".join(lines) + "\n"


def _around(name: str, style: ToolStyle) -> tuple[str, str]:
    """The text of a call before and after its arguments, without the marker."""
    if style is ToolStyle.MISTRAL_ARGS:
        return f"{name}[ARGS]", ""
    key = "parameters" if style is ToolStyle.LLAMA else "arguments"
    before, after = f'{{"name": "{name}", "{key}": ', "}"
    if style is ToolStyle.HERMES:
        return "\n" + before, after + "\n</tool_call>"
    return before, after


def _words(text: str, tool_format: ToolFormat) -> str:
    """A literal text, special tokens in it by their ids."""
    special = tool_format.special_tokens
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part
    )


def _lexemes(text: str) -> str:
    """A part of a JSON object as `_json` with `is_spaced` would read it."""
    return " ".join(map(json.dumps, _LEXEME.findall(text)))


def _json(schema: dict[str, Any], *, lenient: bool = False, is_spaced: bool = False) -> str:
    """is_spaced: a space follows each comma and colon."""
    # Where any white space is allowed, small models write nothing else.
    options: dict[str, Any] = {"whitespace_flexible": False, "lenient": lenient}
    if is_spaced:
        options |= {"item_separator": ", ", "key_separator": ": "}
    return "%json " + json.dumps({**enforced(schema).schema, "x-guidance": options})
