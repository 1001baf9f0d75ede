"""Keys of the config file: refusals, and that footer, help, palette and tabs follow."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from fake_engine import Script
from textual.binding import Binding
from textual.dom import DOMNode
from textual.widgets import Footer
from tui_harness import ANSWER, FrozenApp, ask, chat_engine, pieces, ready, wait_until

import termgen.tui
from termgen.commands import cli
from termgen.commands.settings import SettingLayers
from termgen.config import UIConfig
from termgen.errors import ConfigError
from termgen.tui import actions
from termgen.tui.app import TermgenApp
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.help import HelpScreen
from termgen.tui.keys.keymap import Keymap
from termgen.tui.paint.canvas import Canvas

SIZE = (120, 40)


def read(*entries: str) -> Keymap:
    return TermgenApp.read_keys(UIConfig(keys=entries))


def bindings() -> list[Binding]:
    found = [b for scope in actions.scopes(TermgenApp.BINDINGS) for b in scope.bindings]
    return [b for b in found if isinstance(b, Binding)]


def test_every_class_with_bindings_is_known_and_every_binding_is_complete() -> None:
    for module in pkgutil.walk_packages(termgen.tui.__path__, "termgen.tui."):
        importlib.import_module(module.name)
    known = {b.id for b in bindings()}
    waiting, own = [DOMNode], []
    while waiting:
        waiting += (cls := waiting.pop()).__subclasses__()
        if cls.__module__.startswith("termgen.") and "BINDINGS" in vars(cls):
            own += [b for b in cls.BINDINGS if isinstance(b, Binding)]
            assert len(own) > 0 and all(isinstance(b, Binding) for b in cls.BINDINGS), cls
    assert {b.id for b in own} == known
    assert len(own) == len(known) > 40, "an id is there twice"
    for binding in own:
        assert binding.id and binding.description and binding.tooltip, binding
    for scope in actions.scopes(TermgenApp.BINDINGS):
        keys = [k for b in scope.bindings if isinstance(b, Binding) for k in b.key.split(",")]
        assert len(keys) == len(set(keys)), scope.name


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (["chat.stop"], "keys: 'chat.stop': an entry is written ID=KEY, or ID=KEY KEY"),
        (["chat.stop="], "an entry is written ID=KEY"),
        (["chat.stpo=f14"], "there is no action 'chat.stpo'; did you mean chat.stop?"),
        (["chat.stop=f11", "chat.stop=f14"], "chat.stop is there twice"),
        (["chat.stop=ctlr+x"], "keys: 'chat.stop=ctlr+x': there is no key 'ctlr+x'"),
        (["chat.stop=f99"], "there is no key 'f99'"),
        (["chat.stop=ctrl+"], "there is no key 'ctrl+'"),
        (["chat.stop=ctrl+l"], "'chat.stop=ctrl+l': ctrl+l is the key of chat.clear on the chat"),
        (["app.help=space"], "space is the key of dashboard.pause on the engine screen"),
        (["chat.clear=f11", "prompt.send=f11"], "f11 is the key of prompt.send on the chat screen"),
        (["chat.stop=ctrl+u"], "ctrl+u has a use of its own on the chat screen"),
        (
            ["dashboard.live=ctrl+m"],
            "'dashboard.live=ctrl+m': enter is the key of dashboard.request",
        ),
        (["dashboard.live=tab"], "tab has a use of its own on the engine screen"),
    ],
)
def test_what_cannot_be_is_refused_with_its_entry(entries: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(*entries)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_keys_may_change_places_and_have_many_names() -> None:
    assert read("chat.stop=ctrl+l", "chat.clear=esc").changes == {
        "chat.stop": ("ctrl+l",),
        "chat.clear": ("escape",),
    }
    keys = read("dashboard.zoom_in=+ ? ctrl+/ ctrl+pgup G f24 ctrl++ ü").changes[
        "dashboard.zoom_in"
    ]
    assert " ".join(keys) == "plus question_mark ctrl+slash ctrl+pageup G f24 ctrl+plus ü"
    assert read("help.close=space").changes, "the dashboard's space is not on the help screen"


def layers(tmp_path: Path, text: str) -> SettingLayers:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return SettingLayers(flags={}, environ={}, config_file=path)


def test_the_config_file_has_a_table(tmp_path: Path) -> None:
    text = '[keys]\nchat.stop = "ctrl+x"\n"app.help" = ["f3", "f4"]\n[chat]\ntheme = "nord"\n'
    ui = layers(tmp_path, text).resolve(UIConfig)
    assert ui.keys == ("chat.stop=ctrl+x", "app.help=f3 f4") and ui.theme == "nord"
    for wrong in ("[keys]\nchat.stop = 3\n", '[keys]\nchat.stop = ["a", 3]\n', "keys = 3\n"):
        with pytest.raises(ConfigError, match=r"\[keys\]"):
            layers(tmp_path, wrong)


def test_the_command_lists_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "--keys", "chat.stop=f10 f14"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.split("\n\n")[0].splitlines()} == {
        b.id for b in bindings()
    }
    assert "chat.stop                 *f10  f14" in out
    assert cli.main(["keys", "--keys", "chat.stop=nokey"]) == 2
    assert "there is no key 'nokey'" in capsys.readouterr().err


def footer_keys(app: FrozenApp) -> dict[str, str]:
    footer = app.screen.query_one(Footer)
    return {str(key.description): str(key.key_display) for key in footer.query("FooterKey")}


async def test_footer_help_palette_and_tabs_show_the_changed_keys() -> None:
    changes = ("chat.stop=f10 ctrl+g", "chat.engine=f14", "dashboard.log=y", "dashboard.pause=p")
    app = FrozenApp(chat_engine(), ui=UIConfig(keys=changes))
    stop = "Stop the answer; else give up an edit; else browse the chat"
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        assert footer_keys(app)["Engine"] == "f14"
        words = {c.title: c.help for c in app.get_system_commands(app.screen)}
        assert words["Answer: Stop"] == f"{stop} (f10  ctrl+g)"
        await pilot.press("f2")
        assert isinstance(app.screen, ChatScreen), "its old key does nothing"
        await pilot.press("f14")
        assert isinstance(app.screen, DashboardScreen)
        await pilot.pause()
        assert " y log" in app.screen.query_one("#tabs", Canvas).text
        assert footer_keys(app)["Pause"] == "p"
        await pilot.press("l")
        assert not app.screen.query_one("#page").display
        await pilot.press("y")
        assert app.screen.query_one("#page").display
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        await pilot.pause()
        text = app.screen.query_one(Canvas).text
        assert "  p                   Freeze or go on live" in text
        assert f"  f10  ctrl+g         {stop}" in text


async def test_the_prompts_own_keys_can_be_changed() -> None:
    script = Script(pieces=pieces(ANSWER))
    app = FrozenApp(chat_engine(script), ui=UIConfig(keys=("prompt.send=f11", "chat.stop=f14")))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("a", "enter", "b", "ctrl+j", "c")
        assert app.chat.prompt.text == "a\nb\nc", "enter breaks the line now"
        await pilot.press("f11")
        await wait_until(pilot, lambda: not app.chat.prompt.text)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert app.chat.conversation.turns[0].question == "a\nb\nc"


async def test_two_keys_that_change_places_do() -> None:
    app = FrozenApp(chat_engine(), ui=UIConfig(keys=("chat.clear=ctrl+n", "chat.new=ctrl+l")))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        app.chat.conversation.system_prompt = "changed"
        await ask(app, pilot, "why")
        await pilot.press("ctrl+n")
        assert not app.chat.conversation.turns and app.chat.conversation.system_prompt
        await pilot.press("ctrl+l")
        assert app.chat.conversation.system_prompt is None


async def test_keys_that_text_names_are_those_of_now() -> None:
    changes = {
        "app.help": "f14",
        "app.quit": "ctrl+g",
        "chat.engine": "f10",
        "chat.retry": "alt+u",
        "chat.stop": "f13",
        "chat.thoughts": "f2",
        "help.close": "x",
        "history.older": "f11",
        "models.close": "f11",
        "prompt.newline": "enter",
        "prompt.send": "ctrl+o",
        "sampling.reset": "f11",
        "sessions.delete": "backspace",
        "system.save": "f11",
        "themes.back": "x",
    }
    keys = tuple(f"{name}={key}" for name, key in changes.items())
    script = Script(pieces=("<think>hm", "</think>", "Yes."))
    app = FrozenApp(chat_engine(script), ui=UIConfig(keys=keys))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        empty = app.chat.transcript.plain_text
        for words in (
            "ctrl+o   send",
            "enter    new line",
            "f13      stop",
            "f10      watch",
            "f14 ",
        ):
            assert words in " ".join(empty.split("\n")), words
        assert "^o send  ⏎ new line" in str(app.chat.prompt.border_subtitle)
        app.chat.prompt.insert("why")
        await pilot.press("ctrl+o")
        await wait_until(pilot, lambda: "Yes." in app.chat.transcript.plain_text)
        (folded,) = [line for line in app.chat.transcript.plain_text.split("\n") if "▸" in line]
        assert folded.endswith("f2")
        await pilot.press("alt+up")
        assert "alt+e edit · alt+u again" in app.chat.transcript.plain_text
        await pilot.press("alt+e")
        assert "^o asks it in a new branch · f13 gives up" in str(app.chat.prompt.border_title)
        await pilot.press("f13", "ctrl+b")
        assert "backspace delete" in str(app.chat.panel.border_subtitle)
        await pilot.press("ctrl+b")
        for key, words in (
            ("f14", "x closes"),
            ("f9", "x goes back"),
            ("f3", "f11 the model's defaults"),
            ("f4", "f11 use it"),
            ("ctrl+r", "f11 older"),
        ):
            await pilot.press(key)
            box = next(w for w in app.screen.query("*") if w.border_subtitle)
            assert words in str(box.border_subtitle), words
            await pilot.press("x" if words.startswith("x") else "escape")
            assert isinstance(app.screen, ChatScreen), words
        await pilot.press("ctrl+c")
        said = [note.message for note in app._notifications]
        assert "press ctrl+c again to quit" in said
