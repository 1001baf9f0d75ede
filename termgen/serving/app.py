"""Routes. Thin: a handler parses through `termgen.api` and hands a generation to a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from termgen import __version__
from termgen.api import anthropic, responses_input
from termgen.api.anthropic import (
    MESSAGES,
    MESSAGES_WIRE,
    MessageStream,
    message_response,
    parse_messages,
)
from termgen.api.chat import CHAT, ChatStream, chat_response, parse_chat
from termgen.api.chat_bridge import renamed
from termgen.api.completions import (
    COMPLETIONS,
    CompletionRequest,
    CompletionStream,
    completion_response,
    parse_completion,
)
from termgen.api.errors import http_reply, model_not_found, not_supported
from termgen.api.fields import Endpoint
from termgen.api.models import model_list, model_object, parse_beside_model
from termgen.api.openapi import Operation, describe
from termgen.api.responses import (
    ResponseStream,
    response_object,
    responses_wire,
)
from termgen.api.responses_input import RESPONSES, parse_responses
from termgen.api.sse import CHAT_WIRE
from termgen.api.tokens import (
    parse_detokenize,
    parse_tokenize,
    tokenize_response,
    tokenizer_object,
)
from termgen.client import EngineClient
from termgen.config import ServerConfig
from termgen.errors import RequestError
from termgen.serving.access import ApiKeyCheck, OriginCheck
from termgen.serving.admin_routes import ADMIN_ROUTES
from termgen.serving.event_routes import EVENT_ROUTES
from termgen.serving.handlers import (
    Stream,
    answer,
    ignored_headers,
    parse_body,
    read_json,
    state_of,
    work_on_tokens,
)
from termgen.serving.metrics import CONTENT_TYPE
from termgen.serving.middleware import (
    BodyLimit,
    CrossOrigin,
    HostCheck,
    RequestContext,
    for_path,
)
from termgen.serving.responses import JSONReply, error_response
from termgen.serving.state import ServerState

EVENT_INTERVAL_S = 0.25
"""How often engine events are counted: many at once would hold up the streams."""


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
            Route("/v1/embeddings", embeddings, methods=["POST"], include_in_schema=False),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokenizer_info),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
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
    """Tells browsers which pages may use the server. Nothing, unless asked for."""
    if not config.allowed_origin:
        return []
    return [
        Middleware(
            CrossOrigin,
            allow_origins=[origin.rstrip("/") for origin in config.allowed_origin],
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
    """Errors of the router: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    detail = f"{error.detail}: {request.method} {request.scope['path'][:200]}"
    return error_response(
        for_path(request.scope, http_reply(error.status_code, detail, error.headers))
    )


# -- generation ----------------------------------------------------------------------------


async def chat_completions(request: Request) -> ASGIApp:
    state, engine = state_of(request), state_of(request).require_engine()
    parse = partial(parse_chat, tool_format=engine.model.tool_format)
    chat = await parse_body(
        request,
        parse,
        force_include_usage=state.config.force_include_usage,
        trusts_template=state.config.trust_request_chat_template,
    )
    return answer(
        request,
        [chat.job],
        chat.options,
        ignored=chat.ignored,
        not_used=chat.not_used,
        stream=lambda: (ChatStream(chat), CHAT_WIRE),
        build=lambda answers: chat_response(chat, answers),
    )


async def completions(request: Request) -> ASGIApp:
    state, engine = state_of(request), state_of(request).require_engine()
    completion = await parse_body(
        request, parse_completion, force_include_usage=state.config.force_include_usage
    )
    echoes: list[str] = []
    return answer(
        request,
        completion.jobs,
        completion.options,
        ignored=completion.ignored,
        stream=lambda: (CompletionStream(completion, echoes), CHAT_WIRE),
        build=lambda answers: completion_response(completion, answers, echoes),
        prepare=lambda: _fill_echoes(echoes, engine, completion),
    )


async def _fill_echoes(
    echoes: list[str], engine: EngineClient, completion: CompletionRequest
) -> None:
    """The text of each prompt, for `echo`."""
    for job in completion.jobs:
        prompt = job.prompt
        if not completion.echo:
            echoes.append("")
        elif isinstance(prompt, str):
            echoes.append(prompt)
        else:
            assert isinstance(prompt, tuple), "completions take text or token ids"
            echoes.append(await engine.detokenize(prompt))


# -- everything else -----------------------------------------------------------------------


async def list_models(request: Request) -> Response:
    state = state_of(request)
    engine = state.require_engine()
    return JSONReply(model_list(engine.model, state.names_for(engine)))


async def get_model(request: Request) -> Response:
    state = state_of(request)
    engine = state.require_engine()
    name = request.path_params["id"]
    if name not in state.names_for(engine):
        raise model_not_found(name)
    return JSONReply(model_object(engine.model, name))


async def embeddings(request: Request) -> Response:
    raise not_supported("This server generates text; it makes no embeddings")


