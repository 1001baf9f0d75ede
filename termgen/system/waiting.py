"""Waiting for a server that loads its model, or that does not listen yet. For every client of one.

`wait_for_server` repeats an attempt to reach the server. The attempt raises `NotYet` when it came
too early, and any other exception when waiting would not help: a wrong key, no such path.
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
"""However long a server asks to be left alone."""

ABSENT_S = 1.0
"""A server that nothing is heard of gets so long, for a few attempts, unless told otherwise."""

LOADING_CODE = "loading"
"""In termgen's own answers; others only say it in words."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a server says its start is."""

    phase: str
    progress: float
    retry_s: float

    @property
    def words(self) -> str:
        phase = self.phase or "its model"
        return f"{phase}, {self.progress:.0%}" if self.progress else phase


class NotYet(Exception):
    """An attempt came too early. `refusal` is the error when it was the last one."""

    def __init__(self, refusal: TermgenError, loading: Loading | None = None) -> None:
        """Without `loading` nothing listens at the address."""
        super().__init__(str(refusal))
        self.refusal = refusal
        self.loading = loading


def why_unreachable(error: BaseException) -> str:
    """Plain words for an error of the HTTP client, whose own are `All connection attempts failed`
    whatever the system has said."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def read_loading(status: int, raw: bytes, headers: Mapping[str, str]) -> Loading | None:
    """What an answer tells of a start under way; None if it is about something else.

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
    except ValueError:  # nothing, or a date
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
    """The result of the first attempt that is not too early. Raises what `attempt` raises.

    A server that loads is waited for without end, one that is not there for `absent_s`, or for a
    moment; `limit_s` replaces both. `report` is told the phase and its share; `check` may raise to
    give up before.
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
