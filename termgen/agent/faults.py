"""Errors as the protocol has them: a code of JSON-RPC and one line."""

from __future__ import annotations

import acp

from termgen.errors import RequestError, TermgenError

INVALID_REQUEST = -32600
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
NOT_FOUND = -32002


def invalid(words: str) -> acp.RequestError:
    """An error about a request's parameters."""
    return acp.RequestError(INVALID_PARAMS, words)


def clear_error(error: TermgenError) -> acp.RequestError:
    """A failure as an answer."""
    code = INVALID_PARAMS if isinstance(error, RequestError) else INTERNAL_ERROR
    line = " ".join(str(error).split())
    return acp.RequestError(code, "".join(c if c.isprintable() else "\ufffd" for c in line))
