"""Streams that are silent for a while are pinged; usage at their end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import FakeEngine, Script
from server_harness import (
    ANSWER,
    app_client,
    chat_body,
    chat_text,
    eventually,
    read_events,
)


async def test_usage_can_be_forced_on_streams() -> None:
    async with app_client(FakeEngine(), force_include_usage=True) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    assert read_events(response.content)[-1]["usage"]["completion_tokens"] == 11


async def test_a_silent_stream_is_pinged_and_only_a_silent_one() -> None:
    engine = FakeEngine(script=Script(hold_after=1))
    async with app_client(engine, sse_ping_interval=0.05) as client:
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(stream=True))
        )
        await eventually(lambda: bool(engine.live))
        await asyncio.sleep(0.2)
        engine.release.set()
        response = await asking
    assert b": ping\n\n" in response.content
    assert chat_text(read_events(response.content)) == ANSWER
    async with app_client(FakeEngine(), sse_ping_interval=15) as client:
        response = await client.post("/v1/chat/completions", json=chat_body(stream=True))
        assert b"ping" not in response.content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", chat_body(max_tokens=20)),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_a_request_says_when_its_stream_is_pinged(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(script=Script(first_delay_s=1.2))
    body = {**body, "stream": True}

    async def answered(config_s: float, asked_s: float) -> bytes:
        async with app_client(engine, sse_ping_interval=config_s) as client:
            response = await client.post(path, json={**body, "sse_ping_interval": asked_s})
            assert response.status_code == 200
            assert "x-termgen-ignored" not in response.headers
            return response.content

    pinged, silent = await asyncio.gather(answered(0, 1), answered(0.05, 0))
    ping = b'{"type":"ping"}' if path == "/v1/messages" else b": ping\n\n"
    assert pinged.count(ping) == 1 and b"ping" not in silent
    assert len(pinged) > len(silent) > 100
    async with app_client(engine) as client:
        for wrong in (
            {"sse_ping_interval": 0.5},
            {"sse_ping_interval": -1},
            {"sse_ping_interval": 10**9},
            {"sse_ping_interval": "1"},
            {"sse_ping_interval": 1, "stream": False},
        ):
            response = await client.post(path, json={**body, **wrong})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["message"].startswith("sse_ping_interval ")
            assert error.get("param", "sse_ping_interval") == "sse_ping_interval"


async def test_pings_bridge_a_long_wait_for_the_first_token() -> None:
    engine = FakeEngine(script=Script(hold_after=0))
    async with app_client(engine, sse_ping_interval=0.05) as client:
        asking = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat_body(stream=True))
        )
        await eventually(lambda: bool(engine.live))
        await asyncio.sleep(0.15)
        engine.release.set()
        content = (await asking).content
    assert content.startswith(b": ping\n\n")
    events = read_events(content)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant", "the role waits for a token"
    assert chat_text(events) == ANSWER
