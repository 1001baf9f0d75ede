"""`termgen chat --plain`: a chat in lines of text.

For screen readers and terminals that cannot draw: its output moves no cursor and sets no colour.
Nothing is saved. Called by `cli` only.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from termgen.commands.exit_codes import OK
from termgen.commands.inline_command import Start, Stop, stream_answer, system_message
from termgen.config import UIConfig
from termgen.errors import ConfigError, ContextLengthError, EngineDeadError, TermgenError

if TYPE_CHECKING:
    from termgen.client import EngineClient

PLAIN_HELP = """\
/new          begin another chat; the model forgets this one
/system TEXT  instructions for the model from here on; /system alone shows them, /system off removes
/retry        answer the last question again
/fit          when the chat has filled the context, go on without the oldest turns
/help         list these commands
/quit         leave; so do Ctrl-D and Ctrl-C
@FILE in a question sends that text file along; @"a b.txt" is for names with blanks.
A line that ends with a backslash goes on in the next one. Ctrl-C ends an answer that is written."""


def run_plain(start: Start, stop: Stop, ui: UIConfig) -> int:
    """Chat until the user leaves."""
    # Lines are read between runs of the loop, not in a thread, which Ctrl-C could not interrupt.
    with asyncio.Runner() as runner:
        try:
            client = runner.run(start())
            return PlainChat(client, ui, runner.run).run()
        finally:
            runner.run(stop())


class PlainChat:
    """Reads one question per line from standard input and prints the answers as plain text."""

    def __init__(
        self, client: EngineClient, ui: UIConfig, run: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        from termgen.tui.chat.state.doubts import Doubts

        self._client = client
        self._ui = ui
        self._run = run
        self._system = system_message(ui.system_prompt)
        self._turns: list[dict[str, str]] = []
        """Questions and answers in turn."""
        self._refused = ""
        """The last question, if the context had no room for it."""
        self._fits_itself = False
        """The oldest turns are left out when the context is full."""
        self._commands: dict[str, Callable[[str], object]] = {
            "new": self._begin,
            "system": self._set_system,
            "retry": self._retry,
            "fit": self._fit,
            "help": lambda _: self._say(PLAIN_HELP),
        }
        self._doubts = Doubts((*self._commands, "quit"))

    def run(self) -> int:
        self._say(f"Chat with {self._client.model.model_id}. /help lists the commands.")
        while (line := self._read()) is not None:
            name, _, argument = line.strip().partition(" ")
            if name == "/quit":
                break
            if name.startswith("/") and (command := self._commands.get(name[1:])) is not None:
                command(argument.strip())
            elif line.strip():
                self._question(line)
        return OK

    def _question(self, line: str) -> None:
        from termgen.tui.chat.state import attachments

        if doubt := self._doubts.about(line):
            self._say(f"Not sent: {doubt}. The same line once more is sent as it is.")
            return
        try:
            files = [attachments.read_file(name) for name in attachments.mentions(line)]
            attachments.check(files)
        except TermgenError as error:
            self._say(f"Not sent: {error}")
            return
        if files:
            self._say(f"With {', '.join(file.name for file in files)}.")
        self._ask(attachments.with_files(line, files))

    def _begin(self, _argument: str) -> None:
        self._turns.clear()
        self._refused, self._fits_itself = "", False
        self._system = system_message(self._ui.system_prompt)
        self._say("A new chat.")

    def _set_system(self, argument: str) -> None:
        if argument:
            self._system = system_message("" if argument == "off" else argument)
        shown = self._system[0]["content"] if self._system else "none"
        self._say(f"System prompt: {shown}")

    def _retry(self, _argument: str) -> None:
        if not self._turns:
            self._say("There is no answer to replace yet.")
            return
        question = self._turns[-2]["content"]
        del self._turns[-2:]
        self._ask(question)

    def _fit(self, _argument: str) -> None:
        self._fits_itself = True
        self._say("In a full context the oldest turns are left out.")
        if self._refused:
            self._ask(self._refused)

    def _ask(self, question: str) -> None:
        from termgen.tui.paint.inline import PlainWriter

        asked = {"role": "user", "content": question}
        if sys.stdin.isatty():
            self._say("Answer:")
        writer = PlainWriter(sys.stdout, is_cleaned=True)
        messages = [*self._system, *self._turns, asked]
        try:
            text, stopped = self._run(stream_answer(self._client, messages, self._ui, writer))
        except EngineDeadError:
            raise
        except ContextLengthError:
            self._leave_out(question)
        except TermgenError as error:
            self._say(f"No answer: {error}")
        else:
            self._refused = ""
            self._turns += [asked, {"role": "assistant", "content": text}]
            if stopped:
                self._say("Stopped.")

    def _leave_out(self, question: str) -> None:
        """Ask again without the oldest turn, if that is wanted and there is one."""
        self._refused = question
        if self._fits_itself and self._turns:
            del self._turns[:2]
            self._say("The oldest turn is no longer sent: the context is full.")
            self._ask(question)
            return
        words = "The chat has filled the model's context: /new begins another one"
        fits = "" if self._fits_itself or not self._turns else ", /fit leaves out the oldest turns"
        self._say(f"{words}{fits}.")

    def _read(self) -> str | None:
        """One question; None at the end of the input."""
        lines: list[str] = []
        while True:
            if sys.stdin.isatty():
                print("You: " if not lines else "more: ", end="", flush=True)
            try:
                line = sys.stdin.readline()
            except UnicodeDecodeError:
                raise ConfigError("standard input is not UTF-8 text") from None
            if not line:
                if sys.stdin.isatty():
                    print()
                return "\n".join(lines) or None
            line = line.rstrip("\r\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _say(self, text: str) -> None:
        from termgen.tui.paint.sanitize import clean

        print(clean(text), flush=True)
