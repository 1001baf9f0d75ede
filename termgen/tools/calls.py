"""One tool call from its first piece to its result, and the loop of rounds that a question takes.

A round is an answer of the model with calls, and their results. `CallRunner` carries out the calls
of one round: each is checked, shown to the user for approval, and run under a timeout. `run_rounds`
asks the model again until it calls no more, or has had its rounds.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from termgen.client import CallPiece
from termgen.tools.text import MAX_RESULT_CHARS, escaped, for_model, shortened
from termgen.tools.toolbox import Offered, Toolbox, ToolError

MAX_ROUNDS = 16
MAX_CALLS = 32
"""Calls of one round that are carried out."""
MAX_QUOTED_CHARS = 200
ID_CHARS = 9
"""Templates of Mistral's take ids of this length only."""
CANCELLED_WORDS = "The user stopped this call."
DENIED_WORDS = "The user denied this call."
CUT_WORDS = "The call was cut off by the length limit."


class CallState(enum.Enum):
    WRITTEN = "written"
    """The model writes it, or it waits for the calls before it."""
    ASKED = "asked"
    """The user is asked."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DENIED = "denied"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self not in (CallState.WRITTEN, CallState.ASKED, CallState.RUNNING)


class Approval(enum.Enum):
    """The user's word on a call."""

    ONCE = "once"
    ALWAYS = "always"
    DENY = "deny"


@dataclass(slots=True, eq=False)
class ToolCall:
    """A call and what became of it."""

    name: str
    arguments: str = ""
    """Text of the model: JSON, if it kept to that."""
    state: CallState = CallState.WRITTEN
    result: str = ""
    """All of it; what a model is shown is cut."""
    seconds: float = 0.0
    call_id: str = field(default_factory=lambda: uuid4().hex[:ID_CHARS])

    def end(self, state: CallState, result: str) -> None:
        self.state, self.result = state, result

    def cancel(self) -> None:
        """End it, unless it has ended."""
        if not self.state.is_over:
            self.end(CallState.CANCELLED, CANCELLED_WORDS)

    def messages(self, result_chars: int = MAX_RESULT_CHARS) -> tuple[dict[str, Any], ...]:
        """The call as part of an assistant's message, and the message with its result."""
        parsed = arguments_of(self.arguments)
        function = {"name": self.name, "arguments": parsed if parsed is not None else {}}
        call = {"id": self.call_id, "type": "function", "function": function}
        content = for_model(self.result, result_chars)
        if self.state is CallState.FAILED:
            content = f"Error: {content}"
        elif not self.state.is_over:
            content = CANCELLED_WORDS
        answer = {"role": "tool", "tool_call_id": self.call_id, "name": self.name}
        return call, {**answer, "content": content}


def take_pieces(calls: list[ToolCall], pieces: Sequence[CallPiece]) -> None:
    """Add pieces of calls as they arrive."""
    for piece in pieces:
        if piece.name:
            calls.append(ToolCall(piece.name))
        if piece.index < len(calls):
            calls[piece.index].arguments += piece.arguments


def arguments_of(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None where they are not a JSON object."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


Approve = Callable[[ToolCall, Offered], Awaitable[Approval]]
"""Asks the user about a call."""


class CallRunner:
    """Carries out calls. Used on one event loop."""

    def __init__(self, toolbox: Toolbox, approve: Approve, on_change: Callable[[], None]) -> None:
        """on_change: called when the state of a call has changed."""
        self._toolbox = toolbox
        self._approve = approve
        self._on_change = on_change
        self._always: set[str] = set()
        """Tools that may be called without asking, by their functions: one that its server has
        changed since is asked about again. Kept while this object lives."""

    async def run(self, calls: Sequence[ToolCall]) -> None:
        """Bring every call to its end. The user is asked about one after the other; calls that are
        approved run at the same time. Cancelling this cancels them all."""
        running: list[asyncio.Task[None]] = []
        try:
            for number, call in enumerate(calls):
                if number >= MAX_CALLS:
                    call.end(CallState.FAILED, f"no more than {MAX_CALLS} calls at once are run")
                elif (task := await self._begin(call)) is not None:
                    running.append(task)
            for task in running:
                await task
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for call in calls:
                call.cancel()
            self._on_change()

    async def _begin(self, call: ToolCall) -> asyncio.Task[None] | None:
        """The task that runs the call; None where it has ended without one."""
        offered, arguments = self._toolbox.find(call.name), arguments_of(call.arguments)
        if offered is None:
            call.end(CallState.FAILED, f"there is no tool {_quoted(call.name)}")
        elif arguments is None:
            call.end(
                CallState.FAILED, f"the arguments are not a JSON object: {_quoted(call.arguments)}"
            )
        elif await self._is_approved(call, offered):
            call.state = CallState.RUNNING
            self._on_change()
            return asyncio.create_task(self._run(call, offered, arguments))
        self._on_change()
        return None

    async def _is_approved(self, call: ToolCall, offered: Offered) -> bool:
        function = json.dumps(offered.function, sort_keys=True)
        if function in self._always:
            return True
        call.state = CallState.ASKED
        self._on_change()
        word = await self._approve(call, offered)
        if word is Approval.ALWAYS:
            self._always.add(function)
        if word is Approval.DENY:
            call.end(CallState.DENIED, DENIED_WORDS)
        return word is not Approval.DENY

    async def _run(self, call: ToolCall, offered: Offered, arguments: dict[str, Any]) -> None:
        started, limit_s = time.perf_counter(), offered.tool.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                result = await offered.tool.call(arguments)
        except TimeoutError:
            call.end(CallState.FAILED, f"no result came within {limit_s:g} s")
        except ToolError as error:
            call.end(CallState.FAILED, str(error) or "the tool failed without a word")
        except Exception as error:  # a tool may fail in any way, and that must end its call only
            call.end(CallState.FAILED, f"the tool failed: {type(error).__name__}: {error}")
        else:
            call.end(CallState.DONE, result)
        call.seconds = time.perf_counter() - started
        self._on_change()


def _quoted(text: str) -> str:
    return repr(shortened(escaped(text), MAX_QUOTED_CHARS))


async def run_rounds(
    ask: Callable[[bool], Awaitable[Sequence[ToolCall]]],
    run: Callable[[Sequence[ToolCall]], Awaitable[None]],
    *,
    max_rounds: int = MAX_ROUNDS,
) -> bool:
    """Ask until the model calls no tool. False if it had called in all its rounds, so that it was
    asked a last time without tools.

    ask: has one answer written, with tools offered or not, and returns its calls. run: carries out
    the calls of an answer.
    """
    for _ in range(max_rounds):
        calls = await ask(True)
        if not calls:
            return True
        await run(calls)
    await ask(False)
    return False
