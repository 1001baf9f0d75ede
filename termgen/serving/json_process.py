"""The process that parses large request bodies.

Megabytes of JSON, or tens of thousands of values to check, would block every stream of this
process. `json_program.py` parses and checks them instead, and answers with the request for the
engine, or a fault; a thread waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from termgen.api.errors import unavailable
from termgen.errors import RequestError
from termgen.system.helper_process import (
    HelperClosed,
    HelperFault,
    HelperProcess,
    no_process,
    refusal,
)

PROGRAM = Path(__file__).with_name("json_program.py")
LIMIT_S = 20.0
"""Limit for one body. On a free core, the slowest body within the limit on values takes a
second."""
T = TypeVar("T")


class JSONProcess:
    """Parses one body after the other. Belongs to one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "termgen-json")
        self.helper = HelperProcess(PROGRAM)

    async def parse(self, parts: Sequence[bytes], take: Callable[[dict[str, Any]], T]) -> T:
        """The result of `take` on the JSON object in these parts, computed by the process: a
        function of a module of termgen, or a `partial` of one. Raises `RequestError`."""
        loop = asyncio.get_running_loop()
        if self.helper.is_closed:
            raise _shutting_down()
        try:
            parsing = loop.run_in_executor(self._thread, self._parse, parts, take)
        except RuntimeError:  # the system has no thread left
            raise no_process("request body", "parsed") from None
        return await parsing

    def close(self) -> None:
        """Refuse bodies that are parsed or wait, and later ones."""
        self.helper.close()
        self._thread.shutdown(wait=False)

    def _parse(self, parts: Sequence[bytes], take: Callable[[dict[str, Any]], T]) -> T:
        try:
            taken: T = self.helper.ask(take, parts, limit_s=LIMIT_S)
        except HelperClosed:
            raise _shutting_down() from None
        except HelperFault as fault:
            raise refusal(fault, "request body", "parsed") from None
        return taken


def _shutting_down() -> RequestError:
    return unavailable("draining", "The server is shutting down")
