"""Wait for a server that loads its model or does not listen yet; used by every client.

`wait_for_server` repeats an attempt to reach the server. The attempt raises `NotYet` to be
repeated, and any other exception if waiting would not help: a wrong key, no such path.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from termgen.errors import TermgenError

POLL_S = 0.4
MAX_POLL_S = 10.0
"""Upper limit on a server's Retry-After."""

ABSENT_S = 1.0
"""Default wait for a server that does not answer: time for a few attempts."""

LOADING_CODE = "loading"
"""Error code in termgen's own responses; other servers have only a message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loading:
    """A server's report on its start-up."""

    phase: str
    progress: float
    retry_s: float

    @property
    def words(self) -> str:
        phase = self.phase or "its model"
        return f"{phase}, {self.progress:.0%}" if self.progress else phase


class NotYet(Exception):
    """The server is not ready yet. `refusal` is raised if this was the last attempt."""

    def __init__(self, refusal: TermgenError, loading: Loading | None = None) -> None:
        """loading: None if nothing listens at the address."""
        super().__init__(str(refusal))
        self.refusal = refusal
        self.loading = loading


def why_unreachable(error: BaseException) -> str:
    """The reason for an HTTP client's error, which itself may only say `All connection attempts
    failed`."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def read_loading(status: int, raw: bytes, headers: Mapping[str, str]) -> Loading | None:
    """Read a 503 response that reports loading; None for any other response.

    termgen names the phase; llama.cpp and others say `Loading model` in the error's message.
    """
    if status != 503:
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    error = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    is_ours = LOADING_CODE in (error.get("code"), error.get("status"))
    if not is_ours and "loading" not in str(error.get("message", "")).lower():
        return None
    phase, progress = error.get("phase"), error.get("progress")
    return Loading(
        " ".join(phase.split())[:80] if isinstance(phase, str) else "",
        _share(progress),
        POLL_S if is_ours else _retry_s(headers.get("retry-after")),
    )


def _share(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return min(max(float(value), 0.0), 1.0) if is_number else 0.0


def _retry_s(value: str | None) -> float:
    try:
        seconds = float(value or "")
    except ValueError:  # absent, or a date
        return POLL_S
    return min(max(seconds, POLL_S), MAX_POLL_S) if math.isfinite(seconds) else POLL_S


async def wait_for_server(
    attempt: Callable[[], Awaitable[T]],
    report: Callable[[str, float], None],
    *,
    limit_s: float | None = None,
    absent_s: float | None = None,
    check: Callable[[], None] | None = None,
) -> T:
    """Repeat `attempt` while it raises `NotYet`; return its result, or raise its other exceptions.

    Waits without limit while the server loads, and `absent_s` (default `ABSENT_S`) while it does
    not answer; `limit_s` replaces both. `report` gets the loading phase and its completed share;
    `check` may raise to give up earlier.
    """
    began = time.monotonic()
    absent_s = ABSENT_S if absent_s is None else absent_s
    absent_since: float | None = None
    while True:
        if check is not None:
            check()
        try:
            return await attempt()
        except NotYet as early:
            now, loading = time.monotonic(), early.loading
            if loading is not None:
                absent_since, deadline = None, math.inf
                report(loading.phase or "loading its model", loading.progress)
            else:
                absent_since = now if absent_since is None else absent_since
                deadline = absent_since + absent_s
            if limit_s is not None:
                deadline = began + limit_s
            if loading is None and (absent_s if limit_s is None else limit_s) > ABSENT_S:
                report("no answer yet", 0.0)
            if now >= deadline:
                raise early.refusal from early.__cause__
            pause_s = loading.retry_s if loading is not None else POLL_S
            await asyncio.sleep(min(pause_s, max(0.0, deadline - now)))