async def health(request: Request) -> Response:
    """Liveness: 503 while loading, and when the engine is dead, stuck or does not react."""
    state = state_of(request)
    if state.engine is None:
        return JSONReply(state.status_body, status_code=503, headers={"retry-after": "5"})
    reason = await state.engine.why_unhealthy()
    if reason is None:
        return JSONReply(state.status_body)
    return JSONReply({"status": "engine_dead", "reason": reason}, status_code=503)


async def ready(request: Request) -> Response:
    """Whether a new request would be taken now, and begun without waiting for an administrator."""
    state = state_of(request)
    status = state.status
    if status == "ok" and state.engine is not None and state.engine.is_paused:
        status = "paused"
    if status == "ok" and state.admission.is_full:
        status = "queue_full"
    if status == "ok":
        return JSONReply({"status": status})
    body = state.status_body | {"status": status}
    return JSONReply(body, status_code=503, headers={"retry-after": "5"})


async def metrics(request: Request) -> Response:
    body = await state_of(request).render_metrics()
    return Response(body, headers={"content-type": CONTENT_TYPE})


async def version(request: Request) -> Response:
    return JSONReply({"version": __version__})


# -- chats in other words ----------------------------------------------------------------


T = TypeVar("T")


async def messages(request: Request) -> ASGIApp:
    asked = await _parse(request, parse_messages)
    chat = asked.chat
    return _renaming(
        answer(
            request,
            [chat.job],
            chat.options,
            ignored=asked.ignored,
            not_used=chat.not_used,
            stream=lambda: (MessageStream(asked), MESSAGES_WIRE),
            build=lambda answers: message_response(asked, answers),
        ),
        anthropic.NAMES,
    )


async def count_tokens(request: Request) -> Response:
    state, engine = state_of(request), state_of(request).require_engine()
    asked = await _parse(request, parse_messages, only_counts=True)
    prompt = asked.chat.job.prompt
    size = state.admission.estimate(prompt)
    ids = await work_on_tokens(request, size, lambda: engine.tokenize(prompt))
    headers = ignored_headers(state, asked.ignored, asked.chat.not_used)
    return JSONReply({"input_tokens": len(ids)}, headers=headers)


async def responses(request: Request) -> ASGIApp:
    asked = await _parse(request, parse_responses)
    chat = asked.chat

    def stream() -> Stream:
        events = ResponseStream(asked)
        return events, responses_wire(events)

    return _renaming(
        answer(
            request,
            [chat.job],
            chat.options,
            ignored=asked.ignored,
            not_used=chat.not_used,
            stream=stream,
            build=lambda answers: response_object(asked, answers),
        ),
        responses_input.NAMES,
    )


def _renaming(app: ASGIApp, names: Mapping[str, str]) -> ASGIApp:
    """What the engine finds wrong before it begins, by the names that fields have here."""

    async def answer_renamed(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except RequestError as error:
            if error.param is None:
                raise
            raise renamed(error, names) from None

    return answer_renamed


async def _parse(request: Request, parse: Callable[..., T], **options: bool) -> T:
    state = state_of(request)
    return await parse_body(
        request,
        partial(parse, tool_format=state.require_engine().model.tool_format),
        force_include_usage=False,
        trusts_template=state.config.trust_request_chat_template,
        **options,
    )


# -- text to tokens and back -------------------------------------------------------------


async def tokenize(request: Request) -> Response:
    state, engine = state_of(request), state_of(request).require_engine()
    state.admission.check_room()
    names, tool_format = state.names_for(engine), engine.model.tool_format
    trusts = state.config.trust_request_chat_template
    parse = partial(parse_tokenize, tool_format=tool_format, trusts_template=trusts)
    asked = await read_json(request, partial(parse_beside_model, names=names, parse=parse))

    async def work() -> tuple[list[int], list[str] | None]:
        ids = await engine.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens)
        return ids, await engine.token_texts(ids) if asked.wants_texts else None

    size = state.admission.estimate(asked.prompt)
    ids, texts = await work_on_tokens(request, size, work)
    return JSONReply(
        tokenize_response(engine.model, ids, texts),
        headers=ignored_headers(state, asked.ignored, asked.not_used),
    )


async def detokenize(request: Request) -> Response:
    state, engine = state_of(request), state_of(request).require_engine()
    state.admission.check_room()
    names = state.names_for(engine)
    take = partial(parse_beside_model, names=names, parse=parse_detokenize)
    asked = await read_json(request, take)
    ids = asked.token_ids
    text = await work_on_tokens(request, len(ids), lambda: engine.detokenize(ids))
    return JSONReply({"prompt": text}, headers=ignored_headers(state, asked.ignored))


async def tokenizer_info(request: Request) -> Response:
    """Off unless asked for: a chat template may hold a system prompt that is nobody's business."""
    state = state_of(request)
    if not state.config.enable_tokenizer_info:
        raise HTTPException(404, "off; the server needs --enable-tokenizer-info")
    engine = state.require_engine()
    return JSONReply(tokenizer_object(engine.model, engine.tokenizer_info))


# -- description -------------------------------------------------------------------------


BODIES: Mapping[str, Endpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
"""The bodies of POST routes; the others are described as objects."""

WITHOUT_BODY = frozenset({"/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"})


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
