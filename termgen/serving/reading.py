"""What handlers begin with: the server's state, the body, and what of it is not understood."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from termgen.api.errors import body_too_slow
from termgen.api.fields import ignored_header, parse_json
from termgen.api.models import parse_for_model
from termgen.errors import RequestError
from termgen.serving.body_room import BodyRoom, BodyShare
from termgen.serving.json_process import JSONProcess
from termgen.serving.responses import ClientDisconnected, Headers, until_disconnect
from termgen.serving.state import ServerState

# The body of a request, parsed so that nobody else has to wait for long.
#
# `json.loads` lets nobody else run until it is done. Small bodies are parsed and checked here,
# large ones by a process of its own, one after the other.

T = TypeVar("T")

BODY_TIMEOUT_S = 60.0
"""A body that takes longer to arrive is not waited for."""


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def read_json(request: Request, take: Callable[[dict[str, Any]], T]) -> T:
    """What `take` makes of the body of a POST, which must say that it is JSON.

    Of a large one it is called in another process: a function of a module, or a `partial` of one,
    whose result can travel. Browsers may send other types across sites without asking
    first, JSON they may not.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            "Send the body as JSON, with `content-type: application/json`",
            param="content-type",
        )
    state = state_of(request)
    return await read_object(request, state.large_bodies, state.body_room, take)


async def parse_body(request: Request, parse: Callable[..., T], **options: bool) -> T:
    """What `parse`, an endpoint's own, makes of the body of a request that the engine is to answer.

    Where the queue is full it is not even read.
    """
    state = state_of(request)
    engine = state.require_engine()
    state.admission.check_room()
    names, defaults = state.names_for(engine), engine.model.default_params
    parse = partial(parse, defaults=defaults, **options)
    return await read_json(request, partial(parse_for_model, names=names, parse=parse))


def ignored_headers(
    state: ServerState, names: tuple[str, ...], not_used: tuple[str, ...] = ()
) -> Headers:
    """Tell which fields were not understood, and count them. not_used: those that were, and have
    no effect."""
    headers = {"x-termgen-not-used": ignored_header(not_used)} if not_used else {}
    if not names:
        return headers
    state.require_metrics().ignored_fields.inc(len(names))
    return {**headers, "x-termgen-ignored": ignored_header(names)}


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
