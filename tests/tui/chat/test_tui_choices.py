"""Choices made on a screen are there in the next run: the theme, the model, the list of chats."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.commands.arguments import build_parser
from termgen.commands.chat import with_last_model
from termgen.commands.launch import model_argument
from termgen.config import EngineConfig, UIConfig
from termgen.system.remembered import Remembered
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.models import ModelScreen
from termgen.vocabulary.model_shelf import ModelChoice, Switch

WIDE = (120, 34)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "choices.json"


def app_of(path: Path, **options: Any) -> FrozenApp:
    return FrozenApp(chat_engine(), remembered=Remembered(path), **options)


def notes(app: FrozenApp) -> str:
    return "\n".join(note.message for note in app._notifications)


async def test_a_theme_is_there_in_the_next_run(path: Path) -> None:
    app = app_of(path)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/theme termgen-riso")
        await pilot.press("f9", "down", "escape")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert "config file" not in notes(app)
    assert Remembered(path).read() == {"theme": "termgen-riso"}, "one that was only shown is not"
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        assert app.theme == "termgen-riso"
        await pilot.press("f9", "home", "down", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
    assert Remembered(path).read() == {"theme": "termgen-abyss"}


async def test_a_theme_of_the_settings_counts_more(path: Path) -> None:
    Remembered(path).write({"theme": "termgen-riso"})
    app = app_of(path, ui=UIConfig(theme="termgen-light"))
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        assert app.theme == "termgen-light"
        await ask(app, pilot, "/theme termgen-abyss")
        await wait_until(pilot, lambda: 'theme = "termgen-abyss"' in notes(app))
    assert Remembered(path).read() == {"theme": "termgen-riso"}


async def test_terminals_of_few_colours_have_a_theme_of_their_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Remembered(path).write({"theme": "termgen-riso"})
    monkeypatch.setattr("termgen.tui.app.has_few_colours", lambda _app: True)
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        assert app.theme == "termgen-16"
        await ask(app, pilot, "/theme termgen-contrast")
    kept = {"theme": "termgen-riso", "theme_of_few_colours": "termgen-contrast"}
    assert Remembered(path).read() == kept


async def test_a_theme_that_is_gone_is_one_line(path: Path) -> None:
    Remembered(path).write({"theme": "mine"})
    app = app_of(path)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        assert app.theme == "termgen-dark" and "no theme 'mine'; using termgen-dark" in notes(app)


async def test_a_broken_file_is_one_line(path: Path) -> None:
    path.write_text("{")
    app = app_of(path)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        [said] = [note for note in app._notifications if "earlier runs" in note.message]
        assert said.message == f"what earlier runs chose is not known: {path} is not JSON"
        await ask(app, pilot, "/theme termgen-riso")
    assert Remembered(path).read() == {"theme": "termgen-riso"}


async def test_a_disk_that_keeps_nothing_is_said(path: Path) -> None:
    app = app_of(path / "below" / "choices.json")
    path.write_text("a file where a folder should be")
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/theme termgen-riso")
        await wait_until(pilot, lambda: "the choice is not kept" in notes(app))
        assert app.theme == "termgen-riso"


async def test_the_list_of_chats_is_open_again_where_it_has_room(path: Path) -> None:
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await pilot.press("ctrl+b")
        assert app.chat.panel.display
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        assert app.chat.panel.display and app.focused is app.chat.prompt
        await ask(app, pilot, "two")
        await wait_until(pilot, lambda: "two" in app.chat.panel.session_list.text)
    app = app_of(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        assert not app.chat.panel.display, "it would cover the chat"
        await pilot.press("ctrl+b", "escape")
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        assert app.chat.panel.display, "a list over the chat changes nothing"
        await pilot.press("ctrl+b")
    assert Remembered(path).read() == {"chats_open": False}


def test_the_line_to_resume_names_the_model_as_the_command_line_takes_it() -> None:
    words = model_argument(EngineConfig(model="qwen3-0.6b"))
    parsed = build_parser().parse_args(["chat", *words, "--session", "1f2e3d4c"])
    assert (parsed.model, parsed.session, parsed.question) == ("qwen3-0.6b", "1f2e3d4c", None)
    assert model_argument(EngineConfig()) == ()


class TwoModels:
    """A shelf; switching to the second one fails."""

    can_search = False

    async def offer(self) -> ModelChoice | None:
        return None

    async def choices(self) -> list[ModelChoice]:
        return [ModelChoice("smollm2-135m", is_current=True), await self.look_up("other")]

    async def look_up(self, name: str) -> ModelChoice:
        return ModelChoice(name)

    async def switch(self, name: str, _report: object) -> Switch:
        await asyncio.sleep(0)
        if name == "bad":
            return Switch(chat_engine(), failure="it is too large")
        return Switch(chat_engine(model_id=name), name=name)


async def test_the_model_chosen_last_is_remembered(path: Path) -> None:
    app = app_of(path, models=TwoModels())
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        for name in ("other", "bad"):
            await ask(app, pilot, f"/model {name}")
            await wait_until(pilot, lambda: not isinstance(app.screen, ModelScreen))
    assert Remembered(path).read() == {"model": "other"}


def test_a_start_without_a_model_takes_the_one_chosen_last(
    path: Path, tiny_llama_dir: Path
) -> None:
    kept, plain = Remembered(path), EngineConfig()
    assert with_last_model(plain, kept) == (plain, "", "")
    kept.write({"model": str(tiny_llama_dir)})
    config, chosen, notice = with_last_model(plain, kept)
    assert (config.model, chosen, notice) == (str(tiny_llama_dir), str(tiny_llama_dir), "")
    named = EngineConfig(model="qwen3-0.6b")
    assert with_last_model(named, kept) == (named, "", "")
    kept.write({"model": str(path / "gone")})
    config, chosen, notice = with_last_model(plain, kept)
    assert config == plain and not chosen
    assert notice.endswith("the model chosen last, is not here any more; using smollm2-135m")
