"""From parsed jobs to the answer on its way: a stream of events or one body, as was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from termgen.api.job import Job, ResponseOptions
from termgen.api.sse import Wire
from termgen.client import TokenDelta
from termgen.serving.generation import Generation
from termgen.serving.reading import ignored_headers, state_of
from termgen.serving.responses import ChunkStream, CompleteResponse, EventStreamResponse

Stream = tuple[ChunkStream, Wire]


def answer(
    request: Request,
    jobs: Sequence[Job],
    options: ResponseOptions,
    *,
    ignored: tuple[str, ...],
    stream: Callable[[], Stream],
    build: Callable[[list[TokenDelta]], dict[str, Any]],
) -> ASGIApp:
    """What answers this request. Raises RequestError for what can be told before it is admitted.

    stream: what turns deltas into events, and how these go on the wire. build: a whole answer from
    one merged delta per choice.
    """
    state = state_of(request)
    headers = ignored_headers(state, ignored)
    generation = Generation(state, state.require_engine(), jobs, answer_id=options.id)
    if not options.stream:
        return CompleteResponse(state, generation, headers, build=build)
    chunks, wire = stream()
    return EventStreamResponse(state, generation, headers, chunks=chunks, wire=wire)
