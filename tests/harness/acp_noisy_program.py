"""`termgen acp` with a fake engine that prints whatever it can: `python acp_noisy_program.py acp`.

`START_S` is how long it takes to start; with `FAILS` the first start fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine

from termgen.client import TokenDelta
from termgen.commands import cli, launch
from termgen.errors import ModelError
from termgen.library import catalog

NOISE = "noise on standard output"


def make_noise() -> None:
    print(NOISE)
    os.write(1, f"{NOISE}\n".encode())
    subprocess.run(["echo", NOISE], check=True)
    subprocess.run(["cat"], check=True)  # must not read what the client sends
    warnings.warn(NOISE, stacklevel=1)
    logging.getLogger("noisy").warning(NOISE)


class NoisyEngine(FakeEngine):
    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[TokenDelta, None]:
        async for delta in super().generate(*args, **options):
            make_noise()
            yield delta

    async def shutdown(self) -> None:
        make_noise()


def ensure_model(name: str | None, on_progress: Any) -> None:
    on_progress("fetching", 0.5)
    make_noise()


async def start(self: Any, on_progress: Any) -> FakeEngine:
    on_progress("reading weights", 0.5)
    make_noise()
    await asyncio.sleep(float(os.environ.get("START_S", "0")))
    if os.environ.pop("FAILS", None):
        raise ModelError("the weights are torn")
    self._engine = NoisyEngine()
    return self._engine


if __name__ == "__main__":
    catalog.ensure_model = ensure_model
    launch.EngineHolder.start = start  # type: ignore[method-assign,assignment]
    cli.entry()
