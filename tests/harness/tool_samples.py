"""Tools and providers of tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from termgen.client import ModelInfo
from termgen.tools.calls import Approval, CallRunner, ToolCall
from termgen.tools.toolbox import Offered, Tool, Toolbox
from termgen.vocabulary.tool_format import ToolFormat

TEXT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
}
KNOWS_TOOLS = ToolFormat(knows_tools=True)


async def echo(arguments: dict[str, Any]) -> str:
    return f"echo {arguments.get('text')}"


def make_tool(
    name: str = "echo",
    call: Callable[[dict[str, Any]], Awaitable[str]] = echo,
    *,
    description: str = "says it again",
    schema: Mapping[str, Any] = TEXT_SCHEMA,
    timeout_s: float = 30.0,
) -> Tool:
    return Tool(name=name, description=description, schema=schema, call=call, timeout_s=timeout_s)


class ListedTools:
    """A provider with these tools."""

    state = "ready"

    def __init__(self, name: str, tools: Sequence[Tool]) -> None:
        self.name = name
        self.tools: Sequence[Tool] = tools
        self.events: list[str] = []

    async def start(self) -> None:
        self.events.append("start")

    async def refresh(self) -> None:
        self.events.append("refresh")

    async def restart(self) -> None:
        self.events.append("restart")

    async def close(self) -> None:
        self.events.append("close")


def box_of(*tools: Tool) -> Toolbox:
    return Toolbox([ListedTools("s", tools or (make_tool(),))])


class Words:
    """A user with these words for the calls to come, `ONCE` when they have run out."""

    def __init__(self, *words: Approval) -> None:
        self.words = list(words)
        self.asked: list[str] = []

    async def __call__(self, call: ToolCall, offered: Offered) -> Approval:
        self.asked.append(offered.name)
        return self.words.pop(0) if self.words else Approval.ONCE


def runner_of(box: Toolbox, words: Words) -> CallRunner:
    return CallRunner(box, words, lambda: None)


def hermes(name: str, arguments: str) -> str:
    """A call as models of the Hermes style write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def with_tools(model: ModelInfo, tool_format: ToolFormat = KNOWS_TOOLS) -> ModelInfo:
    return replace(model, tool_format=tool_format)
