"""Typed text goes into the prompt, wherever the focus was: after a click, after tab, while the
model loads, while an answer streams. None of it is lost."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_harness import SIZE, sent, shown
from fake_engine import Script
from rich.console import Console
from textual.events import Paste
from textual.pilot import Pilot
from tui_harness import FrozenApp, TimedEngine, ask, chat_engine, ready, type_text, wait_until

from termgen.client import EngineClient
from termgen.errors import ModelError
from termgen.tui.chat import chat_screen as chat_module
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.state.commands import COMMANDS
from termgen.tui.chat.widgets.messages import LargePaste
from termgen.tui.help import HelpScreen
from termgen.tui.loading import LoadingScreen

PLACES = ("transcript", "status", "prompt")


@pytest.fixture(autouse=True)
def _esc_browses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "STOP_GRACE_S", -1.0)


def ok_engine(**script: Any) -> TimedEngine:
    return chat_engine(Script(pieces=("ok", "."), **script))


def notes(app: FrozenApp) -> str:
    return "\n".join(notification.message for notification in app._notifications)


def printed(app: FrozenApp) -> str:
    """The output below the command, when the screen has closed."""
    console = Console(width=100, file=io.StringIO(), record=True)
    for message in app._exit_renderables:
        console.print(message)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def footer(app: FrozenApp) -> list[str]:
    return [str(key.description) for key in app.screen.query("FooterKey").results()]


# where the keys were


@pytest.mark.parametrize("place", PLACES)
async def test_letters_after_a_click_are_text(place: str) -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        for y in range(3):
            await pilot.click(f"#{place}", offset=(30, y if place != "status" else 0))
        await type_text(pilot, "why not cherry jk2")
        assert app.chat.prompt.text == "why not cherry jk2"
        assert app.clipboard == "" and len(app.chat.conversation.turns) == 1


async def test_letters_without_any_focus_are_text() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        app.chat.set_focus(None)
        await type_text(pilot, "recite")
        assert app.chat.prompt.text == "recite"


async def test_tab_never_leaves_the_prompt() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await pilot.press("tab", "y", "tab", "shift+tab", "c", "tab")
        assert app.focused is app.chat.prompt and app.chat.prompt.text == "yc"


async def test_browse_mode_says_so_and_letters_are_commands() -> None:
    app = FrozenApp(chat_engine(lambda call: Script(pieces=(f"a{call.request_id[-1]}",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two"):
            await ask(app, pilot, question)
        assert "Browse" in footer(app)
        await pilot.press("escape")
        await pilot.pause(0.1)
        assert app.chat.is_browsing and "Type" in footer(app)
        assert "letters are commands" in str(app.chat.prompt.border_subtitle)
        await pilot.press("k", "k", "c")
        assert app.clipboard == "a1" and "◂" in shown(app)
        await pilot.press("e")
        assert app.chat.prompt.text == "one" and app.focused is app.chat.prompt
        await pilot.press("escape", "escape", "r")
        await wait_until(pilot, lambda: "a3" in shown(app))
        for leave in ("i", "enter", "escape"):
            app.chat.begin_browsing()
            await pilot.press(leave, "h")
            assert not app.chat.is_browsing, leave
        assert app.chat.prompt.text == "hhh"


async def test_a_letter_without_a_command_goes_back_to_typing() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        app.chat.begin_browsing()
        await type_text(pilot, "what if 2")
        assert app.chat.prompt.text == "what if 2"
        app.chat.begin_browsing()
        app.post_message(Paste(" and\npasted"))
        await pilot.pause()
        assert app.chat.prompt.text == "what if 2 and\npasted"


async def test_there_is_nothing_to_browse_in_an_empty_chat() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("escape", "c")
        assert app.chat.prompt.text == "c" and "Browse" not in footer(app)


async def test_esc_right_after_the_end_of_an_answer_was_meant_to_stop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_module, "STOP_GRACE_S", 60.0)
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await pilot.press("escape", "c")
        assert app.chat.prompt.text == "c"


async def test_letters_in_the_list_of_chats_search_and_delete_nothing() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=(120, 34)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await pilot.press("ctrl+b")
        await pilot.pause()
        await type_text(pilot, "dru")
        panel = app.chat.panel
        assert panel.search.value == "dru" and panel.search.has_focus and not panel.is_renaming
        assert len(app.chat.conversation.turns) == 1


# the mouse


async def place_of(app: FrozenApp, words: str) -> tuple[int, int]:
    lines = app.chat.transcript.plain_text.split("\n")
    y = next(i for i, line in enumerate(lines) if words in line)
    return app.chat.transcript.margin + lines[y].index(words), y


async def test_the_arrows_of_a_branch_can_be_clicked() -> None:
    app = FrozenApp(chat_engine(lambda call: Script(pieces=(f"a{call.request_id[-1]}",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: "a2" in shown(app) and not app.chat.is_streaming)
        await pilot.click("#transcript", offset=await place_of(app, "‹2/2›"))
        assert "‹1/2›" in shown(app) and "a1" in shown(app)
        x, y = await place_of(app, "‹1/2›")
        await pilot.click("#transcript", offset=(x + 4, y))
        assert "‹2/2›" in shown(app) and app.focused is app.chat.prompt


async def test_a_click_marks_a_message_and_typing_goes_on() -> None:
    app = FrozenApp(chat_engine(lambda call: Script(pieces=(f"a{call.request_id[-1]}",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two"):
            await ask(app, pilot, question)
        await pilot.click("#transcript", offset=await place_of(app, "one"))
        assert app.chat.dialogue.current is app.chat.conversation.turns[0] and "◂" in shown(app)
        await type_text(pilot, "re")
        assert app.chat.prompt.text == "re"
        await pilot.click("#transcript", offset=await place_of(app, "one"))
        assert "◂" not in shown(app)


# the list above the prompt


async def test_tab_completes_commands_and_their_arguments() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        completion, prompt = app.chat.area.completion, app.chat.prompt
        await type_text(pilot, "/")
        await pilot.pause()
        assert len(completion.text.splitlines()) == 8
        assert f"1/{len(COMMANDS)}" in completion.text
        await pilot.press("up")
        await pilot.pause()
        assert "▸ /quit" in completion.text
        await type_text(pilot, "the")
        await pilot.press("tab")
        assert prompt.text == "/theme "
        await type_text(pilot, "abyss")
        await pilot.press("tab")
        assert prompt.text == "/theme termgen-abyss"
        await pilot.press("enter")
        assert app.theme == "termgen-abyss" and prompt.text == ""


@pytest.mark.parametrize("key", ["tab", "enter"])
async def test_keys_may_be_faster_than_the_list(key: str) -> None:
    """All keys are handled in one iteration of the loop, before the list gets the first change."""
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        prompt = app.chat.prompt
        await pilot.press("slash")
        await pilot.pause()
        assert prompt._completion.selected.label == "/clear"
        prompt.insert("mo")  # its message is still on the way
        if key == "tab":
            prompt._edit_completion("tab")
        else:
            prompt.action_submit()
        assert prompt.text.startswith("/model")


async def test_enter_completes_a_command_that_is_half_written() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await type_text(pilot, "/cl")
        await pilot.press("enter")
        assert app.chat.prompt.text == "/clear" and len(app.chat.conversation.turns) == 1
        await pilot.press("enter")
        await pilot.pause()
        assert app.chat.conversation.turns == []


async def test_a_row_of_the_list_can_be_clicked() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await type_text(pilot, "/co")
        await pilot.pause()
        await pilot.click("#completion", offset=(5, 1))
        assert app.chat.prompt.text == "/code " and app.focused is app.chat.prompt


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_the_prompt_stays_where_it_is_when_a_list_opens(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    app = FrozenApp(ok_engine(hold_after=1))
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        before = app.chat.prompt.region
        for text in ("/", "see @"):
            app.chat.prompt.text = ""
            await type_text(pilot, text)
            await wait_until(pilot, lambda: app.chat.area.completion.display)
            await pilot.pause()
            assert app.chat.prompt.region == before, text
        app.chat.prompt.text = ""
        await ask(app, pilot, "one", wait=False)
        await ask(app, pilot, "two", wait=False)
        assert app.chat.area.waiting and app.chat.prompt.region == before


async def test_notices_do_not_hide_the_prompt() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await ready(app, pilot)
        for index in range(3):
            app.notify(f"a notice of some length, number {index}")
        await wait_until(pilot, lambda: len(app.screen.query("Toast")) == 3)
        await pilot.pause()
        prompt = app.chat.prompt.region
        assert not any(toast.region.overlaps(prompt) for toast in app.screen.query("Toast"))


# while an answer is written


async def test_messages_wait_in_order_and_are_sent_when_the_answer_ends() -> None:
    engine = ok_engine(hold_after=1)
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two", "three"):
            await ask(app, pilot, question, wait=False)
        rows = app.chat.area.query_one("#waiting").text.splitlines()
        assert rows[0].startswith("⧗ two") and "sent when the answer ends" in rows[0]
        assert rows[1].startswith("⧗ three") and len(engine.calls) == 1
        assert "Queue" in footer(app)
        engine.release.set()
        await wait_until(pilot, lambda: len(app.chat.conversation.turns) == 3)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert [turn.question for turn in app.chat.conversation.turns] == ["one", "two", "three"]
        assert not app.chat.area.query_one("#waiting").display


async def test_a_waiting_message_can_be_taken_back_and_edited() -> None:
    engine = ok_engine(hold_after=1)
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two", "three"):
            await ask(app, pilot, question, wait=False)
        await pilot.press("up")
        assert app.chat.prompt.text == "three"
        await type_text(pilot, "!")
        await pilot.press("enter", *"draft", "alt+z", "alt+z")
        assert app.chat.prompt.text == "two\nthree!\ndraft" and not app.chat.area.waiting
        await pilot.press("alt+z")
        assert "no message waits" in notes(app)


@pytest.mark.parametrize("how", ["stop", "ctrl+c", "failure"])
async def test_after_a_stop_or_a_failure_messages_wait_for_enter(how: str) -> None:
    engine = ok_engine(hold_after=1, raise_after=1 if how == "failure" else None)
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two"):
            await ask(app, pilot, question, wait=False)
        await wait_until(pilot, lambda: bool(app.chat.conversation.last_answer))
        if how == "failure":
            engine.release.set()
        else:
            await pilot.press("escape" if how == "stop" else how)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        await pilot.pause(0.05)
        assert len(engine.calls) == 1
        rows = app.chat.area.query_one("#waiting").text
        assert rows.startswith("■ two") and "held: ⏎ sends" in rows
        engine._script = Script(pieces=("fine",))
        await ask(app, pilot, "three")
        await wait_until(pilot, lambda: len(app.chat.conversation.turns) == 3)
        questions = [turn.question for turn in app.chat.conversation.turns]
        assert questions == ["one", "two", "three"]


async def test_enter_alone_sends_what_is_held() -> None:
    engine = ok_engine(hold_after=1)
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two"):
            await ask(app, pilot, question, wait=False)
        await pilot.press("escape", "enter")
        await wait_until(pilot, lambda: len(engine.calls) == 2)


async def test_another_chat_leaves_files_and_waiting_messages_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("secret")
    engine = ok_engine(hold_after=1)
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two"):
            await ask(app, pilot, question, wait=False)
        await ask(app, pilot, "/attach notes.md", wait=False)
        app.chat.prompt.insert("a draft")
        await pilot.press("ctrl+n")
        assert app.chat.files.attached == () and app.chat.prompt.border_title in ("", None)
        assert app.chat.prompt.text == "a draft"
        assert "dropped" in notes(app) and "in the history" in notes(app)
        engine._script = Script(pieces=("fine",))
        await pilot.press("enter")
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert sent(engine) == [("user", "a draft")]
        await pilot.press("up", "up")
        assert "/attach notes.md" in app.chat.prompt.prompts.newest_first()
        assert app.chat.prompt.prompts.newest_first().count("two") == 1


# ctrl+c


async def test_ctrl_c_puts_the_draft_into_the_history_before_it_quits() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await type_text(pilot, "a long thought")
        await pilot.press("ctrl+c")
        assert app.chat.prompt.text == "" and "again to quit" in notes(app)
        await pilot.press("up")
        assert app.chat.prompt.text == "a long thought"
        await pilot.press("ctrl+c")
        assert not app._exit, "there was a draft again"
        await pilot.press("ctrl+c")
        assert app._exit and "Not sent:\n\na long thought\n" in printed(app)


@pytest.mark.parametrize("leave", ["ctrl+q", "signal"])
async def test_what_is_not_sent_is_printed_at_the_end(leave: str) -> None:
    app = FrozenApp(ok_engine(hold_after=1))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("one", "two"):
            await ask(app, pilot, question, wait=False)
        app.chat.prompt.insert("half a")
        if leave == "signal":
            app.exit()
        else:
            await pilot.press(leave)
        assert printed(app) == "Not sent:\n\ntwo\n\nhalf a\n\n"


async def test_nothing_is_printed_when_all_was_sent() -> None:
    app = FrozenApp(ok_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await pilot.press("ctrl+q")
        assert app._exit and not app._exit_renderables


# while the model loads


class Loading:
    """An app whose engine is ready on the test's request."""

    def __init__(self, engine: TimedEngine, *, fails: bool = False) -> None:
        self.go_on = asyncio.Event()
        self.engine = engine

        async def give(report: Callable[[str, float], None]) -> EngineClient:
            report("loading weights", 0.25)
            await self.go_on.wait()
            if fails:
                raise ModelError("the file is cut off")
            return engine

        self.app = FrozenApp(engine)
        self.app._start_engine = give

    @property
    def screen(self) -> LoadingScreen:
        assert isinstance(self.app.screen, LoadingScreen)
        return self.app.screen

    async def finish(self, pilot: Pilot[Any]) -> None:
        self.go_on.set()
        await ready(self.app, pilot)
        await pilot.pause()


