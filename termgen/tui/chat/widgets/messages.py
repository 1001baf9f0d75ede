"""Messages between the widgets and the screens."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from termgen.tui.chat.saved.chat_db import SessionSummary


@dataclass
class PromptSubmitted(Message):
    """The user pressed Enter on a prompt that is not blank."""

    text: str


@dataclass
class QueueWanted(Message):
    """Something is to be done with the messages that wait: "send" them, or "take back" the last."""

    what: str


@dataclass
class PromptEdited(Message):
    """The prompt's text or size changed. A later one replaces an earlier one not handled yet."""

    text: str

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, PromptEdited)


@dataclass
class LargePaste(Message):
    """More was pasted than the prompt shows."""

    text: str


@dataclass
class EntryClicked(Message):
    """A click on the transcript, unless it ended a selection."""

    entry: object
    span: tuple[str, str]
    """The text under the pointer and its role."""


@dataclass
class SessionWish(Message):
    """An action of the user in the list of chats: one of open, rename, name (with its `title`),
    delete, undo, search, pin; or of its width: wider, narrower, pulled."""

    what: str
    session: SessionSummary | None
    title: str = ""


@dataclass
class ModelsWanted(Message):
    """The user asked for the list of models, or for one by its name."""

    name: str
