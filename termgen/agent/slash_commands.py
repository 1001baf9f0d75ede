"""The chat's slash commands that a client can use: typed at the beginning of a prompt, and answered
without the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from acp.schema import AvailableCommand, AvailableCommandInput, UnstructuredCommandInput

from termgen.agent.full_context import fit
from termgen.tools.toolbox import Toolbox
from termgen.tui.chat.state.commands import COMMANDS, SlashCommand
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.tool_offers import described

SERVED = ("system", "fit", "rename", "mcp")


class Commanded(Protocol):
    """What the commands act on: a session."""

    conversation: Conversation
    toolbox: Toolbox

    def save(self) -> None: ...

    def save_turns(self, turns: Sequence[Turn]) -> None: ...

    def rename(self, title: str) -> None: ...


def available() -> list[AvailableCommand]:
    """The commands as a client lists them."""
    return [
        AvailableCommand(
            name=command.name,
            description=command.help.replace("`", ""),
            input=AvailableCommandInput(UnstructuredCommandInput(hint=command.argument)),
        )
        for command in COMMANDS
        if command.name in SERVED
    ]


async def run_command(session: Commanded, command: SlashCommand, argument: str) -> str:
    """Do what it asks for; returns the words for the user."""
    if command.name == "system":
        return _system(session, argument)
    if command.name == "fit":
        words, changed = fit(session.conversation, argument)
        session.save()
        session.save_turns(changed)
        return words
    if command.name == "rename":
        return _rename(session, argument)
    if command.name == "mcp":
        return await _mcp(session.toolbox, argument)
    names = ", ".join(f"/{name}" for name in SERVED)
    return f"/{command.name} is for the screen of termgen chat; here there are {names}."


def _system(session: Commanded, argument: str) -> str:
    chat = session.conversation
    if argument:
        chat.system_prompt = None if argument == "off" else argument
        session.save()
    return f"System prompt: {chat.system_prompt or 'none'}"


def _rename(session: Commanded, argument: str) -> str:
    if not session.conversation.turns:
        return "A chat has a name from its first question on."
    if argument:
        session.rename(argument)
    return f"This chat is called: {session.conversation.title}"


async def _mcp(toolbox: Toolbox, argument: str) -> str:
    what, _, name = argument.partition(" ")
    provider = toolbox.provider(name.strip())
    if toolbox.is_empty:
        return "There are no tools: neither --tools files, nor an MCP server of the client's."
    if not argument:
        await toolbox.refresh()
        return _as_block(described(toolbox))
    if what != "restart" or provider is None:
        names = ", ".join(one.name for one in toolbox.providers)
        return f"/mcp lists the tools, /mcp restart NAME restarts one: {names}"
    await provider.restart()
    return _as_block(described(toolbox, provider))


def _as_block(text: str) -> str:
    """Lines that markdown must not join."""
    return "\n".join(f"    {line}" for line in text.splitlines())
