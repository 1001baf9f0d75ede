"""Shared code of the route handlers: from a request's body to the answer on its way.

Small bodies are parsed and checked on the event loop, large ones by a process of their own, because
`json.loads` blocks every other request until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from termgen.api.errors import body_too_slow
from termgen.api.fields import ignored_header, parse_json
from termgen.api.job import Job, ResponseOptions
from termgen.api.models import parse_for_model
from termgen.api.sse import Wire
from termgen.client import TokenDelta
from termgen.errors import RequestError
from termgen.serving.access import Caller, Role, caller_of
from termgen.serving.generation import Generation
from termgen.serving.large_bodies import BodyMemory, BodyShare, JSONProcess
from termgen.serving.responses import (
    ChunkStream,
    ClientDisconnected,
    CompleteResponse,
    EventStreamResponse,
    Headers,
    until_disconnect,
)
from termgen.serving.state import ServerState

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
    return await read_object(request, state.large_bodies, state.body_memory, take)


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
    request: Request, large: JSONProcess, room: BodyMemory, take: Callable[[dict[str, Any]], T]
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


# -- answers -----------------------------------------------------------------------------


Stream = tuple[ChunkStream, Wire]


def answer(
    request: Request,
    jobs: Sequence[Job],
    options: ResponseOptions,
    *,
    ignored: tuple[str, ...],
    not_used: tuple[str, ...] = (),
    stream: Callable[[], Stream],
    build: Callable[[list[TokenDelta]], dict[str, Any]],
    prepare: Callable[[], Awaitable[None]] | None = None,
) -> ASGIApp:
    """What answers this request. Raises RequestError for what can be told before it is admitted.

    stream: what turns deltas into events, and how these go on the wire. build: a whole answer from
    one merged delta per choice. prepare: work that these need, done once it has been admitted.
    """
    state = state_of(request)
    _check_priorities(caller_of(request.scope), jobs)
    headers = ignored_headers(state, ignored, not_used)
    generation = Generation(
        state, state.require_engine(), jobs, answer_id=options.id, prepare=prepare
    )
    if not options.stream:
        return CompleteResponse(state, generation, headers, build=build)
    chunks, wire = stream()
    return EventStreamResponse(
        state,
        generation,
        headers,
        chunks=chunks,
        wire=wire,
        ping_interval_s=options.ping_interval_s,
    )


def _check_priorities(caller: Caller, jobs: Sequence[Job]) -> None:
    """Before everybody else goes only what an administrator sends."""
    if caller.role is not Role.ADMIN and any(job.priority < 0 for job in jobs):
        raise RequestError("priority must be 0 or more without the admin key", param="priority")


async def work_on_tokens(
    request: Request, num_tokens: int, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """The result of work that makes tokens of text or text of tokens: it has a place in the queue
    like any other request, and ends when the client leaves."""
    with state_of(request).admission.place(num_tokens):
        return await until_disconnect(request.receive, work())
