"""The client of `server_load.py`: many streams in one process of low priority, little work a token.

Run as a program by the benchmark; prints one JSON object. Checks that every stream gets every token
once and in order, and measures from the end of the engine's step to the arrival here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import time
from array import array
from collections.abc import Iterable
from typing import Any

CONTENT = b'"delta":{"content":"'


class StreamReader(asyncio.Protocol):
    """One request on one connection: chunks of `N NS;` tokens."""

    def __init__(self, request: bytes, wanted: int, skipped: int, delays: array[int]) -> None:
        self._request = request
        self._wanted = wanted
        self._skipped = skipped
        self._delays = delays
        self._rest = b""
        self._taken_at = 0
        self.gaps = array("q")
        """Times between two arrivals, as a reader of the stream sees them."""
        self.next_token = 0
        self.num_chunks = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        lines = (self._rest + data).split(b"\n\n")
        self._rest = lines.pop()
        for line in lines:
            begin = line.find(CONTENT)
            if begin >= 0:
                begin += len(CONTENT)
                self._take(line[begin : line.index(b'"', begin)], now)
            elif line.endswith(b"data: [DONE]"):
                self._end()

    def _take(self, text: bytes, now: int) -> None:
        self.num_chunks += 1
        if self._taken_at:
            self.gaps.append(now - self._taken_at)
        self._taken_at = now
        for token in text.split(b";")[:-1]:
            number, _, step_ns = token.partition(b" ")
            if int(number) != self.next_token:
                self._fail(f"token {number!r} came where {self.next_token} was due")
                return
            self.next_token += 1
            if self.next_token > self._skipped:
                self._delays.append(now - int(step_ns))

    def _end(self) -> None:
        if self.next_token != self._wanted:
            self._fail(f"{self.next_token} tokens of {self._wanted}")
        elif not self.done.done():
            self.done.set_result(None)
        self._transport.close()

    def _fail(self, what: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(what))
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"cut after {self.next_token} tokens: {exc}"))


def chat_request(max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            "max_tokens": max_tokens,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def percentiles(values: Iterable[int]) -> dict[str, float]:
    ordered = sorted(values) or [0]
    wanted = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        k: ordered[min(len(ordered) - 1, int(len(ordered) * q))] / 1e6 for k, q in wanted.items()
    }


async def run(port: int, streams: int, tokens: int, skipped: int) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    delays = array("q")
    readers = []
    for _ in range(streams):
        _, reader = await loop.create_connection(
            lambda: StreamReader(chat_request(tokens), tokens, skipped, delays), "127.0.0.1", port
        )
        readers.append(reader)
    results = await asyncio.gather(*(r.done for r in readers), return_exceptions=True)
    failures = [str(r) for r in results if r is not None]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    gaps = [gap for reader in readers for gap in reader.gaps]
    return {
        "num_tokens": sum(r.next_token for r in readers),
        "num_chunks": sum(r.num_chunks for r in readers),
        "num_failed": len(failures),
        "failures": failures[:3],
        "delay_ms": percentiles(delays),
        "gap_ms": percentiles(gaps),
        "client_cpu_s": usage.ru_utime + usage.ru_stime,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--skip", type=int, default=0, help="tokens whose delay does not count")
    parser.add_argument("--nice", type=int, default=5)
    args = parser.parse_args()
    os.nice(args.nice)
    print(json.dumps(asyncio.run(run(args.port, args.streams, args.tokens, args.skip))))


if __name__ == "__main__":
    main()
