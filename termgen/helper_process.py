"""Work for another process: what would hold up every stream here is done there, after all else.

`HelperProcess` runs a program of ours; `answer_questions` is the other end. One question at a time:
bytes go over, an object comes back, or what the program raised is raised here. Such a program holds
no lock of this process however long it takes, and has a lower priority: with both of two cores
busy, a stream goes first. Knows nothing of what is asked.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from termgen.errors import TermgenError
from termgen.turns import take_long_turns

SIZE_BYTES = 8
"""Before what is sent either way: how much it is."""
NICENESS = 5


class HelperDied(Exception):
    """The process has ended instead of answering; the next question starts another, unless it was
    ended by `close`."""


class HelperProcess:
    """Starts with the first question, and stays until `close`. One thread asks at a time; any may
    close."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._command = [sys.executable, "-P", str(program), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., HelperProcess] | None = None
        self._lock = threading.Lock()
        """Nothing is started behind `close`."""
        self.is_closed = False
        self.has_answered = False
        """Ever: it does start."""

    def ask(self, task: object, parts: Sequence[bytes] = ()) -> Any:
        """What the program makes of the task and of these bytes. Raises what it raised, or
        `HelperDied`. Functions in the task that only this process has come back as they are."""
        process = self.start()
        head, kept = _packed(task)
        try:
            answer = _exchange(process, [head, *parts])
        except (OSError, EOFError):
            _end(process)
            raise HelperDied from None
        except BaseException:  # what is left of this answer must not be taken for the next one
            _end(process)
            raise
        self.has_answered = True
        told = _Unpickler(answer, kept).load()
        if isinstance(told, BaseException):
            raise told
        return told

    def close(self) -> None:
        """What is asked now dies, and whatever is asked from now on."""
        with self._lock:
            self.is_closed = True
            if self._process is not None:
                _end(self._process)

    def start(self) -> subprocess.Popen[bytes]:
        """Unless it runs; the first question does it, too."""
        with self._lock:
            if self.is_closed:
                raise HelperDied
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    process_group=0,  # Ctrl-C is not for it; priorities count within a session
                )
                if self._finalizer is not None:
                    self._finalizer.detach()
                self._finalizer = weakref.finalize(self, _end, self._process)
            return self._process


def _exchange(process: subprocess.Popen[bytes], parts: Sequence[bytes]) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(sum(map(len, parts)).to_bytes(SIZE_BYTES, "little"))
    for part in parts:
        process.stdin.write(part)
    process.stdin.flush()
    size = int.from_bytes(process.stdout.read(SIZE_BYTES), "little")
    answer = process.stdout.read(size)
    if not answer or len(answer) < size:
        raise EOFError
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


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
    def __init__(self, data: bytes, kept: Sequence[object]) -> None:
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
    take_long_turns()
    gc.disable()  # JSON has no cycles
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    while head := source.read(SIZE_BYTES):
        told = _told(answer, source.read(int.from_bytes(head, "little")))
        target.write(len(told).to_bytes(SIZE_BYTES, "little") + told)
        target.flush()
        del told
        gc.collect(0)  # errors have, and are new


def _told(answer: Callable[[Any, bytes], object], question: bytes) -> bytes:
    stream = io.BytesIO(question)
    try:
        told = answer(pickle.load(stream), stream.read())
    except MemoryError:
        raise  # ends this process, which is what makes room
    except TermgenError as error:
        told = error
    except Exception as error:  # the top of this process: a bug of ours, shown where it is asked
        told = RuntimeError(f"{type(error).__name__} in a helper:\n{traceback.format_exc()}")
    return pickle.dumps(told, protocol=pickle.HIGHEST_PROTOCOL)
