"""Slow or silent clients, and clients that do not speak HTTP, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import socket
from typing import Any

import h11
import httpx
import pytest
from fake_engine import FakeEngine, Script
from server_harness import chat_body, eventually, serving
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from termgen.server import Server
from termgen.serving.connection import Connection


def head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return head(path, len(content)) + content


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


async def narrow_socket(server: Server) -> socket.socket:
    """A connection with a receive buffer of only some kilobytes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address(server))
    return sock


async def is_closed(reader: asyncio.StreamReader) -> bytes:
    """The bytes before the end of the connection."""
    received = b""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            while part := await reader.read(2**16):
                received += part
    return received


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: "])
async def test_a_head_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("termgen.serving.connection.HEAD_TIMEOUT_S", 0.1)
    async with serving(FakeEngine()) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(sent)
        assert await is_closed(reader) == b""
        writer.close()


async def test_a_second_head_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(FakeEngine()) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"}")
        monkeypatch.setattr("termgen.serving.connection.HEAD_TIMEOUT_S", 0.1)
        writer.write(b"GET /version HT")
        assert await is_closed(reader) == b""
        writer.close()


async def test_a_long_answer_is_no_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termgen.serving.connection.HEAD_TIMEOUT_S", 0.05)
    async with serving(FakeEngine(script=Script(first_delay_s=0.3))) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", json=chat_body())
                assert answer.status_code == 200


async def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termgen.serving.handlers.BODY_TIMEOUT_S", 0.1)
    engine = FakeEngine()
    async with serving(engine) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(head("/v1/completions", 100) + b'{"prompt"')
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in await reader.readuntil(b"}}")
        writer.close()
    assert engine.calls == []


async def test_a_whole_answer_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termgen.serving.connection.STALL_TIMEOUT_S", 0.1)
    engine = FakeEngine(script=Script(pieces=["x" * 100_000] * 100))
    async with serving(engine) as server:
        connections = server._uvicorn.server_state.connections
        sock = await narrow_socket(server)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, request("/v1/chat/completions", chat_body()))
        await eventually(lambda: bool(engine.finished))
        await eventually(lambda: not connections)
        sock.close()


