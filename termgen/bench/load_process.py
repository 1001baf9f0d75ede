"""Starts the load generator in a process of its own and reads what it tells.

The other end is `termgen.bench.load`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

from termgen.bench.load import LoadPlan
from termgen.errors import EngineError

OnProgress = Callable[[dict[str, Any]], object]
LINE_LIMIT = 2**31
"""The last line holds every time of the run."""


class Stopped(EngineError):
    """A run was ended before anything was measured."""


class StopSwitch:
    """Ends runs before their time; what has been answered by then is kept."""

    def __init__(self) -> None:
        self.is_on = False

    def turn_on(self) -> None:
        self.is_on = True


async def run_in_process(
    plan: LoadPlan, on_progress: OnProgress | None = None, *, stop: StopSwitch | None = None
) -> dict[str, Any]:
    """The measurements of `run_load`. Ends the process if this is cancelled."""
    if stop is not None and stop.is_on:
        raise Stopped("the run was stopped before it began")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "termgen.bench.load"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    assert process.stdin is not None and process.stdout is not None
    is_stopped = False
    try:
        with contextlib.suppress(ConnectionError):  # it has ended; its code is told below
            process.stdin.write(plan.as_json().encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        async for line in process.stdout:
            told: dict[str, Any] = json.loads(line)
            if "result" in told:
                result: dict[str, Any] = told["result"]
                return result
            if on_progress is not None:
                on_progress(told)
            if stop is not None and stop.is_on and not is_stopped:
                process.terminate()  # it listens for that once it tells of its progress
                is_stopped = True
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise EngineError(f"the load generator ended early, with code {process.returncode}")
