"""Real sockets: streaming, leaving clients, slow clients, third-party stream readers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, GenerateCall, Script
from server_harness import chat_body, chat_text, eventually, read_events, serving, socket_client

from termgen.client import TokenDelta
from termgen.config import ServerConfig
from termgen.engine.loop.engine import DeltaStream
from termgen.errors import ConfigError, EngineError
from termgen.server import Server


def raw_request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


class VLLMBenchReader:
    """A model of how `vllm bench serve` reads a stream: chunks are stripped, then split.

    A chunk is the result of one read of the socket, so frames may be cut anywhere.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.payloads: list[str] = []

    def feed(self, chunk: bytes) -> None:
        self.buffer += chunk.decode()
        while "\n\n" in self.buffer:
            message, self.buffer = self.buffer.split("\n\n", 1)
            message = message.strip()
            if message.startswith(":"):
                continue
            assert message.startswith("data: "), message
            self.payloads.append(message.removeprefix("data: "))


async def test_streamed_text_equals_the_text_over_a_socket() -> None:
    async with socket_client(FakeEngine(script=Script(delay_s=0.002))) as client:
        whole = (await client.post("/v1/chat/completions", json=chat_body())).json()
        reader = VLLMBenchReader()
        async with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as r:
            assert r.headers["content-type"].startswith("text/event-stream")
            async for chunk in r.aiter_raw():
                reader.feed(chunk)
    assert reader.buffer == "" and reader.payloads[-1] == "[DONE]"
    events = [json.loads(p) for p in reader.payloads[:-1]]
    assert chat_text(events) == whole["choices"][0]["message"]["content"]


async def test_the_role_is_in_the_same_write_as_the_first_token() -> None:
    """Clients that take the first chunk for the first token then measure the right time."""
    async with socket_client(FakeEngine(script=Script(first_delay_s=0.05, delay_s=0.05))) as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as r:
            first = await anext(r.aiter_raw())
    assert b'"role":"assistant"' in first and b'"content":"Hello"' in first


async def test_tokens_arrive_while_the_engine_still_works() -> None:
    engine = FakeEngine(script=Script(hold_after=3))
    async with socket_client(engine) as client:
        async with client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as r:
            lines = r.aiter_lines()
            seen = ""
            while "wor" not in seen:
                seen += await anext(lines)
            assert engine.live, "the request is still running"
            engine.release.set()
            rest = [line async for line in lines]
    assert "data: [DONE]" in rest


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("hold_after", "stage"), [(0, "queue"), (0, "prefill"), (2, "decode")])
async def test_a_client_that_leaves_aborts_its_request(
    stream: bool, path: str, hold_after: int, stage: str
) -> None:
    script = Script(hold_after=hold_after, waits_in_queue=stage == "queue")
    engine = FakeEngine(script=script)
    async with serving(engine) as server:
        reader, writer = await connect(server)
        body = {**chat_body(), "prompt": "x", "stream": stream, "n": 2}
        writer.write(raw_request(path, body))
        await eventually(lambda: bool(engine.live))
        if stream and hold_after:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.05)
        assert engine.aborted == []
        writer.close()
        await eventually(lambda: not engine.live)
        assert len(engine.aborted) == 1 and engine.finished == []
        async with httpx.AsyncClient(base_url=server.url) as client:
            text = (await client.get("/metrics")).text
        wanted = f'disconnects_total{{model="fake/model-1",stage="{stage}"}} 1.0'
        assert wanted in text


async def test_leaving_aborts_every_prompt_of_a_batch() -> None:
    def script(call: GenerateCall) -> Script:
        return Script(hold_after=1) if call.prompt != "done" else Script()

    engine = FakeEngine(script=script)
    async with serving(engine) as server:
        _, writer = await connect(server)
        body = {"prompt": ["a", "done", "b", "c"], "stream": True}
        writer.write(raw_request("/v1/completions", body))
        await eventually(lambda: len(engine.calls) == 4 and len(engine.live) == 3)
        writer.close()
        await eventually(lambda: not engine.live)
    assert len(engine.aborted) == 3 and len(engine.finished) == 1


