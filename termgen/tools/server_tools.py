"""`McpTools`: the tools of one MCP server, with the official `mcp` package, imported on first use.

One task owns the connection: it opens it, lists the tools, waits for the end, and closes it. It is
never cancelled; calls come from other tasks. A server that hangs, dies or sends garbage costs its
calls and nothing else. After a death the next call starts it anew, three times.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from termgen.config import is_loopback
from termgen.errors import ConfigError
from termgen.tools.server_config import McpServer, expanded
from termgen.tools.server_process import ServerProcess
from termgen.tools.text import amount, escaped, shortened
from termgen.tools.toolbox import Tool, ToolError

START_S = 30.0
"""Limit of a start, the list of tools included."""
REFRESH_S = 5.0
CLOSE_S = 6.0
CONNECT_S = 10.0
READ_S = 300.0
MAX_PAGES = 50
MAX_LISTED = 500
MAX_DEATHS = 3
"""Deaths in a row after which it stays off."""
MAX_SCHEMA_CHARS = 50_000
MAX_REASON_CHARS = 400
THREAD_CHARS = 200_000
"""A result whose text is longer is put together in a thread."""
NO_PACKAGE = "it needs the package mcp: pip install 'termgen[mcp]'"
CONNECTION_CLOSED = -32000
FORBIDDEN = (401, 403)
NOISY_LOGGERS = ("mcp", "client", "httpx2", "httpcore2")
"""Loggers that would write over the screen."""


class McpTools:
    """A `Provider`."""

    def __init__(self, server: McpServer) -> None:
        self.name = server.name
        self.tools: Sequence[Tool] = ()
        self.state = "not started"
        self._server = server
        self._protocol = server.protocol
        self._owner: asyncio.Task[None] | None = None
        self._client: Any = None
        """The open connection."""
        self._stop = asyncio.Event()
        self._settled = asyncio.Event()
        """The start has succeeded or failed."""
        self._connecting: Any = None
        """Cancel scope of a start that has not ended."""
        self._num_deaths = 0
        self._starting, self._reviving = asyncio.Lock(), asyncio.Lock()
        self._listing: asyncio.Task[None] | None = None
        self._status: int | None = None
        """Status of the last HTTP response that was an error."""

    async def start(self) -> None:
        async with self._starting:
            if self._owner is None or self._owner.done():
                self._begin()
            await self._settled.wait()

    async def refresh(self) -> None:
        await self._list_again(REFRESH_S)

    async def restart(self) -> None:
        await self._end()
        self._num_deaths = 0
        await self.start()

    async def close(self) -> None:
        await self._end()
        self.tools, self.state = (), "ended"

    def _begin(self) -> None:
        self._stop, self._settled = asyncio.Event(), asyncio.Event()
        self.state = "starting"
        self._owner = asyncio.create_task(self._own(self._stop, self._settled))

    async def _end(self) -> None:
        owner = self._owner
        if owner is not None:
            self._stop.set()
            if self._connecting is not None:
                self._connecting.cancel()
            await asyncio.wait([owner], timeout=CLOSE_S)

    # -- the task that owns the connection -------------------------------------------------

    async def _own(self, stop: asyncio.Event, settled: asyncio.Event) -> None:
        process: ServerProcess | None = None
        try:
            await asyncio.to_thread(importlib.import_module, "mcp")
            for name in NOISY_LOGGERS:
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
            async with AsyncExitStack() as stack:
                if self._server.url is None:
                    process = self._process()
                    await self._hold(process, stop, process.gone, settled)
                else:
                    await self._hold(await self._http(stack), stop, asyncio.Event(), settled)
        except ConfigError as error:
            self._fail(str(error))
        except ImportError:
            self._fail(NO_PACKAGE)
        except TimeoutError:
            self._fail(f"it did not start within {START_S:g} s")
        except Exception as error:  # top of the task: whatever the connection may raise
            self._fail(self._reason(error))
        finally:
            self._client = self._connecting = None
            if process is not None and not stop.is_set():
                self._fail(_words_of(process) or self.state)
            settled.set()

    async def _hold(
        self, transport: Any, stop: asyncio.Event, gone: asyncio.Event, settled: asyncio.Event
    ) -> None:
        """Connect, and stay connected until the end is wanted, or the server has gone."""
        import anyio
        from mcp import Client

        if stop.is_set():
            return
        with anyio.fail_after(START_S) as scope:
            self._connecting = scope
            async with Client(
                transport,
                mode=self._protocol,
                read_timeout_seconds=START_S,
                message_handler=self._heard,
            ) as client:
                self.tools = await self._list(client)
                scope.deadline, self._connecting = math.inf, None
                from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

                if client.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS:
                    self._protocol = "legacy"  # the next start need not find that out
                self._client, self.state = client, "ready"
                settled.set()
                waits = [asyncio.create_task(each.wait()) for each in (stop, gone)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in waits:
                        each.cancel()
                    self._client = None
                if gone.is_set():
                    self._fail("it has ended")

    def _process(self) -> ServerProcess:
        command, env = self._server.command, self._values(self._server.env)
        if shutil.which(command[0], path=env.get("PATH")) is None:
            raise ConfigError(f"there is no program {command[0]!r}")
        return ServerProcess(command, env, self._server.folder)

    def _values(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        return texts if self._server.is_literal else expanded(texts)

    async def _http(self, stack: AsyncExitStack) -> Any:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        url = self._server.url
        assert url is not None
        self._status = None

        async def note(response: Any) -> None:
            if response.status_code >= 400:
                self._status = response.status_code

        http = httpx2.AsyncClient(
            headers=self._values(self._server.headers),
            timeout=httpx2.Timeout(CONNECT_S, read=READ_S),
            event_hooks={"response": [note]},
            trust_env=not is_loopback(httpx2.URL(url).host),  # a proxy cannot reach this machine
        )
        await stack.enter_async_context(http)
        return streamable_http_client(url, http_client=http)

    def _fail(self, reason: str) -> None:
        line = shortened(" ".join(escaped(reason).split()), MAX_REASON_CHARS)
        self.state = line or "it has ended"

    def _reason(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup) and error.exceptions:
            error = error.exceptions[0]
        if self._status in FORBIDDEN:
            return (
                f"the server answers {self._status}: it needs a token, which goes into headers "
                f"of [mcp.{self.name}] as ${{VARIABLE}}; OAuth is not supported"
            )
        if self._status is not None:
            return f"the server answers {self._status}"
        line = str(error).strip().partition("\n")[0]
        return line or type(error).__name__

    # -- the list of tools -----------------------------------------------------------------

    async def _list(self, client: Any) -> tuple[Tool, ...]:
        """All tools, within bounds: a server may have pages without end."""
        found: list[Tool] = []
        cursor, seen = None, set()
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            found += [self._tool(one) for one in page.tools[: MAX_LISTED - len(found)]]
            cursor = page.next_cursor
            if not cursor or cursor in seen or len(found) >= MAX_LISTED:
                break
            seen.add(cursor)
        return tuple(found)

    def _tool(self, one: Any) -> Tool:
        schema = dict(one.input_schema)
        words = one.description or one.title or ""
        try:
            is_large = len(json.dumps(schema)) > MAX_SCHEMA_CHARS
        except (RecursionError, ValueError):
            is_large = True
        if is_large:
            schema = {"type": "object"}
            words = f"{words} (Its schema of arguments is too large to be shown.)"
        return Tool(
            name=one.name,
            description=words,
            schema=schema,
            call=partial(self._call, one.name),
            timeout_s=self._server.timeout_s + START_S,  # a call may start the server anew
        )

    async def _heard(self, message: Any) -> None:
        """List the tools again when the server says that they have changed."""
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._list_soon()

    def _list_soon(self) -> None:
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list_again(START_S))

    async def _list_again(self, timeout_s: float) -> None:
        client = self._client
        if client is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                self.tools = await self._list(client)
        except Exception as error:  # top of the task: the tools stay as they were
            self.state = f"ready; its new list of tools cannot be read: {type(error).__name__}"

    # -- calls -----------------------------------------------------------------------------

    async def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        client = await self._connected()
        try:
            async with asyncio.timeout(self._server.timeout_s + 1):
                result = await client.call_tool(
                    tool, arguments, read_timeout_seconds=self._server.timeout_s
                )
        except Exception as error:  # whatever the connection may raise ends this call only
            raise await self._call_error(error, client) from None
        self._num_deaths = 0
        is_long = sum(len(getattr(part, "text", "")) for part in result.content) > THREAD_CHARS
        text = await asyncio.to_thread(_text_of, result) if is_long else _text_of(result)
        if result.is_error:
            if "unknown tool" in text.lower():
                self._list_soon()
            raise ToolError(text or "the tool failed without a word")
        return text

    async def _connected(self) -> Any:
        """The connection, after a death a new one."""
        async with self._reviving:
            return self._client or await self._revived()

    async def _revived(self) -> Any:
        if self._num_deaths >= MAX_DEATHS:
            raise ToolError(
                f"{self.name} is off, as it died {MAX_DEATHS} times: {self.state}. "
                f"The user can type /mcp restart {self.name}"
            )
        await self._end()
        await self.start()
        if self._client is None:
            self._num_deaths += 1
            raise ToolError(f"{self.name} does not start: {self.state}")
        return self._client

    async def _call_error(self, error: Exception, client: Any) -> ToolError:
        from mcp import MCPError
        from pydantic import ValidationError

        if isinstance(error, TimeoutError):
            return ToolError(f"no result came within {self._server.timeout_s:g} s")
        if isinstance(error, ValidationError):
            return ToolError(f"{self.name} sent a result of a wrong shape")
        if isinstance(error, MCPError) and error.code not in (CONNECTION_CLOSED, None):
            if error.code == -32001:
                return ToolError(f"no result came within {self._server.timeout_s:g} s")
            return ToolError(shortened(str(error), MAX_REASON_CHARS))
        self._num_deaths += 1
        if client is self._client:
            self._client = None
        owner = self._owner
        if owner is not None and self._server.url is None and isinstance(error, MCPError):
            await asyncio.wait([owner], timeout=CLOSE_S)  # it knows how the process has ended
        reason = self._reason(error)
        await self._end()
        if self._server.url is not None or self.state == "ready":
            self._fail(reason)
        return ToolError(f"{self.name} ended during the call: {self.state}")


def _words_of(process: ServerProcess) -> str:
    """Why a process has ended, and what it said last."""
    words = [process.fault] if process.fault else []
    if process.last_words:
        words.append(f"it said: {process.last_words}")
    return "; ".join(words)


def _text_of(result: Any) -> str:
    """A result as text; what is none is named."""
    parts: list[str] = []
    for part in result.content:
        kind = part.type
        if kind == "text":
            parts.append(part.text)
        elif kind in ("image", "audio"):
            size = amount(len(part.data))
            parts.append(f"[{kind} {part.mime_type}, {size} characters, left out]")
        elif kind == "resource_link":
            parts.append(f"[link {part.uri}]")
        else:
            text = getattr(part.resource, "text", None)
            parts.append(f"[file {part.resource.uri}, left out]" if text is None else text)
    if not parts and result.structured_content is not None:
        try:
            parts.append(json.dumps(result.structured_content, ensure_ascii=False))
        except (RecursionError, ValueError):
            raise ToolError("the result is nested too deeply") from None
    return "\n".join(parts)
