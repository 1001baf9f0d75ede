"""Slash commands of the chat: their names, their help and how a line is read as one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlashCommand:
    name: str
    help: str
    argument: str = ""


COMMANDS = (
    SlashCommand("clear", "begin anew, with the system prompt of now"),
    SlashCommand("new", "a new chat, with the system prompt it started with"),
    SlashCommand("system", "show or set the system prompt (`/system off` removes it)", "TEXT"),
    SlashCommand("copy", "copy the last answer"),
    SlashCommand("code", "copy code block N of the last answer", "N"),
    SlashCommand("save", "write code block N to a new file", "N PATH"),
    SlashCommand("prompts", "take a kept prompt; `save NAME` keeps the last question", "WORDS"),
    SlashCommand("attach", "send a text file with the next question (`off`: none)", "PATH"),
    SlashCommand("sampling", "temperature and the other sampling parameters"),
    SlashCommand("schema", "answers as JSON of a schema (`off`: any text)", "FILE|{...}"),
    SlashCommand("regex", "answers that match a regular expression (`off`: any text)", "TEXT"),
    SlashCommand("choice", "answers that are one of these (`off`: any text)", "A|B|C"),
    SlashCommand("fit", "in a full context, go on without the oldest turns", "ends|summarise|off"),
    SlashCommand("compact", "send a summary in place of the older turns", "FOCUS"),
    SlashCommand("context", "what the context holds, and what is done when it is full"),
    SlashCommand("retry", "answer the last question again, beside its answer"),
    SlashCommand("beside", "ask another server the last question too", "NAME|URL MODEL"),
    SlashCommand("edit", "edit the last question; sending it makes a branch"),
    SlashCommand("find", "the questions of this chat, or turns that have these words", "WORDS"),
    SlashCommand("tree", "the branches of this chat, or turns that have these words", "WORDS"),
    SlashCommand("tokens", "how likely the answer's tokens were; branch from one"),
    SlashCommand("guessed", "tint what came as guessed tokens, or no longer", "on|off"),
    SlashCommand("links", "list the links of the last answer, to open or copy one"),
    SlashCommand("sessions", "list, search and open earlier chats"),
    SlashCommand("rename", "give this chat a name", "NAME"),
    SlashCommand("pin", "keep this chat at the top of the list of chats, or no longer"),
    SlashCommand("tag", "add tags to this chat; `-NAME` removes one, alone lists them", "NAME"),
    SlashCommand("fork", "go on in a new chat, with all up to the last question"),
    SlashCommand("export", "write this chat to a file; -f replaces one", "[-f] [md|json] PATH"),
    SlashCommand("import", "open a chat that was exported as JSON", "PATH"),
    SlashCommand("mcp", "list the model's tools, or start their server anew", "restart NAME"),
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


def matching(text: str) -> list[SlashCommand]:
    """Commands that what has been typed may become."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:])]
