"""Starts the load generator in a process of its own and reads what it tells.

The other end is `termgen.bench.load`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from termgen.bench.load import LoadPlan
from termgen.errors import EngineError

OnProgress = Callable[[dict[str, Any]], object]
LINE_LIMIT = 2**31
"""The last line holds every time of the run."""


async def run_in_process(plan: LoadPlan, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """The measurements of `run_load`. Ends the process if this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "termgen.bench.load"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
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
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    raise EngineError(f"the load generator ended early, with code {process.returncode}")
