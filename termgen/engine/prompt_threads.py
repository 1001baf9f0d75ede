"""The threads in which prompts become tokens, so that an event loop does not.

Used by `AsyncEngine`. What may take long has threads of its own and so takes none from others: a
long prompt waits for another process, and a template that a request brought for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from termgen.client import ChatPrompt, Prompt
from termgen.engine.text_process import is_long

TEMPLATE_THREADS = 2

Made = TypeVar("Made")


class PromptThreads:
    """Of one engine."""

    def __init__(self) -> None:
        self._template = ThreadPoolExecutor(TEMPLATE_THREADS, "termgen-template")
        self._long = ThreadPoolExecutor(1, "termgen-text")

    async def run(self, prompt: Prompt, work: Callable[[], Made]) -> Made:
        """The result of work that makes tokens of this prompt."""
        threads = None
        if isinstance(prompt, ChatPrompt) and prompt.chat_template is not None:
            threads = self._template
        elif is_long(prompt):
            threads = self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def shutdown(self) -> None:
        """Nothing new is begun."""
        for threads in (self._template, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