async def test_what_is_typed_while_the_model_loads_is_sent_and_kept() -> None:
    engine = ok_engine()
    loading = Loading(engine)
    app = loading.app
    async with app.run_test(size=(80, 24)) as pilot:
        await type_text(pilot, "one")
        await pilot.press("enter")
        await type_text(pilot, "two")
        await pilot.press("enter")
        await type_text(pilot, "a draft")
        assert "⧗ one" in loading.screen.query_one("#waiting").text
        assert engine.calls == []
        await loading.finish(pilot)
        await wait_until(pilot, lambda: len(engine.calls) == 2)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert [turn.question for turn in app.chat.conversation.turns] == ["one", "two"]
        assert app.chat.prompt.text == "a draft" and app.focused is app.chat.prompt
        await pilot.press("up")
        assert app.chat.prompt.text == "two"


async def test_keys_say_why_they_do_nothing_while_the_model_loads() -> None:
    loading = Loading(ok_engine())
    app = loading.app
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await type_text(pilot, "what 2 j")
        for key, name in (("f3", "Sampling"), ("f2", "Engine"), ("alt+r", "Retry")):
            await pilot.press(key)
            assert f"{name}: once the model is loaded" in notes(app)
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        assert loading.screen.area is not None
        assert loading.screen.area.prompt.text == "what 2 j"
        loading.screen.area.prompt.text = ""
        await type_text(pilot, "/export x")
        await pilot.press("enter")
        assert "/export: once" in notes(app)
        assert loading.screen.area.prompt.text == "/export x", "it is not lost"
        await pilot.press("ctrl+c")
        assert loading.screen.area.prompt.text == "" and not app._exit
        await pilot.press("up")
        assert loading.screen.area.prompt.text == "/export x"


