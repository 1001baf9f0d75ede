"""Large bodies are parsed and checked by a process of its own, `json_program.py`.

Megabytes of JSON, or tens of thousands of values to be looked at, would hold up every stream here:
what comes back is what the engine is asked, or a fault. A thread waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from termgen.errors import RequestError
from termgen.helper_process import HelperDied, HelperProcess

PROGRAM = Path(__file__).with_name("json_program.py")
T = TypeVar("T")


class JSONProcess:
    """Reads one body after the other. Belongs to one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "termgen-json")
        self.helper = HelperProcess(PROGRAM)

    async def parse(self, parts: Sequence[bytes], take: Callable[[dict[str, Any]], T]) -> T:
        """What `take` makes of the object that these are together, over there: a function of a
        module of ours, or a `partial` of one. Raises `RequestError`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._parse, parts, take)

    def close(self) -> None:
        """What is under way fails."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.helper.close()

    def _parse(self, parts: Sequence[bytes], take: Callable[[dict[str, Any]], T]) -> T:
        try:
            taken: T = self.helper.ask(take, parts)
        except HelperDied:
            raise RequestError(
                "The request body took too much memory to be parsed",
                code="request_too_large",
                status=413,
            ) from None
        return taken
