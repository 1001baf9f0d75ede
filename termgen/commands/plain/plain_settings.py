"""Commands of `termgen chat --plain` that set what a question is asked with: parameters, form,
model and tools. Imported by `plain_chat` once a chat begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from typing import Any

from termgen.client import EngineClient
from termgen.commands.plain.plain_answer import PlainTools, say
from termgen.config import UIConfig
from termgen.errors import RequestError, TermgenError
from termgen.library.progress import TerminalProgress
from termgen.tui.chat.asked.asked_with import AskedWith
from termgen.tui.chat.state.sampling_fields import FIELDS, field_text
from termgen.tui.chat.state.tool_offers import START_WAIT_S, described
from termgen.tui.paint.formatting import plural
from termgen.tui.paint.sanitize import clean_line
from termgen.vocabulary.memory_ledger import size
from termgen.vocabulary.model_shelf import ModelChoice, ModelShelf
from termgen.vocabulary.sampling_params import SamplingParams

SAMPLING_USAGE = "/sampling NAME VALUE sets one, /sampling NAME its default, /sampling off all"
NO_TOOLS = (
    "There are no tools. --tools files offers the files below the working folder, [mcp.NAME] in "
    "the config file an MCP server."
)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class PlainSettings(AskedWith):
    """What the questions of a chat in lines are asked with, and the commands that change it."""

    def __init__(
        self,
        client: EngineClient,
        ui: UIConfig,
        run: Run,
        *,
        shelf: ModelShelf,
        tools: PlainTools,
        sent_names: set[str] | None,
    ) -> None:
        """sent_names: parameters that are sent to a server, which has its own for the others; None:
        all are sent."""
        super().__init__(client, ui)
        self._run = run
        self._shelf = shelf
        self._tools = tools
        self._sent_names = sent_names
        self._first_names = frozenset(sent_names or ())
        self._said_left_out: tuple[str, ...] = ()

    def params_to_send(self) -> SamplingParams:
        """The parameters that the server knows. A line names the others, once."""
        params, left_out = self.sent()
        if left_out and left_out != self._said_left_out:
            say(f"Left out, as the server knows no {', '.join(left_out)}.")
        self._said_left_out = left_out
        return params

    # -- /sampling, /schema, /regex, /choice ---------------------------------------------------

    def run_sampling(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        try:
            if argument == "off":
                self.reset()
                self._send_only(self._first_names)
            elif argument:
                self.set_field(name, text.strip())
                names = self._names_but(name)
                self._send_only({*names, name} if text else names)
        except RequestError as error:
            say(f"Not set: {error}. {SAMPLING_USAGE}.")
            return
        shown = [name] if argument and argument != "off" else list(FIELDS)
        say("\n".join(map(self._field_line, shown)))
        if not argument:
            say(f"{SAMPLING_USAGE}.")

    def _names_but(self, name: str) -> set[str]:
        return {one for one in self._sent_names or () if one != name or one in self._first_names}

    def _send_only(self, names: Collection[str]) -> None:
        if self._sent_names is not None:
            self._sent_names.clear()
            self._sent_names.update(names)

    def _field_line(self, name: str) -> str:
        if self._sent_names is not None and name not in self._sent_names:
            return f"{name}: the server's own"
        value = field_text(self.params, name) or "none"
        is_default = getattr(self.params, name) == getattr(self.defaults, name)
        return f"{name}: {value}{'' if is_default else ', set'}"

    def run_form(self, command: str, argument: str) -> None:
        try:
            say(self.choose_form(command, argument).replace("`", ""))
        except TermgenError as error:
            say(f"Not set: {error}")

    # -- /model ----------------------------------------------------------------------------------

    def run_model(self, name: str) -> None:
        try:
            if name:
                self._run(self._change_model(name))
            else:
                say("\n".join(map(_choice_line, self._run(self._shelf.choices()))))
        except TermgenError as error:
            say(f"The model is not changed: {error}")

    async def _change_model(self, name: str) -> None:
        choice = await self._shelf.look_up(name)
        if choice.problem:
            say(f"The model is not changed: {choice.problem}")
            return
        with TerminalProgress(plain=True) as progress:
            if not choice.is_here:
                await self._shelf.fetch(name, progress)
            switch = await self._shelf.switch(name, progress)
        self.set_client(switch.client)
        if switch.failure is not None:
            say(f"{clean_line(name)} did not start: {switch.failure}")
        say(f"{switch.client.model.model_id} answers now.")

    # -- /mcp -------------------------------------------------------------------------------------

    async def start_tools(self) -> None:
        """Start where tools come from, and say what there is."""
        toolbox = self._tools.toolbox
        if not toolbox.is_empty:
            toolbox.start()
            await toolbox.wait(START_WAIT_S)
            say(f"{plural(len(toolbox.offered), 'tool')}; /mcp lists them.")

    def run_tools(self, argument: str) -> None:
        toolbox = self._tools.toolbox
        what, _, name = argument.partition(" ")
        provider = toolbox.provider(name.strip())
        if toolbox.is_empty:
            say(NO_TOOLS)
        elif not argument:
            self._run(toolbox.refresh())
            say(described(toolbox))
        elif what != "restart" or provider is None:
            names = ", ".join(one.name for one in toolbox.providers)
            say(f"/mcp lists the tools, /mcp restart NAME restarts one: {names}")
        else:
            self._run(provider.restart())
            say(described(toolbox, provider))


def _choice_line(choice: ModelChoice) -> str:
    """A model of the list: its name, and what there is to know of it."""
    parts = [clean_line(choice.name)]
    if choice.is_current:
        parts.append("answers now")
    if choice.is_best:
        parts.append("best for this machine")
    if choice.size_bytes:
        parts.append(size(choice.size_bytes))
    if not choice.is_here:
        parts.append("to be fetched")
    if choice.is_base:
        parts.append("continues text, has no chat template")
    if choice.problem:
        parts.append(clean_line(choice.problem))
    return ", ".join(parts)
