"""Checks of finished answers against schemas that no grammar enforces in full.

A `SchemaChecker` asks a helper process (`schema_program`): the library that checks is native code,
and the schema is a client's. The engine has one; its process starts with the first such schema.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from termgen.client import TokenDelta
from termgen.engine.grammar.schema_program import CheckTask
from termgen.errors import EngineDeadError, RequestError
from termgen.system.daemon_threads import DaemonThreads
from termgen.system.helper_process import (
    HelperClosed,
    HelperFault,
    HelperMissing,
    HelperProcess,
    HelperTooSlow,
    no_process,
)
from termgen.vocabulary.request import is_whole
from termgen.vocabulary.token_mask import AnswerCheck

PROGRAM = Path(__file__).with_name("schema_program.py")
BUILD_S = 2.0
"""Limit of the first look at a schema."""
TOO_SLOW = "could not be checked: it took too long"
CHECK_S = 0.5
"""Limit of the check of an answer: others wait meanwhile, so it is exceeded once a schema."""
MAX_SLOW = 256
"""Schemas that are remembered as too slow."""


@dataclass(frozen=True, slots=True)
class SchemaCheck:
    """A schema, and who checks answers against it."""

    schema: str
    checker: SchemaChecker

    def errors(self, answer: str) -> tuple[str, ...]:
        """What the answer does not satisfy, one line each; empty if it does. Waits for a process:
        an event loop calls `submit` instead."""
        return self.checker.errors(self.schema, answer)

    def submit(self, answer: str) -> Future[tuple[str, ...]]:
        """`errors` in the checker's own thread."""
        return self.checker.submit(partial(self.errors, answer))


class SchemaChecker:
    """Owns the helper process, and a thread that waits for it. Any thread may call it."""

    def __init__(self) -> None:
        self._helper = HelperProcess(PROGRAM)
        self._threads = DaemonThreads(1, "schema-check")
        self._slow: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def check_of(self, schema: str) -> SchemaCheck:
        """Raises RequestError if answers could not be checked against the schema."""
        if self._is_slow(schema):
            raise _too_much("time")
        try:
            self._helper.ask(CheckTask(schema), limit_s=BUILD_S)
        except HelperClosed:
            raise EngineDeadError("the engine was shut down") from None
        except HelperMissing:
            raise no_process("schema", "tried out") from None
        except HelperFault as fault:
            raise _too_much("time" if isinstance(fault, HelperTooSlow) else "memory") from None
        return SchemaCheck(schema, self)

    def errors(self, schema: str, answer: str) -> tuple[str, ...]:
        if self._is_slow(schema):
            return (TOO_SLOW,)
        try:
            found: tuple[str, ...] = self._helper.ask(CheckTask(schema, answer), limit_s=CHECK_S)
        except HelperTooSlow:
            with self._lock:
                self._slow[schema] = None
                if len(self._slow) > MAX_SLOW:
                    self._slow.popitem(last=False)
            return (TOO_SLOW,)
        except HelperFault:
            return ("could not be checked: the process that does it ended",)
        return found

    def submit(self, work: Callable[[], tuple[str, ...]]) -> Future[tuple[str, ...]]:
        """Run `work`, which does not raise, after all that was submitted before."""
        future: Future[tuple[str, ...]] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():  # the client may have gone
                future.set_result(work())

        with self._lock:
            self._threads.submit(run)
        return future

    def _is_slow(self, schema: str) -> bool:
        with self._lock:
            return schema in self._slow

    def close(self) -> None:
        """End the process. Nothing may be checked afterwards."""
        self._helper.close()
        self._threads.close()


def _too_much(what: str) -> RequestError:
    return RequestError(
        f"answers would take too much {what} to be checked against it", code="invalid_schema"
    )


async def with_checks(
    deltas: AsyncIterator[TokenDelta], check: AnswerCheck
) -> AsyncGenerator[TokenDelta, None]:
    """The deltas of one request; the last one of each answer that has ended by itself says what its
    text does not satisfy."""
    texts: dict[int, list[str]] = {}
    async for delta in deltas:
        texts.setdefault(delta.index, []).append(delta.text)
        if is_whole(delta.finish_reason, delta.stop_reason):
            answer = "".join(texts.pop(delta.index))
            errors = await asyncio.wrap_future(check.submit(answer))
            delta = replace(delta, schema_errors=errors)
        yield delta
