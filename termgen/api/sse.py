"""Server-sent event frames as OpenAI's clients parse them: `data: ` + one JSON line + blank line.

Exactly one space, never an `event:` line: real clients break on anything else. The endpoints whose
clients want events by name have a `Wire` of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
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
    """Compact JSON on one line. NaN and infinities are our bug, hence ValueError."""
    return _ENCODER.encode(value).encode()


def frame(value: dict[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def named_frame(value: dict[str, Any]) -> bytes:
    """A frame whose event is named by its `type`, as Anthropic's and OpenAI's newer streams are."""
    return b"event: " + str(value["type"]).encode() + b"\n" + frame(value)


def error_frames(exc: BaseException) -> bytes:
    """How a stream that has already begun reports a failure. Nothing may follow."""
    return frame(reply_for(exc).body) + DONE


@dataclass(frozen=True, slots=True)
class Wire:
    """How one endpoint's events are put into frames."""

    frame: Callable[[dict[str, Any]], bytes] = frame
    done: bytes = DONE
    """What follows the last event."""
    ping: bytes = PING
    error_frames: Callable[[BaseException], bytes] = error_frames
    """How a stream that has begun reports a failure, with what follows the last event."""


CHAT_WIRE = Wire()
