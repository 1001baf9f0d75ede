"""What a chat can do beside asking: files, code blocks, thoughts, sampling, forms of answers.

The dialogue is made on top of it; the chat screen binds the keys and reads the commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual import on, work
from textual.content import Content

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import RequestError
from termgen.tui.chat.links_panel import LinkChoice, LinksPanel, links_of
from termgen.tui.chat.panels import HistoryPanel, SamplingPanel, SystemPromptPanel
from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.saved.chat_records import restored_params
from termgen.tui.chat.state import attachments as files
from termgen.tui.chat.state.answer_form import KINDS, as_markdown, form_words, parse_form
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.state.conversation import Conversation, Turn, sampling_params
from termgen.tui.chat.state.sampling_fields import FIELDS, changes, without
from termgen.tui.chat.widgets.chat_rows import AFTER_ROLE, BEFORE_ROLE, attachment_words
from termgen.tui.chat.widgets.entries import FOLD_ROLE, AnswerEntry, NoticeEntry, QuestionEntry
from termgen.tui.chat.widgets.messages import EntryClicked, LargePaste
from termgen.tui.chat.widgets.prompt import Prompt
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.canvas_screen import ThemedScreen
from termgen.tui.paint.code_panel import COPY_ROLE, CodeBlock
from termgen.tui.paint.links import open_in_browser
from termgen.tui.paint.markdown import code_blocks
from termgen.tui.paint.sanitize import clean, clean_line
from termgen.tui.paint.spans import cut
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams


class ChatTools(ThemedScreen):
    prompt: Prompt
    transcript: Transcript
    status: Canvas
    # Kept by `compose`, not looked up: an answer may end when the screen has lost them already.
    conversation: Conversation
    autosave: Autosave
    _cursor: Turn | None
    _entries: dict[Turn, tuple[QuestionEntry, AnswerEntry]]

    def __init__(self, client: EngineClient, ui: UIConfig) -> None:
        super().__init__()
        self._client = client
        self._ui = ui
        self._own_params, self._defaults = self._defaults_of_model()
        self._params = self._defaults
        self.attached: tuple[Attachment, ...] = ()
        """Files that go with the next question."""
        self._label = ""
        """Title of the prompt, when it is not for a new question."""

    def apply_palette(self) -> None:
        super().apply_palette()
        self.transcript.set_palette(self.palette)

    def run_tool(self, name: str, argument: str) -> bool:
        """Whether the command is one of these."""
        if name in KINDS:
            self._set_form(name, argument)
        elif name == "code":
            number = self._block_number(argument)
            if number is not None:
                self.action_copy_block(number)
        elif name == "save":
            self._save_block(*argument.partition(" ")[::2])
        elif name == "attach":
            self._attach_file(argument)
        elif name == "sampling":
            self.action_sampling()
        elif name == "links":
            self.action_links()
        else:
            return False
        return True

    def note(self, text: str) -> None:
        """Add a notice of termgen to the transcript."""
        self.transcript.add(NoticeEntry(text))

    def copy(self, text: str) -> None:
        """Copy to the clipboard. A remote answer may hold lone surrogates."""
        self.app.copy_to_clipboard(text.encode(errors="replace").decode())

    def refuse(self, reason: object) -> None:
        self.notify(clean_line(str(reason)), severity="error", markup=False)

    # thoughts and code blocks

    def action_fold_thoughts(self) -> None:
        """Fold or unfold the thoughts of the marked answer, else of the last with any."""
        for turn in self._turns_meant():
            entry = self._entries[turn][1]
            if entry.has_thoughts:
                self._fold(entry)
                return
        which = "no answer has" if self._cursor is None else "this answer has no"
        self.notify(f"{which} thoughts to show", severity="warning")

    def _turns_meant(self) -> Iterable[Turn]:
        """The marked turn; without one, all turns from the last to the first."""
        return (self._cursor,) if self._cursor is not None else reversed(self.conversation.turns)

    def _fold(self, entry: AnswerEntry) -> None:
        entry.fold_thoughts()
        self.transcript.update(entry)

    @on(EntryClicked)
    def _entry_clicked(self, message: EntryClicked) -> None:
        """What can be clicked acts; anything else of a message marks it. The keys stay where they
        were."""
        (text, role), entry = message.span, message.entry
        if not isinstance(entry, AnswerEntry | QuestionEntry):
            return
        if role in (BEFORE_ROLE, AFTER_ROLE):
            self.switch_turn(entry.turn, 1 if role == AFTER_ROLE else -1)
        elif role == FOLD_ROLE and isinstance(entry, AnswerEntry):
            self._fold(entry)
        elif role == COPY_ROLE:
            number = int(text[1 : text.index("]")])
            self._copy(number, _blocks(entry.turn))
        elif " " in role:
            self._open_link(role.partition(" ")[2])
        else:
            self.mark(None if entry.turn is self._cursor else entry.turn)

    def mark(self, turn: Turn | None) -> None:
        raise NotImplementedError

    def switch_turn(self, turn: Turn, by: int) -> None:
        raise NotImplementedError

    def action_links(self) -> None:
        """List the links of the marked answer, else of the last with any."""
        answers = (as_markdown(turn.form, turn.answer) for turn in self._turns_meant())
        links = next((found for answer in answers if (found := links_of(clean(answer)))), None)
        if links is None:
            which = "no answer has a link" if self._cursor is None else "this answer has no link"
            self.notify(which, severity="warning")
            return

        def use(choice: LinkChoice | None) -> None:
            if choice is None:
                return
            if choice.is_copied:
                self.copy(choice.address)
                self.notify(f"copied: {choice.address}", markup=False)
            else:
                self._open_link(choice.address)

        self.app.push_screen(LinksPanel(links), use)

    @work(group="links")
    async def _open_link(self, address: str) -> None:
        """It is said in full: the text of a link may look like another address."""
        if self.app.is_web:
            self.app.open_url(address)
        elif not await asyncio.to_thread(open_in_browser, address):
            self.app.copy_to_clipboard(address)
            self.notify(f"no browser here; copied: {address}", markup=False)
            return
        self.notify(f"opening {address}", markup=False)

    def action_choose_block(self) -> None:
        """The only one, else one of a list."""
        if len(self.last_blocks()) <= 1:
            self.action_copy_block(1)
        else:
            self.prompt.put_away()
            self.prompt.type("/code ")

    def action_copy_block(self, number: int) -> None:
        """Copy a code block of the last answer. number: counted from 1."""
        self._copy(number, self.last_blocks())

    def _copy(self, number: int, blocks: Sequence[CodeBlock]) -> None:
        block = self._block(number, blocks)
        if block is not None:
            self.copy(block.code)
            self.notify(f"code block {number} copied")

    def last_blocks(self) -> list[CodeBlock]:
        answered = (turn for turn in reversed(self.conversation.turns) if turn.answer)
        turn = next(answered, None)
        return _blocks(turn) if turn is not None else []

    def _block(self, number: int, blocks: Sequence[CodeBlock]) -> CodeBlock | None:
        if 1 <= number <= len(blocks):
            return blocks[number - 1]
        has = f"{len(blocks)} code block{'s' if len(blocks) > 1 else ''}" if blocks else "no code"
        self.notify(f"the last answer has {has}", severity="warning")
        return None

    def _block_number(self, text: str) -> int | None:
        """The only block needs no number."""
        if not text and len(self.last_blocks()) <= 1:
            return 1
        if text.isascii() and text.isdigit() and len(text) < 5:
            return int(text)
        self.refuse("which code block? They have numbers: /code 2, /save 2 PATH")
        return None

    def _save_block(self, number_text: str, path_text: str) -> None:
        number = self._block_number(number_text)
        block = self._block(number, self.last_blocks()) if number is not None else None
        if block is None:
            return
        if not path_text.strip():
            self.refuse("where to? /save N PATH")
            return
        try:
            path = Path(path_text.strip()).expanduser()
            with path.open("x", encoding="utf-8", errors="replace", newline="") as file:
                file.write(block.code)
        except FileExistsError:
            self.refuse(f"{path_text.strip()} is there already; choose another name")
        except OSError as error:
            self.refuse(f"{path_text.strip()}: {error.strerror}")
        except (ValueError, RuntimeError):
            self.refuse(f"{path_text.strip()} is not a path")
        else:
            self.note(f"Code block {number} is in {path}.")

    # files

    def take_files(self, question: str) -> tuple[Attachment, ...] | None:
        """What goes with a question: what was attached and the files it names. None, and told
        why, if they cannot go."""
        together = self.files_for(question, self.attached)
        if together is not None:
            self.attach(())
        return together

    def files_for(
        self, question: str, attached: Sequence[Attachment]
    ) -> tuple[Attachment, ...] | None:
        """These and the files that the question names, as of now; None if they cannot go."""
        try:
            named = [files.read_file(path) for path in files.mentions(question)]
            together = files.merged([*attached, *named])
            files.check(together)
        except RequestError as error:
            self.refuse(error)
            return None
        return together

    def give_back(self, question: str, attachments: Sequence[Attachment]) -> None:
        """The files of a question that was not answered, but for those that it names."""
        named = files.mentions(question)
        self.attach([file for file in attachments if file.name not in named])

    @on(LargePaste)
    def _pasted(self, message: LargePaste) -> None:
        self._add(files.pasted_file(message.text, (file.name for file in self.attached)))

    def _attach_file(self, argument: str) -> None:
        path = argument.strip("\"'")
        if argument == "off":
            self.attach(())
            self.note("Nothing is attached.")
        elif not path:
            names = ", ".join(attachment_words(file) for file in self.attached)
            self.note(names or "Nothing is attached. `/attach PATH` adds a file.")
        else:
            try:
                self._add(files.read_file(path))
            except RequestError as error:
                self.refuse(error)

    def _add(self, file: Attachment) -> None:
        together = files.merged([*self.attached, file])
        try:
            files.check(together)
        except RequestError as error:
            self.refuse(error)
        else:
            self.attach(together)

    def attach(self, attached: Sequence[Attachment]) -> None:
        """They are shown on the prompt's edge."""
        self.attached = tuple(attached)
        self.label_prompt(self._label)

    def label_prompt(self, label: str) -> None:
        self._label = label
        words = [label] if label else []
        words += [attachment_words(file) for file in self.attached]
        width = max(8, self.prompt.size.width - 4)
        # Content, not markup: a file's name may hold brackets
        self.prompt.border_title = Content(cut("  ".join(words), width)) if words else None

    # what is asked for

    @property
    def form(self) -> StructuredOutputsParams | None:
        """Form that the next answers must have."""
        return self._params.structured_outputs

    def request_changes(self) -> tuple[str, ...]:
        """For the status line."""
        form = [form_words(self.form)] if self.form is not None else []
        told, _ = without(self._params, self._client.model.untold_params)
        left_out = self.conversation.num_left_out
        sent = [f"from turn {left_out + 1}"] if left_out else []
        return (*sent, *form, *changes(told, self._defaults))

    def _set_form(self, command: str, argument: str) -> None:
        if argument in ("", "off"):
            if argument:
                self._set_params(replace(self._params, structured_outputs=None))
            asked = f"Answers are asked for as {form_words(self.form)}." if self.form else ""
            self.note(asked or "Answers may look like anything.")
            return
        try:
            form = parse_form(command, argument)
        except RequestError as error:
            self.refuse(error)
            return
        self._set_params(replace(self._params, structured_outputs=form))
        self.note(f"Answers now follow it: {form_words(form)}. `/{command} off` ends that.")

    def action_sampling(self) -> None:
        def use(params: SamplingParams | None) -> None:
            if params is not None:
                self._set_params(params)

        self.app.push_screen(SamplingPanel(self._params, self._defaults), use)

    def use_defaults(self) -> None:
        """Those of another model; what the user has set stays."""
        kept = {
            name: getattr(self._params, name)
            for name in (*FIELDS, "structured_outputs")
            if getattr(self._params, name) != getattr(self._defaults, name)
        }
        self._own_params, self._defaults = self._defaults_of_model()
        self._params = replace(self._defaults, **kept)

    def _defaults_of_model(self) -> tuple[SamplingParams, SamplingParams]:
        """The model's parameters: its own, and with the user's settings on top."""
        own = self._client.model.default_params
        return sampling_params(own, UIConfig()), sampling_params(own, self._ui)

    def restore_params(self, kept: Mapping[str, Any]) -> None:
        """Those of a chat that is opened; the form of the answers to come stays."""
        base = replace(self._defaults, structured_outputs=self.form)
        self._params = restored_params(kept, base)

    def _set_params(self, params: SamplingParams) -> None:
        self._params = params
        self.save_settings()
        self.status.repaint()

    def set_system_prompt(self, text: str | None) -> None:
        self.conversation.system_prompt = text
        self.save_settings()

    def save_settings(self) -> None:
        """Save the settings, if the chat is saved at all: one without a question is not."""
        if self.conversation.turns:
            self.autosave.save_session(self.conversation, self._params, own=self._own_params)

    def action_edit_system(self) -> None:
        def use(text: str | None) -> None:
            if text is not None:
                self.set_system_prompt(text or None)
                self.notify("system prompt set" if text else "no system prompt")

        self.app.push_screen(SystemPromptPanel(self.conversation.system_prompt or ""), use)

    def action_search_history(self) -> None:
        def use(text: str | None) -> None:
            if text is not None:
                self.prompt.set_text(text)
                self.prompt.focus()

        self.app.push_screen(HistoryPanel(self.prompt.prompts.newest_first()), use)


def _blocks(turn: Turn) -> list[CodeBlock]:
    return code_blocks(as_markdown(turn.form, turn.answer))
