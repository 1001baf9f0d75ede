"""Error responses of a server as exceptions with a message that a person can act on.

Pure: statuses, headers and bodies in, `RequestError` and `EngineError` out. Reads the error formats
of several servers; without a readable body the status alone gives the message.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from termgen.errors import (
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestError,
    TermgenError,
)

MAX_MESSAGE_CHARS = 300
DEFAULT_RETRY_S = 1.0
"""Retry delay for a busy server that sends none."""

_TOO_LONG_CODES = frozenset(("context_length_exceeded", "exceed_context_size_error"))
_TOO_LONG = re.compile(
    r"maximum context length|exceeds the (available )?context (size|length|window)"
    r"|longer than the model's context length|prompt is too long",
    re.IGNORECASE,
)
"""Phrases by which servers report a prompt that exceeds the context."""


def failure_of(
    url: str,
    path: str,
    status: int,
    raw: bytes,
    headers: Mapping[str, str],
    *,
    sent_key: bool,
) -> TermgenError:
    """The exception for a response whose status is not 200."""
    said = _read(raw)
    text = said.message or _phrase(status)
    if status in (401, 403) and not sent_key:
        words = f"{url} wants an API key: give --api-key, or set OPENAI_API_KEY"
        return RequestError(words, param="api_key", code="invalid_api_key", status=status)
    if status in (401, 403):
        words = f"{url} refuses the API key: {text}"
        return RequestError(words, param="api_key", code="invalid_api_key", status=status)
    if 300 <= status < 400:
        where = headers.get("location", "another address")
        return EngineError(f"{url} sends us on to {_line(where)}: give that address as --url")
    if status in (404, 405) and not said.is_about_a_model:
        return EngineError(f"{url} has no {path}: is it an OpenAI-compatible server?")
    if status == 429:
        return _busy(url, text, headers)
    if 400 <= status < 500:
        return _refusal(text, said, status)
    if status == 503:
        return EngineError(f"{url} cannot answer now: {text}")
    return EngineError(f"{url} failed with status {status}: {text}")


def frame_failure(error: object) -> TermgenError:
    """The exception for an `error` object inside a stream."""
    said = _read(json.dumps({"error": error}).encode())
    text = said.message or "the server does not say why"
    if said.code == "rate_limit_exceeded" or said.type == "rate_limit_error":
        return OverloadedError(
            f"the server broke the answer off: {text}",
            code="rate_limit_exceeded",
            retry_after_s=DEFAULT_RETRY_S,
        )
    if said.type == "invalid_request_error":
        return _refusal(text, said, 400)
    return EngineError(f"the server broke the answer off: {text}")


def short(raw: bytes) -> str:
    """The beginning of an unreadable body, as one line."""
    return _line(raw[: 4 * MAX_MESSAGE_CHARS].decode(errors="replace"))[:80]


class _Said:
    """Fields of an error body; empty where absent."""

    def __init__(self, message: str, error: Mapping[str, Any]) -> None:
        self.message = message
        self.param = _text(error.get("param")) or None
        self.code = _text(error.get("code"))
        self.type = _text(error.get("type"))

    @property
    def is_about_a_model(self) -> bool:
        """True if the model is unknown, rather than the path."""
        return self.param == "model" or "model" in f"{self.code} {self.message}".lower()


def _read(raw: bytes) -> _Said:
    """Read an error body in the format of OpenAI, FastAPI, ollama or older vLLM."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return _Said("", {})
    if not isinstance(body, dict):
        return _Said("", {})
    error = body.get("error", body)
    if isinstance(error, str):
        return _Said(_line(error), {})
    if not isinstance(error, dict):
        return _Said("", {})
    message = error.get("message") or error.get("detail") or error.get("reason")
    if isinstance(message, list):  # FastAPI lists the error of each field
        message = "; ".join(
            str(m.get("msg", m)) if isinstance(m, dict) else str(m) for m in message
        )
    return _Said(_line(_text(message)), error)


def _refusal(text: str, said: _Said, status: int) -> RequestError:
    if {said.code, said.type} & _TOO_LONG_CODES or _TOO_LONG.search(text):
        return ContextLengthError(text, param=said.param)
    return RequestError(text, param=said.param, code=said.code or "refused", status=status)


def _busy(url: str, text: str, headers: Mapping[str, str]) -> OverloadedError:
    wait_s = _retry_after_s(headers.get("retry-after"))
    when = f"; try again in {math.ceil(wait_s)} s" if wait_s is not None else ""
    return OverloadedError(
        f"{url} is too busy: {text.rstrip('.')}{when}",
        code="rate_limit_exceeded",
        retry_after_s=DEFAULT_RETRY_S if wait_s is None else wait_s,
    )


def _retry_after_s(value: str | None) -> float | None:
    """Seconds from a Retry-After header, a number or a date; None if it is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"status {status}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _line(text: str) -> str:
    """Printable text in one line: a server's control characters must not reach the terminal."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 1] + "…"
