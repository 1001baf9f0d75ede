"""Endpoints that show what is served and how the server is."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from termgen import __version__
from termgen.api.errors import model_not_found
from termgen.api.models import model_list, model_object, tokenizer_object
from termgen.serving.metrics import CONTENT_TYPE
from termgen.serving.responses import JSONReply
from termgen.serving.routes import PlainRow
from termgen.serving.state import state_of


async def list_models(request: Request) -> Response:
    state = state_of(request)
    state.check_ready()
    return JSONReply(model_list(state.engines.models()))


async def get_model(request: Request) -> Response:
    state = state_of(request)
    state.check_ready()
    name = request.path_params["id"]
    for served, model in state.engines.models():
        if served == name:
            return JSONReply(model_object(model, name))
    raise model_not_found(name)


async def health(request: Request) -> Response:
    state = state_of(request)
    if state.engine is None:
        return JSONReply(state.status_body, status_code=503, headers={"retry-after": "5"})
    reason = await state.engine.why_unhealthy()
    if reason is None:
        return JSONReply(state.status_body)
    return JSONReply({"status": "engine_dead", "reason": reason}, status_code=503)


async def ready(request: Request) -> Response:
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


async def load(request: Request) -> Response:
    return JSONReply({"server_load": state_of(request).num_answers})


async def version(request: Request) -> Response:
    return JSONReply({"version": __version__})


async def tokenizer_info(request: Request) -> Response:
    state = state_of(request)
    if not state.config.enable_tokenizer_info:
        raise HTTPException(404, "off; the server needs --enable-tokenizer-info")
    engine = state.require_generation()
    return JSONReply(tokenizer_object(engine.model, engine.tokenizer_info))


STATE_ROWS = (
    PlainRow(path="/v1/models", summary="list models", handler=list_models),
    PlainRow(path="/v1/models/{id:path}", summary="get model", handler=get_model),
    PlainRow(
        path="/health",
        summary="Liveness: 503 while loading, and when the engine is dead, stuck or does not "
        "react.",
        handler=health,
        is_open=True,
        is_probe=True,
        tells_status=True,
    ),
    PlainRow(
        path="/ready",
        summary="Readiness: 503 unless a new request would be taken and begun without an "
        "administrator.",
        handler=ready,
        is_probe=True,
        tells_status=True,
    ),
    PlainRow(path="/metrics", summary="metrics", handler=metrics, is_probe=True),
    PlainRow(
        path="/load",
        summary="Load: the answers under way, those that wait included.",
        handler=load,
        is_probe=True,
    ),
    PlainRow(path="/version", summary="version", handler=version),
    PlainRow(
        path="/tokenizer_info",
        summary="Off by default: a chat template may hold a system prompt that clients must not "
        "see.",
        handler=tokenizer_info,
    ),
)
