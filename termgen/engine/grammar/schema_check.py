"""Checks of finished answers against schemas that no grammar enforces in full.

A `SchemaChecker` asks a helper process (`schema_program`): the library that checks is native code,
and the schema is a client's. The engine has one; its process starts with the first such schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from termgen.client import TokenDelta
from termgen.engine.grammar.schema_program import CheckTask
from termgen.errors import EngineDeadError, RequestError
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
BUILD_S = 5.0
"""Limit of the first look at a schema, which may have to start Python's part of the library."""
CHECK_S = 1.0
"""Limit of the check of an answer: others wait meanwhile."""


@dataclass(frozen=True, slots=True)
class SchemaCheck:
    """A schema, and who checks answers against it."""

    schema: str
    checker: SchemaChecker

    def errors(self, answer: str) -> tuple[str, ...]:
        """What the answer does not satisfy, one line each; empty if it does. Waits for a process:
        not for an event loop."""
        return self.checker.errors(self.schema, answer)


class SchemaChecker:
    """Owns the helper process. Any thread may call it."""

    def __init__(self) -> None:
        self._helper = HelperProcess(PROGRAM)

    def check_of(self, schema: str) -> SchemaCheck:
        """Raises RequestError if answers could not be checked against the schema."""
        try:
            self._helper.ask(CheckTask(schema), limit_s=BUILD_S)
        except HelperClosed:
            raise EngineDeadError("the engine was shut down") from None
        except HelperMissing:
            raise no_process("schema", "tried out") from None
        except HelperFault as fault:
            what = "time" if isinstance(fault, HelperTooSlow) else "memory"
            raise RequestError(
                f"answers would take too much {what} to be checked against it",
                code="invalid_schema",
            ) from None
        return SchemaCheck(schema, self)

    def errors(self, schema: str, answer: str) -> tuple[str, ...]:
        try:
            found: tuple[str, ...] = self._helper.ask(CheckTask(schema, answer), limit_s=CHECK_S)
        except HelperFault as fault:
            why = "it took too long" if isinstance(fault, HelperTooSlow) else "its process ended"
            return (f"could not be checked: {why}",)
        return found

    def close(self) -> None:
        """End the process. Nothing may be checked afterwards."""
        self._helper.close()


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
            errors = await asyncio.to_thread(check.errors, answer)
            delta = replace(delta, schema_errors=errors)
        yield delta
