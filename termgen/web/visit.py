"""One tab: a Textual program as a process of its own, which ends with the tab."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

from termgen.tools import launcher

QUIT_S = 5.0
"""Time for the program to end after the tab is closed, as it saves its chat."""


class Visit(AppService):
    """Differs from its base in the command, which no shell reads, and in its certain end."""

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        write_bytes: Callable[[bytes], Awaitable[None]],
        write_str: Callable[[str], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
        download_manager: DownloadManager,
    ) -> None:
        """environ: variables beside those of this process."""
        super().__init__(
            argv[0],
            write_bytes=write_bytes,
            write_str=write_str,
            close=close,
            download_manager=download_manager,
        )
        self._argv = tuple(argv)
        self._environ = dict(environ)

    def _build_environment(self, width: int = 80, height: int = 24) -> dict[str, str]:
        return {**super()._build_environment(width, height), **self._environ}

    async def _open_app_process(
        self, width: int = 80, height: int = 24
    ) -> asyncio.subprocess.Process:
        script = str(Path(launcher.__file__).resolve())
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", script, str(os.getpid()), *self._argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._build_environment(width, height),
            start_new_session=True,
        )
        self._stdin = process.stdin
        return process

    async def stop(self) -> None:
        """End the program: it may quit by itself first. Idempotent."""
        process, reading = self._process, self._task
        if process is None or reading is None:
            return
        self._task = None
        await self._download_manager.cancel_app_downloads(app_service_id=self.app_service_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIT_S):
                await self.send_meta({"type": "quit"})
                await asyncio.shield(reading)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await process.wait()
