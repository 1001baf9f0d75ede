"""What every handler begins with: the server's state, and the body as JSON."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from termgen.api.fields import parse_json
from termgen.errors import RequestError
from termgen.serving.identity import Names, names_of
from termgen.serving.responses import ClientDisconnected
from termgen.serving.state import ServerState


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def names_for(request: Request, answer_id: str) -> Names:
    """What the answer to this request can be cancelled by."""
    has_keys = bool(state_of(request).config.api_key)
    return names_of(request.scope, answer_id, has_keys=has_keys)


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
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parse_json(b"".join(parts))
