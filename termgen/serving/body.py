"""The body of a request, parsed so that nobody else has to wait for long.

`json.loads` lets nobody else run until it is done, and its time goes by the number of values, not
of bytes: eight megabytes of `[],` take a second, the same as one text some milliseconds. So values
are counted first, piece by piece, between which the streams of others go on; and large bodies take
turns, each followed by a pause as long as it took.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request

from termgen.api.errors import body_too_slow
from termgen.api.fields import parse_json
from termgen.errors import RequestError
from termgen.serving.responses import ClientDisconnected

BODY_TIMEOUT_S = 60.0
"""A body that takes longer to arrive is not waited for."""

MAX_JSON_WEIGHT = 2**18
"""Numbers count one, everything else four: a prompt of a quarter million token ids fits."""
OTHER_WEIGHT = 3
"""Beside the comma that is counted anyway."""

ESCAPES_PER_WEIGHT = 4

SMALL_BODY_BYTES = 2**16
"""Not worth counting, nor waiting for a turn."""

QUOTES_PER_TURN = 512
"""Between two pauses: well under a millisecond."""

PIECE_BYTES = 2**18
"""Counted at once: counting takes longer the more there is to be found."""


async def read_object(request: Request, turns: asyncio.Lock) -> dict[str, Any]:
    """The JSON object that the body is. Raises `RequestError`."""
    raw = await _read(request)
    if len(raw) <= SMALL_BODY_BYTES:
        return parse_json(raw)
    await check_weight(raw)
    async with turns:
        begun = time.perf_counter()
        try:
            return parse_json(raw)
        finally:
            await asyncio.sleep(time.perf_counter() - begun)


async def _read(request: Request) -> bytes:
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise body_too_slow(BODY_TIMEOUT_S) from None
    return b"".join(parts)


async def check_weight(raw: bytes) -> None:
    """Refuse JSON of too many values. Other faults are for the parser to find."""
    position = num_quotes = 0
    weight = _weigh_escapes(raw)
    is_inside = False
    while True:
        quote = raw.find(b'"', position)
        end = len(raw) if quote < 0 else quote
        if not is_inside:
            weight = _weigh(raw, position, end, weight + OTHER_WEIGHT * (quote >= 0))
            is_inside = True
        elif not _is_escaped(raw[position:end]):
            is_inside = False
        if quote < 0:
            return
        position = quote + 1
        num_quotes += 1
        if num_quotes % QUOTES_PER_TURN == 0:
            await asyncio.sleep(0)


def _weigh_escapes(raw: bytes) -> int:
    num_escapes = 0
    for begin in range(0, len(raw), PIECE_BYTES):
        num_escapes += raw.count(b"\\", begin, begin + PIECE_BYTES)
        _check(num_escapes // ESCAPES_PER_WEIGHT)
    return num_escapes // ESCAPES_PER_WEIGHT


def _weigh(raw: bytes, position: int, end: int, weight: int) -> int:
    """`weight` and what lies between two strings."""
    for begin in range(position, end, PIECE_BYTES):
        piece = begin, min(end, begin + PIECE_BYTES)
        weight += raw.count(b",", *piece)
        weight += OTHER_WEIGHT * (raw.count(b"[", *piece) + raw.count(b"{", *piece))
        _check(weight)
    _check(weight)
    return weight


def _check(weight: int) -> None:
    if weight > MAX_JSON_WEIGHT:
        raise RequestError(
            "The request body has too many values; see the limits in the documentation",
            code="request_too_large",
            status=413,
        )


def _is_escaped(run: bytes) -> bool:
    """Whether what follows belongs to a backslash at the end of this."""
    return (len(run) - len(run.rstrip(b"\\"))) % 2 == 1
