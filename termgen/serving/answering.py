"""From parsed jobs to the answer on its way: a stream of events or one body, as was asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from termgen.api.job import Job, ResponseOptions
from termgen.api.sse import Wire
from termgen.client import TokenDelta
from termgen.errors import RequestError
from termgen.serving.access import Caller, Role, caller_of
from termgen.serving.generation import Generation
from termgen.serving.reading import ignored_headers, state_of
from termgen.serving.responses import (
    ChunkStream,
    CompleteResponse,
    EventStreamResponse,
    until_disconnect,
)

T = TypeVar("T")

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
