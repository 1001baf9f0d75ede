"""Large bodies are parsed by a process of its own, `json_program.py`, which this talks to.

It starts with the first large body, and stays. A thread waits for it, which holds Python's lock
only while it takes over what comes back: some milliseconds at the most. The same thread then looks
at every value: on the event loop, that would take as long at a stretch.
"""

from __future__ import annotations

import asyncio
import marshal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from termgen.errors import RequestError

PROGRAM = Path(__file__).with_name("json_program.py")
T = TypeVar("T")

SIZE_BYTES = 8
"""Before what is sent either way: how much it is."""


class JSONProcess:
    """Parses one body after the other. Belongs to one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "termgen-json")
        self._process: subprocess.Popen[bytes] | None = None

    async def parse(self, parts: Sequence[bytes], take: Callable[[dict[str, Any]], T]) -> T:
        """What `take` makes of the object that these are together. Raises `RequestError`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: take(self._parse(parts)))

    def close(self) -> None:
        """What is under way fails."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            _end(self._process)

    def _parse(self, parts: Sequence[bytes]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        try:
            value, fault = _exchange(self._process, parts)
        except (OSError, EOFError):
            _end(self._process)
            raise RequestError(
                "The request body took too much memory to be parsed",
                code="request_too_large",
                status=413,
            ) from None
        if fault is not None:
            message, param, code, status = fault
            raise RequestError(message, param=param, code=code, status=status)
        assert isinstance(value, dict), "the program parses objects"
        return value

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        weakref.finalize(self, _end, process)
        return process


def _exchange(process: subprocess.Popen[bytes], parts: Sequence[bytes]) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(sum(map(len, parts)).to_bytes(SIZE_BYTES, "little"))
    for part in parts:
        process.stdin.write(part)
    process.stdin.flush()
    size = int.from_bytes(process.stdout.read(SIZE_BYTES), "little")
    return marshal.loads(process.stdout.read(size))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
