"""A second observer of the same requests: a proxy that relays bytes and notes their times.

It shares no code with termgen's client. Like the bench, it makes one HTTP exchange per connection.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Seen:
    """One relayed completion. Times are of time.perf_counter."""

    asked: float
    texts: list[float] = field(default_factory=list)
    """Time at which each chunk with text was relayed."""
    num_tokens: int = 0
    num_prompt_tokens: int = 0


class Proxy:
    """Listens on `url` while used as a context manager; `seen` holds the relayed completions."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self.seen: list[Seen] = []

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = time.perf_counter()
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        seen: Seen | None = None

        async def upwards() -> None:
            nonlocal seen
            while data := await reader.read(1 << 16):
                if data.startswith(b"POST /v1/c"):
                    seen = Seen(asked)
                up_writer.write(data)

        task = asyncio.create_task(upwards())
        rest = b""
        try:
            while data := await up_reader.read(1 << 16):
                now = time.perf_counter()
                writer.write(data)
                *lines, rest = (rest + data).split(b"\n")
                if seen is not None:
                    self._note(seen, lines, now)
        except ConnectionError:
            pass  # the client closes the connection once it has its answer
        finally:
            task.cancel()
            up_writer.close()
            writer.close()
            if seen is not None:
                self.seen.append(seen)

    @staticmethod
    def _note(seen: Seen, lines: list[bytes], now: float) -> None:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    seen.texts.append(now)
            if event.get("usage"):
                seen.num_tokens = event["usage"]["completion_tokens"]
                seen.num_prompt_tokens = event["usage"]["prompt_tokens"]
