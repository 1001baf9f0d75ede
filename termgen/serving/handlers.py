"""Route handlers: a body is parsed by `termgen.api`, and a generation handed to a response.

Small bodies are parsed and checked on the event loop, large ones by a process of their own, because
`json.loads` blocks every other request until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from termgen import __version__
from termgen.api import anthropic, responses_input
from termgen.api.anthropic import MESSAGES_WIRE, MessageStream, message_response, parse_messages
from termgen.api.chat import ChatStream, chat_response, parse_chat
from termgen.api.chat_bridge import renamed
from termgen.api.completions import (
    CompletionRequest,
    CompletionStream,
    completion_response,
    parse_completion,
)
from termgen.api.errors import body_too_slow, model_not_found, not_supported
from termgen.api.fields import ignored_header, parse_beside_model, parse_for_model, parse_json
from termgen.api.job import Job, ResponseOptions
from termgen.api.models import (
    model_list,
    model_object,
    parse_detokenize,
    parse_tokenize,
    tokenize_response,
    tokenizer_object,
)
from termgen.api.responses import ResponseStream, response_object, responses_wire
from termgen.api.responses_input import parse_responses
from termgen.api.sse import CHAT_WIRE, Wire
from termgen.client import EngineClient, TokenDelta
from termgen.errors import RequestError
from termgen.serving.access import Caller, Role, caller_of
from termgen.serving.admission import BodyShare
from termgen.serving.metrics import CONTENT_TYPE
from termgen.serving.responses import (
    ChunkStream,
    ClientDisconnected,
    CompleteResponse,
    EventStreamResponse,
    Generation,
    Headers,
    JSONReply,
    until_disconnect,
)
from termgen.serving.state import ServerState, state_of

T = TypeVar("T")
Stream = tuple[ChunkStream, Wire]

BODY_TIMEOUT_S = 60.0
"""Limit for the arrival of a body."""


async def read_json(request: Request, take: Callable[[dict[str, Any]], T]) -> T:
    """Apply `take` to the body of a POST, which must declare that it is JSON.

    For a large body, `take` is called in another process: it is a function of a module, or a
    `partial` of one, whose result can be pickled. Browsers may send other types across sites
    without asking first, but not JSON.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            "Send the body as JSON, with `content-type: application/json`",
            param="content-type",
        )
    state = state_of(request)
    with state.body_memory.share() as share:
        parts = await _read(request, share)
        if share.is_small:
            return take(parse_json(b"".join(parts)))
        return await until_disconnect(request.receive, state.large_bodies.parse(parts, take))


async def parse_body(request: Request, parse: Callable[..., T], **options: bool) -> T:
    """Apply an endpoint's `parse` to the body of a request for the engine.

    Where the queue is full the body is not even read.
    """
    state = state_of(request)
    engine = state.require_engine()
    state.admission.check_room()
    names, defaults = state.names_for(engine), engine.model.default_params
    parse = partial(parse, defaults=defaults, **options)
    return await read_json(request, partial(parse_for_model, names=names, parse=parse))


def ignored_headers(
    state: ServerState, names: tuple[str, ...], not_used: tuple[str, ...] = ()
) -> Headers:
    """Headers that name the fields without effect; counts the unknown ones. not_used: fields that
    were understood."""
    headers = {"x-termgen-not-used": ignored_header(not_used)} if not_used else {}
    if not names:
        return headers
    state.require_metrics().ignored_fields.inc(len(names))
    return {**headers, "x-termgen-ignored": ignored_header(names)}


async def _read(request: Request, share: BodyShare) -> list[bytes]:
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                share.add(len(parts[-1]))
                if not message.get("more_body", False):
                    return parts
    except TimeoutError:
        raise body_too_slow(BODY_TIMEOUT_S) from None


# -- answers -------------------------------------------------------------------------------


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
    """The ASGI response to this request. Raises RequestError for faults that are known before
    admission.

    stream: makes the converter of deltas to events, and its wire. build: a whole answer from one
    merged delta per choice. prepare: work that these need, done after admission.
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
    """Negative priorities need the admin key."""
    if caller.role is not Role.ADMIN and any(job.priority < 0 for job in jobs):
        raise RequestError("priority must be 0 or more without the admin key", param="priority")


async def work_on_tokens(
    request: Request, num_tokens: int, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """The result of work that makes tokens of text or text of tokens: it has a place in the queue
    like any other request, and ends when the client leaves."""
    with state_of(request).admission.place(num_tokens):
        return await until_disconnect(request.receive, work())


# -- generation ----------------------------------------------------------------------------


async def _parse_chat(request: Request, parse: Callable[..., T], **options: bool) -> T:
    """The body of an endpoint that is a chat."""
    state = state_of(request)
    return await parse_body(
        request,
        partial(parse, tool_format=state.require_engine().model.tool_format),
        **_conversation_options(state),
        **options,
    )


def _conversation_options(state: ServerState) -> dict[str, Any]:
    """What this server's settings allow in a conversation."""
    return {
        "trusts_template": state.config.trust_request_chat_template,
        "refuses_images": state.config.images == "refuse",
    }


async def chat_completions(request: Request) -> ASGIApp:
    force_usage = state_of(request).config.force_include_usage
    chat = await _parse_chat(request, parse_chat, force_include_usage=force_usage)
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


# -- models and state ----------------------------------------------------------------------


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
    """Readiness: 503 unless a new request would be taken and begun without an administrator."""
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


# -- chats in other words ------------------------------------------------------------------


async def messages(request: Request) -> ASGIApp:
    asked = await _parse_chat(request, parse_messages)
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
    asked = await _parse_chat(request, parse_messages, only_counts=True)
    prompt = asked.chat.job.prompt
    size = state.admission.estimate(prompt)
    ids = await work_on_tokens(request, size, lambda: engine.tokenize(prompt))
    headers = ignored_headers(state, asked.ignored, asked.chat.not_used)
    return JSONReply({"input_tokens": len(ids)}, headers=headers)


async def responses(request: Request) -> ASGIApp:
    asked = await _parse_chat(request, parse_responses)
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
    """Errors of the engine before the answer begins, with this endpoint's names of the fields."""

    async def answer_renamed(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except RequestError as error:
            if error.param is None:
                raise
            raise renamed(error, names) from None

    return answer_renamed


# -- text to tokens and back ---------------------------------------------------------------


async def tokenize(request: Request) -> Response:
    state, engine = state_of(request), state_of(request).require_engine()
    state.admission.check_room()
    names, tool_format = state.names_for(engine), engine.model.tool_format
    options = _conversation_options(state)
    parse = partial(parse_tokenize, tool_format=tool_format, **options)
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
    """Off by default: a chat template may hold a system prompt that clients must not see."""
    state = state_of(request)
    if not state.config.enable_tokenizer_info:
        raise HTTPException(404, "off; the server needs --enable-tokenizer-info")
    engine = state.require_engine()
    return JSONReply(tokenizer_object(engine.model, engine.tokenizer_info))
