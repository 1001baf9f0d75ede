"""The engine's heartbeat, felt from the event loop: is it stepping, or idle and responsive?

A busy engine proves that it lives by the steps that land. An idle one is asked to do nothing at
all, between two steps: a question it does not answer counts as work that makes no progress.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from termgen.engine.loop.core import EngineCore
from termgen.errors import EngineError

STALL_SECONDS = 60.0
"""Work queued and no step landed for this long: the engine counts as stuck."""

ANSWER_SECONDS = 0.5
"""How long a question may wait: a step in flight comes first, and may take longer."""


class Pulse:
    """One engine's. Never more than one question is open, however often it is felt."""

    def __init__(self) -> None:
        self._question: Future[None] | None = None

    def why_stuck(self, core: EngineCore) -> str | None:
        """By what is known without asking."""
        silent_s = (time.perf_counter_ns() - core.last_progress_ns) / 1e9
        is_asked = self._question is not None and not self._question.done()
        if not (core.has_work or is_asked) or silent_s < STALL_SECONDS:
            return None
        return f"the engine stands still: nothing has come of its work for {silent_s:.0f} s"

    async def feel(self, core: EngineCore) -> str | None:
        """Why the engine can serve nobody; None when it answers, or has lately made progress."""
        if self._question is None or self._question.done():
            self._question = core.call(lambda: None)
        answer = asyncio.wrap_future(self._question)
        await asyncio.wait((answer,), timeout=ANSWER_SECONDS)
        if not answer.done():
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())
            return self.why_stuck(core)
        error = None if answer.cancelled() else answer.exception()
        return str(error) if isinstance(error, EngineError) else None
