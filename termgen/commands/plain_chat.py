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
from termgen.commands.inline_command import Start, Stop
from termgen.config import UIConfig
from termgen.errors import ContextLengthError, EngineDeadError, TermgenError
from termgen.tools.toolbox import Toolbox
from termgen.vocabulary.model_shelf import ModelShelf

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
/sampling     temperature and the other sampling parameters; /sampling NAME VALUE sets one
/schema       answers as JSON of a schema: /schema FILE or /schema {...}; /schema off ends it
/regex TEXT   answers that match a regular expression; /regex off ends it
/choice A|B   answers that are one of these; /choice off ends it
/model        the models there are; /model NAME changes to one
/mcp          the model's tools; /mcp restart NAME starts their server anew
/export PATH  write this chat to a new file, PATH.md for people or PATH.json; -f PATH replaces one
/save N PATH  write code block N of the last answer to a new file
/help         list these commands
/quit         leave; so do Ctrl-D and Ctrl-C
@FILE in a question sends that text file along; @"a b.txt" is for names with blanks.
A line that ends with a backslash goes on in the next one. Ctrl-C ends an answer that is written."""


def run_plain(
    start: Start,
    stop: Stop,
    ui: UIConfig,
    shelf: ModelShelf,
    *,
    toolbox: Toolbox | None = None,
    sent_names: set[str] | None = None,
) -> int:
    """Chat until the user leaves. sent_names: sampling parameters that go to a server, which has
    its own for the others; `/sampling` changes them. None: all."""
    toolbox = toolbox or Toolbox()
    # Lines are read between runs of the loop, not in a thread, which Ctrl-C could not interrupt.
    with asyncio.Runner() as runner:
        try:
            client = runner.run(start())
            return PlainChat(client, ui, runner.run, shelf, toolbox, sent_names).run()
        finally:
            runner.run(_ended(stop, toolbox))


async def _ended(stop: Stop, toolbox: Toolbox) -> None:
    try:
        await toolbox.close()
    finally:
        await stop()


class PlainChat:
    """Reads one question per line from standard input and prints the answers as plain text."""

    def __init__(
        self,
        client: EngineClient,
        ui: UIConfig,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        shelf: ModelShelf,
        toolbox: Toolbox,
        sent_names: set[str] | None,
    ) -> None:
        from termgen.commands.plain.plain_answer import Lines, PlainTools, say
        from termgen.commands.plain.plain_settings import PlainSettings
        from termgen.tui.chat.state.doubts import Doubts

        self._ui = ui
        self._run = run
        self._say = say
        self._lines = Lines()
        self._tools = PlainTools(toolbox, self._lines)
        self._asked = PlainSettings(
            client, ui, run, shelf=shelf, tools=self._tools, sent_names=sent_names
        )
        self._chat = self._new()
        self._refused: tuple[str, tuple[Attachment, ...]] | None = None
        """The last question, if the context had no room for it."""
        self._commands: dict[str, Callable[[str], object]] = {
            "new": self._begin,
            "system": self._set_system,
            "retry": self._retry,
            "fit": self._fit,
            "compact": self._compact,
            "context": self._show_context,
            "sampling": self._asked.run_sampling,
            **{form: partial(self._asked.run_form, form) for form in ("schema", "regex", "choice")},
            "model": self._asked.run_model,
            "mcp": self._asked.run_tools,
            "export": self._export,
            "save": self._save,
            "help": lambda _: self._say(PLAIN_HELP),
        }
        self._doubts = Doubts((*self._commands, "quit"))

    @property
    def _client(self) -> EngineClient:
        return self._asked.client

    def run(self) -> int:
        self._say(f"Chat with {self._client.model.model_id}. /help lists the commands.")
        self._run(self._asked.start_tools())
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
        from termgen.commands.plain.plain_answer import StoppedError
        from termgen.tools.text import result_chars
        from termgen.tui.chat.state.conversation import AnswerState

        turn = self._chat.ask(question, now_s=time.perf_counter())
        turn.attachments, turn.form = files, self._asked.form
        self._chat.result_chars = result_chars(self._client.model.max_model_len)
        try:
            stopped = self._run(self._answer(turn))
        except EngineDeadError:
            raise
        except ContextLengthError as error:
            self._chat.remove(turn)
            self._refuse(question, files, error)
            return
        except StoppedError:
            stopped = True
        except TermgenError as error:
            self._say(f"No answer: {error}")
            if turn.rounds:  # what tools gave stays
                turn.end(AnswerState.FAILED)
            else:
                self._chat.remove(turn)
            return
        self._refused = None
        turn.end(AnswerState.STOPPED if stopped else AnswerState.DONE)
        if stopped:
            self._say("Stopped.")
        self._say_form(turn)

    async def _answer(self, turn: Turn) -> bool:
        """Print the answer; returns whether Ctrl-C ended it."""
        from termgen.commands.plain.plain_answer import PlainRounds
        from termgen.tools.calls import MAX_ROUNDS

        params, is_labelled = self._asked.params_to_send(), sys.stdin.isatty()
        rounds = PlainRounds(self._client, self._chat, self._tools, is_labelled=is_labelled)
        if not await rounds.answer(turn, params):
            words = f"The model has called tools {MAX_ROUNDS} times in a row"
            self._say(f"{words}; its answer came without them.")
        return rounds.is_stopped

    def _say_form(self, turn: Turn) -> None:
        from termgen.tui.chat.state.answer_form import fits, form_words

        if turn.form is not None:
            is_whole = fits(turn.form, turn.answer, turn.stats.finish_reason)
            self._say(f"{form_words(turn.form)}: {'complete' if is_whole else 'not complete'}.")

    # -- a context that is full ------------------------------------------------------------

    def _say_change(self, change: Change, *, is_full: bool = True) -> None:
        from termgen.tui.chat.state.context_policy import FULL, cut_notice

        if change.is_one:
            is_new = change.after.summary != change.before.summary
            why = FULL if is_full else ""
            self._say("\n".join(filter(None, cut_notice(change.after, is_new=is_new, why=why))))

    async def _write(self, wish: SummaryWish) -> Draft:
        from termgen.commands.plain.plain_answer import write_summary

        return await write_summary(self._client, wish, self._asked.params)

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
            self._client,
            self._chat,
            max_tokens=self._asked.params.max_tokens,
            with_tools=self._tools.offers.offerer(self._chat, self._client.model),
            with_calls=self._tools.offers.shower(self._chat, self._client.model),
            is_asked=False,
        )
        change = self._run(context.compact(self._write, focus))
        if change.is_one:
            cut_holder(path, is_asked=False).cut = change.after
            self._say_change(change, is_full=False)
        else:
            self._say(f"There is no summary: {change.fault}. Everything is sent as before.")

    def _show_context(self, _argument: str) -> None:
        from termgen.tui.chat.state.context_meter import MeterReader, meter_lines

        read = partial(MeterReader().read, max_tokens=self._asked.params.max_tokens)
        self._say("\n".join(meter_lines(self._run(read(self._client, self._chat)))))

    # -- files ----------------------------------------------------------------------------

    def _export(self, argument: str) -> None:
        from termgen.tui.chat.saved import chat_records as records

        if not self._chat.turns:
            self._say("There is nothing to export yet.")
            return
        params = self._asked.params
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
            line = self._lines.read()
            if not line:
                if sys.stdin.isatty():
                    print()
                return "\n".join(lines) or None
            line = line.rstrip("\r\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
