"""Helpers of the server tests: a client on the app itself, and a real server on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from termgen.client import EngineClient
from termgen.config import ServerConfig
from termgen.server import Server, create_app

MESSAGES = [{"role": "user", "content": "hi"}]
ANSWER = "Hello, world! Ça va? 👋🏽."
"""The answer of a FakeEngine without a script."""


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


def app_client(engine: EngineClient | None, **config: Any) -> httpx.AsyncClient:
    """A client of the ASGI app, without a socket. Exceptions that reach ASGI fail the test."""
    transport = httpx.ASGITransport(app=create_app(engine, ServerConfig(**config)))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@asynccontextmanager
async def serving(engine: EngineClient | None, **config: Any) -> AsyncGenerator[Server, None]:
    """A server on a free port of 127.0.0.1."""
    server = Server(engine, ServerConfig(**{"port": 0, **config}))
    task = asyncio.create_task(server.serve())
    await server.started()
    try:
        yield server
    finally:
        await server.stop(drain_timeout=0)
        await task


@asynccontextmanager
async def socket_client(
    engine: EngineClient, **config: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with serving(engine, **config) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            yield client


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds; asserts nothing about speed."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def read_events(raw: bytes | str) -> list[Any]:
    """A strict reader of event streams: JSON values, and the string `[DONE]`."""
    text = raw.decode() if isinstance(raw, bytes) else raw
    assert text.endswith("\n\n")
    events: list[Any] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(": "):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        payload = block.removeprefix("data: ")
        events.append(payload if payload == "[DONE]" else json.loads(payload))
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    return events[:-1]


def chat_text(events: list[Any]) -> str:
    return "".join(c["delta"].get("content", "") for e in events for c in e["choices"])


def completion_text(events: list[Any]) -> str:
    return "".join(c["text"] for e in events for c in e["choices"])


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked to have OpenAI's shape."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    phase = {"phase", "progress"} & error.keys() if error["code"] == "loading" else set()
    assert error.keys() == {"message", "type", "param", "code", *phase}
    assert isinstance(error["message"], str) and error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error
