"""Streams of well-behaved clients, in a process of their own, by the client of `termgen bench`.

Run as a program by the benchmarks: reads its port, path and bodies as a line of JSON, sends each
body once, or again and again until standard input ends, and prints the times at which each answer's
tokens arrived, by the clock that all processes share. `Clients` starts and ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from termgen.bench.stream_client import Answer, Connector, Target

CHAT = "/v1/chat/completions"
TIMEOUT_S = 600.0
AFTER_ERROR_S = 0.2


def chat_body(max_tokens: int) -> dict[str, Any]:
    """A stream that ends at its last token only."""
    return {
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


@dataclass(frozen=True)
class Streamed:
    """One answer, whole or under way when the clients left."""

    times_ns: list[int]
    """Arrivals of chunks with text."""
    texts: list[str]
    """Their texts, if the clients keep them."""
    is_whole: bool
    error: str | None

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) / 1e6 for a, b in zip(self.times_ns, self.times_ns[1:], strict=False)]


class Clients:
    """The program, run by a benchmark."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        port: int,
        bodies: list[dict[str, Any]],
        path: str = CHAT,
        *,
        repeats: bool = True,
        keeps_texts: bool = False,
    ) -> Clients:
        command = (sys.executable, __file__)
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None
        plan = [port, path, bodies, repeats, keeps_texts]
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        return cls(process)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def stop(self) -> list[Streamed]:
        """End clients that repeat; wait for others."""
        output, _ = await self._process.communicate(b"")  # closes its input
        if self._process.returncode:
            raise SystemExit(f"the clients failed with code {self._process.returncode}")
        return [Streamed(*fields) for fields in json.loads(output)]


async def _ask(connector: Connector, body: dict[str, Any], answer: Answer) -> None:
    await connector.ask(json.dumps(body).encode(), timeout_s=TIMEOUT_S, answer=answer)
    if answer.error is None and answer.num_output_tokens not in (None, body["max_tokens"]):
        answer.error = f"{answer.num_output_tokens} tokens of {body['max_tokens']}"


async def _run(port: int, path: str, bodies: list[dict[str, Any]], repeats: bool) -> list[Answer]:
    connector = Connector(Target("127.0.0.1", port, path), "127.0.0.1")
    answers: list[Answer] = []

    async def send(body: dict[str, Any]) -> None:
        while True:
            answer = Answer()
            answers.append(answer)
            await _ask(connector, body, answer)
            if not repeats:
                return
            if answer.error is not None:
                await asyncio.sleep(AFTER_ERROR_S)

    tasks = [asyncio.create_task(send(body)) for body in bodies]
    if repeats:
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answers


def _fields(answer: Answer, keeps_texts: bool) -> tuple[list[int], list[str], bool, str | None]:
    times = accumulate(answer.gaps, initial=answer.first) if answer.first else ()
    is_whole = answer.has_ended and answer.error is None
    texts = answer.texts if keeps_texts else []
    return [round(1e9 * time) for time in times], texts, is_whole, answer.error


def main() -> None:
    *plan, keeps_texts = json.loads(sys.stdin.readline())
    answers = asyncio.run(_run(*plan))
    print(json.dumps([_fields(answer, keeps_texts) for answer in answers]))


if __name__ == "__main__":
    main()
