"""Routes that control the engine: cancel, pause, sleep, and reset of the prefix cache.

Options come as query parameters, as vLLM's clients send them. A pause waits for the engine to come
to rest, and goes on when the client leaves meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from termgen.api.errors import no_such_option
from termgen.client import PauseMode, SleepLevel
from termgen.errors import RequestError
from termgen.serving.access import caller_of
from termgen.serving.responses import JSONReply
from termgen.serving.routes import PlainRow
from termgen.serving.state import state_of


async def cancel(request: Request) -> Response:
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
    is_empty = await state_of(request).require_admin().reset_prefix_cache(force=force)
    return JSONReply({"reset": is_empty})


async def pause(request: Request) -> Response:
    options = _Options(request)
    mode = options.choice("mode", "wait", get_args(PauseMode))
    options.finish()
    engine = state_of(request).require_admin()
    await _beyond_the_client(engine.pause(cast(PauseMode, mode)))
    return JSONReply({"status": "paused", "mode": mode})


async def resume(request: Request) -> Response:
    _Options(request).finish()
    await state_of(request).require_admin().resume()
    return JSONReply({"status": "resumed"})


async def sleep(request: Request) -> Response:
    options = _Options(request)
    level = int(options.choice("level", "1", tuple(str(n) for n in get_args(SleepLevel))))
    mode = options.choice("mode", "abort", get_args(PauseMode))
    options.finish()
    engine = state_of(request).require_admin()
    await _beyond_the_client(engine.sleep(cast(SleepLevel, level), cast(PauseMode, mode)))
    return JSONReply({"status": "asleep", "level": level})


async def wake_up(request: Request) -> Response:
    _Options(request).finish()
    await _beyond_the_client(state_of(request).require_admin().wake_up())
    return JSONReply({"status": "awake"})


async def is_paused(request: Request) -> Response:
    return JSONReply({"is_paused": state_of(request).require_admin().is_paused})


async def is_sleeping(request: Request) -> Response:
    level = state_of(request).require_admin().sleep_level
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


ADMIN_ROWS = (
    PlainRow(
        path="/v1/requests/{id}/cancel",
        summary="End an answer of this client's, wherever it is: waiting, in its prompt, or being "
        "written.",
        methods=("POST",),
        handler=cancel,
    ),
    *(
        PlainRow(path=path, summary=summary, methods=("POST",), handler=handler, is_admin=True)
        for path, summary, handler in (
            ("/reset_prefix_cache", "reset prefix cache", reset_prefix_cache),
            ("/pause", "pause", pause),
            ("/resume", "resume", resume),
            ("/sleep", "sleep", sleep),
            ("/wake_up", "wake up", wake_up),
        )
    ),
    PlainRow(path="/is_paused", summary="is paused", handler=is_paused, is_admin=True),
    PlainRow(path="/is_sleeping", summary="is sleeping", handler=is_sleeping, is_admin=True),
)
