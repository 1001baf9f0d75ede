"""The progress of fetching a model, in the lines of /api/pull."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from termgen.api.fields import read
from termgen.api.ollama.body import LATEST, PULL, PullFields, asked_name
from termgen.errors import DownloadError, ModelNotFoundError, RequestError, TermgenError

logger = logging.getLogger("termgen.server")

HUB_HOST = re.compile(r"^(hf\.co|huggingface\.co)/")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
"""A name, and no path: one that begins with a dot, a tilde or a slash would be that."""

Report = Callable[[str, float], None]
"""Called with a stage and the finished share of it, from any thread."""


class Fetcher(Protocol):
    """Fetches models to this machine."""

    def num_bytes(self, name: str) -> int | None:
        """About how much is fetched for it; None if that is not known before."""
        ...

    def fetch(self, name: str, report: Report) -> None:
        """Blocks until the model is here. What `report` raises ends it. Raises ModelError."""
        ...


class Pull:
    """A checked body of /api/pull."""

    def __init__(self, name: str, *, is_streamed: bool, ignored: tuple[str, ...]) -> None:
        self.name = name
        self.is_streamed = is_streamed
        self.ignored = ignored
        self.not_used: tuple[str, ...] = ()


def parse_pull(data: Mapping[str, Any]) -> Pull:
    body = read(PullFields, data)
    name = asked_name(data)
    if not isinstance(name, str) or not name:
        raise RequestError("model is required", param="model")
    name = HUB_HOST.sub("", name.removesuffix(LATEST))
    is_path = ".." in name or "//" in name or name.lower().endswith((".json", "/"))
    if is_path or not NAME.fullmatch(name):
        raise RequestError(f"invalid model name {name[:60]!r}", param="model")
    return Pull(name, is_streamed=body.stream, ignored=PULL.unknown(data))


async def progress_of(fetcher: Fetcher, name: str) -> AsyncGenerator[dict[str, Any], None]:
    """The lines while a model is fetched. Raises TermgenError; closing it ends the fetching."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[tuple[str, float] | BaseException | None] = asyncio.Queue()
    is_left = threading.Event()

    def tell(item: tuple[str, float] | BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(news.put_nowait, item)

    def report(stage: str, fraction: float) -> None:
        if is_left.is_set():
            raise DownloadError("the client has left")
        tell((stage, fraction))

    def run() -> None:
        try:
            fetcher.fetch(name, report)
        except BaseException as error:  # top of the thread: raised where the lines are read
            tell(error)
        else:
            tell(None)

    yield {"status": "pulling manifest"}
    total = fetcher.num_bytes(name)
    threading.Thread(target=run, name="termgen-pull", daemon=True).start()
    last: dict[str, Any] = {}
    try:
        while (item := await news.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if (line := _line(*item, total)) != last:
                yield (last := line)
    finally:
        is_left.set()
    yield {"status": "success"}


def failure(error: BaseException) -> RequestError:
    """The error for a client."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TermgenError):
        status = 404 if isinstance(error, ModelNotFoundError) else 500
        return RequestError(str(error), param="model", code="pull_failed", status=status)
    logger.error("a pull failed", exc_info=error)
    message = "Internal server error; the server's log has the details"
    return RequestError(message, code="internal_error", status=500, type="server_error")


def _line(stage: str, fraction: float, total: int | None) -> dict[str, Any]:
    """Clients draw a bar for each digest, where there is one, from two numbers of bytes."""
    share = min(max(fraction, 0.0), 1.0)
    if total is None:
        return {"status": f"{stage} {share:.0%}"}
    part = hashlib.sha256(stage.encode()).hexdigest()
    done = round(share, 3)
    return {
        "status": stage,
        "digest": f"sha256:{part}",
        "total": total,
        "completed": int(total * done),
    }
