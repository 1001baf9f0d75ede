"""Clients that connect and drop, each at a different stage. Used by `server_load.py`."""

from __future__ import annotations

import asyncio
import collections
import json
import random
from typing import Any

MOMENTS = (
    "connected",
    "in the head",
    "in the body",
    "asked",
    "asked to stream",
    "reading",
    "read for a while",
    "two requests",
)


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def drop_all(port: int, num_clients: int, rng: random.Random) -> dict[str, int]:
    """Run them all, 40 at a time. Returns how many dropped at each stage."""
    counts: collections.Counter[str] = collections.Counter()
    numbers = iter(range(num_clients))

    async def worker() -> None:
        for _ in numbers:
            moment = rng.choice(MOMENTS)
            counts[moment] += 1
            await drop(port, moment, rng)

    await asyncio.gather(*(worker() for _ in range(40)))
    return dict(counts)


async def drop(port: int, moment: str, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [rng.randrange(2, 512) for _ in range(rng.choice((1, 8, 100)))]
    body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "n": rng.choice((1, 1, 3))}
    streams = moment in ("asked to stream", "reading", "read for a while")
    whole = request({**body, "stream": streams})
    sent = {"connected": b"", "in the head": whole[:40], "in the body": whole[:-5]}
    writer.write(sent.get(moment, whole) + (whole if moment == "two requests" else b""))
    if moment.startswith("read"):
        # a stream may be refused or wait long, and this client waits for neither
        try:
            async with asyncio.timeout(rng.random()):
                await reader.readuntil(b"data: ")
                if moment == "read for a while":
                    await asyncio.sleep(0.2 * rng.random())
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
    elif rng.random() < 0.5:
        await asyncio.sleep(0.02 * rng.random())
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
