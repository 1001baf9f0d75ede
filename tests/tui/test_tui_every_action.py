"""Every action of every app has a key, an entry in the palette and a line in the help, and an app
lists no action that it does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script
from test_tui_bench import Script as BenchScript
from test_tui_bench import until_shown
from test_tui_top import Clock, replay_of, top_of
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.content import Content
from textual.pilot import Pilot
from textual.widgets import Input
from tui_harness import FrozenApp, ask, chat_engine, ready, shipped_themes, wait_until

from termgen.config import UIConfig
from termgen.tui import actions
from termgen.tui.app import TermgenApp
from termgen.tui.bench.bench_screen import KEYS as BENCH_KEYS
from termgen.tui.bench.bench_screen import BenchEngineScreen, bench_engine_keys
from termgen.tui.chat.chat_keys import COPY_KEYS
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.panels import SamplingPanel
from termgen.tui.chat.state.commands import COMMANDS
from termgen.tui.chat.widgets.prompt import Prompt
from termgen.tui.chat.widgets.session_panel import SessionList
from termgen.tui.chat.widgets.transcript import Transcript
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.dashboard.fleet import FleetScreen, ServerScreen
from termgen.tui.feed_app import FleetApp
from termgen.tui.help import HelpScreen
from termgen.tui.keys.keymap import key_names
from termgen.tui.paint.canvas import Canvas
from termgen.tui.themes.theme_chooser import ThemeChooser

SIZE = (120, 40)
ACTION_OF_COMMAND = {
    "clear": "chat.clear",
    "new": "chat.new",
    "system": "chat.system",
    "copy": "chat.copy",
    "code": "chat.copy_block_1",
    "save": "chat.save",
    "prompts": "chat.prompts",
    "attach": "chat.attach",
    "sampling": "chat.sampling",
    "schema": "chat.schema",
    "regex": "chat.regex",
    "choice": "chat.choice",
    "fit": "chat.fit",
    "compact": "chat.compact",
    "context": "chat.context",
    "retry": "chat.retry",
    "beside": "chat.beside",
    "edit": "chat.edit",
    "find": "chat.find",
    "tree": "chat.tree",
    "tokens": "chat.tokens",
    "guessed": "chat.guessed",
    "links": "chat.links",
    "sessions": "chat.sessions",
    "rename": "chat.rename",
    "pin": "sessions.pin",
    "tag": "chat.tag",
    "fork": "chat.fork",
    "export": "chat.export",
    "import": "chat.import",
    "mcp": "chat.mcp",
    "model": "chat.models",
    "engine": "chat.engine",
    "theme": "app.theme",
    "help": "app.help",
    "quit": "app.quit",
}


def test_every_slash_command_has_a_handler() -> None:
    screen = ChatScreen(chat_engine(Script()), UIConfig())
    assert list(screen.command_table) == [command.name for command in COMMANDS]


def of(*lists: Sequence[BindingType]) -> dict[str, Binding]:
    found = [b for bindings in lists for b in bindings if isinstance(b, Binding)]
    return {b.id: b for b in found if b.id}


def in_palette(app: TermgenApp, screen: Any = None) -> set[str]:
    return {command.help for command in app.get_system_commands(screen or app.screen)}


def entry(binding: Binding) -> str:
    return f"{binding.tooltip} ({key_names(binding)})"


async def help_text(app: TermgenApp, pilot: Pilot[Any]) -> str:
    """The help screen's text, with wrapped lines joined."""
    await pilot.press("f1")
    await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen))
    await pilot.pause()
    text = app.screen.query_one(Canvas).text
    await pilot.press("escape")
    await pilot.pause()
    return " ".join(text.split())


def check(wanted: Iterable[Binding], palette: set[str], helped: str) -> None:
    for binding in wanted:
        assert binding.key and binding.description and binding.tooltip, binding
        line = " ".join(f"{key_names(binding)} {binding.tooltip}".split())
        assert line in helped, f"{binding.id} is not in the help"
        assert entry(binding) in palette, f"{binding.id} is not in the palette"


async def test_every_action_of_the_chat() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("ctrl+b")
        palette = in_palette(app)
        helped = await help_text(app, pilot)
        await pilot.press("f2")
        palette |= in_palette(app)
        for box in actions.BOXES:
            there = in_palette(app, box.__new__(box))
            assert there >= {entry(b) for b in of(box.BINDINGS).values()}, box
            palette |= there
    every = of(*(scope.bindings for scope in actions.scopes(TermgenApp.BINDINGS)))
    bench = of(BENCH_KEYS, bench_engine_keys()).keys() - of(DashboardScreen.BINDINGS).keys()
    for name in (*bench, *of(FleetScreen.BINDINGS)):
        del every[name]
    assert set(every) >= set(of(ChatScreen.BINDINGS, Prompt.BINDINGS, Transcript.BINDINGS))
    assert set(every) >= set(of(DashboardScreen.BINDINGS, SessionList.BINDINGS, app.BINDINGS))
    palette.add(entry(every["app.palette"]))  # this one opens the list of actions
    copies = [every.pop(alike.id or "") for alike in of(COPY_KEYS).values()]
    assert f"{copies[0].tooltip} (alt+1 to alt+9)" in palette
    assert not {entry(copy) for copy in copies} & palette, "one entry for the nine of them"
    assert "alt+2 to alt+9" in helped
    check(every.values(), palette, helped)
    assert {command.name for command in COMMANDS} == set(ACTION_OF_COMMAND)
    assert set(ACTION_OF_COMMAND.values()) <= {*every, "chat.copy_block_1"}
    for command in COMMANDS:
        assert " ".join(f"/{command.name} {command.argument} {command.help}".split()) in helped


