"""Routes. Thin: a handler parses through `termgen.api` and hands a generation to a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from termgen import __version__
from termgen.api.chat import ChatStream, chat_response, parse_chat
from termgen.api.completions import (
    CompletionRequest,
    CompletionStream,
    completion_response,
    parse_completion,
)
from termgen.api.errors import http_reply, model_not_found
from termgen.api.fields import ignored_header, parse_json
from termgen.api.models import model_list, model_object, resolve_model
from termgen.client import EngineClient
from termgen.config import ServerConfig
from termgen.errors import RequestError
from termgen.serving.generation import Generation
from termgen.serving.metrics import CONTENT_TYPE
from termgen.serving.middleware import ApiKeyCheck, BodyLimit, HostCheck, RequestContext
from termgen.serving.responses import (
    ClientDisconnected,
    CompleteResponse,
    EventStreamResponse,
    Headers,
    JSONReply,
    error_response,
)
from termgen.serving.state import ServerState

T = TypeVar("T")

EVENT_INTERVAL_S = 1.0
"""How often engine events are counted; their ring holds many seconds of them."""


def create_app(engine: EngineClient | None, config: ServerConfig) -> Starlette:
    """The ASGI application. Without an engine it answers `loading` until one is attached."""
    state = ServerState(config)
    if engine is not None:
        state.attach(engine)
    return build_app(state)


def build_app(state: ServerState) -> Starlette:
    config = state.config
    app = Starlette(
        routes=[
            Route("/v1/models", list_models),
            Route("/v1/models/{id:path}", get_model),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/version", version),
        ],
        middleware=[
            Middleware(RequestContext),
            Middleware(HostCheck, host=config.host, allowed=config.allowed_host),
            Middleware(ApiKeyCheck, keys=config.api_key),
            Middleware(BodyLimit, max_bytes=config.max_body_bytes),
        ],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
    state: ServerState = app.state.server
    task = asyncio.create_task(_count_events(state))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        state.detach()


async def _count_events(state: ServerState) -> None:
    while True:
        await asyncio.sleep(EVENT_INTERVAL_S)
        state.drain_events()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the router: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    detail = f"{error.detail}: {request.method} {request.scope['path'][:200]}"
    return error_response(http_reply(error.status_code, detail, error.headers))


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


# -- generation ----------------------------------------------------------------------------


async def chat_completions(request: Request) -> ASGIApp:
    state, engine = _state(request), _state(request).require_engine()
    parse = partial(parse_chat, tool_format=engine.model.tool_format)
    chat = await _parse_body(request, engine, parse)
    headers = _answer_headers(state, chat.ignored)
    generation = Generation(state, engine, [chat.job])
    if chat.options.stream:
        return EventStreamResponse(state, generation, headers, chunks=ChatStream(chat))
    return CompleteResponse(
        state, generation, headers, build=lambda answers: chat_response(chat, answers)
    )


async def completions(request: Request) -> ASGIApp:
    state, engine = _state(request), _state(request).require_engine()
    completion = await _parse_body(request, engine, parse_completion)
    headers = _answer_headers(state, completion.ignored)
    echoes = await _echoes(engine, completion)
    generation = Generation(state, engine, completion.jobs)
    if completion.options.stream:
        chunks = CompletionStream(completion, echoes)
        return EventStreamResponse(state, generation, headers, chunks=chunks)
    return CompleteResponse(
        state,
        generation,
        headers,
        build=lambda answers: completion_response(completion, answers, echoes),
    )


async def _parse_body(request: Request, engine: EngineClient, parse: Callable[..., T]) -> T:
    """What `parse`, one of the two endpoints', makes of the body."""
    state = _state(request)
    data = await read_json(request)
    return parse(
        data,
        model=resolve_model(data.get("model"), state.names_for(engine)),
        defaults=engine.model.default_params,
        force_include_usage=state.config.force_include_usage,
    )


async def read_json(request: Request) -> dict[str, Any]:
    """The body of a POST, which must say that it is JSON.

    Browsers may send other types across sites without asking first, JSON they may not.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            "Send the body as JSON, with `content-type: application/json`",
            param="content-type",
        )
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parse_json(b"".join(parts))


async def _echoes(engine: EngineClient, completion: CompletionRequest) -> Sequence[str]:
    """The text of each prompt, for `echo`."""
    if not completion.echo:
        return [""] * len(completion.jobs)
    echoes = []
    for job in completion.jobs:
        prompt = job.prompt
        if isinstance(prompt, str):
            echoes.append(prompt)
        else:
            assert isinstance(prompt, tuple), "completions take text or token ids"
            echoes.append(await engine.detokenize(prompt))
    return echoes


def _answer_headers(state: ServerState, ignored: tuple[str, ...]) -> Headers:
    if not ignored:
        return {}
    state.require_metrics().ignored_fields.inc(len(ignored))
    return {"x-termgen-ignored": ignored_header(ignored)}


# -- everything else -----------------------------------------------------------------------


async def list_models(request: Request) -> Response:
    state = _state(request)
    engine = state.require_engine()
    return JSONReply(model_list(engine.model, state.names_for(engine)))


async def get_model(request: Request) -> Response:
    state = _state(request)
    engine = state.require_engine()
    name = request.path_params["id"]
    if name not in state.names_for(engine):
        raise model_not_found(name)
    return JSONReply(model_object(engine.model, name))


async def health(request: Request) -> Response:
    """Liveness: 503 while loading, and when the engine is dead or stands still with work."""
    status = _state(request).status
    is_alive = status in ("ok", "draining")
    return JSONReply({"status": status}, status_code=200 if is_alive else 503)


async def ready(request: Request) -> Response:
    """Whether a new request would be taken now."""
    status = _state(request).status
    if status == "ok":
        return JSONReply({"status": status})
    return JSONReply({"status": status}, status_code=503, headers={"retry-after": "5"})


async def metrics(request: Request) -> Response:
    body = await _state(request).render_metrics()
    return Response(body, headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    return JSONReply({"version": __version__})
