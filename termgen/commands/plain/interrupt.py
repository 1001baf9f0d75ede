"""Ctrl-C in commands that write an answer without a screen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

REQUEST_ID = "inline"
"""Id of their requests, of which there is one at a time."""


class Interrupt:
    """Makes the first Ctrl-C end what is under way; a second one quits at once."""

    def __init__(self, stop: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """stop: ends it, as aborting a request does, whose text is kept."""
        self._stop = stop
        self._aborting: asyncio.Future[object] | None = None
        """Strong reference: an event loop keeps only weak ones to its tasks."""
        self.came = False

    def __enter__(self) -> Interrupt:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            # without signal handlers (Windows, other threads) Ctrl-C ends the command at once
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.note)
        return self

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def note(self) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        self._aborting = asyncio.ensure_future(self._stop())
