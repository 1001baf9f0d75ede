"""The threads in which prompts become tokens, so that an event loop does not.

Used by `AsyncEngine`. What may take long has threads of its own and so takes none from others: a
long prompt waits for another process, and a template that may never end for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from termgen.client import ChatPrompt, Prompt
from termgen.engine.text.text_process import is_long
from termgen.errors import EngineDeadError
from termgen.system.helper_process import no_process

TEMPLATE_THREADS = 2

Made = TypeVar("Made")


class PromptThreads:
    """One engine's threads for templates and long texts."""

    def __init__(self) -> None:
        self._template = ThreadPoolExecutor(TEMPLATE_THREADS, "termgen-template")
        self._long = ThreadPoolExecutor(1, "termgen-text")
        self._is_over = False

    async def run(
        self, prompt: Prompt, work: Callable[[], Made], *, renders_elsewhere: bool
    ) -> Made:
        """The result of work that makes tokens of this prompt.

        renders_elsewhere: it waits for a process that renders its template. Raises EngineDeadError
        if its turn comes after `shutdown`.
        """
        threads = None
        if renders_elsewhere:
            threads = self._template
        elif is_long(prompt):
            threads = self._long
        loop = asyncio.get_running_loop()
        if self._is_over:
            raise _dead()
        try:
            working = loop.run_in_executor(threads, self._begin, work)
        except RuntimeError:  # the system has no thread left
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise no_process("prompt", "tokenised", param=param) from None
        return await working

    def _begin(self, work: Callable[[], Made]) -> Made:
        if self._is_over:
            raise _dead()
        return work()

    def shutdown(self) -> None:
        """Nothing new is begun."""
        self._is_over = True
        for threads in (self._template, self._long):
            threads.shutdown(wait=False)


def _dead() -> EngineDeadError:
    return EngineDeadError("the engine was shut down")
