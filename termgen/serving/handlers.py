"""How the rows of `termgen.api` are run: a body is read and parsed, and a generation handed to a
response.

Small bodies are parsed and checked on the event loop, large ones by a process of their own, because
`json.loads` blocks every other request until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from termgen.api.chat_bridge import renamed
from termgen.api.errors import body_too_slow
from termgen.api.fields import ignored_header, parse_for_model, parse_json
from termgen.api.job import Job
from termgen.api.rows import Asked, AskingRow, GeneratingRow, TokenRow
from termgen.errors import RequestError
from termgen.serving.access import Caller, Role, caller_of
from termgen.serving.admission import BodyShare
from termgen.serving.responses import (
    ClientDisconnected,
    CompleteResponse,
    EventStreamResponse,
    Generation,
    Headers,
    JSONReply,
    until_disconnect,
)
from termgen.serving.state import ServerState, state_of

T = TypeVar("T")
A = TypeVar("A", bound=Asked)

BODY_TIMEOUT_S = 60.0
"""Limit for the arrival of a body."""


async def generate(row: GeneratingRow[Any], request: Request) -> ASGIApp:
    """The ASGI response to this request. Raises RequestError for faults that are known before
    admission."""
    state = state_of(request)
    name, asked = await _parse_body(row, request)
    _check_priorities(caller_of(request.scope), asked.jobs)
    headers = ignored_headers(state, asked)
    engine, options = state.require_generation(name), asked.options
    if not asked.jobs:
        state.check_awake()
        return JSONReply(row.whole(asked, []), headers=headers)
    generation = Generation(
        state,
        engine,
        asked.jobs,
        answer_id=options.id,
        operation=row.operation,
        prepare=partial(row.prepare, asked, engine) if row.prepare is not None else None,
    )
    response: ASGIApp
    if options.stream and row.stream is not None:
        response = EventStreamResponse(
            state,
            generation,
            headers,
            chunks=row.stream(asked),
            ping_interval_s=options.ping_interval_s,
        )
    else:
        response = CompleteResponse(state, generation, headers, build=partial(row.whole, asked))
    return _renaming(response, row.names) if row.names else response


async def work_on_tokens(row: TokenRow[Any], request: Request) -> Response:
    state = state_of(request)
    name, asked = await _parse_body(row, request)
    engine = state.engines.generation(name)
    with state.admission.place(state.admission.estimate(row.measured(asked))):
        answer = await until_disconnect(request.receive, row.work(asked, engine))
    return JSONReply(answer, headers=ignored_headers(state, asked))


# -- bodies --------------------------------------------------------------------------------


async def _parse_body(row: AskingRow[A], request: Request) -> tuple[str, A]:
    """The name of the model, and the parsed body. Where the queue is full it is not even read."""
    state = state_of(request)
    state.check_ready()
    state.admission.check_room()
    take = partial(parse_for_model, state.served_models(), row.resolve, row.parse)
    return await read_json(request, take)


async def read_json(request: Request, take: Callable[[dict[str, Any]], T]) -> T:
    """Apply `take` to the body of a POST, which must declare that it is JSON.

    For a large body, `take` is called in another process: it is a function of a module, or a
    `partial` of one, whose result can be pickled. Browsers may send other types across sites
    without asking first, but not JSON.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            "Send the body as JSON, with `content-type: application/json`",
            param="content-type",
        )
    state = state_of(request)
    with state.body_memory.share() as share:
        parts = await _read(request, share)
        if share.is_small:
            return take(parse_json(b"".join(parts)))
        return await until_disconnect(request.receive, state.large_bodies.parse(parts, take))


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


# -- answers -------------------------------------------------------------------------------


def ignored_headers(state: ServerState, asked: Asked) -> Headers:
    """Headers that name the fields without effect; counts the unknown ones."""
    headers = {"x-termgen-not-used": ignored_header(asked.not_used)} if asked.not_used else {}
    if not asked.ignored:
        return headers
    state.require_metrics().ignored_fields.inc(len(asked.ignored))
    return {**headers, "x-termgen-ignored": ignored_header(asked.ignored)}


def _check_priorities(caller: Caller, jobs: Sequence[Job]) -> None:
    """Negative priorities need the admin key."""
    if caller.role is not Role.ADMIN and any(job.priority < 0 for job in jobs):
        raise RequestError("priority must be 0 or more without the admin key", param="priority")


def _renaming(app: ASGIApp, names: Mapping[str, str]) -> ASGIApp:
    """Errors of the engine before the answer begins, with this endpoint's names of the fields."""

    async def answer_renamed(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except RequestError as error:
            if error.param is None:
                raise
            raise renamed(error, names) from None

    return answer_renamed
