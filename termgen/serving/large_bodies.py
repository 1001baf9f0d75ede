"""Large request bodies: a limit on the memory they hold, and the process that parses them.

Megabytes of JSON, or tens of thousands of values to check, would block every stream of this
process. `json_program.py` parses and checks them instead, and answers with the request for the
engine, or a fault; a thread waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from termgen.api.errors import unavailable
from termgen.errors import OverloadedError, RequestError
from termgen.system.helper_process import (
    HelperClosed,
    HelperFault,
    HelperProcess,
    no_process,
    refusal,
)

SMALL_BODY_BYTES = 2**15
"""Parsed within a millisecond whatever it holds."""
RETRY_AFTER_S = 1.0
"""Most large bodies are parsed within that."""


class BodyMemory:
    """Memory for the large bodies of all requests, from their first byte until they are parsed.
    Small ones always find room: who sends large ones cannot keep others out."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: 0 for no limit."""
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Held by large bodies now."""

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """One body's."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_held

    def take(self, num_bytes: int) -> None:
        """Raises `OverloadedError` where there is no room for these."""
        if self._max_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"Large request bodies hold {self.num_bytes} bytes already, and at most "
                f"{self._max_bytes} may be held; try again in {RETRY_AFTER_S:g} s",
                code="bodies_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_bytes += num_bytes


class BodyShare:
    """What one body holds of the room."""

    def __init__(self, room: BodyMemory) -> None:
        self._room = room
        self.num_bytes = self.num_held = 0
        """That came, and of these those that are counted."""

    @property
    def is_small(self) -> bool:
        return self.num_bytes <= SMALL_BODY_BYTES

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if not self.is_small:
            self._room.take(self.num_bytes - self.num_held)
            self.num_held = self.num_bytes


# -- the process -------------------------------------------------------------------------


PROGRAM = Path(__file__).with_name("json_program.py")
LIMIT_S = 20.0
"""Where a core is free, the worst body that is not refused for its number of values takes a second.
"""
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
        if self.helper.is_closed:
            raise _shutting_down()
        try:
            parsing = loop.run_in_executor(self._thread, self._parse, parts, take)
        except RuntimeError:  # the system has no thread left
            raise no_process("request body", "parsed") from None
        return await parsing

    def close(self) -> None:
        """What is under way or waits is refused, as is whatever comes from now on."""
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
