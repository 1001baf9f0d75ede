"""Routes that turn text into tokens and back. They work while the engine is paused or asleep, and
wait in line with everybody else."""

from __future__ import annotations

from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from termgen.api.models import parse_beside_model
from termgen.api.tokens import (
    parse_detokenize,
    parse_tokenize,
    tokenize_response,
    tokenizer_object,
)
from termgen.serving.answering import work_on_tokens
from termgen.serving.reading import ignored_headers, read_json, state_of
from termgen.serving.responses import JSONReply


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


TOKEN_ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
)