async def test_a_client_that_takes_little_by_little_gets_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading takes longer than the timeout, but is never silent for that long."""
    monkeypatch.setattr("termgen.serving.connection.STALL_TIMEOUT_S", 0.5)
    engine = FakeEngine(script=Script(pieces=["x" * 100_000] * 40))
    async with serving(engine) as server:
        (listener,) = server._sockets  # otherwise the kernel buffers megabytes
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        sock = await narrow_socket(server)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, request("/v1/chat/completions", chat_body()))
        received = b""
        begun = loop.time()
        while not received.endswith(b"}}}"):
            slowly = loop.time() - begun < 1.0
            part = await loop.sock_recv(sock, 16_384 if slowly else 2**20)
            assert part, "the connection was cut"
            received += part
            await asyncio.sleep(0.02 if slowly else 0)
        sock.close()
    body = json.loads(received[received.index(b"\r\n\r\n") + 4 :])
    assert body["choices"][0]["message"]["content"] == "x" * 4_000_000


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_sends_its_next_request_early_is_seen_to_leave(how: str) -> None:
    engine = FakeEngine(script=Script(hold_after=1))
    async with serving(engine) as server:
        _, writer = await asyncio.open_connection(*address(server))
        writer.write(request("/v1/completions", {"prompt": "x"}))
        await eventually(lambda: bool(engine.live))
        writer.write(request("/v1/completions", {"prompt": "x"}))
        await asyncio.sleep(0.05)
        assert len(engine.calls) == 1
        writer.close() if how == "close" else writer.transport.abort()
        await eventually(lambda: not engine.live)
    assert len(engine.aborted) == 1 and len(engine.calls) == 1


async def test_early_requests_are_answered_in_order() -> None:
    engine = FakeEngine(script=Script(delay_s=0.002))
    async with serving(engine) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        one = request("/v1/completions", {"prompt": "x", "max_tokens": 3})
        writer.write(one * 2)
        await asyncio.sleep(0.01)
        writer.write(one)
        for _ in range(3):
            answer = await reader.readuntil(b"}}}")
            assert answer.startswith(b"HTTP/1.1 200") and b"Hello, wor" in answer
        writer.close()
    assert len(engine.finished) == 3


async def test_early_requests_without_end_are_not_kept() -> None:
    engine = FakeEngine(script=Script(hold_after=1))
    async with serving(engine) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(request("/v1/completions", {"prompt": "x"}))
        await eventually(lambda: bool(engine.live))
        writer.write(request("/v1/completions", {"prompt": "x" * 2_000_000}))
        assert await is_closed(reader) == b""
        await eventually(lambda: not engine.live)
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5, 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 1_000_000,
    ],
    ids=["tls", "words", "two hosts", "no host", "lengths", "length", "header", "path"],
)
async def test_what_is_not_http_gets_json(sent: bytes) -> None:
    async with serving(FakeEngine()) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(sent)
        answer = await is_closed(reader)
        status, _, rest = answer.partition(b"\r\n")
        assert status.startswith(b"HTTP/1.1 4"), answer
        error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
        writer.close()


async def test_clients_that_drop_leave_nothing_behind() -> None:
    """Clients drop at every stage: connected, in the head, in the body, waiting, reading. A small
    version of `benchmarks/server_load.py --part drop`."""
    engine = FakeEngine(script=Script(pieces=["x"] * 10_000, delay_s=0.002))
    async with serving(engine) as server:
        await asyncio.sleep(0.05)
        state = server._uvicorn.server_state
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        whole = request("/v1/chat/completions", chat_body())
        stream = request("/v1/chat/completions", chat_body(stream=True))
        for i in range(200):
            sent = (b"", whole[:20], whole[:-5], whole, stream)[i % 5]
            reader, writer = await asyncio.open_connection(*address(server))
            writer.write(sent)
            if sent is stream:
                await reader.readuntil(b"data: ")
            elif i % 3:
                await asyncio.sleep(0.005)
            writer.transport.abort() if i % 2 else writer.close()
        await eventually(lambda: not engine.live and not state.connections, timeout_s=20)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= files)
        await eventually(lambda: not state.tasks)  # a task that has ended is in it for a moment
        assert server.num_answers == 0
        assert not server._state.admission._open
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
    assert engine.finished == [] and len(engine.aborted) >= 40


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"prompt": "x"}'
CHUNKED = b"f\r\n" + BODY + b"\r\n0\r\n\r\n"


def ambiguous(headers: bytes, body: bytes, *, version: bytes = b"1.1") -> bytes:
    """A request whose end two parsers may find at different places, followed by another one."""
    line = b"POST /v1/completions HTTP/" + version + b"\r\nhost: 127.0.0.1\r\n"
    line += b"content-type: application/json\r\n"
    return line + headers + b"\r\n" + body + SMUGGLED


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(ambiguous(headers, body, **options), id=name)
        for name, headers, body, options in (
            ("both", b"content-length: 5\r\ntransfer-encoding: chunked\r\n", CHUNKED, {}),
            ("both, swapped", b"transfer-encoding: chunked\r\ncontent-length: 15\r\n", CHUNKED, {}),
            ("two lengths", b"content-length: 15\r\ncontent-length: 3\r\n", BODY, {}),
            ("a list of lengths", b"content-length: 15, 3\r\n", BODY, {}),
            ("a signed length", b"content-length: +15\r\n", BODY, {}),
            ("a hexadecimal length", b"content-length: 0xf\r\n", BODY, {}),
            ("a negative length", b"content-length: -1\r\n", BODY, {}),
            ("folded", b"transfer-encoding:\r\n chunked\r\n", CHUNKED, {}),
            ("folded harmlessly", b"x-a: b\r\n\tc\r\ncontent-length: 15\r\n", BODY, {}),
            ("bare CR", b"x-a: b\rcontent-length: 3\r\ncontent-length: 15\r\n", BODY, {}),
            ("NUL", b"x-a: b\x00\r\ncontent-length: 15\r\n", BODY, {}),
            ("space before colon", b"transfer-encoding : chunked\r\n", CHUNKED, {}),
            ("a tab in a name", b"transfer-\tencoding: chunked\r\n", CHUNKED, {}),
            ("no colon", b"transfer-encoding\r\n", CHUNKED, {}),
            ("chunked not last", b"transfer-encoding: chunked, gzip\r\n", CHUNKED, {}),
            ("identity", b"transfer-encoding: identity\r\n", CHUNKED, {}),
            ("chunked twice", b"transfer-encoding: chunked\r\n" * 2, CHUNKED, {}),
            ("xchunked", b"transfer-encoding: xchunked\r\n", CHUNKED, {}),
            ("HTTP/1.0", b"transfer-encoding: chunked\r\n", CHUNKED, {"version": b"1.0"}),
            (
                *(
                    "HTTP/1.0 kept alive",
                    b"connection: keep-alive\r\ntransfer-encoding: chunked\r\n",
                ),
                *(CHUNKED, {"version": b"1.0"}),
            ),
        )
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_request_with_two_possible_ends_closes_its_connection(
    request_bytes: bytes, at_once: bool
) -> None:
    """Requests in two packets are included: cut before the blanks of a folded line, or at the
    end."""
    engine = FakeEngine()
    end = request_bytes.index(b"\r\n\r\n") + 4
    fold = re.search(rb"\n[ \t]", request_bytes)
    cut = end - 1 if fold is None else fold.start() + 1
    async with serving(engine) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        if at_once:
            writer.write(request_bytes)
        else:
            writer.write(request_bytes[:cut])
            await asyncio.sleep(0.02)
            writer.write(request_bytes[cut:end])
        answer = await is_closed(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert not engine.calls


@pytest.mark.parametrize(
    ("body", "is_whole"),
    [
        (b"f\r\n" + BODY + b"\r\n0\r\n\r\n", True),
        (b"f;name=value\r\n" + BODY + b"\r\n0\r\n\r\n", True),
        (b"F \r\n" + BODY + b"\r\n0\r\n\r\n", True),
        (b"f\n" + BODY + b"\n0\n\n", False),
        (b"f;a\nf\r\n" + BODY + b"\r\n0\r\n\r\n", False),
        (b"+f\r\n" + BODY + b"\r\n0\r\n\r\n", False),
        (b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n", False),
        (b"fffffffffffffffffffff\r\n" + BODY, False),
        (b"f\r\n" + BODY + b"xx0\r\n\r\n", False),
        (b"e\r\n" + BODY + b"\r\n0\r\n\r\n", False),
    ],
)
async def test_chunks_that_are_none_are_refused(body: bytes, is_whole: bool) -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(ambiguous(b"transfer-encoding: chunked\r\nconnection: close\r\n", body))
        answer = await is_closed(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 " if is_whole else b"HTTP/1.1 400 "), answer
    assert b"/smuggled" not in answer and len(engine.calls) == is_whole


@pytest.mark.parametrize("leaves", ["at the end", "in the middle", "before the body", "kept alive"])
async def test_an_ended_connection_is_no_garbage(leaves: str) -> None:
    """Python's collector seldom runs under load: a reference cycle would keep the bodies."""
    engine = FakeEngine(script=Script(pieces=["one ", "two "] * 50, delay_s=0.01))
    kinds = (Connection, RequestResponseCycle, h11.Connection)
    async with serving(engine) as server:
        gc.collect()
        # Objects that another test's failure, or its server, still holds do not count here.
        before = {id(one) for one in alive(*kinds)}
        gc.disable()
        try:
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address(server))
                sent = request("/v1/chat/completions", chat_body(stream=leaves == "in the middle"))
                writer.write(sent[: -5 if leaves == "before the body" else None])
                if leaves == "in the middle":
                    await reader.readuntil(b"two ")
                elif leaves != "before the body":
                    await reader.readuntil(b"usage")
                if leaves == "kept alive":
                    writer.write(b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                    await reader.readuntil(b'version"')
                writer.close()
                del reader, writer
            await eventually(lambda: {id(one) for one in alive(*kinds)} <= before)
        finally:
            gc.enable()


def alive(*kinds: type) -> list[object]:
    return [found for found in gc.get_objects() if issubclass(type(found), kinds)]


# -- clients that close their side ---------------------------------------------------------


async def half_closed(server: Server, sent: bytes) -> bytes:
    """All that comes back to a client that closes its side after what it sends."""
    reader, writer = await asyncio.open_connection(*address(server))
    writer.write(sent)
    writer.write_eof()
    received = await is_closed(reader)
    writer.close()
    return received


def last_body(received: bytes) -> bytes:
    """The body of the answer behind responses that announce it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(received)
    client.receive_data(b"")
    body = b""
    while not isinstance(event := client.next_event(), (h11.EndOfMessage, h11.ConnectionClosed)):
        assert event is not h11.NEED_DATA
        body += event.data if isinstance(event, h11.Data) else b""
    return body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_client_that_closes_its_side_gets_its_whole_answer(path: str, stream: bool) -> None:
    engine = FakeEngine(script=Script(first_delay_s=0.2, delay_s=0.05))
    body = chat_body(stream=stream) if "chat" in path else {"prompt": "x", "stream": stream}
    async with serving(engine) as server:
        received = await half_closed(server, request(path, body))
        answer = last_body(received).decode()
        if stream:
            assert answer.rstrip().endswith("data: [DONE]")
        else:
            assert json.loads(answer)["choices"][0]["finish_reason"] == "stop"
    assert len(engine.finished) == 1 and not engine.aborted


async def test_answers_to_requests_in_a_row_come_to_a_closed_side() -> None:
    async with serving(FakeEngine(script=Script(first_delay_s=0.1))) as server:
        sent = request("/v1/completions", {"prompt": "x"})
        received = await half_closed(server, sent + head("/version", 0).replace(b"POST", b"GET"))
        assert received.count(b"HTTP/1.1 200") == 2 and b'"version"' in received
        closing = sent.replace(b"host:", b"connection: close\r\nhost:", 1)
        assert (await half_closed(server, closing)).count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("script", [Script(first_delay_s=30), Script(hold_after=1)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request_at_once(script: Script, stream: bool) -> None:
    engine = FakeEngine(script=script)
    async with serving(engine) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(request("/v1/chat/completions", chat_body(stream=stream)))
        await eventually(lambda: bool(engine.live))
        if stream and script.hold_after:
            await reader.readuntil(b"data: ")
        began = asyncio.get_running_loop().time()
        writer.close()
        await eventually(lambda: not engine.live)
        assert asyncio.get_running_loop().time() - began < 1


async def test_a_client_may_leave_after_it_has_closed_its_side() -> None:
    engine = FakeEngine(script=Script(first_delay_s=30))
    async with serving(engine) as server:
        _, writer = await asyncio.open_connection(*address(server))
        writer.write(request("/v1/chat/completions", chat_body()))
        await eventually(lambda: bool(engine.live))
        writer.write_eof()
        await asyncio.sleep(0.2)
        assert engine.live, "it still reads"
        writer.transport.abort()
        await eventually(lambda: not engine.live, timeout_s=10)


async def test_a_stream_that_has_begun_goes_on_to_a_closed_side() -> None:
    engine = FakeEngine(script=Script(delay_s=0.05))
    async with serving(engine) as server:
        reader, writer = await asyncio.open_connection(*address(server))
        writer.write(request("/v1/chat/completions", chat_body(stream=True)))
        received = await reader.readuntil(b"data: ")
        writer.write_eof()
        received += await is_closed(reader)
        writer.close()
        assert last_body(received).rstrip().endswith(b"data: [DONE]")
    assert engine.finished


async def test_a_part_of_a_request_before_the_end_is_dropped() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        assert await half_closed(server, head("/v1/completions", 50) + b"{}") == b""
        assert await half_closed(server, b"") == b""
        old = request("/v1/completions", {"prompt": "x"}).replace(b"HTTP/1.1", b"HTTP/1.0")
        assert b"100 Continue" not in await half_closed(server, old)
    assert not engine.calls or engine.aborted or engine.finished


# -- whole addresses as targets ------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1/v1/models", "127.0.0.1", 200),
        ("HTTP://localhost:8000/v1/models?x=1", "evil.example", 200),
        ("http://evil.example/v1/models", "127.0.0.1", 403),
        ("http://127.0.0.1", "127.0.0.1", 200),
        ("http://127.0.0.1?x=/v1/models", "127.0.0.1", 200),
        ("http:///v1/models", "127.0.0.1", 400),
        ("http://me@127.0.0.1/v1/models", "127.0.0.1", 400),
        ("ftp://127.0.0.1/v1/models", "127.0.0.1", 404),
    ],
)
async def test_a_whole_address_is_served_by_its_own_host(
    target: str, host: str, status: int
) -> None:
    async with serving(FakeEngine()) as server:
        sent = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        received = await half_closed(server, sent.encode())
        assert f"HTTP/1.1 {status}".encode() in received, received
        if status == 200 and "/v1/models" not in target.partition("?")[0]:
            assert last_body(received) == b"Ollama is running"
        elif status == 200:
            assert json.loads(last_body(received))["object"] == "list"
