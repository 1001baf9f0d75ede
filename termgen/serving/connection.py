"""One client's connection: protection from slow and faulty clients, which uvicorn leaves out.

- A client that begins a request and does not finish its head is disconnected.
- So is one that takes no data, which aborts its request. Taking little by little is fine.
- The next request of a client is read while one is answered: else a client's leaving would not be
  seen. A client that has only closed its side of the connection gets its answer.
- Too many headers, or a body in crumbs, are refused before they are read: each header or chunk
  costs tens of microseconds, and one read of a socket has room for a hundred thousand.
- Data that is not HTTP gets an error as JSON, like every other error. So does a head that a proxy
  in front may read otherwise, and so find another end of the request.

For speed, a stream may write its chunks here directly, past the layers between.
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from termgen.api.errors import error_body
from termgen.api.sse import dumps

HEAD_TIMEOUT_S = 60.0
"""Limit from the first byte of a request, or the connection, to the end of its head."""

MAX_EARLY_BYTES = 2**20
"""Limit for further requests while one is answered."""

MAX_HEAD_LINES = 256
MAX_EARLY_LINES = 1024

FREE_CHUNKS = 256
BYTES_PER_CHUNK = 2048
"""A body may have `FREE_CHUNKS`, and one more for every so many bytes."""

RECEIVE_BYTES = 3 * 2**15
"""Size of a read from the socket. A buffer of more than 128 KiB is fresh memory from the system
each time, and is copied four times: other requests wait, and eight megabytes take half as long
again."""

MOST_UNSENT = 2**14
"""Limit for bytes that wait here, in this process and as many in the system, for a client that
takes none: beyond it, streams to it are seen as unread. What is on its way does not count."""

STALL_TIMEOUT_S = 60.0
"""A client that takes no data for this long is disconnected."""

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNK_PROBE = b"0"
"""Bytes without a meaning, to which the system of a client that has left objects: a response that
clients skip, before the answer, and a leading zero of the next chunk's size, within a stream."""
FIRST_CHECK_S = 0.01
REPEAT_PROBE_S = 0.5
LONGEST_CHECK_S = 15.0
"""Times between looks at the connection of a client that may have left: each is twice the last, and
from `REPEAT_PROBE_S` on another probe comes before an answer."""

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
_FOLDED_LINE = re.compile(rb"\n[ \t]")
_END_OF_HEAD = re.compile(rb"\n\r?\n")

WRITE_CHUNK = "termgen.write_chunk"
"""Key in the ASGI scope's `extensions`: `(data) -> bool` writes a chunk of a stream whose head was
sent. The layers between would only pass it on, at half of the cost of a token. False: `send` it
instead."""


class _Parser(h11.Connection):
    """h11's connection, without requests whose end proxies and servers have found at different
    places.

    RFC 9112, 6.1: a request with both lengths, or with chunks in HTTP/1.0, may smuggle another one
    in; the connection must not live on.
    """

    why_refused: str | None = None

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and b"content-length" in names:
                self._refuse("Content-Length and Transfer-Encoding exclude each other.")
            if b"transfer-encoding" in names and event.http_version < b"1.1":
                self._refuse("HTTP/1.0 knows no Transfer-Encoding.")
            absolute = _ABSOLUTE.fullmatch(event.target)
            if absolute is not None:
                event = self._in_origin_form(event, *absolute.groups())
        return event

    def _in_origin_form(self, request: h11.Request, host: bytes, rest: bytes) -> h11.Request:
        """The request for a whole address as one for its path. RFC 9112, 3.2.2: the host is that of
        the address, whatever the header says."""
        if not host or b"@" in host:
            self._refuse("The request names no host that can be asked.")
        others = [(name, value) for name, value in request.headers if name != b"host"]
        return h11.Request(
            method=request.method,
            target=rest if rest.startswith(b"/") else b"/" + rest,
            headers=[(b"host", host), *others],
            http_version=request.http_version,
        )

    def _refuse(self, why: str) -> None:
        self.why_refused = why
        raise h11.RemoteProtocolError(why)


