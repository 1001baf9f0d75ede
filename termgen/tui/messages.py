"""Messages between the widgets and the screens."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message


@dataclass
class PromptSubmitted(Message):
    """The user pressed Enter on a prompt that is not blank."""

    text: str


@dataclass
class PromptEdited(Message):
    """The prompt's text changed. A later one replaces an earlier one that was not handled yet."""

    text: str

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, PromptEdited)


@dataclass
class ModelsWanted(Message):
    """The user asked for the list of models, or for one by its name."""

    name: str


@dataclass
class StartupFailed(Message):
    """The engine could not be started."""

    error: Exception
