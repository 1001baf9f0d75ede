"""The body of a request, parsed so that nobody else has to wait for long.

`json.loads` lets nobody else run until it is done. Small bodies are parsed and checked here, large
ones by a process of its own, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from termgen.api.errors import body_too_slow
from termgen.api.fields import parse_json
from termgen.serving.body_room import BodyRoom, BodyShare
from termgen.serving.json_process import JSONProcess
from termgen.serving.responses import ClientDisconnected, until_disconnect

T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
"""A body that takes longer to arrive is not waited for."""


async def read_object(
    request: Request, large: JSONProcess, room: BodyRoom, take: Callable[[dict[str, Any]], T]
) -> T:
    """What `take` makes of the JSON object that the body is. Raises `RequestError`."""
    with room.share() as share:
        parts = await _read(request, share)
        if share.is_small:
            return take(parse_json(b"".join(parts)))
        return await until_disconnect(request.receive, large.parse(parts, take))


async def _read(request: Request, share: BodyShare) -> list[bytes]:
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                share.add(len(parts[-1]))
                if not message.get("more_body", False):
                    return parts
    except TimeoutError:
        raise body_too_slow(BODY_TIMEOUT_S) from None
