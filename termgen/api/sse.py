"""Server-sent event frames as OpenAI's clients parse them: `data: ` + one JSON line + blank line.

Exactly one space, never an `event:` line: real clients break on anything else. Endpoints whose
clients want named events have a `Wire` of their own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from termgen.api.errors import reply_for

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment. Some clients choke on it, so it is sent only into long silences."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def dumps(value: Any) -> bytes:
    """Compact JSON on one line. Raises ValueError for NaN and infinities, which would be our
    bug."""
    return _ENCODER.encode(value).encode()


def frame(value: dict[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def named_frame(value: dict[str, Any]) -> bytes:
    """A frame whose event is named by its `type`, as Anthropic's and OpenAI's newer streams are."""
    return b"event: " + str(value["type"]).encode() + b"\n" + frame(value)


class TextTemplate:
    """Frames that differ only in one text: the rest is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(
        self,
        make_chunk: Callable[[str], dict[str, Any]],
        to_frame: Callable[[dict[str, Any]], bytes] = frame,
    ) -> None:
        marker = secrets.token_hex(16)
        self._before, self._after = to_frame(make_chunk(marker)).split(dumps(marker))

    def frame(self, text: str) -> bytes:
        return self._before + dumps(text) + self._after


class NumberedTextTemplate:
    """Named frames that differ in one text and, before it, in their number."""

    __slots__ = ("_after", "_before", "_between")

    def __init__(self, make_event: Callable[[int, str], dict[str, Any]]) -> None:
        marker, number = secrets.token_hex(16), 10**30 + secrets.randbits(64)
        before, self._after = named_frame(make_event(number, marker)).split(dumps(marker))
        self._before, self._between = before.split(dumps(number))

    def frame(self, number: int, text: str) -> bytes:
        return b"%b%d%b%b%b" % (self._before, number, self._between, dumps(text), self._after)


def error_frames(exc: BaseException) -> bytes:
    """The frames that report a failure in a stream that has begun, and end it."""
    return frame(reply_for(exc).body) + DONE


@dataclass(frozen=True, slots=True)
class Wire:
    """The frames of one endpoint's events."""

    frame: Callable[[dict[str, Any]], bytes] = frame
    done: bytes = DONE
    """The bytes after the last event."""
    ping: bytes = PING
    error_frames: Callable[[BaseException], bytes] = error_frames
    """The frames that report a failure in a stream that has begun, and end it."""
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)


CHAT_WIRE = Wire()
