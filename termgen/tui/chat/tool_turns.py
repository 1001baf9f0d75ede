"""Tools on the chat's screen: the user's approval of calls, and `/mcp`.

`Dialogue` asks it before each request, which `ToolOffers` makes, and hands it the calls of an
answer, which `CallRunner` carries out. Nothing here waits on the loop for a tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from termgen.tools.calls import Approval, CallRunner, ToolCall
from termgen.tools.toolbox import Offered, Provider, Toolbox
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.state.conversation import Turn
from termgen.tui.chat.state.tool_offers import ToolOffers, described
from termgen.tui.chat.view import ChatView

LOOK_S = 0.1
"""How often to see whether the chat is in front, while a call waits for approval."""


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
        self._stop = stop
        self._runner = CallRunner(toolbox, self._approve, on_change)
        offers = ToolOffers(toolbox, say)
        self.request_for, self.asks_again = offers.request_for, offers.asks_again
        self.shower, self.offerer = offers.shower, offers.offerer

    def start(self) -> None:
        """Start the providers. The screen calls it when it is mounted."""
        if not self._toolbox.is_empty:
            self._toolbox.start()

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
        self._view.note(described(self._toolbox, provider))

    async def _list(self) -> None:
        await self._toolbox.refresh()
        self._view.note(described(self._toolbox))
