"""One streamed request on its own connection, timed as bytes arrive.

Time stamps are taken in the socket callback, before parsing: an HTTP library's own scheduling would
count as the server's time. Used in the load generator's process.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

import h11

MOST_ERROR_BYTES = 2048
CONTENT_FIELDS = ("content", "reasoning_content", "reasoning")
"""Fields of a chat delta that hold text."""


@dataclass(frozen=True, slots=True)
class Target:
    """Address and headers of the requests."""

    host: str
    port: int
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    is_tls: bool = False

    def encode(self, body: bytes) -> tuple[h11.Connection, bytes]:
        """A new connection state, and the whole request as bytes."""
        connection = h11.Connection(h11.CLIENT)
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = h11.Request(
            method="POST",
            target=self.path,
            headers=[
                ("host", f"{host}:{self.port}"),
                ("content-type", "application/json"),
                ("accept", "text/event-stream"),
                ("connection", "close"),
                ("content-length", str(len(body))),
                *self.headers,
            ],
        )
        parts = (connection.send(head), connection.send(h11.Data(body)))
        end = connection.send(h11.EndOfMessage())
        return connection, b"".join(part for part in (*parts, end) if part)


@dataclass(slots=True)
class Answer:
    """The answer to one request. Times are from time.perf_counter."""

    began: float = 0.0
    first: float = 0.0
    """Time of the first chunk with text; 0: none so far."""
    last: float = 0.0
    """Time of the last chunk with a choice."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between chunks with text."""
    texts: list[str] = field(default_factory=list)
    num_chunks: int = 0
    """Chunks with text."""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    has_ended: bool = False
    """The server sent a finish reason or `[DONE]`."""
    error: str | None = None


class _Stream(asyncio.Protocol):
    """Reads one answer; `done` resolves when it has ended."""

    def __init__(self, connection: h11.Connection, request: bytes, answer: Answer) -> None:
        self._connection = connection
        self._request = request
        self._answer = answer
        self._newest_text = 0.0
        self._rest = b""
        self._status = 0
        self._error_body = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._read(data, time.perf_counter())

    def eof_received(self) -> None:
        self._read(b"", time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(str(exc) if exc is not None else None)

    def _read(self, data: bytes, now: float) -> None:
        if self.done.done():
            return
        try:
            self._connection.receive_data(data)
            while True:
                event = self._connection.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    return
                if isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.Data):
                    self._take(bytes(event.data), now)
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    self._finish(None)
                    return
        except h11.RemoteProtocolError as error:
            # without data the connection merely ended in the middle of the answer
            self._finish(f"this is not HTTP: {error}" if data else None)

    def _take(self, data: bytes, now: float) -> None:
        if self._status != 200:
            self._error_body = (self._error_body + data)[:MOST_ERROR_BYTES]
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        answer = self._answer
        if payload == b"[DONE]":
            answer.has_ended = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            answer.error = answer.error or f"an event is not a JSON object: {_short(payload)}"
            return
        if event.get("error"):
            answer.error = answer.error or _short(json.dumps(event["error"]).encode())
        for choice in event.get("choices") or ():
            answer.last = now
            self._choice(choice, now)
        self._usage(event.get("usage"))

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        answer = self._answer
        text = choice.get("text")
        if text is None:
            delta = choice.get("delta") or {}
            text = "".join(delta.get(name) or "" for name in CONTENT_FIELDS)
        if choice.get("finish_reason"):
            answer.has_ended = True
        if not text:
            return
        answer.texts.append(text)
        answer.num_chunks += 1
        if answer.first:
            answer.gaps.append(now - self._newest_text)
        else:
            answer.first = now
        self._newest_text = now

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            answer = self._answer
            answer.num_prompt_tokens = usage.get("prompt_tokens")
            answer.num_output_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            answer.num_cached_tokens = details.get("cached_tokens")

    def _finish(self, error: str | None) -> None:
        if self.done.done():
            return
        answer = self._answer
        if not self._status:
            answer.error = error or "the connection was closed without an answer"
        elif self._status != 200:
            answer.error = f"status {self._status}: {_short(self._error_body)}"
        elif error is not None:
            answer.error = answer.error or error
        elif not answer.has_ended:
            answer.error = answer.error or "the answer broke off"
        elif not answer.last:
            answer.error = answer.error or "the answer had no tokens"
        self.done.set_result(None)


class Connector:
    """Opens connections to one server. Resolves its address and loads certificates once: both take
    milliseconds that would count as the server's."""

    def __init__(self, target: Target, address: str) -> None:
        self.target = target
        self._address = address
        self._tls = ssl.create_default_context() if target.is_tls else None

    @classmethod
    async def find(cls, target: Target) -> Connector:
        """Resolve the address with a first connection; if it fails, the host name stands in."""
        try:
            _, writer = await asyncio.open_connection(target.host, target.port)
        except OSError:
            return cls(target, target.host)
        peer: tuple[str, int] = writer.get_extra_info("peername")
        writer.close()
        return cls(target, peer[0])

    async def ask(self, body: bytes, *, timeout_s: float, answer: Answer | None = None) -> Answer:
        """Send one request and read its answer to the end; failures go into `Answer.error`.
        `answer`, if given, is filled as chunks arrive."""
        answer, target = answer or Answer(), self.target
        answer.began = time.perf_counter()
        state, request = target.encode(body)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(timeout_s):
                transport, stream = await asyncio.get_running_loop().create_connection(
                    lambda: _Stream(state, request, answer),
                    self._address,
                    target.port,
                    ssl=self._tls,
                    server_hostname=target.host if target.is_tls else None,
                )
                await stream.done
        except TimeoutError:
            answer.error = f"no end after {timeout_s:g} s"
        except OSError as error:
            reason = error.strerror or error
            answer.error = f"no connection to {target.host}:{target.port}: {reason}"
        finally:
            if transport is not None:
                transport.abort()
        return answer


def _short(raw: bytes) -> str:
    return " ".join(raw.decode(errors="replace").split())[:300]
