"""A `termgen serve` of the bench's own, in a process of its own, on a free port of this machine.

Its log, a line for each request, goes to a file that is shown if it ends early. Whoever else finds
the port has no key for it.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from termgen.errors import EngineError

HOST = "127.0.0.1"
STOP_S = 15.0
SHOWN_LINES = 3
OTHERS_KEYS = ("TERMGEN_API_KEY", "TERMGEN_ADMIN_KEY", "TERMGEN_API_KEY_FILE")


@dataclass(frozen=True, slots=True)
class OwnServer:
    url: str
    api_key: str
    admin_key: str
    """For who watches its engine."""
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises `EngineError`, with the last it said, if it has ended."""
        code = self.process.poll()
        if code is not None:
            said = self.log.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:]
            raise EngineError(f"the server of the bench ended with code {code}: {' / '.join(said)}")

    def start_lines(self) -> list[str]:
        """What it said of its memory and its start."""
        said = self.log.read_text(errors="replace").splitlines()
        return [line for line in said if " memory: " in line or " ready in " in line]


@contextmanager
def own_server(flags: Sequence[str]) -> Generator[OwnServer, None, None]:
    """`flags` of `termgen serve`, beside those that say where it listens. Loading takes a while:
    wait for it with `ServerApi.wait_ready`."""
    port, key, admin_key = _free_port(), secrets.token_urlsafe(16), secrets.token_urlsafe(16)
    address = ("--host", HOST, "--port", str(port), "--drain-timeout", "0", "--max-queue", "0")
    with tempfile.NamedTemporaryFile(prefix="termgen-bench-", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "termgen", "serve", *address, *flags],
            env=_environment(os.environ, key, admin_key),
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            yield OwnServer(f"http://{HOST}:{port}", key, admin_key, process, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(environ: Mapping[str, str], key: str, admin_key: str) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in OTHERS_KEYS}
    # not a flag: other users of the machine can see those
    return kept | {"TERMGEN_API_KEY": key, "TERMGEN_ADMIN_KEY": admin_key}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
