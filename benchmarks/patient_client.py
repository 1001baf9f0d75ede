"""Endless streams of a well-behaved client. Used by `hostile_load.py`.

Run as a program by the benchmark; ends when its standard input does, and prints the times at which
each stream's tokens arrived, by the clock that all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

LAST = b"data: [DONE]"


class Stream(asyncio.Protocol):
    """One answer: records when a chunk with text arrives."""

    def __init__(self, body: bytes, times: list[int]) -> None:
        self._body = body
        self._times = times
        self._tail = b""
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(self._body)
            + self._body
        )

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        if b'"content":"' in data:
            self._times.append(now)
        self._tail = (self._tail + data)[-4096:]
        if self._tail.startswith(b"HTTP/1.1 ") and not self._tail.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(f"refused: {self._tail!r}"))
        if LAST in data:
            self.done.set_result(self._tail)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"cut: {exc}; {self._tail[-300:]!r}"))


async def repeat(port: int, tokens: int, answers: list[list[int]]) -> None:
    message = {"role": "user", "content": "x"}
    body = json.dumps(
        {
            "messages": [message],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": tokens,
            "ignore_eos": True,
        }
    ).encode()
    while True:
        times: list[int] = []
        answers.append(times)
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda body=body, times=times: Stream(body, times), "127.0.0.1", port
        )
        tail = await stream.done
        if b'"completion_tokens":%d' % tokens not in tail:
            raise RuntimeError(f"not all tokens came: {tail[-500:]!r}")


async def run(port: int, streams: int, tokens: int) -> list[list[int]]:
    answers: list[list[int]] = []
    tasks = [asyncio.create_task(repeat(port, tokens, answers)) for _ in range(streams)]
    end = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait((*tasks, end), return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task in done:
            task.result()
        task.cancel()
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of each answer")
    args = parser.parse_args()
    print(json.dumps(asyncio.run(run(args.port, args.streams, args.tokens))))


if __name__ == "__main__":
    main()
