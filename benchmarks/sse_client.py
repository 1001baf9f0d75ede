"""Reads streamed completions over plain sockets, as fast as they arrive; run by `gpu_async.py`.

    python benchmarks/sse_client.py HOST PORT STREAMS MAX_TOKENS PROMPT_TOKENS VOCAB

Ends when its standard input does. Prints the number of bytes read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys


async def read_stream(host: str, port: int, body: bytes) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    total = 0
    try:
        while part := await reader.read(1 << 16):
            if not total and not part.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"the server answered {part[:500]!r}")
            total += len(part)
            if b"[DONE]" in part:
                break
    finally:
        writer.close()
    return total


async def main() -> None:
    host = sys.argv[1]
    port, streams, max_tokens, prompt_tokens, vocab = map(int, sys.argv[2:])
    tasks = []
    for index in range(streams):
        rng = random.Random(f"{index} {prompt_tokens}")
        body = {
            "prompt": [rng.randrange(10, vocab) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        tasks.append(asyncio.create_task(read_stream(host, port, json.dumps(body).encode())))
    reading = asyncio.gather(*tasks)
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait((reading, told), return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        print(sum(reading.result()), flush=True)
        await told
    else:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        print("left", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
