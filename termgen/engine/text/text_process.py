"""Long prompts become tokens in a process of their own, `text_program.py`.

A chat is rendered twice, compared, and encoded up to three times, most of it under Python's lock;
of a megabyte that takes a second, and the tokens of it tens of milliseconds to be freed. For a
server, which takes prompts from anybody, all that is done elsewhere: one prompt after the other,
with a lower priority, so that others' streams go on. `InputProcessor` asks, in a thread.
"""

from __future__ import annotations

from array import array
from pathlib import Path

from termgen.client import ChatPrompt, FillPrompt, Prompt, prompt_chars
from termgen.errors import EngineDeadError
from termgen.system.helper_process import HelperClosed, HelperFault, HelperProcess, refusal

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
