"""Errors in Ollama's form, `{"error": "..."}`, and the lines of its streams."""

from __future__ import annotations

import re
from typing import Any

from termgen.api import sse
from termgen.api.errors import ErrorReply, ErrorShape, reply_for

PATHS = re.compile(r"/api(/.*)?", re.DOTALL)
"""Paths whose errors have Ollama's form."""

ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
HEADERS = {**sse.HEADERS, "content-type": "application/x-ndjson"}


def line(value: dict[str, Any]) -> bytes:
    return sse.dumps(value) + b"\n"


def error_of(exc: BaseException) -> dict[str, Any]:
    return {"error": reply_for(exc).body["error"]["message"]}


def _reshape(reply: ErrorReply, request_id: str) -> ErrorReply:
    return ErrorReply(reply.status, {"error": reply.body["error"]["message"]}, reply.headers)


WIRE = sse.Wire(
    frame=line,
    done=b"",
    ping=b" ",  # before the next line: clients cannot read an empty one
    error_frames=lambda exc: line(error_of(exc)),
    headers=HEADERS,
)
ERRORS = ErrorShape("OllamaError", ERROR_SCHEMA, _reshape, paths=PATHS)
