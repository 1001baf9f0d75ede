"""What a chat remembers from one run to the next: questions, drafts, and how to go on."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from fake_engine import Script
from textual.pilot import Pilot
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.commands.launch import end_app
from termgen.config import UIConfig
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.saved.chat_store import ChatStore, Resume, find_session
from termgen.tui.chat.state.conversation import PromptHistory


def make_app(path: Path, session: str | None = None, **options: object) -> FrozenApp:
    resume = None if session is None else Resume(find_session(path, session), {})
    engine = chat_engine(Script(pieces=("an ", "answer")))
    return FrozenApp(engine, chats=ChatStore(path), resume=resume, **options)


def draft_of(path: Path, session_id: str) -> str:
    database = ChatDatabase(path)
    try:
        return database.draft(session_id)
    finally:
        database.close()


async def opened(app: FrozenApp, pilot: Pilot[None], num_turns: int) -> None:
    await ready(app, pilot)
    await wait_until(pilot, lambda: len(app.chat.conversation.turns) == num_turns)


def test_earlier_prompts_come_in_front_as_far_as_there_is_room() -> None:
    history = PromptHistory(limit=4)
    history.add("three")
    assert history.older("typing") == "three"
    history.add_earlier(["zero", "one", "two", "two", "three"])
    assert [history.older("") for _ in range(4)] == ["two", "one", "zero", None]
    history.add("four")
    history.add_earlier(["ancient"])
    assert history.newest_first() == ["four", "three", "two", "one"]


async def test_the_up_key_finds_the_questions_of_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = make_app(path)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        await ask(app, pilot, "second")
        await pilot.press("ctrl+n")
        await ask(app, pilot, "of a chat that goes")
        gone = app.chat.conversation.session_id
    following = make_app(path)
    async with following.run_test(size=(100, 30)) as pilot:
        await ready(following, pilot)
        prompt = following.chat.prompt
        await wait_until(pilot, lambda: len(prompt.prompts.newest_first()) == 3)
        await pilot.press("n", "e", "w", "up")
        assert prompt.text == "of a chat that goes"
        await pilot.press("up", "up", "up")
        assert prompt.text == "first"
        await pilot.press("down", "down", "down")
        assert prompt.text == "new"
        following.chat.autosave.delete(gone)
    last = make_app(path)
    async with last.run_test(size=(100, 30)) as pilot:
        await ready(last, pilot)
        history = last.chat.prompt.prompts
        await wait_until(pilot, lambda: history.newest_first() == ["second", "first"])


async def test_a_chat_keeps_its_draft(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = make_app(path)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "about cats")
        cats = app.chat.conversation.session_id
        app.chat.prompt.insert("and dogs?")
        await wait_until(pilot, lambda: draft_of(path, cats) == "and dogs?")
        await pilot.press("ctrl+n")
        assert app.chat.prompt.text == "and dogs?", "typed for a chat of its own"
        await wait_until(pilot, lambda: draft_of(path, cats) == "")
        app.chat.prompt.text = ""
        await ask(app, pilot, "about ships")
        ships = app.chat.conversation.session_id
        app.chat.prompt.insert("sails")
        app.chat.saved.open(cats)
        await wait_until(pilot, lambda: app.chat.conversation.session_id == cats)
        await wait_until(pilot, lambda: app.chat.prompt.text == "")
        app.chat.prompt.insert("whiskers")
        app.chat.saved.open(ships)
        await wait_until(pilot, lambda: app.chat.prompt.text == "sails")
        app.chat.prompt.insert("!")
    assert draft_of(path, ships) == "sails!" and draft_of(path, cats) == "whiskers"
    following = make_app(path, ships)
    async with following.run_test(size=(100, 30)) as pilot:
        await opened(following, pilot, 1)
        await wait_until(pilot, lambda: following.chat.prompt.text == "sails!")
        await pilot.press("enter")
        await wait_until(pilot, lambda: not following.chat.is_streaming)
    assert draft_of(path, ships) == "", "it was sent"


async def test_an_edited_question_is_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = make_app(path)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "a question")
        session_id = app.chat.conversation.session_id
        app.chat.prompt.insert("half a thought")
        await pilot.press("alt+e")
        assert app.chat.prompt.text == "a question"
        app.chat.saved.save_draft()
        await wait_until(pilot, lambda: draft_of(path, session_id) == "half a thought")


async def test_what_was_typed_before_a_chat_opens_stays(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = make_app(path)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        session_id = app.chat.conversation.session_id
        app.chat.prompt.insert("kept")
    following = make_app(path)
    async with following.run_test(size=(100, 30)) as pilot:
        await ready(following, pilot)
        following.chat.prompt.insert("typed")
        following.chat.saved.open(session_id)
        await wait_until(pilot, lambda: following.chat.prompt.text == "kept\ntyped")


async def test_the_end_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my chats.sqlite3"
    app = make_app(
        path, ui=UIConfig(chat_db=str(path)), found_by=lambda: ("--url", "http://gpu:8000")
    )
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "hello")
        session_id = app.chat.conversation.session_id
        await pilot.press("ctrl+q")
    assert end_app(app) == 0
    (said,) = capsys.readouterr().err.splitlines()
    word, _, command = said.partition(" ")
    assert word == "resume:"
    *words, wanted = shlex.split(command)
    assert words == [
        *("termgen", "chat", "--url", "http://gpu:8000", "--chat-db", str(path), "--session")
    ]
    assert find_session(path, wanted) == session_id


async def test_the_end_names_no_chat_that_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for chats in (ChatStore(None), ChatStore(tmp_path / "chats.sqlite3")):
        app = FrozenApp(chat_engine(), chats=chats)
        async with app.run_test(size=(100, 30)) as pilot:
            await ready(app, pilot)
            if chats.path is None:
                await ask(app, pilot, "hello")
            await pilot.press("ctrl+q")
        assert end_app(app) == 0 and capsys.readouterr().err == ""
