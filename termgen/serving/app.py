"""The application: its routes, its middleware, and the description of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from termgen import __version__
from termgen.api.anthropic import COUNT_TOKENS, MESSAGES
from termgen.api.chat import CHAT
from termgen.api.completions import COMPLETIONS
from termgen.api.errors import http_reply
from termgen.api.fields import Endpoint
from termgen.api.models import DETOKENIZE
from termgen.api.openapi import Operation, describe
from termgen.api.responses_input import RESPONSES
from termgen.client import EngineClient
from termgen.config import ServerConfig
from termgen.serving import handlers
from termgen.serving.access import LOCAL_ORIGIN, LOCAL_PAGES, ApiKeyCheck, OriginCheck
from termgen.serving.admin_routes import ADMIN_ROUTES
from termgen.serving.event_routes import EVENT_ROUTES
from termgen.serving.middleware import BodyLimit, CrossOrigin, HostCheck, RequestContext, for_path
from termgen.serving.responses import JSONReply, error_response
from termgen.serving.state import ServerState

EVENT_INTERVAL_S = 0.25
"""Interval of counting engine events: many at once would delay the streams."""

BODIES: Mapping[str, Endpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/responses": RESPONSES,
    "/detokenize": DETOKENIZE,
}
"""Declarations of the bodies of POST routes; other bodies are described as objects."""

WITHOUT_BODY = frozenset({"/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"})


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
            Route("/v1/models", handlers.list_models),
            Route("/v1/models/{id:path}", handlers.get_model),
            Route("/v1/chat/completions", handlers.chat_completions, methods=["POST"]),
            Route("/v1/completions", handlers.completions, methods=["POST"]),
            Route("/v1/embeddings", handlers.embeddings, methods=["POST"], include_in_schema=False),
            Route("/health", handlers.health),
            Route("/ready", handlers.ready),
            Route("/metrics", handlers.metrics),
            Route("/version", handlers.version),
            Route("/tokenize", handlers.tokenize, methods=["POST"]),
            Route("/detokenize", handlers.detokenize, methods=["POST"]),
            Route("/tokenizer_info", handlers.tokenizer_info),
            Route("/v1/messages", handlers.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", handlers.count_tokens, methods=["POST"]),
            Route("/v1/responses", handlers.responses, methods=["POST"]),
            *ADMIN_ROUTES,
            *EVENT_ROUTES,
            Route("/openapi.json", openapi),
        ],
        middleware=[
            *_cross_origin(config),
            Middleware(RequestContext, on_refused=state.refused),
            Middleware(HostCheck, host=config.host, allowed=config.allowed_host),
            Middleware(OriginCheck, allowed=config.allowed_origin),
            Middleware(ApiKeyCheck, keys=state.keys),
            Middleware(BodyLimit, max_bytes=config.max_body_bytes),
        ],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.openapi = None
    return app


def _cross_origin(config: ServerConfig) -> list[Middleware]:
    """Middleware that tells browsers which pages may use the server: none by default."""
    if not config.allowed_origin:
        return []
    return [
        Middleware(
            CrossOrigin,
            allow_origins=[origin.rstrip("/") for origin in config.allowed_origin],
            allow_origin_regex=LOCAL_ORIGIN if LOCAL_PAGES in config.allowed_origin else None,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[
                *("x-request-id", "x-termgen-ignored", "x-termgen-max-tokens"),
                "x-termgen-not-used",
                *("retry-after", "retry-after-ms"),
            ],
        )
    ]


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
        if state.wants_reports:
            await asyncio.to_thread(state.close_reports)


async def _count_events(state: ServerState) -> None:
    while True:
        await asyncio.sleep(EVENT_INTERVAL_S)
        state.drain_events()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """JSON for errors of the router: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    detail = f"{error.detail}: {request.method} {request.scope['path'][:200]}"
    return error_response(
        for_path(request.scope, http_reply(error.status_code, detail, error.headers))
    )


async def openapi(request: Request) -> Response:
    state = request.app.state
    if state.openapi is None:
        state.openapi = await asyncio.to_thread(describe_app, request.app)
    return JSONReply(state.openapi)


def describe_app(app: Starlette) -> dict[str, Any]:
    takes_templates = app.state.server.config.trust_request_chat_template
    hidden = frozenset() if takes_templates else frozenset({"chat_template"})
    operations = [
        Operation(route.path, method, _summary(route), _body(route.path, method), hidden)
        for route in app.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return describe(operations, title="termgen", version=__version__)


def _summary(route: Route) -> str:
    text = (getattr(route.endpoint, "__doc__", None) or "").strip().partition("\n")[0]
    return text or route.name.replace("_", " ")


def _body(path: str, method: str) -> Endpoint | None:
    if method != "POST" or path in WITHOUT_BODY or path.endswith("/cancel"):
        return None
    return BODIES.get(path, Endpoint(()))