async def test_waiting_messages_are_taken_back_while_the_model_loads() -> None:
    loading = Loading(ok_engine())
    async with loading.app.run_test(size=(80, 24)) as pilot:
        await type_text(pilot, "one")
        await pilot.press("enter", "up", "x")
        assert loading.screen.area is not None and not loading.screen.area.waiting
        assert loading.screen.area.prompt.text == "onex"
        await loading.finish(pilot)
        assert loading.app.chat.prompt.text == "onex" and loading.engine.calls == []


async def test_a_long_paste_while_the_model_loads_goes_with_the_next_message() -> None:
    engine = ok_engine()
    loading = Loading(engine)
    async with loading.app.run_test(size=(80, 24)) as pilot:
        loading.screen.post_message(LargePaste("long " * 4000))
        await pilot.pause()
        assert loading.screen.area is not None
        assert "pasted-1.txt" in str(loading.screen.area.prompt.border_title)
        await type_text(pilot, "sum")
        await pilot.press("enter")
        await loading.finish(pilot)
        await wait_until(pilot, lambda: len(engine.calls) == 1)
        assert "pasted-1.txt" in sent(engine)[0][1] and sent(engine)[0][1].endswith("sum")


async def test_what_was_typed_is_shown_when_the_load_fails() -> None:
    loading = Loading(ok_engine(), fails=True)
    app = loading.app
    async with app.run_test(size=(80, 24)) as pilot:
        await type_text(pilot, "one")
        await pilot.press("enter")
        await type_text(pilot, "a draft")
        loading.go_on.set()
        await wait_until(pilot, lambda: app._exit)
        said = printed(app)
    assert "Not sent:\n\none\n\na draft\n" in said and "the file is cut off" in said


async def test_keys_at_the_very_moment_of_the_change_arrive_in_order() -> None:
    loading = Loading(ok_engine())
    app = loading.app
    words = "the quick brown fox jumps over the lazy dog"
    async with app.run_test(size=(80, 24)) as pilot:
        for index, char in enumerate(words):
            if index == 7:
                loading.go_on.set()
            await pilot.press("space" if char == " " else char)
        await ready(app, pilot)
        await pilot.pause(0.1)
        assert isinstance(app.screen, ChatScreen)
        assert app.chat.prompt.text == words
