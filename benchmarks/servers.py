"""Servers for benchmarks: in this process, or a whole `termgen serve` in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from termgen.client import EngineClient
    from termgen.server import Server

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 40.0


def post(path: str, body: bytes, *, close: bool = True) -> bytes:
    """A whole request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"connection: {'close' if close else 'keep-alive'}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextlib.asynccontextmanager
async def serving(engine: EngineClient, **config: Any) -> AsyncGenerator[Server, None]:
    """A server in this process, on a free port of 127.0.0.1."""
    from termgen.config import ServerConfig
    from termgen.server import Server

    server = Server(engine, ServerConfig(port=0, **config))
    task = asyncio.create_task(server.serve())
    await server.started()
    try:
        yield server
    finally:
        await server.stop(drain_timeout=0)
        await task


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


async def left_behind(
    engine: EngineClient, server: Server, others: Callable[[], dict[str, int]] = dict
) -> dict[str, int]:
    """Resources still held once every client has left, after at most 30 s."""
    deadline = time.monotonic() + 30
    while True:
        snapshot = await engine.snapshot()
        left = {
            "requests": snapshot.num_running + snapshot.num_waiting,
            "blocks": snapshot.num_used_blocks,
            "answers": server.num_answers,
            **others(),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.05)


class ServerProcess:
    """`termgen serve` with random weights on a free port. Ready after construction."""

    def __init__(
        self, model: Path, options: Sequence[str], log: Path | None = None, tree: Path = ROOT
    ) -> None:
        """log: for what it prints. tree: the sources that it runs."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "termgen", "serve", "--model", str(model), *options]
        command += ["--port", str(self.port), "--load-format", "dummy"]
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("wb")) if log else subprocess.DEVNULL
            self._process = subprocess.Popen(
                command,
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.pid = self._process.pid
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.ending is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health") == 200:
                    return
            time.sleep(0.1)
        raise SystemExit(f"the server did not start: {self.ending or 'it was not ready in time'}")

    def request(self, method: str, path: str) -> int:
        """Status of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path)
            return connection.getresponse().status

    @property
    def ending(self) -> str | None:
        """How the process ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
