"""Work for another process: what would hold up every stream here is done there, after all else.

`HelperProcess` runs a program of ours; `answer_questions` is the other end. One question at a time:
bytes go over, an object comes back, or what the program raised is raised here. Such a program holds
no lock of this process however long it takes, and has a lower priority: with both of two cores
busy, a stream goes first. The two speak through a socket, the program's standard input. What it
prints is kept, and logged if it has to be replaced: it has no terminal. Knows nothing of what is
asked.
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
"""Before what is sent either way: how much it is."""
READY = b"\1"
"""What the program says once, before it reads the first question."""
NICENESS = 5

MAX_START_S = 60.0
"""From starting the program to its first word: Python and its libraries may come from a disk that
is busy."""
EXIT_S = 1.0
"""For the last words of a program that ends by itself."""
ORPHAN_S = 1.0
"""So long beyond its limit a question lasts if nobody is there any more to end it."""
KEPT_OUTPUT_BYTES = 4096
RETRY_AFTER_S = 1.0


class HelperFault(Exception):
    """There is no answer. The next question goes to a new process."""


class HelperClosed(HelperFault):
    """`close` has been called: nothing is answered any more."""


class HelperMissing(HelperFault):
    """The system gave no process, or it ended before it could be asked."""


class HelperDied(HelperFault):
    """The process ended instead of answering: as a rule, for lack of memory."""


class HelperTooSlow(HelperFault):
    """The process took longer than it may, and was ended."""


def no_process(thing: str, done: str, *, param: str | None = None) -> OverloadedError:
    """For a client: `thing`, of its request, was to be `done` in a process of its own."""
    return OverloadedError(
        f"The {thing} cannot be {done} now: the system has no process left for it; try again soon",
        code="no_process",
        retry_after_s=RETRY_AFTER_S,
        param=param,
    )


def refusal(fault: HelperFault, thing: str, done: str, *, param: str | None = None) -> RequestError:
    """The same for any fault but that the helper was closed."""
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
    """Starts with the first question, and stays until `close`. Any thread may ask; they wait for
    each other."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._name = program.name
        self._command = [sys.executable, "-P", str(program), *arguments]
        self._child: _Child | None = None
        self._turn = threading.Lock()
        """Held by whoever asks."""
        self._lock = threading.Lock()
        """Nothing is started behind `close`."""
        self.is_closed = False

    def ask(self, task: object, parts: Sequence[bytes] = (), *, limit_s: float) -> Any:
        """What the program makes of the task and of these bytes. Raises what it raised, or a
        `HelperFault`. Functions in the task that only this process has come back as they are.

        limit_s: from its turn on, by the clock, not counting the start of the process.
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
                if answer is None:  # what is left of it must not be taken for the next one
                    child.end()
        told = _Unpickler(answer, kept).load()
        if isinstance(told, BaseException):
            raise told
        return told

    def start(self) -> subprocess.Popen[bytes]:
        """Unless it runs; the first question does it, too. Raises `HelperFault`."""
        with self._turn:
            return self._running().process

    def close(self) -> None:
        """What is asked now has no answer, nor whatever is asked from now on."""
        with self._lock:
            self.is_closed = True
            if self._child is not None:
                self._child.process.kill()
        with self._turn:  # whoever had it has seen the end
            if self._child is not None:
                self._child.end()

    def _running(self) -> _Child:
        """For whoever has the turn."""
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
        """Why there was no answer, which the log is told, too."""
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
    """The program while it runs once. Used by one thread at a time; any may kill the process."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError where the system has no process, or no file descriptors for one."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    process_group=0,  # Ctrl-C is not for it; priorities count within a session
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
        """Once; also when nobody refers to it any more."""

    @property
    def has_ended(self) -> bool:
        """By itself."""
        return self.end.alive and self.process.poll() is not None

    def ask(self, parts: Sequence[bytes], limit_s: float) -> bytearray:
        """The answer. Raises OSError or EOFError, TimeoutError among them; it is of no use then."""
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
        """How it ends. Waits a moment for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_S)
        status = self.process.poll()
        return "no longer listens" if status is None else f"ended with status {status}"

    def last_words(self) -> str:
        """The end of all that it has printed."""
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
        """Until the socket can go on. What is printed is taken in meanwhile, or a program that
        prints much would wait for ever."""
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
        """Take in a piece of what it has printed; False when there is none."""
        try:
            piece = os.read(self._output.fileno(), select.PIPE_BUF)
        except BlockingIOError:
            return False
        self._printed = (self._printed + piece)[-KEPT_OUTPUT_BYTES:]
        return bool(piece)


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its forks are in its group
    process.wait()
    channel.close()
    assert process.stdout is not None
    process.stdout.close()


# -- what crosses ------------------------------------------------------------------------------


class Elsewhere:
    """Stands, over there, for a function that only the asking process has."""

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


# -- over there --------------------------------------------------------------------------------


def answer_questions(answer: Callable[[Any, bytes], object]) -> None:
    """What the program does until its standard input ends: `answer` makes something of each task
    and of the bytes that came with it."""
    with contextlib.suppress(AttributeError, OSError):  # not every system can
        os.nice(NICENESS)  # the engine goes first
    take_long_slices()
    gc.disable()  # JSON has no cycles
    channel = socket.socket(fileno=sys.stdin.fileno()).makefile("rwb")
    channel.write(READY)
    channel.flush()
    while head := channel.read(SIZE_BYTES):
        told = _told(answer, channel.read(int.from_bytes(head, "little")))
        channel.write(len(told).to_bytes(SIZE_BYTES, "little"))
        channel.write(told)
        channel.flush()
        del told
        gc.collect(0)  # errors have, and are new


def _told(answer: Callable[[Any, bytes], object], question: bytes) -> bytes:
    stream = io.BytesIO(question)
    try:
        task, limit_s = pickle.load(stream)
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # which nothing that runs here can ignore
        return pickle.dumps(answer(task, stream.read()), protocol=pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise  # ends this process, which is what makes room
    except TermgenError as error:
        told: Exception = error
    except Exception as error:  # the top of this process: a bug of ours, shown where it is asked
        told = RuntimeError(f"{type(error).__name__} in a helper:\n{traceback.format_exc()}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL)
