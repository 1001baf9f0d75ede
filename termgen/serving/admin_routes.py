"""Routes that control the engine: cancel, pause, sleep, and reset of the prefix cache.

Options come as query parameters, as vLLM's clients send them. A pause waits for the engine to come
to rest, and goes on when the client leaves meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from termgen.api.errors import no_such_option
from termgen.client import PauseMode, SleepLevel
from termgen.errors import RequestError
from termgen.serving.access import AdminRoute, caller_of
from termgen.serving.responses import JSONReply
from termgen.serving.state import state_of


async def cancel(request: Request) -> Response:
    """End an answer of this client's, wherever it is: waiting, in its prompt, or being written."""
    state = state_of(request)
    name = request.path_params["id"]
    if not state.cancel(caller_of(request.scope), name):
        raise RequestError(
            f"no answer under way is known as {name[:100]!r}",
            param="id",
            code="not_found",
            status=404,
        )
    return JSONReply({"id": name, "object": "request", "status": "cancelled"})


async def reset_prefix_cache(request: Request) -> Response:
    options = _Options(request)
    force = options.choice("force", "false", ("false", "true")) == "true"
    options.finish()
    is_empty = await state_of(request).require_engine().reset_prefix_cache(force=force)
    return JSONReply({"reset": is_empty})


async def pause(request: Request) -> Response:
    options = _Options(request)
    mode = options.choice("mode", "wait", get_args(PauseMode))
    options.finish()
    engine = state_of(request).require_engine()
    await _beyond_the_client(engine.pause(cast(PauseMode, mode)))
    return JSONReply({"status": "paused", "mode": mode})


async def resume(request: Request) -> Response:
    _Options(request).finish()
    await state_of(request).require_engine().resume()
    return JSONReply({"status": "resumed"})


async def sleep(request: Request) -> Response:
    options = _Options(request)
    level = int(options.choice("level", "1", tuple(str(n) for n in get_args(SleepLevel))))
    mode = options.choice("mode", "abort", get_args(PauseMode))
    options.finish()
    engine = state_of(request).require_engine()
    await _beyond_the_client(engine.sleep(cast(SleepLevel, level), cast(PauseMode, mode)))
    return JSONReply({"status": "asleep", "level": level})


async def wake_up(request: Request) -> Response:
    _Options(request).finish()
    await _beyond_the_client(state_of(request).require_engine().wake_up())
    return JSONReply({"status": "awake"})


async def is_paused(request: Request) -> Response:
    return JSONReply({"is_paused": state_of(request).require_engine().is_paused})


async def is_sleeping(request: Request) -> Response:
    level = state_of(request).require_engine().sleep_level
    return JSONReply({"is_sleeping": bool(level), "level": level})


async def _beyond_the_client(command: Any) -> None:
    """Run a command to its end whether or not the client waits for it."""
    await asyncio.shield(asyncio.ensure_future(command))


class _Options:
    """Query parameters with a fixed set of words each."""

    def __init__(self, request: Request) -> None:
        self._given = dict(request.query_params)

    def choice(self, name: str, default: str, words: tuple[str, ...]) -> str:
        value = self._given.pop(name, default)
        if value not in words:
            raise RequestError(
                f"{name} must be one of {', '.join(words)}, not {value[:40]!r}", param=name
            )
        return value

    def finish(self) -> None:
        if self._given:
            raise no_such_option(next(iter(self._given)))


ADMIN_ROUTES = (
    Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
    AdminRoute("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    AdminRoute("/pause", pause, methods=["POST"]),
    AdminRoute("/resume", resume, methods=["POST"]),
    AdminRoute("/sleep", sleep, methods=["POST"]),
    AdminRoute("/wake_up", wake_up, methods=["POST"]),
    AdminRoute("/is_paused", is_paused),
    AdminRoute("/is_sleeping", is_sleeping),
)
