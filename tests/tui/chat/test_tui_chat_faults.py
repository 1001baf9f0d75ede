"""Faults that a chat must survive: odd paths, bad rows, control characters, early keys."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from pathlib import Path

import pytest
from chat_store_harness import keep, talk_of
from fake_engine import Script
from test_tui_chat import shown
from test_tui_sessions import app_with, messages
from textual import events
from textual.widgets import Input, TextArea
from tui_harness import FrozenApp, ask, chat_engine, pieces, ready, wait_until

from termgen.client import ChatPrompt
from termgen.errors import ChatStoreError, ConfigError, EngineError
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.saved.chat_records import read_chat
from termgen.tui.chat.saved.chat_store import Resume, store_path
from termgen.tui.chat.state.attachments import MAX_SCANNED, Attachment, files_below
from termgen.tui.chat.state.conversation import AnswerState, Conversation
from termgen.tui.paint.sanitize import clean_in_place

SIZE = (100, 30)
EVIL, SHOWN = "a\x1b]0;title\x07b\x9bc", "a␛]0;title␇b\ufffdc"


def drawn(app: FrozenApp) -> str:
    """The bytes that draw the screen."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def keys(app: FrozenApp, *names: str) -> None:
    """Post all keys at once, like a user who types ahead."""
    for name in names:
        app.post_message(events.Key(name, name if len(name) == 1 else "\r"))


async def test_what_is_typed_right_after_enter_stays() -> None:
    engine = chat_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        keys(app, "h", "i", "enter", "a", "b")
        await wait_until(pilot, lambda: app.chat.prompt.text == "ab")
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert [turn.question for turn in app.chat.conversation.turns] == ["hi"]
        app.chat.prompt.set_text("/copy")
        keys(app, "enter", "q", "enter", "r")
        await wait_until(pilot, lambda: len(engine.calls) == 2)
        assert [turn.question for turn in app.chat.conversation.turns] == ["hi", "q"]
        assert app.chat.prompt.text == "r"


async def test_what_is_not_sent_stands_before_what_was_typed_since() -> None:
    app = FrozenApp(chat_engine(Script(pieces=pieces("x" * 40), hold_after=2)))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        keys(app, "/", "o", "n", "e", "enter", "s")  # no command
        await wait_until(pilot, lambda: app.chat.prompt.text == "/ones")


async def test_an_edit_that_is_sent_keeps_what_is_typed_ahead() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "hi")
        app.chat.prompt.set_text("draft ")
        await pilot.press("alt+e")
        keys(app, "s", "enter", "z")
        await wait_until(pilot, lambda: app.chat.prompt.text == "draft z")
        await wait_until(pilot, lambda: not app.chat.is_streaming)


async def test_an_answer_may_end_while_the_screen_is_taken_down() -> None:
    """Its widgets are removed first, and the answering task is removed with the screen."""
    app = FrozenApp(chat_engine(Script(pieces=pieces("x" * 40), hold_after=2)))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "hi", wait=False)
        await wait_until(pilot, lambda: "xx" in shown(app))
        chat = app.chat
        await chat.remove_children()
        chat.dialogue.flush()
        chat.dialogue.stop_answer()
        assert chat.conversation.turns[0].state is AnswerState.STOPPED


async def test_ctrl_c_stops_the_answer_wherever_the_keys_are() -> None:
    app = FrozenApp(chat_engine(Script(pieces=pieces("x" * 40), hold_after=2)))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "hi", wait=False)
        await wait_until(pilot, lambda: "xx" in shown(app))
        await pilot.press("ctrl+b", "ctrl+c")
        assert app.chat.conversation.turns[0].state is AnswerState.STOPPED
        assert app.chat.panel.display


async def test_thoughts_outlast_a_failure() -> None:
    error = EngineError("the server is gone")
    script = Script(pieces=("<think>", "deep ", "in ", "thought"), fail_after=3, error=error)
    app = FrozenApp(chat_engine(script))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why?")
        turn = app.chat.conversation.turns[0]
        assert (turn.state, turn.thought.text) == (AnswerState.FAILED, "deep in")
        assert "the server is gone" in shown(app)


def test_a_question_without_answer_is_asked_with_the_next() -> None:
    talk = Conversation(system_prompt="be brief")
    for question, answer in (("a", ""), ("b", "yes"), ("c", ""), ("d", "")):
        turn = talk.ask(question, now_s=0.0)
        turn.answer = answer
    prompt = talk.prompt()
    assert isinstance(prompt, ChatPrompt)
    assert [(m["role"], m["content"]) for m in prompt.messages] == [
        ("system", "be brief"),
        ("user", "a\n\nb"),
        ("assistant", "yes"),
        ("user", "c\n\nd"),
    ]


@pytest.mark.parametrize("name", ["[/b].txt", "[red]x.txt", "[x", EVIL])
async def test_a_file_may_be_called_anything(name: str) -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        app.chat.files.attach([Attachment(name, "text")])
        await pilot.pause()
        screen = drawn(app)
        assert (name if name != EVIL else SHOWN) in screen and "\x1b" not in screen


