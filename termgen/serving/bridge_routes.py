"""Routes of the endpoints that are a chat in other words: /v1/messages and /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from termgen.api import anthropic_input, responses_input
from termgen.api.anthropic import MESSAGES_WIRE, MessageStream, message_response
from termgen.api.anthropic_input import parse_messages
from termgen.api.chat_bridge import renamed
from termgen.api.fields import ignored_header
from termgen.api.models import resolve_model
from termgen.api.responses import (
    ResponseStream,
    response_object,
    responses_wire,
)
from termgen.api.responses_input import parse_responses
from termgen.errors import RequestError
from termgen.serving.generation import Generation
from termgen.serving.reading import read_json, state_of
from termgen.serving.responses import (
    CompleteResponse,
    EventStreamResponse,
    Headers,
    JSONReply,
)

T = TypeVar("T")


async def messages(request: Request) -> ASGIApp:
    state, engine = state_of(request), state_of(request).require_engine()
    asked = await _parse(request, parse_messages)
    headers, chat = _headers(request, asked.ignored), asked.chat
    generation = Generation(state, engine, [chat.job], answer_id=chat.options.id)
    if chat.options.stream:
        stream = MessageStream(asked)
        answer: ASGIApp = EventStreamResponse(
            state, generation, headers, chunks=stream, wire=MESSAGES_WIRE
        )
    else:
        answer = CompleteResponse(
            state, generation, headers, build=lambda answers: message_response(asked, answers)
        )
    return _renaming(answer, anthropic_input.NAMES)


async def count_tokens(request: Request) -> Response:
    engine = state_of(request).require_engine()
    asked = await _parse(request, parse_messages, only_counts=True)
    ids = await engine.tokenize(asked.chat.job.prompt)
    return JSONReply({"input_tokens": len(ids)}, headers=_headers(request, asked.ignored))


async def responses(request: Request) -> ASGIApp:
    state, engine = state_of(request), state_of(request).require_engine()
    asked = await _parse(request, parse_responses)
    headers, chat = _headers(request, asked.ignored), asked.chat
    generation = Generation(state, engine, [chat.job], answer_id=chat.options.id)
    if chat.options.stream:
        stream = ResponseStream(asked)
        answer: ASGIApp = EventStreamResponse(
            state, generation, headers, chunks=stream, wire=responses_wire(stream)
        )
    else:
        answer = CompleteResponse(
            state, generation, headers, build=lambda answers: response_object(asked, answers)
        )
    return _renaming(answer, responses_input.NAMES)


def _renaming(answer: ASGIApp, names: Mapping[str, str]) -> ASGIApp:
    """What the engine finds wrong before it begins, by the names that fields have here."""

    async def answer_renamed(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await answer(scope, receive, send)
        except RequestError as error:
            if error.param is None:
                raise
            raise renamed(error, names) from None

    return answer_renamed


async def _parse(request: Request, parse: Callable[..., T], **options: bool) -> T:
    state = state_of(request)
    engine = state.require_engine()
    state.admission.check_room()
    data = await read_json(request)
    return parse(
        data,
        model=resolve_model(data.get("model"), state.names_for(engine)),
        defaults=engine.model.default_params,
        tool_format=engine.model.tool_format,
        force_include_usage=False,
        **options,
    )


def _headers(request: Request, ignored: tuple[str, ...]) -> Headers:
    if not ignored:
        return {}
    state_of(request).require_metrics().ignored_fields.inc(len(ignored))
    return {"x-termgen-ignored": ignored_header(ignored)}


BRIDGE_ROUTES = (
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
)
