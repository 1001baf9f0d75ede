"""Tokenises long prompts in a helper process, `text_program.py`.

A chat is rendered twice, compared, and encoded up to three times, mostly under the GIL; a megabyte
takes a second, and freeing its tokens tens of milliseconds. A server, which accepts prompts from
anyone, does all that in another process: one prompt after another, with a lower priority, so that
other streams continue. `InputProcessor` uses it in one of the `PromptThreads`, so that the event
loop does not wait.
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
from termgen.vocabulary.request import TurnEnds

PROGRAM = Path(__file__).with_name("text_program.py")
LONG_PROMPT_CHARS = 4096
"""Shorter prompts take a millisecond or two, as does using the helper process."""
LIMIT_S = 60.0
"""With a free core a megabyte takes a second at worst, and the default limit of a body is 8 MiB."""

TEMPLATE_THREADS = 2


def is_long(prompt: Prompt) -> bool:
    """True if tokenising the prompt takes long. False for a request's own template, which has
    processes of its own."""
    if isinstance(prompt, ChatPrompt):
        return prompt.chat_template is None and prompt_chars(prompt) >= LONG_PROMPT_CHARS
    return isinstance(prompt, (str, FillPrompt)) and prompt_chars(prompt) >= LONG_PROMPT_CHARS


class TextProcess:
    """Tokenises for one model. Thread-safe: prompts are processed one after another."""

    def __init__(self, source: Path, max_model_len: int, vocab_size: int) -> None:
        self._helper = HelperProcess(PROGRAM, str(source), str(max_model_len), str(vocab_size))

    def start(self) -> bool:
        """Begin to start the process; the first prompt waits until it is ready. False if the system
        allows no process: prompts must then be tokenised in this one."""
        try:
            self._helper.start()
        except HelperFault:
            return False
        return True

    def read(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool,
        has_to_fit: bool,
        marks_turns: bool,
        keep: int | None = None,
    ) -> tuple[list[int], TurnEnds]:
        """The result of `InputProcessor.read`, or its exception."""
        asked = prompt, add_special_tokens, has_to_fit, marks_turns, keep
        try:
            answer: bytes = self._helper.ask(asked, limit_s=LIMIT_S)
        except HelperClosed:
            raise EngineDeadError("the engine was shut down") from None
        except HelperFault as fault:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise refusal(fault, "prompt", "tokenised", param=param) from None
        found = array("I")
        found.frombytes(answer)
        numbers = found.tolist()
        num_ends = len(TurnEnds._fields)
        return numbers[num_ends:], TurnEnds(*numbers[:num_ends])

    def close(self) -> None:
        self._helper.close()


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
        """Run work that tokenises this prompt.

        renders_elsewhere: the work waits for a helper process that renders the template. Raises
        EngineDeadError if it has not started by `shutdown`.
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
        """Start no further work."""
        self._is_over = True
        for threads in (self._template, self._long):
            threads.shutdown(wait=False)


def _dead() -> EngineDeadError:
    return EngineDeadError("the engine was shut down")