async def test_control_characters_do_not_reach_the_terminal() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await ready(app, pilot)
        chat = app.chat
        chat.prompt.set_text(f"{EVIL}\twords")
        chat.conversation.system_prompt = EVIL
        chat.notify(EVIL, markup=False)
        await wait_until(pilot, lambda: drawn(app).count(SHOWN) == 2)
        assert chat.prompt.text == f"{EVIL}\twords"
        await pilot.press("f4")
        await pilot.pause()
        assert SHOWN in drawn(app) and "\x1b" not in drawn(app)


def test_a_line_is_cleaned_in_place() -> None:
    line = "a\tb\x1b\u2028c\ud800\u202e"
    assert clean_in_place(line) == "a\tb␛\ufffdc\ufffd⇄"


async def test_paths_without_a_home_are_told() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "hi")
        for command in ("export", "import"):
            await ask(app, pilot, f"/{command} ~nobody-here/x.md")
        await wait_until(pilot, lambda: sum("not a path" in m for m in messages(app)) == 2)
        await ask(app, pilot, "/import bad\0.json")
        await wait_until(pilot, lambda: any("cannot be read" in m for m in messages(app)))
    with pytest.raises(ConfigError, match="chat_db"):
        store_path("~nobody-here/x")


def test_devices_are_not_imported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ChatStoreError, match="not a file"):
            read_chat(path)


async def test_half_a_pair_of_code_units_can_be_copied() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "hi")
        app.chat.conversation.turns[0].answer = "a\ud83db"
        await ask(app, pilot, "/copy")
        assert app.clipboard == "a?b"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("state", "'odd'"),
        ("figures", "'{'"),
        ("figures", "'[]'"),
        ("figures", """'{"ttft_s": NaN}'"""),
        ("answer", "x'00ff'"),
        ("asked_s", "'noon'"),
    ],
)
async def test_a_row_that_is_broken_is_told(tmp_path: Path, column: str, value: str) -> None:
    path = tmp_path / "chats.sqlite3"
    database = ChatDatabase(path)
    talk = talk_of("q0")
    keep(database, talk)
    database.close()
    connection = sqlite3.connect(path)
    connection.execute("DROP TRIGGER turn_words_changed")
    connection.execute(f"UPDATE turns SET {column} = {value}")
    connection.commit()
    connection.close()
    app = app_with(path, resume=Resume(talk.session_id, {}))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: len(messages(app)) > 0)
        assert not any("any more" in message for message in messages(app))
        await ask(app, pilot, "q1")
        assert "answer0" in shown(app)
    database = ChatDatabase(path)
    assert [session.title for session in database.sessions()] == ["q1", "q0"]
    database.close()


def test_an_import_with_impossible_figures_is_refused(tmp_path: Path) -> None:
    from chat_store_harness import PARAMS

    from termgen.tui.chat.saved.chat_records import as_json, session_record, turn_record

    talk = talk_of("q0")
    turns = [turn_record(talk, turn) for turn in talk.turns]
    document = json.loads(as_json(session_record(talk, PARAMS), turns))
    document["turns"][0]["question"] = "half \ud83d"
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    assert read_chat(path)[1][0].question == "half \\ud83d"
    for figure in ("ttft_s", "output_s"):
        broken = json.loads(json.dumps(document))
        broken["turns"][0]["figures"][figure] = float("nan")
        path.write_text(json.dumps(broken))
        with pytest.raises(ChatStoreError, match="no number of seconds"):
            read_chat(path)


def test_chats_are_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    database = ChatDatabase(path)
    keep(database, talk_of("q0"))
    for name in os.listdir(tmp_path):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name
    database.close()


def test_folders_without_end_are_not_listed_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(30):
        (tmp_path / f"d{i}" / "e").mkdir(parents=True)
        (tmp_path / f"d{i}" / "e" / "f").touch()
    (tmp_path / "near").touch()
    assert len(files_below(tmp_path)) == 31 < MAX_SCANNED
    monkeypatch.setattr("termgen.tui.chat.state.attachments.MAX_SCANNED", 40)
    assert files_below(tmp_path) == ["near"]


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        (("ctrl+b", "slash"), 200),
        (("f3",), 2000),
        (("ctrl+r",), 2000),
        (("f2", "slash"), 200),
        (("f4",), 50_000),
    ],
    ids=str,
)
async def test_no_field_is_blocked_by_a_megabyte(keys: tuple[str, ...], most: int) -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        field = app.focused
        assert isinstance(field, Input | TextArea)
        for text in ("word " * 200_000, "line\n" * 200_000):
            app.post_message(events.Paste(text))
            await pilot.press("end", "7")
        shown = field.text if isinstance(field, TextArea) else field.value
        assert 0 < len(shown) <= most and "7" in shown, "the keys work on"
        told = [note.message for note in app._notifications]
        refused = "not pasted: a system prompt has at most 50,000 characters"
        assert told.count(refused) == (2 if isinstance(field, TextArea) else 0)
