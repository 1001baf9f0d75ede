"""Pure ASGI middleware, outermost first: request context, Host check, (`access`), body limit.

`RequestContext` is also the one error handler: it turns every exception of a handler or another
middleware into a JSON body. Nothing reads `request.url`, which a client's Host header can change.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from termgen.api.errors import (
    OPENAI_ERRORS,
    ErrorReply,
    ErrorShape,
    body_too_large,
    cors_not_allowed,
    host_not_allowed,
    origin_not_allowed,
    reply_for,
)
from termgen.config import is_loopback
from termgen.errors import RequestError, TermgenError
from termgen.serving.access import REQUEST_ID, header
from termgen.serving.responses import ClientDisconnected, error_response

logger = logging.getLogger("termgen.server")
access_logger = logging.getLogger("termgen.server.access")

REFUSALS = frozenset(
    {
        *("invalid_api_key", "admin_only", "host_not_allowed", "origin_not_allowed"),
        *("request_too_large", "request_timeout", "bodies_full", "loading", "draining", "asleep"),
        *("grammar_queue_full", "no_process", "too_many_listeners"),
    }
)
"""Error codes that refuse a request whatever it asks. Admission counts its own."""

REPEATED_STATUSES = frozenset({401, 403, 429, 503})
"""Statuses that clients retry again and again: one access line a minute is enough."""

QUIET_S = 60.0
MAX_REPEATED = 256

CLIENT_CLOSED = 499
"""A status for the access log only: the client has left."""

SHAPE = "termgen.error_shape"
"""Key of the ASGI scope."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


class RepeatedLines:
    """Detects access lines that repeat one of the last minute.

    A client that waits for a loading server, or retries after a full queue, asks several times a
    second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[tuple[object, ...], float] = {}

    def is_new(self, *line: object) -> bool:
        """True if this line should be written. Remembers it."""
        now = self._clock()
        if now - self._last.get(line, -QUIET_S) < QUIET_S:
            return False
        self._last.pop(line, None)
        self._last[line] = now
        if len(self._last) > MAX_REPEATED:
            del self._last[next(iter(self._last))]  # the oldest
        return True


class RootPath:
    """Takes the path that a proxy adds off every request that has it, so that all that looks at a
    path behind this, access control above all, sees the server's own."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self.app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"][len(self._root_path) :]}
        await self.app(scope, receive, send)


class RequestContext:
    """Names the request, turns exceptions into JSON errors, writes the access line."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_refused: Callable[[str], None],
        shapes: Sequence[ErrorShape],
        probe_paths: frozenset[str],
    ) -> None:
        """shapes: those of errors, by path. probe_paths: paths that machines poll, whose access
        lines are logged at debug level."""
        self.app = app
        self._on_refused = on_refused
        self._shapes = shapes
        self._probe_paths = probe_paths
        self._repeated = RepeatedLines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        is_usable = given is not None and _REQUEST_ID.fullmatch(given)
        request_id = given if given is not None and is_usable else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        shape = scope[SHAPE] = shape_of(scope["path"], self._shapes)
        status = 0
        begun = time.perf_counter()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if shape.id_header is not None:
                    headers[shape.id_header] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except ClientDisconnected:
            status = CLIENT_CLOSED
        except Exception as error:
            if status:
                raise  # too late for a response; the server closes the connection
            if isinstance(error, RequestError) and error.code in REFUSALS:
                self._on_refused(error.code)
            if not isinstance(error, TermgenError):
                logger.exception("request %s failed", request_id)
            reply = shape.reshape(reply_for(error), request_id)
            await error_response(reply)(scope, receive, send_named)
        finally:
            self._log(scope, status, time.perf_counter() - begun, request_id)

    def _log(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        client = scope.get("client")
        host = client[0] if client else "-"
        path = quote(scope["path"])  # without the query, and without line breaks
        is_quiet = path in self._probe_paths
        if status in REPEATED_STATUSES and not is_quiet:
            is_quiet = not self._repeated.is_new(host, scope["method"], path, status)
        access_logger.log(
            logging.DEBUG if is_quiet else logging.INFO,
            '%s "%s %s" %d %.1f ms %s',
            host,
            scope["method"],
            path,
            status,
            seconds * 1e3,
            request_id,
        )


def shape_of(path: str, shapes: Sequence[ErrorShape]) -> ErrorShape:
    """The shape of the errors on a path, whether it has a route or not."""
    for shape in shapes:
        if shape.paths is not None and shape.paths.fullmatch(path):
            return shape
    return OPENAI_ERRORS


def for_path(scope: Scope, reply: ErrorReply) -> ErrorReply:
    """The reply in the shape that clients of this endpoint expect."""
    shape: ErrorShape = scope[SHAPE]
    return shape.reshape(reply, scope[REQUEST_ID])


class CrossOrigin(CORSMiddleware):
    """Starlette's middleware, with JSON refusals like every other error."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        origin = request_headers["origin"]
        if self.is_allowed_origin(origin):
            error = cors_not_allowed(bytes(response.body).decode())
        else:
            error = origin_not_allowed(origin[:100])
        refusal = error_response(reply_for(error))
        names = (name for name in response.headers if name not in refusal.headers)
        refusal.headers.update({name: response.headers[name] for name in names})
        return refusal


class HostCheck:
    """On a loopback address, rejects requests for other hosts than this machine.

    A web page whose own name was rebound to 127.0.0.1 sends its name as Host.
    """

    def __init__(self, app: ASGIApp, *, host: str, allowed: Sequence[str]) -> None:
        self.app = app
        self._is_active = is_loopback(host) and "*" not in allowed
        self._allowed = {"localhost", host.lower(), *(name.lower() for name in allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_active and scope["type"] == "http":
            host = header(scope, b"host")
            if host is not None and not self._is_allowed(host):
                raise host_not_allowed(host[:100])
        await self.app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        return name in self._allowed or is_loopback(name)


class BodyLimit:
    """Refuses bodies over the limit: by their announced length, or while they arrive."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = header(scope, b"content-length")
        is_number = length is not None and length.isascii() and length.isdigit()
        if length is not None and is_number and int(length[:20]) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise body_too_large(self._max_bytes)
            return message

        await self.app(scope, receive_limited, send)
