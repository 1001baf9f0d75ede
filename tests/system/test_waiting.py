"""Clients of a server that is loading, not yet listening, or refusing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine
from server_harness import eventually, serving

from termgen.bench.server_api import ServerApi
from termgen.config import ServerConfig
from termgen.errors import ConfigError, RequestError, TermgenError
from termgen.remote.client import RemoteClient
from termgen.server import Server
from termgen.system import waiting
from termgen.system.waiting import Loading, NotYet, read_loading, wait_for_server
from termgen.tui.feeds.attach import RemoteFeed

Report = Callable[[str, float], None]
Connect = Callable[[str, Report, float | None], Awaitable[None]]


async def chat(url: str, report: Report, wait_s: float | None) -> None:
    client = await RemoteClient.connect(url, report=report, wait_s=wait_s)
    assert client.model.model_id
    await client.aclose()


async def watch(url: str, report: Report, wait_s: float | None) -> None:
    feed = await RemoteFeed.connect(url, hz=10, report=report, wait_s=wait_s)
    assert feed.model.model_id
    await feed.close()


async def bench(url: str, report: Report, wait_s: float | None) -> None:
    async with ServerApi(url, api_key=None) as api:
        assert await api.wait_ready(report, absent_s=waiting.ABSENT_S, limit_s=wait_s)


CLIENTS = pytest.mark.parametrize("connect", [chat, watch, bench])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    monkeypatch.setattr(waiting, "ABSENT_S", 0.1)


@asynccontextmanager
async def listening(server: Server) -> AsyncGenerator[Server, None]:
    task = asyncio.create_task(server.serve())
    await server.started()
    try:
        yield server
    finally:
        await server.stop(drain_timeout=0)
        await task


@CLIENTS
async def test_a_loading_server_is_waited_for_and_its_phases_are_shown(connect: Connect) -> None:
    """The wait has no limit, unlike that for a server that does not listen."""
    told: list[tuple[str, float]] = []
    async with serving(None) as server:
        connecting = asyncio.create_task(connect(server.url, lambda *p: told.append(p), None))
        for phase, progress in (("loading weights", 0.25), ("recording graphs", 0.5)):
            server.on_loading(phase, progress)
            await eventually(lambda p=phase: any(p in words for words, _ in told))
        await asyncio.sleep(2 * waiting.ABSENT_S)
        assert not connecting.done()
        server.attach(FakeEngine())
        async with asyncio.timeout(5):
            await connecting
    assert ("loading weights", 0.25) in told
    assert ("recording graphs", 0.5) in told


@CLIENTS
async def test_waiting_for_a_loading_server_has_the_limit_that_is_given(connect: Connect) -> None:
    async with serving(None) as server:
        server.on_loading("loading weights", 0.25)
        with pytest.raises(TermgenError, match="loading weights, 25%"):
            await connect(server.url, print, 0.05)
        with pytest.raises(TermgenError, match="loading weights, 25%"):
            await connect(server.url, print, 0.0)


@CLIENTS
async def test_a_server_that_is_not_there_is_waited_for_when_asked(connect: Connect) -> None:
    told: list[str] = []
    server = Server(FakeEngine(), ServerConfig(port=0))
    server.bind()
    url = server.url
    assert server._sockets
    port = int(url.rpartition(":")[2])
    await server.stop()  # the port is free now: no process listens
    connecting = asyncio.create_task(connect(url, lambda words, _: told.append(words), 20.0))
    await eventually(lambda: bool(told))
    assert told[0] == "no answer yet"
    await asyncio.sleep(2 * waiting.ABSENT_S)
    assert not connecting.done()
    async with listening(Server(FakeEngine(), ServerConfig(port=port))):
        async with asyncio.timeout(5):
            await connecting


@CLIENTS
async def test_a_server_that_is_not_there_is_one_plain_error(connect: Connect) -> None:
    told: list[str] = []
    began = time.monotonic()
    with pytest.raises(TermgenError, match="(no server at|does not answer).*nothing listens there"):
        await connect("http://127.0.0.1:9", lambda words, _: told.append(words), None)
    assert waiting.ABSENT_S <= time.monotonic() - began < 5
    assert not told  # a short wait is not reported


@pytest.mark.parametrize("connect", [chat, bench])
@pytest.mark.parametrize("engine", [None, FakeEngine()])
async def test_a_wrong_key_is_said_at_once(connect: Connect, engine: FakeEngine | None) -> None:
    """A loading server tells clients without a key nothing but its phase."""
    async with serving(engine, api_key=("k",)) as server:
        with pytest.raises((RequestError, ConfigError), match="key"):
            await connect(server.url, print, 20.0)


@CLIENTS
async def test_what_is_no_model_server_is_said_at_once(connect: Connect) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TermgenError, match="has no /v1|status 404"):
            await connect(f"http://127.0.0.1:{port}", print, 20.0)


async def test_a_watched_server_that_restarts_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it loads, the screen shows the current phase."""
    monkeypatch.setattr("termgen.tui.feeds.attach.RETRY_S", 0.02)
    async with serving(FakeEngine()) as first:
        port = int(first.url.rpartition(":")[2])
        feed = await RemoteFeed.connect(first.url, hz=20)
    try:
        await eventually(lambda: feed.trouble == "connection lost")
        async with listening(Server(None, ServerConfig(port=port))) as second:
            second.on_loading("loading weights", 0.5)
            await eventually(lambda: feed.trouble == "the server is loading: loading weights, 50%")
            second.attach(FakeEngine())
            await eventually(lambda: not feed.trouble)
    finally:
        await feed.close()


