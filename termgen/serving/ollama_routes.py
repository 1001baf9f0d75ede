"""Ollama's endpoints about models, and those of its endpoints that this server does not have."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from termgen import __version__
from termgen.api.errors import not_supported
from termgen.api.ollama.body import EMBED, PULL, SHOW
from termgen.api.ollama.errors import ERRORS, HEADERS, error_of, line
from termgen.api.ollama.pull import Fetcher, failure, parse_pull, progress_of
from termgen.api.ollama.shown import (
    API_VERSION,
    model_card,
    parse_embed,
    parse_show,
    process_list,
    tag_list,
)
from termgen.serving.handlers import ignored_headers, read_json
from termgen.serving.responses import JSONReply
from termgen.serving.routes import PlainRow
from termgen.serving.state import ServerState, state_of

ABSENT = (
    ("/api/create", "POST"),
    ("/api/copy", "POST"),
    ("/api/push", "POST"),
    ("/api/delete", "DELETE"),
    ("/api/blobs/{digest}", "POST"),
)
"""Endpoints of Ollama that change its store of models."""


async def running(request: Request) -> Response:
    return PlainTextResponse("Ollama is running")


async def version(request: Request) -> Response:
    return JSONReply({"version": API_VERSION, "termgen": __version__})


async def tags(request: Request) -> Response:
    state = state_of(request)
    state.check_ready()
    return JSONReply(tag_list(state.engines.models()))


async def processes(request: Request) -> Response:
    """The loaded models: none while the engine sleeps."""
    state = state_of(request)
    state.check_ready()
    return JSONReply(process_list(() if state.status == "asleep" else state.engines.models()))


async def show(request: Request) -> Response:
    state = state_of(request)
    state.check_ready()
    models = dict(state.engines.models())
    asked = await read_json(request, partial(parse_show, tuple(models)))
    template = None
    if state.config.enable_tokenizer_info:
        template = state.engines.generation(asked.name).tokenizer_info.chat_template
    card = model_card(asked.name, models[asked.name], chat_template=template)
    return JSONReply(card, headers=ignored_headers(state, asked))


async def embed(request: Request) -> Response:
    state = state_of(request)
    state.check_ready()
    models = dict(state.engines.models())
    await read_json(request, partial(parse_embed, tuple(models)))
    raise not_supported("this model does not support embeddings")


async def pull(request: Request) -> Response:
    state = state_of(request)
    asked = await read_json(request, parse_pull)
    headers = ignored_headers(state, asked)
    if asked.name in state.served_models():
        lines = _here()
    elif state.fetcher is not None:
        lines = _pulled(state, state.fetcher, asked.name)
    else:
        raise not_supported("This server fetches no models; `termgen pull` does")
    if asked.is_streamed:
        return StreamingResponse(_encoded(lines), headers={**HEADERS, **headers})
    last: dict[str, Any] = {}
    try:
        async for news in lines:
            last = news
    except Exception as error:  # the thread's; the client gets it, and what is a bug is logged
        raise failure(error) from None
    return JSONReply(last, headers=headers)


async def _here() -> AsyncGenerator[dict[str, Any], None]:
    """The lines for a model that is served."""
    yield {"status": "success"}


async def _pulled(
    state: ServerState, fetcher: Fetcher, name: str
) -> AsyncGenerator[dict[str, Any], None]:
    """The lines of a pull; of one at a time, while others wait."""
    async with state.pulling:
        async with aclosing(progress_of(fetcher, name)) as lines:
            async for news in lines:
                yield news


async def _encoded(lines: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(lines):
        try:
            async for news in lines:
                yield line(news)
        except Exception as error:  # as above, but the answer has begun
            yield line(error_of(failure(error)))


async def absent(request: Request) -> Response:
    raise not_supported(
        "This server answers with the model it was started with; it keeps no store of models that "
        "clients can change"
    )


OLLAMA_ROWS = (
    PlainRow(
        path="/",
        summary="Ollama's sign of life",
        handler=running,
        is_described=False,
        is_probe=True,
    ),
    PlainRow(path="/api/version", summary="Ollama's version", handler=version, errors=ERRORS),
    PlainRow(path="/api/tags", summary="Ollama's list of models", handler=tags, errors=ERRORS),
    PlainRow(path="/api/ps", summary="Ollama's loaded models", handler=processes, errors=ERRORS),
    PlainRow(
        path="/api/show",
        summary="Ollama's facts about a model",
        methods=("POST",),
        body=SHOW,
        handler=show,
        errors=ERRORS,
    ),
    PlainRow(
        path="/api/pull",
        summary="Ollama's way to fetch a model",
        methods=("POST",),
        body=PULL,
        handler=pull,
        is_admin=True,
        errors=ERRORS,
    ),
    *(
        PlainRow(
            path=path,
            summary="Ollama's embeddings",
            methods=("POST",),
            body=EMBED,
            handler=embed,
            errors=ERRORS,
            is_described=False,
        )
        for path in ("/api/embed", "/api/embeddings")
    ),
    *(
        PlainRow(
            path=path,
            summary="not here",
            methods=(method,),
            handler=absent,
            errors=ERRORS,
            is_described=False,
        )
        for path, method in ABSENT
    ),
)
