"""Error bodies: every failure a client can see becomes one `ErrorReply`.

The server uses it for responses and for error frames inside a running stream. It knows no HTTP
library; a reply is a status, headers and a JSON object in OpenAI's shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from termgen.errors import (
    EngineDeadError,
    EngineError,
    LoadingError,
    OverloadedError,
    RequestError,
    TermgenError,
)

_PLAIN_ORIGIN = re.compile(r"https?://[\w.\-\[\]:]{1,90}", re.ASCII)
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
NO_RETRY = {"x-should-retry": "false"}
"""Clients built on OpenAI's SDK retry every 5xx unless this header is false."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Status, headers and body of one failure."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """Form of the errors that a dialect's clients read."""

    name: str
    """Its name in the description of the server."""
    schema: Mapping[str, Any]
    """JSON schema of a body."""
    reshape: Callable[[ErrorReply, str], ErrorReply]
    """(reply in OpenAI's shape, id of the request) -> reply in this one."""
    paths: re.Pattern[str] | None = None
    """The dialect's paths, those without a route included. None: all that no other shape has."""
    id_header: str | None = None
    """A header for the id of the request, beside `x-request-id`."""


OPENAI_ERRORS = ErrorShape("Error", ERROR_SCHEMA, lambda reply, request_id: reply)


def error_body(
    message: str, *, type: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def reply_for(exc: BaseException) -> ErrorReply:
    """The reply for anything a handler can raise. An unknown exception reveals nothing to the
    client."""
    if isinstance(exc, RequestError):
        body = error_body(str(exc), type=exc.type, param=exc.param, code=exc.code)
        if isinstance(exc, LoadingError) and exc.phase:
            body["error"] |= {"phase": exc.phase, "progress": exc.progress}
        return ErrorReply(exc.status, body, _request_headers(exc))
    if isinstance(exc, EngineDeadError):
        body = error_body(str(exc), type="server_error", code="engine_dead")
        return ErrorReply(503, body, {"retry-after": "10"})
    if isinstance(exc, EngineError):
        return ErrorReply(500, error_body(str(exc), type="server_error", code=exc.code))
    if isinstance(exc, TermgenError):
        return ErrorReply(500, error_body(str(exc), type="server_error", code="internal_error"))
    message = "Internal server error; the server's log has the details"
    return ErrorReply(500, error_body(message, type="server_error", code="internal_error"))


def error_code(exc: BaseException) -> str:
    """The error code that a client gets for this."""
    code = reply_for(exc).body["error"]["code"]
    return str(code)


def http_reply(status: int, detail: str, headers: Mapping[str, str] | None = None) -> ErrorReply:
    """The reply for a failure of HTTP itself: no such path, wrong method."""
    code = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}.get(status)
    type = "invalid_request_error" if status < 500 else "server_error"
    return ErrorReply(status, error_body(detail, type=type, code=code), dict(headers or {}))


def unsupported(param: str, message: str | None = None) -> RequestError:
    """Refusal of a known field that would change the answer and is not supported."""
    message = message or f"{param} is not supported by this server"
    return RequestError(message, param=param, code="unsupported_parameter")


def invalid_json(message: str, param: str | None = None) -> RequestError:
    return RequestError(message, param=param, code="invalid_json")


def model_not_found(model: str) -> RequestError:
    return RequestError(
        f"The model {model!r} does not exist; GET /v1/models lists what is served",
        param="model",
        code="model_not_found",
        status=404,
    )


def invalid_api_key() -> RequestError:
    return RequestError(
        "Missing or wrong API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        code="invalid_api_key",
        status=401,
        type="authentication_error",
    )


def host_not_allowed(host: str) -> RequestError:
    message = f"Host {host!r} is not one this server answers to; see --allowed-host"
    return _forbidden("host_not_allowed", message)


def origin_not_allowed(origin: str) -> RequestError:
    hint = "see its --allowed-origin"
    if _PLAIN_ORIGIN.fullmatch(origin):
        hint = f"start it with --allowed-origin {origin} to allow them"
    message = f"Pages of {origin!r} may not use this server; {hint}"
    return _forbidden("origin_not_allowed", message)


def cors_not_allowed(message: str) -> RequestError:
    """Refusal of a browser's preflight request for a method or a header that no page may send."""
    return _forbidden("cors_not_allowed", message)


def admin_only(*, is_possible: bool) -> RequestError:
    hint = "send the admin key" if is_possible else "start the server with --admin-key to allow it"
    return _forbidden("admin_only", f"This is for administrators: {hint}")


def _forbidden(code: str, message: str) -> RequestError:
    return RequestError(message, code=code, status=403, type="permission_error")


def path_not_found() -> RequestError:
    return RequestError("There is no such path", code="not_found", status=404)


def no_such_option(name: str) -> RequestError:
    """Refusal of a query parameter that the route does not know."""
    name = name[:40]
    return RequestError(f"there is no option {name!r}", code="unknown_option", param=name)


def body_too_slow(limit_s: float) -> RequestError:
    return RequestError(
        f"The request body did not arrive within {limit_s:g} s", code="request_timeout", status=408
    )


def body_too_large(limit: int) -> RequestError:
    return RequestError(
        f"The request body exceeds {limit} bytes", code="request_too_large", status=413
    )


def unavailable(code: str, message: str) -> RequestError:
    """`draining` or `asleep`: the same request may succeed later, or elsewhere now."""
    return RequestError(message, code=code, status=503, type="server_error")


def request_aborted() -> RequestError:
    return RequestError("The request was aborted", code="aborted", status=500, type="server_error")


def not_supported(message: str) -> RequestError:
    """Refusal of an endpoint that clients know and this server does not have."""
    return RequestError(message, code="not_supported", status=501, type="server_error")


def _request_headers(exc: RequestError) -> dict[str, str]:
    if exc.status == 401:
        return {"www-authenticate": "Bearer"}
    if isinstance(exc, OverloadedError):
        return {
            "retry-after": str(math.ceil(exc.retry_after_s)),
            "retry-after-ms": str(math.ceil(exc.retry_after_s * 1000)),
        }
    if exc.status == 503:
        return {"retry-after": "5"}
    return dict(NO_RETRY) if exc.code == "aborted" or exc.status == 501 else {}
