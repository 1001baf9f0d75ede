"""The application: its routes, its middleware, and the description of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from termgen import __version__
from termgen.api.errors import http_reply
from termgen.api.openapi import describe
from termgen.api.rows import Row
from termgen.client import EngineClient
from termgen.config import ServerConfig
from termgen.serving.access import (
    LOCAL_ORIGIN,
    LOCAL_PAGES,
    ApiKeyCheck,
    KeyFileWatch,
    OriginCheck,
)
from termgen.serving.middleware import (
    BodyLimit,
    CrossOrigin,
    HostCheck,
    RequestContext,
    RootPath,
    for_path,
)
from termgen.serving.responses import JSONReply, error_response
from termgen.serving.routes import PlainRow, paths_of, route_of, shapes_of
from termgen.serving.state import ServerState
from termgen.serving.table import ENDPOINTS

EVENT_INTERVAL_S = 0.25
"""Interval of counting engine events: many at once would delay the streams."""
KEY_INTERVAL_S = 1.0
"""Interval of looks at the key file; a change is read at the second look."""


def create_app(
    engine: EngineClient | None, config: ServerConfig, *, endpoints: Sequence[Row] = ENDPOINTS
) -> Starlette:
    """The ASGI application. Without an engine it answers `loading` until one is attached."""
    state = ServerState(config)
    if engine is not None:
        state.attach(engine)
    return build_app(state, endpoints=endpoints)


def build_app(state: ServerState, *, endpoints: Sequence[Row] = ENDPOINTS) -> Starlette:
    config = state.config
    rows = (*endpoints, PlainRow(path="/openapi.json", summary="openapi", handler=openapi))
    app = Starlette(
        routes=[route_of(row) for row in rows],
        middleware=[
            *([Middleware(RootPath, root_path=config.root_path)] if config.root_path else []),
            *_cross_origin(config),
            Middleware(
                RequestContext,
                on_refused=state.refused,
                shapes=shapes_of(rows),
                probe_paths=paths_of(rows, lambda row: row.is_probe),
            ),
            Middleware(HostCheck, host=config.host, allowed=config.allowed_host),
            Middleware(OriginCheck, allowed=config.allowed_origin),
            Middleware(
                ApiKeyCheck, keys=state.keys, open_paths=paths_of(rows, lambda row: row.is_open)
            ),
            Middleware(BodyLimit, max_bytes=config.max_body_bytes),
        ],
        exception_handlers={HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.rows = rows
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
    tasks = [asyncio.create_task(_count_events(state))]
    if state.config.api_key_file is not None:
        watch = KeyFileWatch(state.keys, state.config.api_key_file)
        tasks.append(asyncio.create_task(_watch_keys(watch)))
    try:
        yield
    finally:
        for task in tasks:
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


async def _watch_keys(watch: KeyFileWatch) -> None:
    while True:
        await asyncio.sleep(KEY_INTERVAL_S)
        with suppress(RuntimeError):  # the system has no thread left: the next look will do
            await asyncio.to_thread(watch.look)  # a file of another machine may take its time


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
    config = app.state.server.config
    takes_templates = config.trust_request_chat_template
    hidden = frozenset() if takes_templates else frozenset({"chat_template"})
    return describe(
        app.state.rows,
        title="termgen",
        version=__version__,
        hidden=hidden,
        root_path=config.root_path,
    )