async def test_absence_after_loading_has_its_own_moment() -> None:
    """A server that dies while it loads is not waited for as long as it has loaded."""
    refusal = ConfigError("gone")
    script: list[Loading | None] = [Loading("weights", 0.1, 0.01)] * 20

    async def attempt() -> None:
        raise NotYet(refusal, script.pop() if script else None)

    began = time.monotonic()
    with pytest.raises(ConfigError, match="gone"):
        await wait_for_server(attempt, lambda *_: None)
    assert not script and time.monotonic() - began >= 20 * 0.01 + waiting.ABSENT_S


async def test_a_check_ends_the_waiting() -> None:
    calls = 0

    async def attempt() -> None:
        raise NotYet(ConfigError("x"), Loading("weights", 0.1, 0.01))

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ConfigError("the process has ended")

    with pytest.raises(ConfigError, match="the process has ended"):
        await wait_for_server(attempt, lambda *_: None, check=check)


@pytest.mark.parametrize(
    ("status", "body", "phase"),
    [
        (503, {"error": {"code": "loading", "phase": "weights", "progress": 0.5}}, "weights"),
        (503, {"status": "loading", "phase": "weights", "progress": 0.5}, "weights"),
        (503, {"error": {"code": "loading"}}, ""),
        (503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable"}}, ""),
        (503, {"error": {"code": "loading", "phase": ["x"], "progress": "y"}}, ""),
        (503, {"error": {"code": "loading", "phase": "a\n b", "progress": 1e400}}, "a b"),
        (503, {"error": {"code": "draining", "message": "The server is shutting down"}}, None),
        (503, {"error": "no backend"}, None),
        (503, ["loading"], None),
        (503, None, None),
        (500, {"error": {"code": "loading"}}, None),
        (200, {"status": "loading"}, None),
    ],
)
def test_what_says_that_a_server_loads(status: int, body: Any, phase: str | None) -> None:
    raw = b"<html>" if body is None else json.dumps(body).encode()
    found = read_loading(status, raw, {})
    assert (None if found is None else found.phase) == phase
    assert found is None or (0 <= found.progress <= 1 and found.retry_s > 0)


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3.0), ("1e9", 10.0), ("-5", 0.01), ("nan", 0.01), ("Mon", 0.01)]
)
def test_other_servers_say_how_long_to_leave_them_alone(header: str, seconds: float) -> None:
    raw = json.dumps({"error": {"message": "Loading model"}}).encode()
    found = read_loading(503, raw, {"retry-after": header})
    assert found is not None and found.retry_s == seconds
