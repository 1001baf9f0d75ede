"""/openapi.json: the routes of the running server, described."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from termgen import __version__
from termgen.api.anthropic_input import parse_messages
from termgen.api.chat import parse_chat
from termgen.api.completions import parse_completion
from termgen.api.models import resolve_model
from termgen.api.openapi import Body, Endpoint, Parser, describe
from termgen.api.responses_input import parse_responses
from termgen.serving.responses import JSONReply


def _checked(parse: Callable[..., object], **options: bool) -> Parser:
    """The parser as routes use it; any name of a model will do."""

    def check(data: Mapping[str, Any]) -> object:
        model = resolve_model(data.get("model"), (str(data.get("model")),))
        return parse(data, model=model, defaults={}, **options)

    return check


def _bodies(**options: bool) -> Mapping[str, Body]:
    """What is known of the bodies of POST routes; of others only that they are objects. options: of
    the parsers of chats."""
    messages = [{"role": "user", "content": "x"}]
    return {
        "/v1/chat/completions": Body(_checked(parse_chat, **options), {"messages": messages}),
        "/v1/completions": Body(_checked(parse_completion), {"prompt": "x"}),
        "/v1/messages": Body(
            _checked(parse_messages, **options), {"messages": messages, "max_tokens": 1}
        ),
        "/v1/responses": Body(_checked(parse_responses, **options), {"input": "x"}),
    }


WITHOUT_BODY = frozenset({"/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"})


class OpenAPI:
    """Answers with the description of one app; made when first asked for."""

    def __init__(self) -> None:
        self._document: dict[str, Any] | None = None

    async def __call__(self, request: Request) -> Response:
        if self._document is None:
            self._document = await asyncio.to_thread(describe_app, request.app)
        return JSONReply(self._document)

    def route(self) -> Route:
        return Route("/openapi.json", self.__call__)


def describe_app(app: Starlette) -> dict[str, Any]:
    bodies = _bodies(trusts_template=app.state.server.config.trust_request_chat_template)
    endpoints = [
        Endpoint(route.path, method, _summary(route), _body(bodies, route.path, method))
        for route in app.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return describe(endpoints, title="termgen", version=__version__)


def _summary(route: Route) -> str:
    text = (getattr(route.endpoint, "__doc__", None) or "").strip().partition("\n")[0]
    return text or route.name.replace("_", " ")


def _body(bodies: Mapping[str, Body], path: str, method: str) -> Body | None:
    if method != "POST" or path in WITHOUT_BODY or path.endswith("/cancel"):
        return None
    return bodies.get(path, Body())
