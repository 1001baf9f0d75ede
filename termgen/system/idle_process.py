"""A process for work that can wait: it runs only while its owner has nothing to do.

The owner says when it rests and when it is busy. After a while of rest the command starts; work
kills it at once, and the next rest starts it anew, later each time. So the command must keep what
it has done step by step. It ends for good when it ends by itself. Its standard input is a pipe that
ends with this process: the command watches it, so as not to outlive its owner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

MAX_WAIT_S = 600.0
"""Longest rest to wait for; it doubles whenever the command was killed."""
END_S = 5.0
"""Longest wait for the end of a killed command, which may hold a device."""
NICENESS = 19
"""Priority of the command, which asks for it (`run_while_owned`)."""


class IdleProcess:
    """Runs one command to its end, in as many attempts as it takes. `rest`, `busy` and `close` may
    be called at any time, by one thread."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        after_s: float,
        on_start: Callable[[], None],
        on_end: Callable[[int, str], None],
    ) -> None:
        """after_s: rest before the first attempt. on_start: called before each attempt. on_end:
        called once, with the exit code and the output, unless the command was killed from here.
        Both are called in a thread of their own."""
        self._command = list(command)
        self._after_s = after_s
        self._on_start = on_start
        self._on_end = on_end
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self.is_over = False

    def rest(self) -> None:
        """The owner has nothing to do; may be said again while that is so."""
        if self._attempt is not None or self.is_over:
            return
        attempt = self._attempt = _Attempt()
        attempt.timer = threading.Timer(self._after_s, self._run, [attempt])
        attempt.timer.name = "termgen-idle-process"
        attempt.timer.daemon = True
        try:
            attempt.timer.start()
        except RuntimeError:  # the system has no thread left
            self.is_over = True

    def busy(self) -> None:
        """The owner has work: the command does not run from here on."""
        attempt = self._attempt
        if attempt is None:
            return
        with self._lock:
            self._attempt = None
            if attempt.timer is not None:
                attempt.timer.cancel()
            if attempt.process is not None:
                _kill(attempt.process)
                self._after_s = min(2 * self._after_s, MAX_WAIT_S)

    def end(self) -> None:
        """Do as `busy` does, and wait until the command has given back what it held."""
        attempt = self._attempt
        self.busy()
        if attempt is not None and attempt.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                attempt.process.wait(END_S)

    def close(self) -> None:
        """End the command, for good."""
        self.is_over = True
        self.end()

    def _run(self, attempt: _Attempt) -> None:
        with self._lock:
            if self._attempt is not attempt:
                return
            self._on_start()
            try:
                attempt.process = process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    process_group=0,  # no Ctrl-C; no new session, as niceness counts within one
                )
            except OSError as error:
                self.is_over = True
                self._on_end(-1, str(error))
                return
        assert process.stdout is not None and process.stdin is not None
        # Not `communicate`: it closes the standard input, whose end the command watches for.
        with process, process.stdin:
            output = process.stdout.read()
            code = process.wait()
        with self._lock:
            if self._attempt is attempt:
                self.is_over = True
                self._on_end(code, output)


def _kill(process: subprocess.Popen[str]) -> None:
    """End the command with all that it has started: they are a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Attempt:
    """One start of the command, which may not have begun yet."""

    def __init__(self) -> None:
        self.timer: threading.Timer | None = None
        self.process: subprocess.Popen[str] | None = None


def run_while_owned(read_input: Callable[[], object]) -> None:
    """The command's side: take the lowest priority, and end with the owner.

    read_input: blocks until the standard input ends.
    """
    if hasattr(os, "nice"):
        os.nice(NICENESS)

    def watch() -> None:
        read_input()
        os._exit(1)

    threading.Thread(target=watch, name="termgen-owner", daemon=True).start()
