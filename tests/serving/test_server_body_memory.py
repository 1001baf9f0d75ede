"""Memory for large bodies: beyond the limit large ones are refused, small ones never; all is
freed."""

from __future__ import annotations

import asyncio
import json
import signal

import httpx
import pytest
from fake_engine import FakeEngine
from server_harness import app_client, error_of, eventually, serving

from termgen.errors import OverloadedError
from termgen.server import Server
from termgen.serving.admission import SMALL_BODY_BYTES, BodyMemory

LARGE = json.dumps({"prompt": "x", "user": "u" * 100_000}).encode()
JSON = {"content-type": "application/json"}


async def begin_body(server: Server, num_bytes: int) -> asyncio.StreamWriter:
    """A request of two such bodies, of which the first is sent."""
    _, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (2 * num_bytes) + b" " * num_bytes
    )
    await writer.drain()
    return writer


async def test_further_large_bodies_are_refused_and_small_ones_are_not() -> None:
    async with (
        serving(FakeEngine(), max_body_memory=3 * len(LARGE)) as server,
        httpx.AsyncClient(base_url=server.url, headers=JSON) as client,
    ):
        room = server._state.body_memory
        arriving = [await begin_body(server, len(LARGE)) for _ in range(2)]
        await eventually(lambda: room.num_bytes == 2 * len(LARGE))
        assert (await client.post("/v1/completions", content=LARGE)).status_code == 200
        assert room.num_bytes == 2 * len(LARGE), "what was parsed is given back"

        arriving.append(await begin_body(server, len(LARGE)))
        await eventually(lambda: room.num_bytes == 3 * len(LARGE))
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
            refused = await client.post(path, content=LARGE)
            assert refused.status_code == 429 and error_of(refused)["code"] == "bodies_full"
            assert refused.headers["retry-after"] == "1"
        small = b'{"prompt":"x"}'.ljust(SMALL_BODY_BYTES)
        assert (await client.post("/v1/completions", content=small)).status_code == 200
        assert 'reason="bodies_full"} 4.0' in (await client.get("/metrics")).text

        for writer in arriving:
            writer.close()
        await eventually(lambda: room.num_bytes == 0)
        assert (await client.post("/v1/completions", content=LARGE)).status_code == 200


async def test_a_body_that_waits_to_be_parsed_still_takes_its_room() -> None:
    async with (
        serving(FakeEngine(), max_body_memory=2 * len(LARGE)) as server,
        httpx.AsyncClient(base_url=server.url, headers=JSON) as client,
    ):
        room = server._state.body_memory
        assert (await client.post("/v1/completions", content=LARGE)).status_code == 200
        child = server._state.large_bodies.helper.start()
        child.send_signal(signal.SIGSTOP)
        asked = [
            asyncio.create_task(client.post("/v1/completions", content=LARGE)) for _ in range(2)
        ]
        await eventually(lambda: room.num_bytes == 2 * len(LARGE))
        assert (await client.post("/v1/completions", content=LARGE)).status_code == 429
        child.send_signal(signal.SIGCONT)
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        assert room.num_bytes == 0


async def test_a_faulty_body_gives_its_room_back_and_no_limit_is_none() -> None:
    async with app_client(FakeEngine(), max_body_memory=0) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", content=LARGE, headers=JSON) for _ in range(3)),
            client.post("/v1/completions", content=LARGE[:-1], headers=JSON),
        )
        assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        assert transport.app.state.server.body_memory.num_bytes == 0  # type: ignore[attr-defined]


def test_a_body_counts_from_its_first_byte_once_it_is_large() -> None:
    room = BodyMemory(SMALL_BODY_BYTES + 10)
    with room.share() as share:
        share.add(SMALL_BODY_BYTES)
        assert room.num_bytes == 0 and share.is_small
        share.add(10)
        assert room.num_bytes == SMALL_BODY_BYTES + 10
        with pytest.raises(OverloadedError):
            share.add(1)
    assert room.num_bytes == 0
