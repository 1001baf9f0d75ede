"""An MCP server as a process of its own: JSON-RPC, a message a line, over its standard streams.

Instead of the transport of the `mcp` package, which has no limits and lets a server write over the
screen. Lines are bounded, large ones parsed in a thread, and a server that sends garbage is killed.
What it writes to standard error is kept for messages. At the end the whole process group is killed,
and the kernel kills the server when this program dies in any way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from termgen.system.sure_ends import to_its_end
from termgen.tools import launcher
from termgen.tools.text import escaped

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MAX_LINE_BYTES = 8 << 20
THREAD_BYTES = 200_000
"""A longer line is parsed in a thread."""
MAX_BAD_LINES = 20
"""Lines in a row that are no messages."""
MAX_RATE = 500
"""Messages that are read in a second; more wait in the server's pipe."""
KEPT_STDERR_BYTES = 4096
CLOSE_S = 1.0
"""Time to end after standard input is closed, and again after SIGTERM."""
POLL_S = 0.01
KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""Variables that a server gets: no keys are among them."""


class ServerProcess:
    """A transport as `mcp.Client` takes it: an async context manager of two streams."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path | None = None
    ) -> None:
        """folder: its working folder; None: that of this program."""
        self._command = tuple(command)
        self._folder = folder
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        self._env = {**kept, **env}
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: tuple[Any, ...] = ()
        self._stderr = b""
        self.fault = ""
        """Why it was killed, or ended; empty while it runs."""
        self.gone = asyncio.Event()
        """It sends no more."""

    @property
    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return escaped(lines[-1].strip())[:300] if lines else ""

    async def __aenter__(self) -> TransportStreams:
        import anyio

        script = str(Path(launcher.__file__).resolve())
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", script, str(os.getpid()), *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._env,
            cwd=self._folder,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        into, read = anyio.create_memory_object_stream[Any](0)
        write, out_of = anyio.create_memory_object_stream[Any](0)
        self._streams = (into, read, write, out_of)
        jobs: tuple[Coroutine[Any, Any, None], ...] = (
            self._read(self._process, into),
            self._write(self._process, out_of, into),
            self._keep_stderr(self._process),
        )
        self._tasks = [asyncio.create_task(job) for job in jobs]
        return read, write

    async def __aexit__(self, *exc_info: object) -> None:
        await to_its_end(self._close())  # a cancelled caller must not leave the server alive

    async def _read(self, process: asyncio.subprocess.Process, into: Any) -> None:
        import anyio

        assert process.stdout is not None
        num_bad, pace = 0, _Pace()
        try:
            while num_bad < MAX_BAD_LINES:
                try:
                    line = await process.stdout.readuntil(b"\n")
                except asyncio.IncompleteReadError:
                    return
                except asyncio.LimitOverrunError:
                    self._kill(f"it sent a line over {MAX_LINE_BYTES >> 20} MiB")
                    return
                message = await _message_of(line)
                if message is None:
                    num_bad += 1
                else:
                    num_bad = 0
                    await pace.wait()
                    await into.send(message)
            self._kill(f"it sent {MAX_BAD_LINES} lines that are no messages")
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
            return  # the session is over
        finally:
            into.close()
            self.gone.set()

    async def _write(self, process: asyncio.subprocess.Process, out_of: Any, into: Any) -> None:
        assert process.stdin is not None
        try:
            async for sent in out_of:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode(errors="replace") + b"\n")
                await process.stdin.drain()
        except OSError:
            into.close()  # the calls that wait must not wait for their timeout
            self.gone.set()

    async def _keep_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(65536):
            self._stderr = (self._stderr + part)[-KEPT_STDERR_BYTES:]

    def _kill(self, why: str) -> None:
        self.fault = why
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Signal the whole group: also what the server has started."""
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _close(self) -> None:
        process = self._process
        if process is None:
            return  # it did not start
        assert process.stdin is not None
        if self.gone.is_set() and await _ends(process, CLOSE_S) and not self.fault:
            code = process.returncode or 0
            self.fault = f"it ended with code {code}" if code >= 0 else f"signal {-code} ended it"
        with suppress(OSError):
            process.stdin.close()
        if not await _ends(process, CLOSE_S):
            self._signal(signal.SIGTERM)
            await _ends(process, CLOSE_S)
        self._signal(signal.SIGKILL)
        await _ends(process, CLOSE_S)
        await asyncio.wait(self._tasks[2:], timeout=CLOSE_S / 10)  # its last words
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            stream.close()
        # descendants that left the group may hold the pipes open
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()


class _Pace:
    """Lets `MAX_RATE` pass in a second."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._num = 0

    async def wait(self) -> None:
        now_s = self._loop.time()
        if now_s - self._since_s >= 1.0:
            self._since_s, self._num = now_s, 0
        self._num += 1
        if self._num > MAX_RATE:
            await asyncio.sleep(self._since_s + 1.0 - now_s)


async def _ends(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    """Whether it ends in time. `process.wait` would also wait for its pipes."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while process.returncode is None:
        if loop.time() >= end_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def _message_of(line: bytes) -> Any:
    """The message of a line; None if it is none."""
    if len(line) > THREAD_BYTES:
        return await asyncio.to_thread(_parsed, line)
    return _parsed(line)


def _parsed(line: bytes) -> Any:
    import mcp_types
    from mcp.shared.message import SessionMessage

    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except (ValueError, RecursionError):
        return None
