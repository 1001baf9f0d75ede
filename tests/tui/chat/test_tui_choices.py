"""Choices made on a screen are there in the next run: the theme, the model, the list of chats."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from foreign_server import foreign_server, model_list
from remote_chat import chat_of, remote_app
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.commands.arguments import build_parser
from termgen.commands.chat import with_last_model
from termgen.commands.launch import model_argument
from termgen.config import EngineConfig, UIConfig
from termgen.system.choices import Choices, model_choice
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


async def test_the_width_of_the_list_of_chats_is_there_in_the_next_run(path: Path) -> None:
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        panel = app.chat.panel
        await pilot.press("ctrl+b")
        usual = panel.outer_size.width
        await pilot.press("shift+right", "shift+right", "shift+left")
        await wait_until(pilot, lambda: panel.outer_size.width == usual + 4)
        assert app.chat.transcript.region.x == panel.region.right
    assert Remembered(path).read()["chats_columns"] == usual + 4
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        panel = app.chat.panel
        await wait_until(pilot, lambda: panel.outer_size.width == usual + 4)
        edge = panel.region.right - 1
        await pilot.mouse_down(offset=(edge, 10))
        await pilot.hover(offset=(edge + 9, 10))
        await wait_until(pilot, lambda: panel.outer_size.width == usual + 13)
        await pilot.mouse_up(offset=(edge + 9, 10))
        await pilot.hover(offset=(edge + 20, 10))
        assert panel.outer_size.width == usual + 13, "the edge was let go"
        await pilot.hover(offset=(edge, 10))
        await pilot.mouse_down(offset=(edge, 10))
        await pilot.mouse_up(offset=(edge, 10))
        assert panel.outer_size.width == usual + 13, "that was no pull at the edge"
    assert Remembered(path).read()["chats_columns"] == usual + 13


async def test_the_list_of_chats_leaves_room_for_the_chat(path: Path) -> None:
    Remembered(path).write({"chats_open": True, "chats_columns": 4000})
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        panel = app.chat.panel
        await wait_until(pilot, lambda: panel.outer_size.width == 72)
        await pilot.press("ctrl+b", "ctrl+b", *(["shift+left"] * 20))
        await wait_until(pilot, lambda: panel.outer_size.width == 28)
        await pilot.resize_terminal(80, 24)
        await wait_until(pilot, lambda: panel.outer_size.width == 80)
        await pilot.press("shift+right")
        assert panel.outer_size.width == 80, "over the chat it has no width of its own"
        await pilot.resize_terminal(*WIDE)
        await wait_until(pilot, lambda: panel.outer_size.width == 28)
    assert Remembered(path).read()["chats_columns"] == 28


@pytest.mark.parametrize("value", ["60", True, -4, 0, 60.5, [60]])
async def test_a_width_that_is_none_is_the_usual_one(path: Path, value: object) -> None:
    Remembered(path).write({"chats_open": True, "chats_columns": value})
    app = app_of(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: app.chat.panel.outer_size.width == 40)


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


async def test_the_model_of_a_server_is_remembered_for_that_server(path: Path) -> None:
    async with foreign_server(models=model_list("m1", "m2")) as server:
        app = remote_app(server.url, remembered=Remembered(path))
        async with app.run_test(size=WIDE) as pilot:
            chat = await chat_of(app, pilot)
            assert "m1 is ready" in chat.transcript.plain_text
            chat.prompt.insert("/model m2")
            await pilot.press("enter")
            await wait_until(pilot, lambda: chat.settings.client.model.model_id == "m2")
        assert Remembered(path).read() == {f"model of {server.url}": "m2"}
        app = remote_app(f"{server.url}/v1/", remembered=Remembered(path))
        async with app.run_test(size=WIDE) as pilot:
            chat = await chat_of(app, pilot)
            assert "m2 is ready" in chat.transcript.plain_text
        app = remote_app(server.url, remembered=Remembered(path), model="m1")
        async with app.run_test(size=WIDE) as pilot:
            chat = await chat_of(app, pilot)
            assert "m1 is ready" in chat.transcript.plain_text, "a flag counts more"


async def test_a_model_that_the_server_has_no_more_is_one_line(path: Path) -> None:
    async with foreign_server(models=model_list("m1")) as server:
        Remembered(path).write({f"model of {server.url}": "m2", "model of http://b": "m1"})
        app = remote_app(server.url, remembered=Remembered(path))
        async with app.run_test(size=WIDE, notifications=True) as pilot:
            chat = await chat_of(app, pilot)
            assert "m1 is ready" in chat.transcript.plain_text
            [note] = [note.message for note in app._notifications]
            assert note == "m2, the model chosen last, is not on the server any more; using m1"


async def test_models_of_many_servers_are_not_kept_for_ever(path: Path) -> None:
    choices = Choices(Remembered(path))
    for number in range(53):
        choices.change(model_choice(f"http://s{number}"), "m")
    choices.change("theme", "termgen-riso")
    assert await choices.write() == ""
    kept = Choices(Remembered(path))
    assert [number for number in range(53) if not kept.text(f"model of http://s{number}")] == [
        *range(3)
    ]
    assert len(Remembered(path).read()) == 51
