"""Renders untrusted chat templates in processes that can be killed.

A template is a program from a request or from a model's files. Nested loops, or one filter with a
large number, can take any time or memory, and a thread cannot be stopped. So templates of requests,
and those of models unless `is_bounded` shows that they end, run in `template_worker` processes,
which are started on demand, reused, and killed when a template takes too long. Thread-safe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from termgen.client import MAX_CHAT_TEMPLATE_CHARS
from termgen.errors import EngineDeadError, OverloadedError, RequestError
from termgen.system.helper_process import no_process

MAX_ANSWER_S = 10.0
"""Wall-clock limit, for a busy machine; otherwise the CPU time limit is reached first."""
MAX_START_S = 60.0
WORKER = "termgen.engine.text.template_worker"
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")

OF_REQUEST = "the chat template of the request"
OF_MODEL = "the model's chat template"


def fault(message: str) -> RequestError:
    return RequestError(message, param="chat_template")


class RequestTemplate:
    """One template, with the interface of `ChatTemplate`."""

    def __init__(self, source: str, workers: TemplateWorkers, *, whose: str = OF_REQUEST) -> None:
        """whose: its name in error messages. Raises RequestError for an invalid template."""
        if whose == OF_REQUEST and len(source) > MAX_CHAT_TEMPLATE_CHARS:
            raise fault(f"chat_template may have at most {MAX_CHAT_TEMPLATE_CHARS} characters")
        self._workers = workers
        self._whose = whose
        self.source = source
        found = self._ask({})
        self.literal_text: str = found["literal_text"]
        self.variables = frozenset(found["variables"])

    def render(self, variables: Mapping[str, Any], *, num_input_chars: int) -> str:
        asked = {"variables": dict(variables), "num_input_chars": num_input_chars}
        text: str = self._ask(asked)["text"]
        return text

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        asked = {"source": self.source, "whose": self._whose, **asked}
        try:
            return self._workers.ask(asked)
        except OverloadedError:
            raise
        except RequestError as error:
            if self._whose == OF_REQUEST:
                raise
            raise RequestError(str(error), param="messages") from None


class TemplateWorkers:
    """The worker processes, as many as threads that ask at the same time."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._is_closed = False
        weakref.finalize(self, _end_all, self._idle)

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Send a question to a worker. Raises RequestError for a fault of the template."""
        line = json.dumps(asked).encode() + b"\n"
        try:
            worker = self._take()
            reply = worker.ask(line, MAX_ANSWER_S)
        except (OSError, RuntimeError):  # the system lacks processes, descriptors or threads
            raise _no_process() from None
        if reply is None:
            whose = asked.get("whose", OF_REQUEST)
            raise fault(f"{whose} takes too long or too much memory")
        self._idle.append(worker)
        if self._is_closed:  # meanwhile
            _end_all(self._idle)
        if "error" in reply:
            raise fault(reply["error"])
        return reply

    def close(self) -> None:
        """End the processes; current renderings finish first."""
        self._is_closed = True
        _end_all(self._idle)

    def _take(self) -> _Worker:
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # empty; checking first would race with other threads
                return _Worker()
            if worker.is_alive:
                return worker
            worker.end()


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self) -> None:
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, "PYTHONPATH": path},  # no keys, in case a template escapes the sandbox
            process_group=0,  # no Ctrl-C
        )
        if self.ask(b"", MAX_START_S) is None:
            raise _no_process()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, line: bytes, timeout_s: float) -> dict[str, Any] | None:
        """The reply to this line; None if the process has ended, or was killed for its time."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:
            self.end()
            raise
        try:
            stdin.write(line)
            stdin.flush()
            answer = stdout.readline()
        except OSError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self.end()
            return None
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # unsent data at the end of the process


def _no_process() -> RequestError:
    return no_process("chat template", "rendered", param="chat_template")


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
