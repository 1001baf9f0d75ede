"""The kinds of requests that `benchmarks/hostile_load.py` times: each gets its documented answer,
and a good stream beside them gets all its tokens. A small version, without times."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import completion_text, eventually, read_events, serving

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine

PATH = Path(__file__).parents[2] / "benchmarks" / "hostile_kinds.py"
LARGE = {"many values", "many numbers", "long text", "escapes", "no JSON", "too large"}
"""Eight megabytes each: test_server_body.py has similar ones."""

HARMLESS = {"many at once", "tools, large", "odd path"}
"""Answered like any other; their unusual parts are ignored."""


def load() -> Any:
    spec = importlib.util.spec_from_file_location("hostile_kinds", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kinds = load()


async def send(port: int, sent: bytes) -> bytes:
    """The bytes received until the server closes, or the answer is complete."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        return head + await reader.readexactly(length)
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""  # closed before all was sent
    finally:
        writer.transport.abort()


def check(kind: str, answer: bytes) -> None:
    if not answer:
        return
    status, body = int(answer[9:12]), json.loads(answer.partition(b"\r\n\r\n")[2])
    if status == 200:
        assert kind in HARMLESS, kind
        return
    assert status in (400, 404, 405, 413), (kind, answer)
    assert body["error"].keys() == {"message", "type", "param", "code"}, kind
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("group", ["body", "template", "header"])
async def test_every_kind_is_answered_beside_a_good_stream(
    group: str, tiny_llama_dir: Path
) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", max_model_len=256)
    engine = await AsyncEngine.start(config)
    try:
        async with serving(engine) as server:
            port = int(server.url.rsplit(":", 1)[1])
            good = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "seed": 1}
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

                async def stream() -> str:
                    answer = await client.post("/v1/completions", json={**good, "stream": True})
                    return completion_text(read_events(answer.content))

                alone = await stream()
                beside = asyncio.create_task(stream())
                for kind in set(kinds.KINDS[group]) - LARGE - set(kinds.CONNECTIONS):
                    check(kind, await send(port, kinds.bytes_of(kind, 1)))
                assert await beside == alone
            await eventually(lambda: not engine.parts.core.has_work)
            assert (await engine.snapshot()).num_used_blocks == 0 and server.num_answers == 0
    finally:
        await engine.shutdown()


async def test_many_small_things_are_refused_before_they_are_read(tiny_llama_dir: Path) -> None:
    """Slow requests, and chunks of any size, are not refused."""
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu", max_model_len=256)
    engine = await AsyncEngine.start(config)
    try:
        async with serving(engine) as server:
            port = int(server.url.rsplit(":", 1)[1])
            for kind, why in (
                ("small chunks", "too many small chunks"),
                ("many headers", "Too many headers"),
                ("most headers", "Too many headers"),
                ("end headers", "too many small chunks"),
            ):
                answer = await send(port, kinds.bytes_of(kind, 1))
                assert not answer or why in answer.decode(), (kind, answer)
            body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
            lines = ("content-type: application/json", "transfer-encoding: chunked")
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
            headers = [f"x-{i}: y" for i in range(200)]
            whole = kinds.head("/v1/completions", *lines, *headers) + chunks + b"0\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for size in (1, 7, 4096):  # one after the other on one connection
                for begin in range(0, len(whole), size):
                    writer.write(whole[begin : begin + size])
                    await asyncio.sleep(0)
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
                assert (await reader.readuntil(b"}}")).startswith(b"{")
            writer.close()
    finally:
        await engine.shutdown()
