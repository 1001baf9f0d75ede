"""An app for a pseudo-terminal that records its actions instead of running them.

`python recording_app.py IN OUT` reads scenes from descriptor IN, a line each: it shows the scene,
empties its fields and answers on OUT with an empty list. An empty line is answered with the texts
of the fields. Each action that a key calls is written to OUT as a list: name, parameters.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

from fake_engine import Script
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input, TextArea
from tui_harness import NOW_NS, FrozenApp, chat_engine, shipped_themes

from termgen.tools.calls import ToolCall
from termgen.tools.toolbox import Offered, Tool
from termgen.tui.bench.bench_screen import BenchEngineScreen, BenchScreen
from termgen.tui.bench.bench_view import BenchView
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.beside_screen import BesideScreen, Side
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.context_panel import ContextPanel
from termgen.tui.chat.links_panel import Link, LinksPanel
from termgen.tui.chat.lists.find_panel import FindPanel
from termgen.tui.chat.lists.tree_panel import TreePanel
from termgen.tui.chat.panels import HistoryPanel, SamplingPanel, SystemPromptPanel
from termgen.tui.chat.prompts_panel import PromptsPanel
from termgen.tui.chat.state.context_policy import ContextPolicy
from termgen.tui.chat.state.conversation import Turn
from termgen.tui.chat.state.prompt_library import KeptPrompt
from termgen.tui.chat.state.thoughts import AnswerNews
from termgen.tui.chat.token_lens import LensScreen
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.fleet import FleetScreen, ServerScreen
from termgen.tui.help import HelpScreen
from termgen.tui.models import ModelScreen
from termgen.tui.silent import SilentScreen
from termgen.tui.themes.theme_chooser import ThemeChooser
from termgen.vocabulary.model_shelf import ModelChoice
from termgen.vocabulary.sampling_params import SamplingParams

SETTLE_S = 0.03
"""Time for a scene's messages, such as those of the focus."""
PARAMS = SamplingParams()


class Shelf:
    can_search = True

    async def offer(self) -> ModelChoice | None:
        return None

    async def choices(self) -> list[ModelChoice]:
        return [ModelChoice("one-model")]


def _no_server(_feed: object) -> ServerScreen:
    raise AssertionError("no server is connected to")


async def _never(*_arguments: object) -> Any:
    await asyncio.Event().wait()


async def _nothing() -> AsyncGenerator[AnswerNews, None]:
    await _never()
    yield AnswerNews(*[None] * 3)  # type: ignore[arg-type]


OVER: dict[str, Callable[[], Screen[Any]]] = {
    "help": lambda: HelpScreen([("Chat", ChatScreen.BINDINGS)]),
    "themes": ThemeChooser,
    "models": lambda: ModelScreen(Shelf(), before_switch=lambda: None),  # type: ignore[arg-type]
    "tokens": lambda: LensScreen(_never, params=PARAMS, vocab_size=9),
    "links": lambda: LinksPanel([Link("a", "https://a.example/")]),
    "sampling": lambda: SamplingPanel(PARAMS, PARAMS),
    "system prompt": lambda: SystemPromptPanel(""),
    "earlier prompts": lambda: HistoryPanel(["one", "two"]),
    "kept prompts": lambda: PromptsPanel([KeptPrompt("one", "1"), KeptPrompt("two", "2")]),
    "find": lambda: FindPanel([Turn("one"), Turn("two")]),
    "tree": lambda: TreePanel(Turn("root", children=[Turn("one"), Turn("two")]), (), None),
    "beside": lambda: BesideScreen(
        [Side(Turn("one"), chat_engine().model, _nothing)] * 2, lambda _name: ""
    ),
    "context": lambda: ContextPanel(_never, ContextPolicy.ASK),
    "approval": lambda: ApprovalPanel(
        ToolCall("files_read", "{}"),
        Offered("files_read", "files", Tool(name="read", description="", schema={}, call=_never)),
        type_text=str,
        clock=count(step=10).__next__,
    ),
    "silent": lambda: SilentScreen("no engine"),
    "engine": lambda: DashboardScreen(chat_engine(), hz=1.0, now_ns=lambda: NOW_NS),
    "bench": lambda: BenchScreen(lambda: BenchView("m", "l", "p"), stop=lambda: None, hz=1.0),
    "bench's engine": lambda: BenchEngineScreen(chat_engine(), hz=1.0, now_ns=lambda: NOW_NS),
    "servers": lambda: FleetScreen([("http://a", _never)], make_screen=_no_server),
}
"""Screens that are put over the chat, by the name of the scene."""


class RecordingApp(FrozenApp):
    def __init__(self, orders: int, reports: int) -> None:
        folders = (shipped_themes(),)
        super().__init__(chat_engine(Script(pieces=("ok",))), theme_folders=folders)
        self._orders, self._reports = os.fdopen(orders), reports
        self._scene = ""
        self._records = False
        self._chat: ChatScreen | None = None

    async def _dispatch_action(self, namespace: DOMNode, action_name: str, params: Any) -> bool:
        # Textual's own boxes leave a key to others where nothing can be scrolled.
        is_box = action_name in ("scroll_up", "scroll_down") and not isinstance(
            namespace, Transcript
        )
        if not self._records or is_box:
            return await super()._dispatch_action(namespace, action_name, params)
        self._report([action_name, list(params)])
        return True

    def _report(self, what: object) -> None:
        os.write(self._reports, json.dumps(what).encode() + b"\n")

    async def action_show(self, name: str) -> None:
        await super().action_show(name)
        self._chat = self.chat
        self.run_worker(self._obey())

    async def _obey(self) -> None:
        self.chat.dialogue.ask("why", ())
        while True:
            scene = (await asyncio.to_thread(self._orders.readline)).rstrip("\n")
            if not scene:
                self._report([field for field in map(_text, self._fields()) if field])
                continue
            self._records = False
            if scene != self._scene:
                await self._show(scene)
                self._scene = scene
                await asyncio.sleep(SETTLE_S)
            for field in self._fields():
                if isinstance(field, Input):
                    field.value = ""
                else:
                    field.text = ""
            self._records = True
            self._report([])

    async def _show(self, scene: str) -> None:
        chat = self._chat
        assert chat is not None
        while self.screen is not chat:
            await self.pop_screen()
        if chat.panel.display:
            chat.saved.toggle_panel()
        chat.prompt.focus()
        if scene in OVER:
            await self.push_screen(OVER[scene]())
        elif scene == "browse":
            chat.begin_browsing()
        elif scene == "chats":
            chat.saved.toggle_panel()
            await asyncio.sleep(SETTLE_S)
            chat.panel.session_list.focus()

    def _fields(self) -> list[Input | TextArea]:
        screens = {self.screen, self._chat}
        return [
            field
            for screen in screens
            if screen is not None
            for field in screen.query("Input, TextArea").results()
            if isinstance(field, Input | TextArea)
        ]


def _text(field: Input | TextArea) -> str:
    return field.value if isinstance(field, Input) else field.text


if __name__ == "__main__":
    RecordingApp(int(sys.argv[1]), int(sys.argv[2])).run()