async def test_every_action_of_top(tmp_path: Path) -> None:
    app = top_of(replay_of(tmp_path, Clock()))
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
        palette, helped = in_palette(app), await help_text(app, pilot)
        for box in (ThemeChooser, HelpScreen):
            palette |= in_palette(app, box.__new__(box))
    wanted = of(DashboardScreen.BINDINGS, app.everywhere)
    del wanted["dashboard.chat"]
    everywhere = {f"{entry(b)}" for b in of(app.everywhere).values()}
    boxes = of(ThemeChooser.BINDINGS, HelpScreen.BINDINGS)
    palette.add(entry(wanted["app.palette"]))
    check([*wanted.values(), *boxes.values()], palette, helped)
    assert palette == everywhere | {entry(b) for b in [*wanted.values(), *boxes.values()]}
    no_chat_here(helped, palette)


async def test_every_action_of_several_servers() -> None:
    async def never(_report: object) -> Any:
        await asyncio.Event().wait()

    servers = [("http://a", never)]
    app = FleetApp(servers, ui=UIConfig(), theme_folders=(shipped_themes(),))
    async with app.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: isinstance(app.screen, FleetScreen))
        palette, helped = in_palette(app), await help_text(app, pilot)
        for other in (ServerScreen, ThemeChooser, HelpScreen):
            palette |= in_palette(app, other.__new__(other))
    wanted = of(FleetScreen.BINDINGS, DashboardScreen.BINDINGS, app.everywhere)
    del wanted["dashboard.chat"]
    palette.add(entry(wanted["app.palette"]))
    boxes = of(ThemeChooser.BINDINGS, HelpScreen.BINDINGS)
    check([*wanted.values(), *boxes.values()], palette, helped)
    no_chat_here(helped, palette)


async def test_every_action_of_a_watched_bench() -> None:
    app = BenchScript().app()
    async with app.run_test(size=SIZE) as pilot:
        await until_shown(app, pilot, "10/40")
        palette, helped = in_palette(app), await help_text(app, pilot)
        for other in (BenchEngineScreen, ThemeChooser, HelpScreen):
            palette |= in_palette(app, other.__new__(other))
    wanted = of(BENCH_KEYS, bench_engine_keys(), app.everywhere)
    palette.add(entry(wanted["app.palette"]))
    boxes = of(ThemeChooser.BINDINGS, HelpScreen.BINDINGS)
    check([*wanted.values(), *boxes.values()], palette, helped)
    no_chat_here(helped, palette)


def no_chat_here(helped: str, palette: set[str]) -> None:
    for text in (helped, *palette):
        for word in ("chat", "the answer", "prompt", "question", "Commands", "/clear"):
            assert word not in text, f"{word!r} of a chat: {text[:200]}"


async def test_the_palette_lists_a_chat_by_subject() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("ctrl+p")
        await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette))
        await wait_until(pilot, lambda: app.screen.query_one("CommandList").option_count > 40)
        shown = app.screen.query_one("CommandList")
        titles = [
            str(shown.get_option_at_index(i).prompt).split("\n")[0]
            for i in range(shown.option_count)
        ]
    subjects = [title.partition(":")[0] for title in titles]
    assert list(dict.fromkeys(subjects)) == list(actions.SUBJECTS)
    assert titles[0] == "Answer: Retry" and len(titles) == len(set(titles))


async def run_from_palette(pilot: Pilot[Any], words: str) -> None:
    app = pilot.app
    await pilot.press("ctrl+p")
    await wait_until(pilot, lambda: isinstance(app.screen, CommandPalette))
    app.screen.query_one(Input).value = words
    await wait_until(pilot, lambda: app.screen.query_one("CommandList").option_count == 1)
    await pilot.press("down", "enter")
    await wait_until(pilot, lambda: not isinstance(app.screen, CommandPalette))
    await pilot.pause()


async def test_the_palette_knows_the_box_that_is_open() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("f3")
        await wait_until(pilot, lambda: isinstance(app.screen, SamplingPanel))
        panel = app.screen
        field = panel.query_one("#temperature", Input)
        field.value = "0.1"
        await run_from_palette(pilot, "Defaults")
        assert app.screen is panel and field.value == "0.7"
        field.value = "0.2"
        await run_from_palette(pilot, "Apply")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert "T 0.2" in app.chat.status.text
        await pilot.press("f1")
        await wait_until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await run_from_palette(pilot, "Close")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))


@pytest.mark.parametrize("name", ["attach", "export", "schema"])
async def test_keys_begin_commands_that_want_an_argument(name: str) -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    key = of(ChatScreen.BINDINGS)[f"chat.{name}"].key
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        app.chat.prompt.insert("a draft")
        await pilot.press("alt+e", key)
        assert app.chat.prompt.text == f"/{name} " and app.chat.dialogue.editing is None
        await pilot.pause()
        (command,) = [command for command in COMMANDS if command.name == name]
        hint = Content.from_markup(str(app.chat.prompt.border_subtitle)).plain
        assert hint.startswith(f"/{name} {command.argument}  ")
        await pilot.press("up")
        assert app.chat.prompt.text == "a draft", "nothing that was typed is lost"
