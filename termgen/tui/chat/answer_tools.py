"""Tools for an answer: fold its thoughts, follow its links, copy and save its code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from termgen.tui.chat.asking import Settings
from termgen.tui.chat.dialogue import Dialogue
from termgen.tui.chat.links_panel import LinkChoice, LinksPanel, links_of
from termgen.tui.chat.state.answer_form import as_markdown
from termgen.tui.chat.state.conversation import Turn
from termgen.tui.chat.view import ChatView
from termgen.tui.chat.widgets.call_rows import CALL_ROLE
from termgen.tui.chat.widgets.chat_rows import AFTER_ROLE, BEFORE_ROLE
from termgen.tui.chat.widgets.entries import FOLD_ROLE, AnswerEntry, QuestionEntry
from termgen.tui.chat.widgets.messages import EntryClicked
from termgen.tui.paint.code_panel import COPY_ROLE, CodeBlock
from termgen.tui.paint.links import open_in_browser
from termgen.tui.paint.markdown import code_blocks
from termgen.tui.paint.sanitize import clean, clean_line

_CALL = CALL_ROLE[CALL_ROLE.index(" ") :]
SERVER_DOES_NOT_SAY = "This server does not say which tokens of an answer were guessed."
GUESSES_NOTHING = "This engine guesses no tokens. With `--speculative-config ngram` it does."


class AnswerTools:
    def __init__(self, view: ChatView, dialogue: Dialogue) -> None:
        self._view = view
        self._dialogue = dialogue

    def click(self, message: EntryClicked) -> None:
        """Act on what was clicked in a message: a branch, thoughts, a code block or a link. A click
        elsewhere marks the message. The focus stays."""
        (text, role), entry = message.span, message.entry
        if not isinstance(entry, AnswerEntry | QuestionEntry):
            return
        if role in (BEFORE_ROLE, AFTER_ROLE):
            self._dialogue.switch_turn(entry.turn, 1 if role == AFTER_ROLE else -1)
        elif role == FOLD_ROLE and isinstance(entry, AnswerEntry):
            entry.fold_thoughts(text)
            self._view.transcript.update(entry)
        elif _CALL in role and isinstance(entry, AnswerEntry):
            entry.fold(int(role.partition(_CALL)[2]))
            self._view.transcript.update(entry)
        elif role == COPY_ROLE:
            number = int(text[1 : text.index("]")])
            self._copy(number, _blocks(entry.turn))
        elif " " in role:
            self._open_link(role.partition(" ")[2])
        else:
            self._dialogue.mark(None if entry.turn is self._dialogue.marked else entry.turn)

    def tint_drafts(self, settings: Settings, argument: str) -> None:
        """`/guessed`: tint the parts of answers that came as guessed tokens, or no longer."""
        if argument not in ("", "on", "off"):
            self._view.warn(f"`/guessed` takes on or off, not {clean_line(argument)!r:.40}")
            return
        view, model = self._view, settings.client.model
        is_on = argument == "on" or (not argument and not view.tints_drafts)
        entries = [e for e in view.transcript.entries if isinstance(e, AnswerEntry)]
        if is_on and not (model.num_drafts or any(entry.has_drafted for entry in entries)):
            is_remote = model.memory is None
            view.note(SERVER_DOES_NOT_SAY if is_remote else GUESSES_NOTHING)
            return
        view.tints_drafts = is_on
        for entry in entries:
            if entry.has_drafted:
                view.transcript.update(entry)
        view.notify("guessed text is tinted" if is_on else "guessed text is no longer tinted")

    def _turns(self) -> Iterable[Turn]:
        """The marked turn; without one, all turns from the last to the first."""
        marked = self._dialogue.marked
        return (marked,) if marked is not None else reversed(self._dialogue.conversation.turns)

    def copy_answer(self) -> None:
        """Copy the marked answer, else the last."""
        marked = self._dialogue.marked
        answer = marked.answer if marked else self._dialogue.conversation.last_answer
        if not answer:
            self._view.warn("no answer to copy yet")
            return
        self._view.copy(answer, "answer")

    def fold_thoughts(self) -> None:
        """Fold or unfold the thoughts and calls of the marked answer, else of the last with
        any."""
        for turn in self._turns():
            entry = self._dialogue.answer_entry(turn)
            if entry.has_folds:
                entry.fold()
                self._view.transcript.update(entry)
                return
        which = "no answer has" if self._dialogue.marked is None else "this answer has no"
        self._view.warn(f"{which} thoughts to show")

    # -- links -----------------------------------------------------------------------------

    def list_links(self) -> None:
        """List the links of the marked answer, else of the last with any."""
        answers = (as_markdown(turn.form, turn.answer) for turn in self._turns())
        links = next((found for answer in answers if (found := links_of(clean(answer)))), None)
        if links is None:
            is_any = self._dialogue.marked is None
            self._view.warn("no answer has a link" if is_any else "this answer has no link")
            return

        def use(choice: LinkChoice | None) -> None:
            if choice is None:
                return
            if choice.is_copied:
                self._view.copy(choice.address, choice.address)
            else:
                self._open_link(choice.address)

        self._view.screen.app.push_screen(LinksPanel(links), use)

    def _open_link(self, address: str) -> None:
        self._view.start_worker("links", self._opening, address)

    async def _opening(self, address: str) -> None:
        """Open a link, and show its address in full: its text may look like another one."""
        app = self._view.screen.app
        if app.is_web:
            app.open_url(address)
        elif not await asyncio.to_thread(open_in_browser, address):
            self._view.copy(address, f"no browser here; {address}")
            return
        self._view.notify(f"opening {address}")

    # -- code blocks -----------------------------------------------------------------------

    def last_blocks(self) -> list[CodeBlock]:
        """The code blocks of the last answer."""
        turns = reversed(self._dialogue.conversation.turns)
        turn = next((turn for turn in turns if turn.answer), None)
        return _blocks(turn) if turn is not None else []

    def choose_block(self) -> None:
        """Copy the only code block of the last answer, or begin `/code` to choose one."""
        if len(self.last_blocks()) <= 1:
            self.copy_block(1)
        else:
            self._view.prompt.put_away()
            self._view.prompt.type("/code ")

    def copy_block(self, number: int) -> None:
        """Copy a code block of the last answer. number: counted from 1."""
        self._copy(number, self.last_blocks())

    def copy_command(self, argument: str) -> None:
        """`/code N`."""
        number = self._number(argument)
        if number is not None:
            self.copy_block(number)

    def save_command(self, argument: str) -> None:
        """`/save N PATH`: write a code block of the last answer to a new file."""
        number_text, _, path_text = argument.partition(" ")
        number = self._number(number_text)
        block = self._block(number, self.last_blocks()) if number is not None else None
        if block is None:
            return
        if not path_text.strip():
            self._view.refuse("where to? /save N PATH")
            return
        try:
            path = Path(path_text.strip()).expanduser()
            with path.open("x", encoding="utf-8", errors="replace", newline="") as file:
                file.write(block.code)
        except FileExistsError:
            self._view.refuse(f"{path_text.strip()} is there already; choose another name")
        except OSError as error:
            self._view.refuse(f"{path_text.strip()}: {error.strerror}")
        except (ValueError, RuntimeError):
            self._view.refuse(f"{path_text.strip()} is not a path")
        else:
            self._view.note(f"Code block {number} is in {path}.")

    def _number(self, text: str) -> int | None:
        """A block's number as typed; the only block needs none. None, with the reason shown, for
        other text."""
        if not text and len(self.last_blocks()) <= 1:
            return 1
        if text.isascii() and text.isdigit() and len(text) < 5:
            return int(text)
        self._view.refuse("which code block? They have numbers: /code 2, /save 2 PATH")
        return None

    def _copy(self, number: int, blocks: Sequence[CodeBlock]) -> None:
        block = self._block(number, blocks)
        if block is not None:
            self._view.copy(block.code, f"code block {number}")

    def _block(self, number: int, blocks: Sequence[CodeBlock]) -> CodeBlock | None:
        if 1 <= number <= len(blocks):
            return blocks[number - 1]
        has = f"{len(blocks)} code block{'s' if len(blocks) > 1 else ''}" if blocks else "no code"
        self._view.warn(f"the last answer has {has}")
        return None


def _blocks(turn: Turn) -> list[CodeBlock]:
    return code_blocks(as_markdown(turn.form, turn.answer))
