"""/openapi.json: the routes of the running server, described."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from termgen import __version__
from termgen.api.anthropic import MESSAGES
from termgen.api.chat import CHAT
from termgen.api.completions import COMPLETIONS
from termgen.api.fields import Endpoint
from termgen.api.openapi import Operation, describe
from termgen.api.responses_input import RESPONSES
from termgen.serving.responses import JSONReply

BODIES: Mapping[str, Endpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
"""The bodies of POST routes; the others are described as objects."""

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
