"""What every handler begins with: the server's state, and the body as JSON."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from termgen.errors import RequestError
from termgen.serving.body import read_object
from termgen.serving.state import ServerState


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def read_json(request: Request) -> dict[str, Any]:
    """The body of a POST, which must say that it is JSON.

    Browsers may send other types across sites without asking first, JSON they may not.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError(
            "Send the body as JSON, with `content-type: application/json`",
            param="content-type",
        )
    return await read_object(request, state_of(request).large_bodies)
