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

STRINGS_PER_TURN = 256
"""Between two pauses: well under a millisecond."""

_QUOTE = b'"'


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
    position = num_strings = 0
    weight = raw.count(b"\\") // ESCAPES_PER_WEIGHT
    while True:
        begin = raw.find(_QUOTE, position)
        end = len(raw) if begin < 0 else begin
        weight += raw.count(b",", position, end)
        weight += OTHER_WEIGHT * (raw.count(b"[", position, end) + raw.count(b"{", position, end))
        if weight > MAX_JSON_WEIGHT:
            raise RequestError(
                "The request body has too many values; see the limits in the documentation",
                code="request_too_large",
                status=413,
            )
        if begin < 0:
            return
        position = _end_of_string(raw, begin)
        weight += OTHER_WEIGHT
        num_strings += 1
        if num_strings % STRINGS_PER_TURN == 0:
            await asyncio.sleep(0)


def _end_of_string(raw: bytes, begin: int) -> int:
    """Behind the quote that closes the string which begins there."""
    position = begin + 1
    while True:
        end = raw.find(_QUOTE, position)
        if end < 0:
            return len(raw)
        run = raw[position:end]
        position = end + 1
        if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
            return position
