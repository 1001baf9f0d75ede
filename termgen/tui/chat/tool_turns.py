"""Tools in a chat: which the next request offers, the user's approval of calls, and `/mcp`.

`Dialogue` asks it before each request and hands it the calls of an answer; `CallRunner` of
`termgen.tools` carries them out. Nothing here waits on the loop for a tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from termgen.client import ModelInfo
from termgen.errors import ContextLengthError, EngineError, RequestError
from termgen.tools.calls import Approval, CallRunner, ToolCall
from termgen.tools.request import ToolRequest, tool_request
from termgen.tools.toolbox import Offered, Provider, Toolbox
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.chat.state.full_context import WithTools, unchanged
from termgen.tui.chat.view import ChatView
from termgen.tui.paint.sanitize import clean_line

START_WAIT_S = 10.0
"""Longest wait for tools that are not known yet, before a question is sent without them."""
LOOK_S = 0.1
"""How often to see whether the chat is in front, while a call waits for approval."""
MAX_LISTED = 40
"""Names of tools that are listed of each provider."""


class ToolTurns:
    def __init__(
        self,
        view: ChatView,
        toolbox: Toolbox,
        *,
        say: Callable[[Turn, str], None],
        stop: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """say: shows a notice above a turn. stop: ends the answer whose call the user was asked
        about. on_change: called when the state of a call has changed."""
        self._view = view
        self._toolbox = toolbox
        self._say = say
        self._stop = stop
        self._runner = CallRunner(toolbox, self._approve, on_change)
        self._refusing: set[str] = set()
        """Ids of models that were found to take no tools."""
        self._unenforced: set[str] = set()
        """Ids of models for which the tools' schemas make no grammar."""
        self._made: tuple[object, ModelInfo, ToolRequest] | None = None
        """The last request's tools, model and result: making one takes milliseconds."""

    def start(self) -> None:
        """Start the providers. The screen calls it when it is mounted."""
        if not self._toolbox.is_empty:
            self._toolbox.start()

    async def request_for(
        self, chat: Conversation, turn: Turn, model: ModelInfo, *, offers: bool
    ) -> ToolRequest | None:
        """What the next request of a turn sends; None where no tool is or was ever in this chat.

        offers: False where the model has called enough.
        """
        offered: Sequence[Offered] = ()
        # an answer of a given form has no room for calls
        if offers and turn.form is None and self._takes_tools(turn, model):
            await self._toolbox.wait(START_WAIT_S)
            offered = self._toolbox.offered
        if not offered and not any(each.rounds for each in chat.turns):
            return None
        return self._request(offered, model)

    def shower(self, chat: Conversation, model: ModelInfo) -> WithTools:
        """Puts the calls of the chat, where there are any, into a prompt that offers no tools."""
        if any(turn.rounds for turn in chat.turns):
            return tool_request((), model).prompt
        return unchanged

    def offerer(self, chat: Conversation, model: ModelInfo) -> WithTools:
        """Puts the tools that were offered last into a prompt, and the calls of the chat."""
        if self._made is not None and self._made[1] is model:
            return self._made[2].prompt
        return self.shower(chat, model)

    def _request(self, offered: Sequence[Offered], model: ModelInfo) -> ToolRequest:
        made = self._made
        if made is None or made[0] is not offered or made[1] is not model:
            enforces = model.model_id not in self._unenforced
            request = tool_request(offered, model, enforces=enforces)
            made = self._made = (offered, model, request)
        return made[2]

    def _takes_tools(self, turn: Turn, model: ModelInfo) -> bool:
        """Whether the model can be offered any; says once if not."""
        if self._toolbox.is_empty or model.model_id in self._refusing:
            return False
        if model.reads_calls or model.tool_format.knows_tools:
            return True
        name = clean_line(model.model_id)
        self._refusing.add(model.model_id)
        self._say(turn, f"The chat template of {name} knows no tools; it answers without them.")
        return False

    def asks_again(
        self,
        chat: Conversation,
        turn: Turn,
        error: RequestError | EngineError,
        request: ToolRequest | None,
    ) -> bool:
        """True if a request that failed is to be sent again: with less of the results if the
        context is full, without the grammar of a model here, or to a server without tools."""
        if turn.rounds and isinstance(error, ContextLengthError):
            return chat.cut_results()
        if request is None or not request.may_call:
            return False
        model, param = request.model, getattr(error, "param", None) or ""
        is_of_tools = param.startswith("tools")
        if model.reads_calls:  # servers have their own words
            is_of_tools |= "tool" in str(error).lower()
        if is_of_tools and request.is_enforced and model.model_id not in self._unenforced:
            self._unenforced.add(model.model_id)
            self._made = None
            return True
        if is_of_tools and model.reads_calls:
            self._refusing.add(model.model_id)
            name, reason = clean_line(model.model_id), clean_line(str(error))
            self._say(turn, f"{name} takes no tools and answers without them: {reason}")
            return True
        return False

    async def run(self, calls: Sequence[ToolCall]) -> None:
        """Carry out the calls of an answer, those that the user approves."""
        await self._runner.run(calls)

    async def _approve(self, call: ToolCall, offered: Offered) -> Approval:
        screen, app = self._view.screen, self._view.screen.app
        if app.screen is not screen:
            self._view.notify(f"the chat asks whether {offered.name} may be called")
        while app.screen is not screen:
            await asyncio.sleep(LOOK_S)
        answered: asyncio.Future[Approval] = asyncio.get_running_loop().create_future()

        def use(word: Approval | None) -> None:
            if word is None:
                self._stop()
            elif not answered.done():
                answered.set_result(word)

        panel = ApprovalPanel(call, offered, type_text=self._view.prompt.type)
        app.push_screen(panel, use)
        try:
            return await answered
        finally:
            panel.withdraw()

    # -- /mcp ------------------------------------------------------------------------------

    def run_command(self, argument: str) -> None:
        """`/mcp`: show where tools come from; `/mcp restart NAME`: restart one of these."""
        what, _, name = argument.partition(" ")
        provider = self._toolbox.provider(name.strip())
        if self._toolbox.is_empty:
            self._view.note(
                "There are no tools. `--tools files` offers the files below the working folder, "
                "[mcp.NAME] in the config file an MCP server."
            )
        elif not argument:
            self._view.start_worker("tools", self._list)
        elif what != "restart" or provider is None:
            names = ", ".join(one.name for one in self._toolbox.providers)
            self._view.refuse(f"/mcp lists the tools, /mcp restart NAME restarts one: {names}")
        else:
            self._view.start_worker("tools", self._restart, provider)

    async def _restart(self, provider: Provider) -> None:
        self._view.notify(f"{provider.name} restarts")
        await provider.restart()
        self._view.note(self._described(provider))

    async def _list(self) -> None:
        await self._toolbox.refresh()
        self._view.note("\n".join(map(self._described, self._toolbox.providers)))

    def _described(self, provider: Provider) -> str:
        offered = [one.name for one in self._toolbox.offered if one.provider == provider.name]
        lines = [f"{provider.name}: {provider.state}"]
        if offered:
            more = len(offered) - MAX_LISTED
            end = f" and {more} more" if more > 0 else ""
            lines.append(f"  {', '.join(offered[:MAX_LISTED])}{end}")
        beginning = f"{provider.name}_"
        for name, reason in list(self._toolbox.left_out.items())[:MAX_LISTED]:
            if name.startswith(beginning):
                lines.append(f"  {name} is not offered: {reason}")
        return "\n".join(map(clean_line, lines))
