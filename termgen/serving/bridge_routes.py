"""Routes of the endpoints that are a chat in other words: /v1/messages and /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from termgen.api import anthropic, responses_input
from termgen.api.anthropic import MESSAGES_WIRE, MessageStream, message_response, parse_messages
from termgen.api.chat_bridge import renamed
from termgen.api.responses import (
    ResponseStream,
    response_object,
    responses_wire,
)
from termgen.api.responses_input import parse_responses
from termgen.errors import RequestError
from termgen.serving.answering import Stream, answer, work_on_tokens
from termgen.serving.reading import ignored_headers, parse_body, state_of
from termgen.serving.responses import JSONReply

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


BRIDGE_ROUTES = (
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
)
