"""Helper processes, for work that would stall every stream if it held this process's GIL.

`HelperProcess` runs one of termgen's programs; `answer_questions` is the program's side. One
question at a time: a task and bytes go over, an object comes back, or the exception is raised here.
The program has a lower priority, so that streams go first when all cores are busy. Both sides use
a socket, which is the program's standard input. Its output is kept and logged if it fails. Knows
nothing of the tasks.

`multiprocessing.connection` would not do: its `send_bytes` and `recv_bytes` take no timeout, so a
program that stops within a message, or blocks on its output, would hold its caller for ever.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from termgen.errors import OverloadedError, RequestError, TermgenError
from termgen.system.cpu_slices import take_long_slices

logger = logging.getLogger(__name__)

SIZE_BYTES = 8
"""Length of the size prefix of every message."""
READY = b"\1"
"""Sent once by the program before it reads the first question."""
NICENESS = 5

MAX_START_S = 60.0
"""Timeout of a start, including `READY`: Python and its libraries may come from a busy disk."""
EXIT_S = 1.0
"""Wait for the exit status of a program that stopped responding."""
ORPHAN_S = 1.0
"""Grace period beyond the limit after which an orphaned helper ends itself."""
KEPT_OUTPUT_BYTES = 4096
RETRY_AFTER_S = 1.0


class HelperFault(Exception):
    """The helper gave no answer. The next question goes to a new process."""


class HelperClosed(HelperFault):
    """`close` has been called."""


class HelperMissing(HelperFault):
    """The process could not be started, or ended before it was ready."""


class HelperDied(HelperFault):
    """The process ended instead of answering, usually for lack of memory."""


class HelperTooSlow(HelperFault):
    """The process exceeded its time limit and was killed."""


def no_process(thing: str, done: str, *, param: str | None = None) -> OverloadedError:
    """The client's error if no helper can start. `thing`: part of its request, to be `done`."""
    return OverloadedError(
        f"The {thing} cannot be {done} now: the system has no process left for it; try again soon",
        code="no_process",
        retry_after_s=RETRY_AFTER_S,
        param=param,
    )


def refusal(fault: HelperFault, thing: str, done: str, *, param: str | None = None) -> RequestError:
    """The client's error for any fault but `HelperClosed`; arguments as for `no_process`."""
    assert not isinstance(fault, HelperClosed), "that is nothing about the request"
    if isinstance(fault, HelperMissing):
        return no_process(thing, done, param=param)
    what = "time" if isinstance(fault, HelperTooSlow) else "memory"
    return RequestError(
        f"The {thing} took too much {what} to be {done}",
        param=param,
        code="request_too_large",
        status=413,
    )


