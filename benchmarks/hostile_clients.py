"""Clients that send the worst, at a given rate at most. Used by `hostile_load.py`.

Run as a program by the benchmark. Reads lines `SECONDS KIND`, and answers each, when its time is
over, with one JSON object: how often which answer came.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import sys
import time

from hostile_kinds import CONNECTIONS, bytes_of

from termgen.system.cpu_slices import take_long_slices

NUM_CONNECTIONS = 4
ANSWER_TIMEOUT_S = 15.0


async def ask(port: int, sent: bytes) -> str:
    """Status and code of the answer, if one comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        answer = await reader.read(4096)
        if b"\r\n\r\n" in answer and not answer.partition(b"\r\n\r\n")[2]:
            answer += await reader.read(4096)
        code = answer.partition(b'"code":')[2].partition(b"}")[0].decode().strip('"')
        return f"{answer[9:12].decode()} {code}".strip() if answer else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.transport.abort()


async def attack(port: int, kind: str, seconds: float, pause_s: float) -> dict[str, int]:
    """Each connection rests for `pause_s` after each answer."""
    answers: collections.Counter[str] = collections.Counter()
    begun = int(time.time() * 1000) % 10**7
    end = time.monotonic() + seconds

    async def worker(place: int) -> None:
        await asyncio.sleep(pause_s * place / NUM_CONNECTIONS)
        number = begun + place
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(max(0.1, end - time.monotonic())):
                    if kind in CONNECTIONS:
                        answer = await CONNECTIONS[kind](port)
                    else:
                        answer = await ask(port, bytes_of(kind, number))
            except TimeoutError:
                answer = "none in time"
            answers[answer] += 1
            number += NUM_CONNECTIONS
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(worker(place) for place in range(NUM_CONNECTIONS)))
    return dict(answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pause", type=float, required=True, help="seconds after each answer")
    args = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # whoever serves goes first
    os.nice(10)
    take_long_slices()
    for line in sys.stdin:
        seconds, kind = line.strip().split(" ", 1)
        if kind not in CONNECTIONS:
            bytes_of(kind, 0)
        answers = asyncio.run(attack(args.port, kind, float(seconds), args.pause))
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
