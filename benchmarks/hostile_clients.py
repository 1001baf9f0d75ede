"""Clients that send the worst that is refused, as fast as they can. Used by `server_load.py`.

Run as a program by the benchmark; prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import time
from collections.abc import Callable
from typing import Any

USER = '"messages":[{"role":"user","content":"x"}]'
MB8 = 8 * 2**20 - 1000


def good(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


KINDS: dict[str, Callable[[], bytes]] = {
    "deep": lambda: b'{"messages":' + b"[" * 1_000_000,
    "many values": lambda: b'{"messages":[' + b"[]," * (MB8 // 3 - 20) + b"[]]}",
    "many numbers": lambda: b'{"n":[' + b"7," * (MB8 // 2 - 99) + b"7]," + USER.encode() + b"}",
    "most numbers": lambda: b'{"n":[' + b"7," * 250_000 + b"7]," + USER.encode() + b"}",
    "most values": lambda: b'{"n":[' + b"[]," * 60_000 + b"[]]," + USER.encode() + b"}",
    "long text": lambda: good(n=0, user="x" * MB8),
    "escapes": lambda: b'{"n":0,"user":"' + b"\\u00e9" * (MB8 // 6) + b'",' + USER.encode() + b"}",
    "quotes": lambda: b'{"n":0,"user":"' + b'\\"' * 500_000 + b'",' + USER.encode() + b"}",
    "no JSON": lambda: b"\xff" * MB8,
    "too large": lambda: b" " * (2 * MB8),
    "huge n": lambda: good(n=10**30),
    "NaN": lambda: b'{"temperature":NaN,' + USER.encode() + b"}",
    "stop list": lambda: good(stop=["x"] * 200_000),
    "logit_bias": lambda: good(logit_bias={str(i): 1 for i in range(200_000)}),
    "messages": lambda: good()[:-2] + b',{"role":"user","content":""}' * 200_000 + b',{"role":5}]}',
    "digits": lambda: b'{"n":' + b"9" * 1_000_000 + b"," + USER.encode() + b"}",
}


def request(content: bytes) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def ask(port: int, sent: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        answer = await reader.read(4096)
        status = answer[9:12].decode()
        code = answer.partition(b'"code":')[2].partition(b"}")[0].decode().strip('"')
        return f"{status} {code}" if answer else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.transport.abort()


async def attack(port: int, kind: str, seconds: float) -> dict[str, Any]:
    sent = request(KINDS[kind]())
    statuses: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + seconds

    async def worker() -> None:
        while time.monotonic() < end:
            statuses[await ask(port, sent)] += 1

    await asyncio.gather(*(worker() for _ in range(4)))
    return {"statuses": dict(statuses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # whoever serves goes first
    print(json.dumps(asyncio.run(attack(args.port, args.kind, args.seconds))))


if __name__ == "__main__":
    main()