async def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    engine = FakeEngine(script=Script(pieces=["x"] * 500, delay_s=0.001))
    async with serving(engine) as server:
        await asyncio.sleep(0.05)
        before = len(asyncio.all_tasks())
        for i in range(60):
            _, writer = await connect(server)
            writer.write(raw_request("/v1/chat/completions", chat_body(stream=bool(i % 2))))
            await eventually(lambda seen=i: len(engine.calls) > seen)
            writer.transport.abort()
        await eventually(lambda: not engine.live)
        await eventually(lambda: len(asyncio.all_tasks()) <= before)
    assert len(engine.aborted) == 60


async def test_a_half_sent_body_is_dropped_quietly(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        _, writer = await connect(server)
        writer.write(raw_request("/v1/completions", {"prompt": "x" * 100})[:-20])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
    assert engine.calls == []
    assert "Traceback" not in caplog.text


class MergingEngine(FakeEngine):
    """Reads its script at its own pace and merges unread deltas, as the real engine does."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[TokenDelta, None]:
        stream = DeltaStream(1)

        async def play() -> None:
            async with aclosing(FakeEngine.generate(self, *args, **kwargs)) as deltas:
                async for delta in deltas:
                    stream.push(delta)

        playing = asyncio.create_task(play())
        try:
            async for delta in stream:
                yield delta
        finally:
            playing.cancel()
            await asyncio.wait([playing])


async def test_a_slow_client_gets_larger_chunks_and_holds_nobody_up() -> None:
    """The engine finishes at its own pace; the backlog arrives merged, and complete."""
    pieces = [f"{i:05d}" + "·" * 10_000 for i in range(1000)]
    engine = MergingEngine(script=Script(pieces=pieces))
    async with serving(engine) as server:
        host, port = server.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
        body = chat_body(stream=True)
        writer.write(raw_request("/v1/chat/completions", body))
        await eventually(lambda: bool(engine.finished), timeout_s=15)
        parts = [b""]
        while not parts[-1].endswith(b"\r\n0\r\n\r\n"):
            parts.append(await reader.read(2**20))
            assert parts[-1], "the stream was cut"
        writer.close()
    events = read_events(_dechunk(b"".join(parts)))
    assert chat_text(events) == "".join(pieces)
    assert len(events) < 900, "some of the 1000 tokens were merged"


def _dechunk(raw: bytes) -> bytes:
    """The body of a response in HTTP/1.1 chunks."""
    position = raw.index(b"\r\n\r\n") + 4
    body = []
    while True:
        end = raw.index(b"\r\n", position)
        size = int(raw[position:end], 16)
        if size == 0:
            return b"".join(body)
        body.append(raw[end + 2 : end + 2 + size])
        position = end + 2 + size + 2


async def test_a_stalled_client_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("termgen.serving.connection.STALL_TIMEOUT_S", 0.2)
    engine = FakeEngine(script=Script(pieces=["x" * 20_000] * 1000, hold_after=900))
    async with serving(engine) as server:
        host, port = server.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, raw_request("/v1/chat/completions", chat_body(stream=True)))
        await eventually(lambda: bool(engine.aborted))
        sock.close()
    assert engine.live == ()


async def test_other_requests_go_on_while_one_fails() -> None:
    def script(call: GenerateCall) -> Script:
        is_bad = call.prompt == "bad"
        return Script(delay_s=0.002, fail_after=3 if is_bad else None, error=EngineError("boom"))

    async with socket_client(FakeEngine(script=script)) as client:

        async def ask(prompt: str) -> bytes:
            body = {"prompt": prompt, "stream": True}
            return (await client.post("/v1/completions", json=body)).content

        answers = await asyncio.gather(*(ask(p) for p in ["a", "bad", "b", "bad", "c"]))
    ended = [read_events(a)[-1] for a in answers]
    assert ["error" in e for e in ended] == [False, True, False, True, False]


async def test_keep_alive_connections_serve_many_requests() -> None:
    async with serving(FakeEngine()) as server:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
            for i in range(10):
                body = chat_body(stream=bool(i % 2))
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_too_large_a_body_gets_its_answer_over_a_socket() -> None:
    async with socket_client(FakeEngine(), max_body_bytes=10_000) as client:
        response = await client.post("/v1/completions", json={"prompt": "x" * 1_000_000})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert (await client.get("/health")).status_code == 200


async def test_a_port_in_use_is_one_line() -> None:
    async with serving(FakeEngine()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            Server(FakeEngine(), ServerConfig(port=port)).bind()
        assert caught.value.param == "port"
    with pytest.raises(ConfigError) as caught:
        Server(FakeEngine(), ServerConfig(host="no.such.host.invalid")).bind()
    assert caught.value.param == "host"


async def test_stopping_lets_running_requests_finish_and_refuses_new_ones() -> None:
    engine = FakeEngine(script=Script(hold_after=2))
    server = Server(engine, ServerConfig(port=0))
    task = asyncio.create_task(server.serve())
    await server.started()
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        plain = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body()))
        streamed = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(stream=True))
        )
        await eventually(lambda: len(engine.live) == 2)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0.05)
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        refused = await client.post("/v1/chat/completions", json=chat_body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        assert not stopping.done()
        engine.release.set()
        assert (await plain).status_code == 200
        assert read_events((await streamed).content)[-1]["choices"][0]["finish_reason"] == "stop"
        await stopping
        await task
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
    assert len(engine.finished) == 2


async def test_what_does_not_finish_in_time_ends_with_an_error() -> None:
    engine = FakeEngine(script=Script(hold_after=2))
    server = Server(engine, ServerConfig(port=0))
    task = asyncio.create_task(server.serve())
    await server.started()
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        plain = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body()))
        streamed = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(stream=True))
        )
        await eventually(lambda: len(engine.live) == 2)
        await asyncio.sleep(0.02)
        await server.stop(drain_timeout=0.05)
        await task
        assert (await plain).status_code == 503
        events = read_events((await streamed).content)
        assert events[-1]["error"]["code"] == "draining"
    assert len(engine.aborted) == 2 and engine.live == ()


async def test_cancelling_serve_closes_everything() -> None:
    engine = FakeEngine(script=Script(hold_after=2))
    server = Server(engine, ServerConfig(port=0))
    task = asyncio.create_task(server.serve())
    await server.started()
    _, writer = await connect(server)
    writer.write(raw_request("/v1/chat/completions", chat_body(stream=True)))
    await eventually(lambda: bool(engine.live))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not engine.live)
    writer.close()
    other = Server(engine, ServerConfig(port=int(server.url.rsplit(":", 1)[1])))
    other.bind()
    await other.stop()


async def test_an_engine_can_come_later() -> None:
    server = Server(None, ServerConfig(port=0))
    task = asyncio.create_task(server.serve())
    await server.started()
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).json() == {"status": "loading"}
        server.attach(FakeEngine())
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    await server.stop()
    await task


async def test_many_streams_lose_and_reorder_nothing() -> None:
    """A small version of `benchmarks/server_load.py --part stream`."""
    pieces = [f"{i} " for i in range(60)]
    engine = MergingEngine(script=Script(pieces=pieces, delay_s=0.001))
    request = raw_request("/v1/chat/completions", chat_body(stream=True))
    async with serving(engine) as server:

        async def read() -> bytes:
            reader, writer = await connect(server)
            writer.write(request)
            received = await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()
            return _dechunk(received)

        answers = await asyncio.gather(*(read() for _ in range(100)))
    for answer in answers:
        assert chat_text(read_events(answer)) == "".join(pieces)
    assert len(engine.finished) == 100
