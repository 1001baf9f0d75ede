"""What a tool is, and the box of all tools that a chat offers to its model.

Tools come from providers: the built-in files, MCP servers. The box gives each tool a name of its
own, `PROVIDER_TOOL`, whatever the providers call theirs, and leaves out those that no model can be
shown. No Textual here, and nothing of the engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from termgen.api.tools import MAX_NAME_CHARS, MAX_TOOLS, parse_tools
from termgen.errors import RequestError, TermgenError
from termgen.tools.text import escaped, shortened
from termgen.vocabulary.tool_format import ToolFormat

CALL_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0
MAX_DESCRIPTION_CHARS = 4000
MAX_REASON_CHARS = 200
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")


class ToolError(TermgenError):
    """A tool could not do what it was called for. The message goes to the model and the screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function that a model may call."""

    name: str
    """The provider's own name."""
    description: str
    schema: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Returns the result as text; raises `ToolError`. May be cancelled at any time."""
    timeout_s: float = CALL_TIMEOUT_S


class Provider(Protocol):
    """Where some of the tools come from."""

    name: str
    """Letters, digits, _ and -; no other provider has it."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools as far as they are known now."""
        ...

    @property
    def state(self) -> str:
        """In a few words: ready, starting, why it does not work."""
        ...

    async def start(self) -> None:
        """Learn which tools there are. Returns when that is known, or cannot be; never raises."""
        ...

    async def refresh(self) -> None:
        """Learn again which tools there are, if it works. Never raises."""
        ...

    async def restart(self) -> None:
        """Start anew, whatever happened before; as `start`."""
        ...

    async def close(self) -> None:
        """End it; no call comes after this. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool under the name that the model knows it by."""

    name: str
    provider: str
    tool: Tool

    @property
    def function(self) -> dict[str, Any]:
        """The tool as the API of chats lists it."""
        words = escaped(self.tool.description)[:MAX_DESCRIPTION_CHARS]
        function = {"name": self.name, "description": words, "parameters": dict(self.tool.schema)}
        return {"type": "function", "function": function}


class Toolbox:
    """The tools of all providers. Used on one event loop."""

    def __init__(self, providers: Sequence[Provider] = ()) -> None:
        self.providers = tuple(providers)
        assert len({one.name for one in providers}) == len(providers), "names are unique"
        self.left_out: dict[str, str] = {}
        """Name of each tool that is not offered -> why."""
        self._seen: tuple[Sequence[Tool], ...] = ()
        self._offered: tuple[Offered, ...] = ()
        self._starting: asyncio.Task[None] | None = None

    @property
    def is_empty(self) -> bool:
        """True where there is no provider at all."""
        return not self.providers

    def start(self) -> None:
        """Start all providers, each for itself; a slow one holds up none of the others."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        await asyncio.gather(*(one.start() for one in self.providers))

    async def wait(self, timeout_s: float) -> None:
        """Wait until every provider knows its tools, `timeout_s` at most."""
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=timeout_s)

    async def refresh(self) -> None:
        """Learn again which tools there are, from all providers at the same time."""
        await asyncio.gather(*(one.refresh() for one in self.providers))

    async def close(self) -> None:
        """End all providers at the same time. Returns within `CLOSE_TIMEOUT_S`."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
        closing = [asyncio.create_task(one.close()) for one in self.providers]
        if closing:
            _, late = await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()

    @property
    def offered(self) -> tuple[Offered, ...]:
        """The tools to offer, at most `MAX_TOOLS`. Their names stay while the providers' tools
        do."""
        seen = tuple(one.tools for one in self.providers)
        if len(seen) != len(self._seen) or any(
            a is not b for a, b in zip(seen, self._seen, strict=True)
        ):
            self._seen = seen
            self._choose()
        return self._offered

    def _choose(self) -> None:
        self.left_out = {}
        offered: list[Offered] = []
        names: set[str] = set()
        for provider in self.providers:
            for tool in provider.tools:
                name = _free_name(f"{provider.name}_{tool.name}", names)
                one = Offered(name, provider.name, tool)
                reason = _why_not(one)
                if reason is None and len(offered) == MAX_TOOLS:
                    reason = f"a model is shown {MAX_TOOLS} tools at most"
                if reason is not None:
                    self.left_out[name] = reason
                    continue
                names.add(name)
                offered.append(one)
        self._offered = tuple(offered)

    def find(self, name: str) -> Offered | None:
        return next((one for one in self.offered if one.name == name), None)

    def provider(self, name: str) -> Provider | None:
        return next((one for one in self.providers if one.name == name), None)


def _free_name(wanted: str, taken: set[str]) -> str:
    """A name that APIs and templates accept, and that no other tool has."""
    name = _NOT_IN_NAMES.sub("_", wanted)[:MAX_NAME_CHARS] or "tool"
    number = 1
    while name in taken:
        number += 1
        end = f"_{number}"
        name = name[: MAX_NAME_CHARS - len(end)].removesuffix(f"_{number - 1}") + end
    return name


def _why_not(one: Offered) -> str | None:
    """Why no model can be shown the tool; None where it can."""
    try:
        parse_tools([one.function], None, ToolFormat(), parallel=True, strict=False)
    except RequestError as error:
        reason = str(error).replace("tools[0].function.", "")
        return shortened(escaped(reason).replace("\n", " "), MAX_REASON_CHARS)
    return None
