"""MCP servers over HTTP: one of the `mcp` package, and bad ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from termgen.tools import server_tools
from termgen.tools.server_config import McpServer
from termgen.tools.server_tools import McpTools
from termgen.tools.toolbox import ToolError

pytest.importorskip("mcp")
HARNESS = Path(__file__).parents[1] / "harness"
TOKEN = "sesame"


class Sample:
    """A server process, which may be ended and started again at the same port."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "port"
        self.process = subprocess.Popen(
            [sys.executable, str(HARNESS / "mcp_server.py"), "http", str(self._file), TOKEN],
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 30
        while not self._file.exists():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self._file.read_text()}/mcp"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    server = Sample(tmp_path_factory.mktemp("mcp"))
    yield server
    server.end()


@asynccontextmanager
async def started(url: str, *, timeout_s: float = 20.0, **headers: str) -> AsyncGenerator[McpTools]:
    tools = McpTools(McpServer(name="h", url=url, headers=headers, timeout_s=timeout_s))
    try:
        await tools.start()
        yield tools
    finally:
        await tools.close()


async def call(tools: McpTools, tool: str = "echo", **arguments: Any) -> str:
    (found,) = [one for one in tools.tools if one.name == tool]
    return await found.call(arguments)


async def test_a_server_with_a_token(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", TOKEN)
    async with started(sample.url, **{"X-Token": "${TOKEN_OF_TEST}"}) as tools:
        assert tools.state == "ready"
        assert await call(tools, text="hi") == "echo hi"
        assert len(await call(tools, "big", num_chars=1_000_000)) == 1_000_000
        with pytest.raises(ToolError):
            await call(tools, "fail")
        both = await asyncio.gather(call(tools, text="a"), call(tools, text="b"))
        assert both == ["echo a", "echo b"]


async def test_a_missing_token_is_said(sample: Sample) -> None:
    async with started(sample.url) as tools:
        assert "it needs a token" in tools.state and "[mcp.h]" in tools.state
        assert "OAuth" in tools.state and not tools.tools


async def test_a_variable_that_is_missing_is_named(sample: Sample) -> None:
    async with started(sample.url, **{"X-Token": "${NO_SUCH_VARIABLE}"}) as tools:
        assert tools.state == "the variable NO_SUCH_VARIABLE is not set"


async def test_a_slow_call_times_out(sample: Sample) -> None:
    async with started(sample.url, timeout_s=1.0, **{"X-Token": TOKEN}) as tools:
        with pytest.raises(ToolError, match="no result came within 1 s"):
            await call(tools, "slow", seconds=60)
        assert await call(tools, text="on") == "echo on"


async def test_a_server_that_goes_costs_its_calls(tmp_path: Path) -> None:
    server = Sample(tmp_path)
    async with started(server.url, **{"X-Token": TOKEN}) as tools:
        assert await call(tools, text="hi") == "echo hi"
        server.end()
        for _ in range(2):
            with pytest.raises(ToolError, match="h "):
                await call(tools, text="gone")
        assert tools.state != "ready"


async def _ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bytes) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        if not reply:
            await asyncio.sleep(60)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def answering(reply: bytes) -> AsyncGenerator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _ok(reader, writer, reply)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()


def response(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


@pytest.mark.parametrize(
    ("reply", "fits"),
    [
        (b"", lambda state: "did not start within 1 s" in state),
        (response("500 X", "text/plain", b"no"), lambda state: "answers 500" in state),
        (response("403 X", "text/plain", b"no"), lambda state: "needs a token" in state),
        (response("200 OK", "text/html", b"<html>"), lambda state: state != "ready"),
        (response("200 OK", "application/json", b"{"), lambda state: state != "ready"),
        (b"SSH-2.0-nothing\r\n", lambda state: state != "ready"),
    ],
)
async def test_bad_servers_say_why(
    reply: bytes, fits: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tools, "START_S", 1.0)
    async with answering(reply) as url, started(url) as tools:
        assert fits(tools.state) and "\n" not in tools.state, tools.state
        assert not tools.tools


async def test_nothing_listens() -> None:
    async with started("http://127.0.0.1:1/mcp") as tools:
        assert tools.state not in ("ready", "") and not tools.tools