class HelperProcess:
    """A program that starts with the first question and runs until `close`. Thread-safe: questions
    are answered one after another."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._name = program.name
        self._command = [sys.executable, "-P", str(program), *arguments]
        self._child: _Child | None = None
        self._turn = threading.Lock()
        """Held by the thread that asks."""
        self._lock = threading.Lock()
        """Guards `_child` and `is_closed`: no process starts after `close`."""
        self.is_closed = False

    def ask(self, task: object, parts: Sequence[bytes] = (), *, limit_s: float) -> Any:
        """The program's answer to a task with these bytes. Raises its exception, or a
        `HelperFault`. Local functions in the task are not sent; in an answer they come back as
        the same objects.

        limit_s: wall-clock limit, without the wait for other threads and the process's start.
        """
        head, kept = _packed((task, limit_s + ORPHAN_S))
        with self._turn:
            child = self._running()
            answer = None
            try:
                answer = child.ask([head, *parts], limit_s)
            except (OSError, EOFError) as error:
                raise self._fault(child, error) from None
            finally:
                if answer is None:  # a late answer must not be read as the next one
                    child.end()
        result = _Unpickler(answer, kept).load()
        if isinstance(result, BaseException):
            raise result
        return result

    def start(self) -> subprocess.Popen[bytes]:
        """Start the program unless it runs, as the first `ask` would. Raises `HelperFault`."""
        with self._turn:
            return self._running().process

    def close(self) -> None:
        """End the program: the current and all later questions raise `HelperClosed`."""
        with self._lock:
            self.is_closed = True
            if self._child is not None:
                self._child.process.kill()
        with self._turn:  # after the asking thread has noticed the end
            if self._child is not None:
                self._child.end()

    def _running(self) -> _Child:
        """The running program, started if needed. The caller holds `_turn`."""
        with self._lock:
            if self.is_closed:
                raise HelperClosed
            child = self._child
            if child is not None and child.has_ended:
                self._log_end(child, child.last_status())
                child.end()
            if child is None or not child.end.alive:
                try:
                    self._child = child = _Child(self._command)
                except OSError as error:
                    logger.warning("%s cannot be started: %s", self._name, error)
                    raise HelperMissing from None
            return child

    def _fault(self, child: _Child, error: Exception) -> HelperFault:
        """Log why there was no answer, and return the fault to raise."""
        if self.is_closed:
            return HelperClosed()
        is_slow = isinstance(error, TimeoutError)
        self._log_end(child, "took too long" if is_slow else child.last_status())
        if not child.is_ready:
            return HelperMissing()
        return HelperTooSlow() if is_slow else HelperDied()

    def _log_end(self, child: _Child, why: str) -> None:
        logger.warning("%s %s; its last words: %s", self._name, why, child.last_words() or "none")


class _Child:
    """One run of the program. Used by one thread at a time; any thread may kill the process."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError if the system has no process or file descriptors left."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    process_group=0,  # no Ctrl-C; no new session, as niceness counts within one
                )
            except BaseException:
                self._socket.close()
                raise
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self._socket.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        self._printed = b""
        self.is_ready = False
        self.end = weakref.finalize(self, _end, self.process, self._socket)
        """Ends the process, once; also when this object is garbage-collected."""

    @property
    def has_ended(self) -> bool:
        """True if the process has ended without `end`."""
        return self.end.alive and self.process.poll() is not None

    def ask(self, parts: Sequence[bytes], limit_s: float) -> bytearray:
        """Send the parts and read the answer. After an OSError (such as TimeoutError) or EOFError
        the process is unusable."""
        if not self.is_ready:
            self._receive(len(READY), time.monotonic() + MAX_START_S)
            self.is_ready = True
        deadline = time.monotonic() + limit_s
        size = sum(map(len, parts))
        for part in (size.to_bytes(SIZE_BYTES, "little"), *parts):
            self._send(part, deadline)
        size = int.from_bytes(self._receive(SIZE_BYTES, deadline), "little")
        return self._receive(size, deadline)

    def last_status(self) -> str:
        """Its exit status as text, after a short wait for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        status = self.process.poll()
        return "no longer listens" if status is None else f"ended with status {status}"

    def last_words(self) -> str:
        """The end of its output."""
        while self._hear():
            continue
        return self._printed.decode(errors="replace").strip()

    def _send(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            self._wait_for(select.POLLOUT, deadline)
            left = left[self._socket.send(left) :]

    def _receive(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            self._wait_for(select.POLLIN, deadline)
            count = self._socket.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return data

    def _wait_for(self, event: int, deadline: float) -> None:
        """Wait until the socket is ready. Reads the output meanwhile, or a program that prints much
        would block."""
        poll = select.poll()
        poll.register(self._socket, event)
        poll.register(self._output, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            found = {fd for fd, _ in poll.poll(left_s * 1e3)}
            if self._output.fileno() in found and not self._hear():
                poll.unregister(self._output)
            if self._socket.fileno() in found:
                return
        raise TimeoutError

    def _hear(self) -> bool:
        """Read a piece of its output; False if there is none."""
        try:
            piece = os.read(self._output.fileno(), select.PIPE_BUF)
        except BlockingIOError:
            return False
        self._printed = (self._printed + piece)[-KEPT_OUTPUT_BYTES:]
        return bool(piece)


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children are in its group
    process.wait()
    channel.close()
    assert process.stdout is not None
    process.stdout.close()


# -- messages ----------------------------------------------------------------------------------


class Elsewhere:
    """Stands in the program for a local function of the asking process."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (self.place,)


class _Pickler(pickle.Pickler):
    def __init__(self, target: io.BytesIO) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)
        self.kept: list[object] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType) or "<locals>" not in obj.__qualname__:
            return NotImplemented
        self.kept.append(obj)
        return Elsewhere, (len(self.kept) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes | bytearray, kept: Sequence[object]) -> None:
        super().__init__(io.BytesIO(data))
        self._kept = kept

    def find_class(self, module: str, name: str) -> Any:
        if name == Elsewhere.__name__:
            return self._kept.__getitem__
        return super().find_class(module, name)


def _packed(task: object) -> tuple[bytes, Sequence[object]]:
    target = io.BytesIO()
    pickler = _Pickler(target)
    pickler.dump(task)
    return target.getvalue(), pickler.kept


# -- in the program ----------------------------------------------------------------------------


def answer_questions(answer: Callable[[Any, bytes], object]) -> None:
    """The program's main loop, until its standard input ends: `answer` gets each task with its
    bytes and returns the result."""
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        os.nice(NICENESS)  # the engine goes first
    take_long_slices()
    gc.disable()  # JSON has no cycles
    channel = socket.socket(fileno=sys.stdin.fileno()).makefile("rwb")
    channel.write(READY)
    channel.flush()
    while head := channel.read(SIZE_BYTES):
        reply = _reply_to(answer, channel.read(int.from_bytes(head, "little")))
        channel.write(len(reply).to_bytes(SIZE_BYTES, "little"))
        channel.write(reply)
        channel.flush()
        del reply
        gc.collect(0)  # exceptions have cycles, and are in the youngest generation


def _reply_to(answer: Callable[[Any, bytes], object], question: bytes) -> bytes:
    stream = io.BytesIO(question)
    try:
        task, limit_s = pickle.load(stream)
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends the process, whatever runs
        return pickle.dumps(answer(task, stream.read()), protocol=pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise  # ends this process, which frees the memory
    except TermgenError as error:
        failure: Exception = error
    except Exception as error:  # top of the process: a bug in termgen, raised at the caller
        failure = RuntimeError(f"{type(error).__name__} in a helper:\n{traceback.format_exc()}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return pickle.dumps(failure, protocol=pickle.HIGHEST_PROTOCOL)
