"""Streams that are not read hold up no other client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_server import serving_tiny
from server_harness import eventually, read_events

NUM_STREAMS = 4
NUM_TOKENS = 1200
UNREAD_S = 0.3
BOUND_S = 10.0
"""Limit for the short request. All tokens of the streams before it take several times as long."""


async def open_stream(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream of four long answers, of which the client reads nothing yet."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
    body = (
        f'{{"prompt": [5, 6, 7], "n": 4, "max_tokens": {NUM_TOKENS}, "ignore_eos": true,'
        ' "logprobs": 5, "stream": true, "temperature": 1, "seed": 1}'
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    return reader, writer


async def test_a_short_request_is_served_while_streams_are_not_read(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir("llama", max_position_embeddings=1536)
    monkeypatch.setattr("termgen.engine.loop.engine.UNREAD_S", UNREAD_S)
    limits: dict[str, Any] = {"max_model_len": 1536, "max_num_seqs": 4, "kv_cache_gib": 0.05}
    async with serving_tiny(folder, **limits) as (client, engine):
        streams = [await open_stream(str(client.base_url)) for _ in range(NUM_STREAMS)]
        await eventually(lambda: len(engine._streams) == NUM_STREAMS)
        began = time.monotonic()
        short = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=short)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
        waited_s = time.monotonic() - began
        print(f"the short request took {waited_s:.1f} s")
        assert waited_s < BOUND_S
        assert len(engine._streams) == NUM_STREAMS, "and no stream has ended for it"
        # A stream that is read again goes on where it was, and to its end.
        first, _ = streams[0]
        for _, writer in streams[1:]:
            writer.transport.abort()
        received = await first.read(-1)
        text = b"".join(
            line + b"\n\n" for line in received.split(b"\n") if line.startswith(b"data: ")
        )
        ends = [
            choice["finish_reason"]
            for event in read_events(text)
            if isinstance(event, dict)
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        assert ends == ["length"] * 4
        streams[0][1].close()
        assert (await engine.snapshot()).num_preemptions > 0
