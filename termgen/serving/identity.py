"""Who sent a request, and under which names its answer is known while it is under way."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.types import Scope

REQUEST_ID = "termgen.request_id"
"""Key of the ASGI scope under which the request's `x-request-id` is kept."""


@dataclass(frozen=True, slots=True)
class Names:
    """What an answer under way can be cancelled by."""

    owner: bytes
    """Whoever sent it: the digest of the API key."""
    ids: frozenset[str]


def key_of(scope: Scope) -> str:
    """The API key a request came with: `Authorization: Bearer KEY`, or Anthropic's `x-api-key`."""
    headers = {bytes(name): bytes(value) for name, value in reversed(scope["headers"])}
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


def owner_of(scope: Scope, *, has_keys: bool) -> bytes:
    """has_keys: whether keys tell clients apart. Without, everybody is the same."""
    return hashlib.sha256(key_of(scope).encode("latin-1")).digest() if has_keys else b""


def names_of(scope: Scope, answer_id: str, *, has_keys: bool) -> Names:
    """answer_id: the `id` in the answer's body."""
    return Names(
        owner_of(scope, has_keys=has_keys), frozenset({answer_id, scope.get(REQUEST_ID, answer_id)})
    )
