"""How answers travel: one JSON body, or a stream of events. ASGI callables, no BaseHTTPMiddleware.

Both watch the client while the engine works: when it disconnects, the generation is cancelled at
once, which aborts it in the engine. A stream's status line waits for the first token, so that
everything wrong with a request is still a proper 4xx, but not longer than the ping interval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from termgen.api import sse
from termgen.api.errors import ErrorReply
from termgen.client import TokenDelta, merge_deltas
from termgen.errors import TermgenError
from termgen.serving.connection import WRITE_CHUNK
from termgen.serving.generation import Generation
from termgen.serving.state import ServerState

logger = logging.getLogger("termgen.server")

T = TypeVar("T")
Headers = Mapping[str, str]


class ClientDisconnected(Exception):
    """The client left; there is nobody to answer."""


class ChunkStream(Protocol):
    """`ChatStream`, `CompletionStream`, or what another endpoint makes of the former."""

    def feed(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]: ...

    def end(self) -> list[dict[str, Any]]: ...


@runtime_checkable
class TextFrames(Protocol):
    """A `ChunkStream` that has a shorter way for deltas that are nothing but text."""

    def frame(self, index: int, delta: TokenDelta) -> bytes | None:
        """The bytes of what `feed` would return; None where this way does not do."""
        ...


class JSONReply(Response):
    """A JSON body, compact and strict."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return sse.dumps(content)


def error_response(reply: ErrorReply) -> JSONReply:
    return JSONReply(reply.body, status_code=reply.status, headers=dict(reply.headers))


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client goes first, cancel it and say so.

    `work` has come to its end, clean-up included, when this returns or raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))
        for future in (task, gone):
            if not future.cancelled():
                future.exception()  # retrieved, or asyncio complains


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(
    state: ServerState,
    generation: Generation,
    scope: Scope,
    receive: Receive,
    work: Coroutine[Any, Any, None],
) -> None:
    generation.bind(scope)
    try:
        await until_disconnect(receive, work)
    except ClientDisconnected:
        state.require_metrics().disconnected(generation.stage)
        raise


class CompleteResponse:
    """Collects the whole answer, then sends `build(answers)`, one merged delta per choice."""

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        headers: Headers,
        *,
        build: Callable[[list[TokenDelta]], dict[str, Any]],
    ) -> None:
        self._state = state
        self._generation = generation
        self._headers = headers
        self._build = build

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._run(scope, receive, send)
        await _while_connected(self._state, self._generation, scope, receive, work)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            parts: list[list[TokenDelta]] = [[] for _ in range(generation.num_choices)]

            async def keep(choice: int, delta: TokenDelta) -> None:
                parts[choice].append(delta)

            await generation.run(keep)
        body = self._build([merge_deltas(deltas) for deltas in parts])
        headers = {**self._headers, **generation.headers}
        await JSONReply(body, headers=headers)(scope, receive, send)


class EventStreamResponse:
    """Streams chunks as they come. While a slow client holds a write up, the engine's stream merges
    what follows into one."""

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        headers: Headers,
        *,
        chunks: ChunkStream,
        wire: sse.Wire = sse.CHAT_WIRE,
        ping_interval_s: float | None = None,
    ) -> None:
        """ping_interval_s: None: as the server has it."""
        self._state = state
        self._generation = generation
        self._headers = {**sse.HEADERS, **headers}
        self._chunks = chunks
        self._wire = wire
        default_s = state.config.sse_ping_interval
        self._ping_interval_s = default_s if ping_interval_s is None else ping_interval_s
        self._fast = chunks.frame if isinstance(chunks, TextFrames) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._run(scope, send)
        await _while_connected(self._state, self._generation, scope, receive, work)

    async def _run(self, scope: Scope, send: Send) -> None:
        write_chunk = scope.get("extensions", {}).get(WRITE_CHUNK)
        async with self._generation as generation:
            writer = EventWriter(
                send,
                self._headers,
                ping_interval_s=self._ping_interval_s,
                write_chunk=write_chunk,
                ping=self._wire.ping,
            )

            async def write(choice: int, delta: TokenDelta) -> None:
                data = self._data(choice, delta)
                if not writer.has_started:
                    writer.headers = {**self._headers, **generation.headers}
                if generation.is_complete:
                    data += self._frames(self._chunks.end()) + self._wire.done
                    await writer.write(data, is_last=True)
                elif data:
                    await writer.write(data)

            try:
                await generation.run(write)
            except ClientDisconnected:
                raise
            except Exception as error:
                if not writer.has_started:
                    raise  # still a plain error response
                if not isinstance(error, TermgenError):
                    logger.exception("a stream failed")  # the client learns only that it did
                await writer.write(self._wire.error_frames(error), is_last=True)
            finally:
                writer.close()

    def _data(self, choice: int, delta: TokenDelta) -> bytes:
        if self._fast is not None:
            data = self._fast(choice, delta)
            if data is not None:
                return data
        return self._frames(self._chunks.feed(choice, delta))

    def _frames(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(self._wire.frame(chunk) for chunk in chunks)


class EventWriter:
    """Writes to the client, and a ping into long silences.

    One timer per stream looks at a stamp now and then, so that a token costs no timer.
    """

    def __init__(
        self,
        send: Send,
        headers: Headers,
        *,
        ping_interval_s: float,
        write_chunk: Callable[[bytes], bool] | None,
        ping: bytes = sse.PING,
    ) -> None:
        self._send = send
        self._write_chunk = write_chunk
        self._ping_frame = ping
        self.headers = headers
        """Of no effect once it has started."""
        self._ping_interval_s = ping_interval_s
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._is_blocked = False
        self._is_over = False
        self.has_started = False
        self._ping: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if ping_interval_s:
            self._timer = self._loop.call_later(ping_interval_s, self._look)

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        self._wrote_at = self._loop.time()
        quickly = self._write_chunk if self.has_started and not is_last else None
        if quickly is not None and not self._is_blocked and quickly(data):
            return
        self._is_blocked = True
        self._is_over = self._is_over or is_last
        try:
            if not self.has_started:
                await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except OSError:
            raise ClientDisconnected from None  # how newer ASGI servers report it
        self._is_blocked = False
        self._wrote_at = self._loop.time()

    def close(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    async def _start(self) -> None:
        self.has_started = True
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self.headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    def _look(self) -> None:
        silence_s = self._loop.time() - self._wrote_at
        if silence_s >= self._ping_interval_s and not self._is_blocked:
            self._ping = self._loop.create_task(self._write_ping())
        wait_s = self._ping_interval_s - silence_s
        self._timer = self._loop.call_later(
            wait_s if wait_s > 0 else self._ping_interval_s, self._look
        )

    async def _write_ping(self) -> None:
        if not self._is_over:
            with suppress(ClientDisconnected):  # whoever writes next finds out
                await self.write(self._ping_frame)
