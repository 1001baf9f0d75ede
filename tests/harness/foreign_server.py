"""A minimal HTTP server that answers `/v1/models` and chats with scripted bytes, well formed or
not, and can close the connection in the middle. Every connection serves one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(text: str, *, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def done() -> bytes:
    return b"data: [DONE]\n\n"


class ForeignServer:
    """Its answers are frames of a stream, or the raw bytes of a whole response."""

    def __init__(
        self,
        frames: tuple[bytes | None, ...],
        *,
        answer: Callable[[ForeignServer], bytes] | None,
        models: bytes,
        frame_s: float,
    ) -> None:
        self._frames = frames
        self._answer = answer
        self._models = models
        self._frame_s = frame_s
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    def response(self, status: int, headers: dict[str, str], body: bytes) -> bytes:
        fields = {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"HTTP/1.1 {status} X\r\n{lines}Connection: close\r\n\r\n".encode() + body

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._reply(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has closed the connection
        finally:
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        self.paths.append(path)
        if path == "/v1/models":
            writer.write(self.response(200, {}, self._models))
        elif path != "/v1/chat/completions":
            writer.write(self.response(404, {}, b'{"detail": "Not Found"}'))
        elif self._answer is not None:
            writer.write(self._answer(self))
        else:
            self.bodies.append(json.loads(body))
            await self._stream(writer)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        for frame in self._frames:
            if frame is None:  # closes the connection without an answer
                await writer.drain()
                return
            writer.write(b"%x\r\n%s\r\n" % (len(frame), frame))
            await writer.drain()
            await asyncio.sleep(self._frame_s)
        writer.write(b"0\r\n\r\n")


def model_list(*names: str, owner: str = "somebody") -> bytes:
    return json.dumps({"data": [{"id": name, "owned_by": owner} for name in names]}).encode()


@asynccontextmanager
async def foreign_server(
    *frames: bytes | None,
    answer: Callable[[ForeignServer], bytes] | None = None,
    models: bytes | None = None,
    owner: str = "somebody",
    frame_s: float = 0.0,
) -> AsyncGenerator[ForeignServer, None]:
    listed = model_list("m1", owner=owner) if models is None else models
    server = ForeignServer(frames, answer=answer, models=listed, frame_s=frame_s)
    await server.start()
    try:
        yield server
    finally:
        await server.aclose()
