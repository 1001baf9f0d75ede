"""Two functions that a model may call, and requests that offer them."""

from __future__ import annotations

from typing import Any

from termgen.api.chat import ChatRequest, parse_chat
from termgen.vocabulary.tool_format import ToolFormat

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
F: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "does f", "parameters": SCHEMA},
}
G: dict[str, Any] = {"type": "function", "function": {"name": "g.h"}}
NAMES = frozenset({"f", "g.h"})
KNOWS = ToolFormat(knows_tools=True)
HERMES_TWO = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "a}\\"{"}}\n</tool_call>\n'
    '<tool_call>{"arguments": {"y": [1, {"z": null}]}, "name": "g.h"}</tool_call>\n Done. '
)


def chat(tool_format: ToolFormat = KNOWS, **fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(body, model="m", defaults={}, tool_format=tool_format)
