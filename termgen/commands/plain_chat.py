"""`termgen chat --plain`: a chat in lines of text.

For screen readers and terminals that cannot draw: its output moves no cursor and sets no colour.
Nothing is saved. Called by `cli` only.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from termgen.commands.exit_codes import OK
from termgen.commands.inline_command import REQUEST_ID, Interrupt, Start, Stop, stream_answer
from termgen.config import UIConfig
from termgen.errors import ConfigError, ContextLengthError, EngineDeadError, TermgenError

if TYPE_CHECKING:
    from termgen.client import EngineClient
    from termgen.tui.chat.state.attachments import Attachment
    from termgen.tui.chat.state.conversation import Conversation, Turn
    from termgen.tui.chat.state.full_context import Change
    from termgen.tui.chat.state.summary import Draft, SummaryWish

PLAIN_HELP = """\
/new          begin another chat; the model forgets this one
/system TEXT  instructions for the model from here on; /system alone shows them, /system off removes
/retry        answer the last question again
/fit          when the chat has filled the context, go on without the oldest turns; /fit ends keeps
              the first one, too, /fit summarise has them summarised, /fit off sends all again
/compact      have the older turns summarised now; /compact TEXT says what matters most
/context      what the context holds
/export PATH  write this chat to a new file, PATH.md for people or PATH.json; -f PATH replaces one
/save N PATH  write code block N of the last answer to a new file
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
        self._chat = self._new()
        self._refused: tuple[str, tuple[Attachment, ...]] | None = None
        """The last question, if the context had no room for it."""
        self._may_write = True
        """No summary was made for the present question yet."""
        self._commands: dict[str, Callable[[str], object]] = {
            "new": self._begin,
            "system": self._set_system,
            "retry": self._retry,
            "fit": self._fit,
            "compact": self._compact,
            "context": self._show_context,
            "export": self._export,
            "save": self._save,
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
        self._ask(line, tuple(files))

    def _new(self) -> Conversation:
        from termgen.tui.chat.state.context_policy import ContextPolicy
        from termgen.tui.chat.state.conversation import Conversation

        chat = Conversation(system_prompt=self._ui.system_prompt)
        chat.policy = ContextPolicy(self._ui.context_policy)
        return chat

    def _begin(self, _argument: str) -> None:
        self._chat, self._refused = self._new(), None
        self._say("A new chat.")

    def _set_system(self, argument: str) -> None:
        if argument:
            self._chat.system_prompt = None if argument == "off" else argument
        self._say(f"System prompt: {self._chat.system_prompt or 'none'}")

    def _retry(self, _argument: str) -> None:
        if not self._chat.turns:
            self._say("There is no answer to replace yet.")
            return
        turn = self._chat.turns[-1]
        self._chat.remove(turn)
        self._ask(turn.question, turn.attachments)

    def _ask(self, question: str, files: tuple[Attachment, ...] = ()) -> None:
        from termgen.tui.chat.state.conversation import AnswerState

        if sys.stdin.isatty():
            self._say("Answer:")
        turn = self._chat.ask(question, now_s=time.perf_counter())
        turn.attachments = files
        try:
            stopped = self._run(self._answer(turn))
        except EngineDeadError:
            raise
        except ContextLengthError as error:
            self._chat.remove(turn)
            self._refuse(question, files, error)
        except TermgenError as error:
            self._chat.remove(turn)
            self._say(f"No answer: {error}")
        else:
            self._refused = None
            turn.end(AnswerState.STOPPED if stopped else AnswerState.DONE)
            if stopped:
                self._say("Stopped.")

    # -- a context that is full ------------------------------------------------------------

    async def _answer(self, turn: Turn) -> bool:
        """Print the answer; returns whether Ctrl-C ended it."""
        from termgen.tui.chat.state.full_context import cut_holder
        from termgen.tui.paint.inline import PlainWriter

        path = self._chat.turns
        holder = cut_holder(path) if len(path) > 1 else turn
        held, self._may_write = holder.cut, True
        try:
            await self._make_room(refused=False)
            while True:
                writer = PlainWriter(sys.stdout, is_cleaned=True)
                messages = self._chat.prompt().messages
                try:
                    turn.answer, stopped = await stream_answer(
                        self._client, messages, self._ui, writer, stats=turn.stats
                    )
                    return stopped
                except ContextLengthError:
                    if not await self._make_room(refused=True):
                        raise
        except ContextLengthError:
            holder.cut = held  # it did not help
            raise

    async def _make_room(self, *, refused: bool) -> bool:
        """Leave more out, with a line. False if there is nothing more, or it is not wanted."""
        from termgen.tui.chat.state.full_context import make_room

        change = await make_room(
            self._client,
            self._chat,
            max_tokens=self._ui.max_tokens,
            write=self._write if self._may_write else None,
            refused=refused,
        )
        if change is None:
            return False
        if change.fault:
            self._say(f"The model's summary is not used: {change.fault}. /compact tries again.")
        self._say_change(change)
        return change.is_one

    def _say_change(self, change: Change, *, is_full: bool = True) -> None:
        from termgen.tui.chat.state.context_policy import FULL, cut_notice

        if change.is_one:
            is_new = change.after.summary != change.before.summary
            why = FULL if is_full else ""
            self._say("\n".join(filter(None, cut_notice(change.after, is_new=is_new, why=why))))

    async def _write(self, wish: SummaryWish) -> Draft:
        from termgen.tui.chat.state.context_policy import turns_words
        from termgen.tui.chat.state.conversation import sampling_params
        from termgen.tui.chat.state.summary import read_draft

        self._may_write = False
        which = turns_words(wish.first, wish.last)
        self._say(f"The model summarises {which}. Ctrl-C stops it.")
        params = sampling_params(self._client.model.default_params, self._ui)
        with Interrupt(self._client):
            return await read_draft(
                self._client, wish, params, request_id=REQUEST_ID, show=lambda *_: None
            )

    def _fit(self, argument: str) -> None:
        from termgen.tui.chat.state.context_policy import CHOSEN_WORDS, FIT_USAGE, FIT_WORDS

        policy = FIT_WORDS.get(argument)
        if policy is None:
            self._say(FIT_USAGE)
            return
        self._chat.choose(policy)
        self._say(CHOSEN_WORDS[policy])
        if self._refused is not None and argument != "off":
            self._ask(*self._refused)

    def _compact(self, focus: str) -> None:
        from termgen.tui.chat.state.full_context import FullContext, cut_holder

        path = self._chat.turns
        if len(path) < 2:
            self._say("There is nothing to summarise yet.")
            return
        self._chat.is_summary_off = False
        context = FullContext(
            self._client, self._chat, max_tokens=self._ui.max_tokens, is_asked=False
        )
        change = self._run(context.compact(self._write, focus))
        if change.is_one:
            cut_holder(path, is_asked=False).cut = change.after
            self._say_change(change, is_full=False)
        else:
            self._say(f"There is no summary: {change.fault}. Everything is sent as before.")

    def _show_context(self, _argument: str) -> None:
        from termgen.tui.chat.state.context_meter import MeterReader, meter_lines

        read = partial(MeterReader().read, max_tokens=self._ui.max_tokens)
        self._say("\n".join(meter_lines(self._run(read(self._client, self._chat)))))

    # -- files ----------------------------------------------------------------------------

    def _export(self, argument: str) -> None:
        from termgen.tui.chat.saved import chat_records as records
        from termgen.tui.chat.state.conversation import sampling_params

        if not self._chat.turns:
            self._say("There is nothing to export yet.")
            return
        params = sampling_params(self._client.model.default_params, self._ui)
        try:
            wanted = records.parse_export(argument)
            session = records.session_record(self._chat, params)
            if wanted.form == "md":
                text = records.as_markdown(session, self._chat)
            else:
                turns = [records.turn_record(self._chat, turn) for turn in self._chat.turns]
                text = records.as_json(session, turns)
            replaced = records.write_new(wanted, text)
        except TermgenError as error:
            self._say(f"Not exported: {error}")
            return
        over = ", over the file that was there" if replaced else ""
        self._say(f"Exported to {wanted.path}{over}.")

    def _save(self, argument: str) -> None:
        from termgen.tui.chat.saved.chat_records import ExportWish, user_path, write_new
        from termgen.tui.paint.markdown import code_blocks

        number, _, path = argument.partition(" ")
        answers = [turn.answer for turn in self._chat.turns if turn.answer]
        blocks = code_blocks(answers[-1]) if answers else []
        if not number.isascii() or not number.isdigit() or not path.strip():
            self._say("Not saved: which block, and where to? /save N PATH")
        elif not 1 <= int(number[:5]) <= len(blocks):
            self._say(f"Not saved: the last answer has {len(blocks)} code blocks")
        else:
            try:
                wanted = user_path(path)
                if wanted.exists():
                    self._say(f"Not saved: {wanted} is there already; choose another name")
                    return
                write_new(ExportWish(wanted, "code"), blocks[int(number) - 1].code)
            except (TermgenError, ValueError) as error:
                self._say(f"Not saved: {error}")
            else:
                self._say(f"Code block {number} is in {wanted}.")

    def _refuse(
        self, question: str, files: tuple[Attachment, ...], error: ContextLengthError
    ) -> None:
        """Say that a question was too long, and what can be done."""
        from termgen.tui.chat.state.context_policy import ContextPolicy
        from termgen.tui.chat.state.full_context import MessageTooLong

        self._refused = question, files
        if isinstance(error, MessageTooLong):
            self._say(f"This message is too long. {error}")
            return
        may_fit = self._chat.turns and self._chat.policy is ContextPolicy.ASK
        fits = ", /fit leaves out the oldest turns" if may_fit else ""
        self._say(f"The chat has filled the model's context: /new begins another one{fits}.")

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
