"""Slash commands of the chat: their names, their help and how a line is read as one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlashCommand:
    name: str
    help: str
    argument: str = ""


COMMANDS = (
    SlashCommand("clear", "forget the conversation, keep the system prompt"),
    SlashCommand("new", "a new chat, with the system prompt it started with"),
    SlashCommand("system", "show or set the system prompt (`/system off` removes it)", "TEXT"),
    SlashCommand("copy", "copy the last answer"),
    SlashCommand("retry", "answer the last question again"),
    SlashCommand("model", "choose another model, or `/model NAME`", "NAME"),
    SlashCommand("engine", "watch the engine work"),
    SlashCommand("theme", "choose a colour theme, or `/theme NAME`", "NAME"),
    SlashCommand("help", "keys and commands"),
    SlashCommand("quit", "leave termgen"),
)
_BY_NAME = {command.name: command for command in COMMANDS}


def parse(text: str) -> tuple[SlashCommand, str] | None:
    """The command and its argument, or None for text that is meant for the model.

    Only a first line like `/word` is a command: `/etc/passwd` or `//` is text.
    """
    name, _, argument = text.strip().partition(" ")
    if "\n" in name:
        return None
    command = _BY_NAME.get(name[1:]) if name.startswith("/") else None
    return (command, argument.strip()) if command else None


def looks_like_command(text: str) -> bool:
    """One word behind a slash: a mistyped command rather than a message."""
    word = text.strip()
    return word.startswith("/") and word[1:].isalpha()


def matching(text: str) -> list[SlashCommand]:
    """Commands that what has been typed may become."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:])]
