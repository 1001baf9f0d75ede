"""How the next question is asked: by which model, with which parameters, form and files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from textual.content import Content

from termgen.client import EngineClient
from termgen.config import UIConfig
from termgen.errors import RequestError
from termgen.tui.chat.asked.asked_with import AskedWith
from termgen.tui.chat.panels import SamplingPanel
from termgen.tui.chat.state import attachments as files
from termgen.tui.chat.state import documents
from termgen.tui.chat.state.attachments import Attachment
from termgen.tui.chat.view import ChatView
from termgen.tui.chat.widgets.chat_rows import attachment_words
from termgen.tui.chat.widgets.file_tokens import Chip, FileTokens
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.spans import cut
from termgen.vocabulary.sampling_params import SamplingParams


class Settings(AskedWith):
    """The same in a chat with a screen."""

    def __init__(
        self, view: ChatView, client: EngineClient, ui: UIConfig, *, on_change: Callable[[], None]
    ) -> None:
        super().__init__(client, ui)
        self._view = view
        self._on_change = on_change

    def set(self, params: SamplingParams) -> None:
        super().set(params)
        self._on_change()

    def set_form(self, command: str, argument: str) -> None:
        """`/schema`, `/regex`, `/choice`."""
        try:
            words = self.choose_form(command, argument)
        except RequestError as error:
            self._view.refuse(error)
        else:
            self._view.note(words)

    def open_panel(self) -> None:
        def use(params: SamplingParams | None) -> None:
            if params is not None:
                self.set(params)

        self._view.screen.app.push_screen(SamplingPanel(self.params, self.defaults), use)


class QuestionFiles:
    """Files that go with the next question, and the title of the prompt, which shows them."""

    def __init__(self, view: ChatView, client: Callable[[], EngineClient]) -> None:
        self._view = view
        self._tokens = FileTokens(view.start_worker, client, on_counted=self.show_title)
        self.attached: tuple[Attachment, ...] = ()
        self._label = ""
        """First words of the title, when the prompt is not for a new question."""
        self._reading: set[str] = set()
        """Documents that are being read."""

    def unread(self, question: str) -> list[str]:
        """Documents that the question names, and that take time to read."""
        return [name for name in files.mentions(question) if documents.is_unread(name)]

    async def read_documents(self, names: Sequence[str]) -> None:
        """Read them beside the screen, so that `take` finds their text, or what is wrong."""
        self._reading |= set(names)
        self.show_title()
        try:
            for name in names:
                with suppress(RequestError):
                    await asyncio.to_thread(files.read_file, name)
        finally:
            self._reading -= set(names)
            self.show_title()

    def take(self, question: str) -> tuple[Attachment, ...] | None:
        """The attached files and those that the question names; none is attached any more.

        None, with the reason shown, if they cannot be sent.
        """
        together = self.read(question, self.attached)
        if together is not None:
            self.attach(())
        return together

    def read(self, question: str, attached: Sequence[Attachment]) -> tuple[Attachment, ...] | None:
        """These files, and those that the question names as they are now. None, with the reason
        shown, if they cannot be sent."""
        try:
            named = [files.read_file(path) for path in files.mentions(question)]
            together = files.merged([*attached, *named])
            files.check(together)
        except RequestError as error:
            self._view.refuse(error)
            return None
        return together

    def give_back(self, question: str, attachments: Sequence[Attachment]) -> None:
        """Attach the files of a question that was not answered, but for those that it names."""
        named = files.mentions(question)
        self.attach([file for file in attachments if file.name not in named])

    def add_pasted(self, text: str) -> None:
        self._add(files.pasted_file(text, (file.name for file in self.attached)))

    def run_command(self, argument: str) -> None:
        """`/attach`: show, add or drop files."""
        path = argument.strip("\"'")
        if argument == "off":
            self.attach(())
            self._view.note("Nothing is attached.")
        elif not path:
            names = ", ".join(attachment_words(file.name, file.num_bytes) for file in self.attached)
            self._view.note(names or "Nothing is attached. `/attach PATH` adds a file.")
        elif documents.is_unread(path):
            self._view.start_worker("files", self._read_and_add, path)
        else:
            self._add_file(path)

    async def _read_and_add(self, path: str) -> None:
        await self.read_documents([path])
        self._add_file(path)

    def _add_file(self, path: str) -> None:
        try:
            self._add(files.read_file(path))
        except RequestError as error:
            self._view.refuse(error)

    def _add(self, file: Attachment) -> None:
        together = files.merged([*self.attached, file])
        try:
            files.check(together)
        except RequestError as error:
            self._view.refuse(error)
        else:
            self.attach(together)

    def attach(self, attached: Sequence[Attachment]) -> None:
        """Attach these files and no others."""
        self.attached = tuple(attached)
        self.show_title(self._label)

    def show_title(self, label: str | None = None) -> None:
        """Show the label, a new one if it is given, and the files on the prompt's edge."""
        if label is not None:
            self._label = label
        prompt = self._view.prompt
        words = [self._label] if self._label else []
        chips = [Chip(file.name, file.num_bytes, attached=file) for file in self.attached]
        attached = {file.name for file in self.attached}
        chips += [
            Chip(name, *files.version_of(name))
            for name in files.mentions(prompt.text)
            if name not in attached and name not in self._reading
        ]
        self._tokens.count(chips)
        words += [attachment_words(c.name, c.num_bytes, self._tokens.of(c)) for c in chips]
        words += [f"▤ {clean_line(name)} is read …" for name in sorted(self._reading)]
        width = max(8, prompt.size.width - 4)
        # Content, not markup: a file's name may hold brackets
        prompt.border_title = Content(cut("  ".join(words), width)) if words else None
