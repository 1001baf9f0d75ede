"""A helper program that proves that a grammar compiles, before the engine's process compiles it.

    python -P grammar_prover.py

llguidance is native code: a stack overflow would end the process, an endless loop would hold a
thread for ever. Here it hits a worker, a fork of this program, which is killed by its own timers
and replaced within milliseconds; all forks share the vocabulary, which is read once.
`GrammarCompiler` uses it through `HelperProcess`; the worker does everything that the engine's
process will do with the grammar, on smaller stacks and with less memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # independent of the working directory

import numpy as np

from termgen.engine.grammar.grammar_source import (
    MAX_PROOF_BYTES,
    MAX_PROOF_WALL_S,
    PROOF_STACK_BYTES,
    Proof,
    ProofTask,
    Verdict,
    VocabularyTask,
    brief,
    compile_source,
    read_vocabulary,
    source_of,
)
from termgen.errors import RequestError
from termgen.system.helper_process import answer_questions

MATCHER_STACK_BYTES = 1 << 20
"""Smaller than the stack of any thread that fills a mask or frees a matcher in the engine."""
NUM_STEPS = 4
"""Tokens that are accepted after the first mask."""
EXIT_S = 1.0
"""Time for a worker to end after its pipe is closed."""


class Prover:
    """Owns the worker and the vocabulary. Starts no thread, so that it can fork safely."""

    def __init__(self) -> None:
        self._vocabulary: Any = None
        self._num_words = 0
        self._worker: _Worker | None = None

    def answer(self, task: VocabularyTask | ProofTask, data: bytes) -> Proof:
        """Read the vocabulary in `data`, or prove a grammar. Raises RequestError."""
        if isinstance(task, VocabularyTask):
            self._vocabulary = read_vocabulary(task, data.decode())
            self._num_words = -(-task.num_tokens // 32)
            self._end_worker()  # it has another vocabulary
            self._start_worker()
            return Proof(Verdict.PROVEN)
        if self._vocabulary is None:
            return Proof(Verdict.NO_VOCABULARY)
        worker = self._worker or self._start_worker()
        try:
            source = worker.ask(task)
        except (EOFError, OSError):
            return self._verdict_on(task, self._end_worker())
        if isinstance(source, RequestError):
            raise source
        return Proof(Verdict.PROVEN, source)

    def _start_worker(self) -> _Worker:
        self._worker = _Worker(self._vocabulary, self._num_words)
        return self._worker

    def _end_worker(self) -> int:
        """End the worker; returns its wait status."""
        worker, self._worker = self._worker, None
        return 0 if worker is None else worker.end()

    def _verdict_on(self, task: ProofTask, status: int) -> Proof:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGPROF:
            return Proof(Verdict.SLOW)
        if number in (0, signal.SIGKILL, signal.SIGTERM, signal.SIGALRM):
            # Killed by the system or an administrator, not through the grammar.
            return Proof(Verdict.UNDECIDED)
        name = signal.Signals(number).name
        raise RequestError(
            f"too complex to be compiled: the grammar library ended with {name};"
            " nest less, and use no integer at the edge of 64 bits",
            code="invalid_schema",
        )


class _Worker:
    """A fork of this process that proves one grammar after another."""

    def __init__(self, vocabulary: Any, num_words: int) -> None:
        self._connection, theirs = Pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                self._connection.close()
                _work(theirs, vocabulary, num_words)
            finally:
                os._exit(0)
        theirs.close()

    def ask(self, task: ProofTask) -> str | RequestError:
        """Raises EOFError or OSError when the worker ends instead of answering."""
        self._connection.send(task)
        reply: str | RequestError = self._connection.recv()
        return reply

    def end(self) -> int:
        """Close its pipe, which ends it; returns its wait status."""
        self._connection.close()
        deadline = time.monotonic() + EXIT_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return status
            time.sleep(0.001)
        os.kill(self._pid, signal.SIGKILL)
        return os.waitpid(self._pid, 0)[1]


def _work(connection: Connection[Any, Any], vocabulary: Any, num_words: int) -> None:
    os.close(0)  # the parent's socket: an open copy would hide the parent's end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + MAX_PROOF_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, task.max_cpu_s)  # its signal ends the process
        signal.setitimer(signal.ITIMER_REAL, MAX_PROOF_WALL_S)
        reply = _prove(task, vocabulary, num_words)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(reply)


def _prove(task: ProofTask, vocabulary: Any, num_words: int) -> str | RequestError:
    """Compile the grammar, use it for some tokens and free it; returns its source."""
    compiled: list[Any] = []
    sources: list[str] = []

    def compile_it() -> None:
        of_task = {"is_own_grammar": task.is_own_grammar, "is_strict": task.is_strict}
        sources.append(source_of(task.kind, task.value, **of_task))
        compiled.append(compile_source(sources[0], task.kind, vocabulary))

    try:
        _on_stack(PROOF_STACK_BYTES, compile_it)
        _on_stack(MATCHER_STACK_BYTES, lambda: _follow(compiled.pop(), num_words))
    except RequestError as error:
        return error
    return sources[0]


def _follow(matcher: Any, num_words: int) -> None:
    """Fill masks and accept tokens, as the engine's process will do."""
    bits = np.zeros(num_words, np.int32)
    matcher = matcher.deep_copy()
    for step in range(NUM_STEPS + 1):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise RequestError(
                f"the grammar is too complex: {brief(matcher.get_error())}", code="invalid_schema"
            )
        words = np.flatnonzero(bits)
        if not len(words) or matcher.is_stopped() or step == NUM_STEPS:
            return
        word = int(words[len(words) * step // NUM_STEPS])  # another part of the mask each time
        allowed = int(bits[word]) & 0xFFFFFFFF
        matcher.consume_token(word * 32 + (allowed & -allowed).bit_length() - 1)


def _on_stack(num_bytes: int, work: Callable[[], None]) -> None:
    """Run `work` in a thread with a stack of this size. Raises its exception; a panic of native
    code, which is no Exception, becomes a RequestError."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threading.stack_size(num_bytes)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        if isinstance(error, MemoryError):
            os.abort()
        if isinstance(error, RequestError):
            raise error
        raise RequestError(brief(str(error)), code="invalid_schema") from error


if __name__ == "__main__":
    answer_questions(Prover().answer)
