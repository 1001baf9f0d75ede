"""Long prompts become tokens in a process of their own, `text_program.py`.

A chat is rendered twice, compared, and encoded up to three times, most of it under Python's lock;
of a megabyte that takes a second, and the tokens of it tens of milliseconds to be freed. For a
server, which takes prompts from anybody, all that is done elsewhere: one prompt after the other,
with a lower priority, so that others' streams go on. `InputProcessor` asks it in one of the
`PromptThreads`, so that the event loop does not wait.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from termgen.client import ChatPrompt, FillPrompt, Prompt, prompt_chars
from termgen.errors import EngineDeadError
from termgen.system.helper_process import (
    HelperClosed,
    HelperFault,
    HelperProcess,
    no_process,
    refusal,
)

PROGRAM = Path(__file__).with_name("text_program.py")
LONG_PROMPT_CHARS = 4096
"""Shorter ones take a millisecond or two, which is what asking takes."""
LIMIT_S = 60.0
"""Where a core is free, a megabyte takes a second at worst, and a body has eight at most unless the
server is set otherwise."""


def is_long(prompt: Prompt) -> bool:
    """Whether making tokens of it takes so long that others would notice. A template that came with
    a request has processes of its own already."""
    if isinstance(prompt, ChatPrompt):
        return prompt.chat_template is None and prompt_chars(prompt) >= LONG_PROMPT_CHARS
    return isinstance(prompt, (str, FillPrompt)) and prompt_chars(prompt) >= LONG_PROMPT_CHARS


class TextProcess:
    """Tokenises for one model. Any thread may ask; they wait for each other."""

    def __init__(self, source: Path, max_model_len: int, vocab_size: int) -> None:
        self._helper = HelperProcess(PROGRAM, str(source), str(max_model_len), str(vocab_size))

    def start(self) -> bool:
        """Begin to start it; the first prompt waits for what is still missing then. False where
        the system allows no process: prompts are then to be tokenised here."""
        try:
            self._helper.start()
        except HelperFault:
            return False
        return True

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool, has_to_fit: bool) -> list[int]:
        """What `InputProcessor.tokenize` gives, or raises."""
        asked = prompt, add_special_tokens, has_to_fit
        try:
            ids: bytes = self._helper.ask(asked, limit_s=LIMIT_S)
        except HelperClosed:
            raise EngineDeadError("the engine was shut down") from None
        except HelperFault as fault:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise refusal(fault, "prompt", "tokenised", param=param) from None
        found = array("I")
        found.frombytes(ids)
        return found.tolist()

    def close(self) -> None:
        self._helper.close()


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