class Connection(H11Protocol):
    """uvicorn's connection with two timers, both off while a request makes progress."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _check_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = self._parser = _Parser(h11.SERVER)
        self._num_early_bytes = 0
        self._num_head_lines = 0
        self._head_end = b""
        """The last characters of the head that came so far."""
        self._is_folded = False
        self._num_body_lines = self._num_body_bytes = 0
        self._num_running = 0
        self._is_lost = False
        self._has_ended = False
        """The client has closed its side: nothing more comes from it."""
        self._is_in_chunks = False
        """The answer has begun, and comes in chunks."""
        self._inner = self.app
        self.app = self._run

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] == "1.1":  # others know no chunks
            scope["extensions"] = {WRITE_CHUNK: self._write_chunk}
        self._is_in_chunks = False

        async def send_noted(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.start" and scope["method"] != "HEAD":
                names = {name.lower() for name, _ in message["headers"]}
                self._is_in_chunks = b"content-length" not in names

        self._num_running += 1
        try:
            await self._inner(scope, receive, send_noted)
        finally:
            self._num_running -= 1
            if self._is_lost and not self._num_running:
                self._let_go()

    def _write_chunk(self, data: bytes) -> bool:
        if self._is_lost or self.flow.write_paused or self.cycle.disconnected or not data:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own, not that of another loop
            transport.max_size = RECEIVE_BYTES
        transport.set_write_buffer_limits(MOST_UNSENT)
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(OSError):  # a socket of another kind
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn forgets it when the connection broke
        self._stop_head_timer()
        self._stop_stall_timer()
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._is_lost = True
        if not self._num_running:
            self._let_go()

    def _let_go(self) -> None:
        """Break the cycles of references, once the connection and its request have ended. Python's
        collector seldom runs under load, and these cycles hold the request's body."""
        self.app = self._inner
        self.cycle = self.scope = None  # type: ignore[assignment]
        if hasattr(self.transport, "_read_ready_cb"):  # asyncio's own: a method of the same object
            self.transport._read_ready_cb = None

    def data_received(self, data: bytes) -> None:
        is_early = self._is_early
        self._num_early_bytes = self._num_early_bytes + len(data) if is_early else 0
        if self._num_early_bytes > MAX_EARLY_BYTES:
            self.transport.abort()
            return
        self._feed(data)
        if self._is_early:
            self.flow.resume_reading()
        if self._is_answering:
            self._stop_head_timer()
        elif self.timeout_keep_alive_task is None and self._head_timer is None:
            self._await_head()

    @property
    def _is_early(self) -> bool:
        """True while the data that comes belongs to a later request."""
        return self._is_answering and self.conn.their_state is h11.DONE

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # -- many small things -----------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Pass data to the parser, unless it has too many small parts."""
        if self.conn.their_state is h11.IDLE and not self._is_answering:
            size = self._head_part(data)
            if self._num_head_lines > MAX_HEAD_LINES:
                self._refuse("Too many headers.")
                return
            if self._is_folded:
                self._refuse("A header that goes on in the next line is not taken.")
                return
            super().data_received(data[:size])
            data = data[size:]
            if not data or self.transport.is_closing():
                return
        if self.conn.their_state is h11.SEND_BODY and self._is_chunked:
            self._num_body_lines += data.count(b"\n")
            self._num_body_bytes += len(data)
            most = FREE_CHUNKS + self._num_body_bytes // BYTES_PER_CHUNK
            if self._num_body_lines > 2 * most:
                self._refuse("The body comes in too many small chunks.")
                return
        super().data_received(data)

    def _head_part(self, data: bytes) -> int:
        """Size of the part that belongs to the head; counts its lines."""
        joined = self._head_end + data
        end = _END_OF_HEAD.search(joined)
        size = len(data) if end is None else end.end() - len(self._head_end)
        self._num_head_lines += data.count(b"\n", 0, size)
        head = joined[: len(self._head_end) + size]
        self._is_folded = self._is_folded or _FOLDED_LINE.search(head) is not None
        self._head_end = joined[-2:]
        if end is not None and self._num_head_lines <= MAX_HEAD_LINES and not self._is_folded:
            self._begin_head()
            self._num_body_lines = self._num_body_bytes = 0
        return size

    def _begin_head(self) -> None:
        self._num_head_lines, self._head_end = 0, b""

    @property
    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _refuse(self, message: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self._is_answering:
            self.cycle.disconnected = True  # no other answer may follow
            self.cycle.message_event.set()
        self.send_400_response(message)

    def on_response_complete(self) -> None:
        early, _ = self.conn.trailing_data  # parsed in one go by what follows
        if early.count(b"\n") > MAX_EARLY_LINES:
            self.transport.abort()
        self._begin_head()
        super().on_response_complete()
        if self._has_ended and not self._is_answering:
            self.transport.close()

    # -- clients that have closed their side -----------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection while a whole request is answered: the client may still read.

        It may also have left, which looks the same until something is sent to it.
        """
        is_whole = self._is_answering and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        if not is_whole or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False
        self._has_ended = True
        if self._is_in_chunks:
            self.transport.write(CHUNK_PROBE)
        self._check_later(FIRST_CHECK_S)
        return True

    def _check_later(self, delay_s: float) -> None:
        is_time = delay_s == FIRST_CHECK_S or delay_s > REPEAT_PROBE_S
        if is_time and not self.cycle.response_started:
            self.transport.write(PROBE)
        self._check_timer = self.loop.call_later(delay_s, self._check_connection, delay_s)

    def _check_connection(self, delay_s: float) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._check_later(min(2 * delay_s, LONGEST_CHECK_S))

    # -- heads that do not come ------------------------------------------------------------

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_no_head)

    def _on_no_head(self) -> None:
        self._head_timer = None
        if not self._is_answering and self.timeout_keep_alive_task is None:
            self.transport.abort()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # -- clients that do not read ----------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait until the client has taken it

    def _watch(self, size: int) -> None:
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self._on_slow, size)

    def _on_slow(self, size_before: int) -> None:
        size = self.transport.get_write_buffer_size()
        if size < size_before:
            self._watch(size)
            return
        self._stall_timer = None
        self.logger.warning("a client took no data for %.0f s", STALL_TIMEOUT_S)
        self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # -- what is not HTTP ------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        msg = self._parser.why_refused or msg
        body = dumps(error_body(msg, type="invalid_request_error", code="invalid_http"))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=HTTPStatus(400).phrase)
        events: list[Any] = [response, h11.Data(data=body), h11.EndOfMessage()]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
