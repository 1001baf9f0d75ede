"""Titles by the model: what is one, when it is asked for, and that it is in nothing's way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chat_store_harness import keep, talk_of
from fake_engine import FakeEngine, Script
from server_harness import serving
from test_tui_sessions import app_with, chats_on_disk
from tui_harness import (
    FrozenApp,
    TimedEngine,
    ask,
    chat_engine,
    ready,
    shipped_themes,
    type_text,
    wait_until,
)

from termgen.commands.remote_command import RemoteHolder, RemoteTarget
from termgen.config import UIConfig
from termgen.errors import ConfigError, EngineError, RequestError
from termgen.tui.chat import titler as titler_module
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.saved.titles import MAX_CELLS, PARAMS, read_title, tidy_title
from termgen.tui.chat.state.conversation import AnswerState, Turn
from termgen.tui.remote_app import RemoteApp
from termgen.vocabulary.request import FinishReason

SIZE = (120, 34)
MODEL_TITLES = UIConfig(titles="model")
QUESTION = "Why does chunked prefill help the others?"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titler_module, "IDLE_S", 0.05)
    monkeypatch.setattr(titler_module, "LOOK_S", 0.02)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.sqlite3"


def engine_with(title: Script, answer: Script | None = None) -> TimedEngine:
    """Answers, and a title for them."""

    def script(call: Any) -> Script:
        if call.request_id.startswith("title-"):
            return title
        return answer or Script(pieces=("It ", "does."))

    return chat_engine(script)


def title_calls(engine: FakeEngine) -> list[str]:
    return [call.request_id for call in engine.calls if call.request_id.startswith("title-")]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Chunked prefill", "Chunked prefill"),
        (' "Title: Chunked  *prefill*." ', "Chunked prefill"),
        ("**Chunked prefill**", "Chunked prefill"),
        ("Why does it", "Why does it"),
        ("日本語の題", "日本語の題"),
        ("", ""),
        ('"..."', ""),
        ("one\ntwo", ""),
        ("bad\x1b[31m code", ""),
        ("turned\u202e round", ""),
        ("x" * (MAX_CELLS + 1), ""),
        ("題" * 31, ""),
        ("why does CHUNKED prefill", ""),
        ("Why does chunked prefill help", ""),
        ("the the the end", ""),
        ("At most six words, in their language.", ""),
        ("Only the title", ""),
    ],
)
def test_what_is_a_title(text: str, title: str) -> None:
    assert tidy_title(text, QUESTION) == title


def test_any_text_is_a_short_line_or_no_title() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(2000):
        text = "".join(rng.choices('ab \n\t\x07"*題é\u200b\u2028', k=rng.randrange(90)))
        title = tidy_title(text, QUESTION)
        assert len(title) <= MAX_CELLS and title == " ".join(title.split())
        assert all(char.isprintable() for char in title)


async def test_a_title_that_is_cut_off_is_none() -> None:
    turn = Turn("question", "answer", AnswerState.DONE)
    for reason, title in ((FinishReason.STOP, "A title"), (FinishReason.LENGTH, "")):
        engine = chat_engine(Script(pieces=("A ", "title"), finish_reason=reason))
        assert await read_title(engine, turn, request_id="t", template_kwargs={}) == title
    [call] = engine.calls
    assert call.params == PARAMS and call.params.max_tokens == 16
    assert "question" in call.prompt.messages[0]["content"]
    assert "answer" in call.prompt.messages[0]["content"]


def test_a_title_of_the_user_stays(path: Path) -> None:
    database = ChatDatabase(path)
    talk = talk_of("one")
    keep(database, talk)
    assert not database.retitle(talk.session_id, "another", "by the model")
    database.rename(talk.session_id, "one")
    assert not database.retitle(talk.session_id, "one", "by the model"), "the same words, by hand"
    other = talk_of("two")
    keep(database, other)
    assert database.retitle(other.session_id, "two", "by the model")
    assert not database.retitle(other.session_id, "by the model", "again")
    keep(database, other)
    titles = {session.title for session in database.sessions()}
    assert titles == {"one", "by the model"}, "a later save changes none"
    database.close()


def test_the_setting_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match="titles must be one of words, model"):
        UIConfig(titles="both")


async def test_an_idle_chat_gets_a_title(path: Path) -> None:
    engine = engine_with(Script(pieces=('"Chunked ', 'prefill"')))
    app = app_with(path, engine, ui=MODEL_TITLES)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("ctrl+b")
        await ask_in(app, pilot, QUESTION)
        await wait_until(pilot, lambda: app.chat.conversation.title == "Chunked prefill")
        await wait_until(pilot, lambda: "Chunked prefill" in app.chat.panel.session_list.text)
        await ask_in(app, pilot, "And more?")
        await pilot.pause(0.3)
    assert title_calls(engine) == ["title-1"], "once"
    assert [session.title for session in chats_on_disk(path)] == ["Chunked prefill"]


async def ask_in(app: FrozenApp, pilot: Any, text: str) -> None:
    app.chat.prompt.focus()
    await ask(app, pilot, text)


async def test_a_server_elsewhere_writes_titles_too(path: Path) -> None:
    def script(call: Any) -> Script:
        is_title = "Write only the title" in call.prompt.messages[-1]["content"]
        return Script(pieces=("A title",) if is_title else ("It does.",))

    async with serving(chat_engine(script)) as server:
        holder = RemoteHolder(RemoteTarget(server.url))
        app = RemoteApp(
            holder.start,
            stop_engine=holder.stop,
            ui=MODEL_TITLES,
            models=holder,
            open_feed=lambda: holder.open_feed(20.0),
            theme_folders=(shipped_themes(),),
            chats=ChatStore(path),
        )
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
            chat = app.screen
            assert isinstance(chat, ChatScreen)
            chat.prompt.insert(QUESTION)
            await pilot.press("enter")
            await wait_until(pilot, lambda: chat.conversation.title == "A title")
    assert chats_on_disk(path)[0].title == "A title"


async def test_words_are_the_default(path: Path) -> None:
    engine = engine_with(Script(pieces=("A title",)))
    app = app_with(path, engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION)
        await pilot.pause(0.3)
    assert title_calls(engine) == [] and chats_on_disk(path)[0].title == QUESTION


@pytest.mark.parametrize(
    "script",
    [
        Script(pieces=("one two three four five six seven " * 4,)),
        Script(pieces=("A title",), finish_reason=FinishReason.LENGTH),
        Script(raises=RequestError("no")),
        Script(pieces=("A ", "title"), fail_after=1, error=EngineError("it broke")),
    ],
    ids=["long", "cut", "refused", "failed"],
)
async def test_the_words_stay_where_none_comes_and_nothing_is_said(
    path: Path, script: Script
) -> None:
    engine = engine_with(script)
    app = app_with(path, engine, ui=MODEL_TITLES)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION)
        await wait_until(pilot, lambda: bool(title_calls(engine)))
        await pilot.pause(0.3)
        assert not app._notifications and "broke" not in app.chat.transcript.plain_text
    assert title_calls(engine) == ["title-1"] and chats_on_disk(path)[0].title == QUESTION


async def test_a_question_or_a_key_aborts_it(path: Path) -> None:
    engine = engine_with(Script(pieces=("A ", "title"), hold_after=1))
    app = app_with(path, engine, ui=MODEL_TITLES)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION)
        await wait_until(pilot, lambda: engine.live == ("title-1",))
        await type_text(pilot, "n")
        await wait_until(pilot, lambda: "title-1" in engine.aborted)
        await wait_until(pilot, lambda: engine.live == ("title-2",))
        app.chat.dialogue.regenerate()  # by a click or the palette: no key comes before it
        await wait_until(pilot, lambda: "title-2" in engine.aborted)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert app.chat.conversation.turns[0].answer == "It does."
        await wait_until(pilot, lambda: engine.live == ("title-3",))
        await type_text(pilot, "o")
        await pilot.pause(0.3)
        assert app.chat.prompt.text == "no"
    assert title_calls(engine) == ["title-1", "title-2", "title-3"], "and no more"
    assert chats_on_disk(path)[0].title == QUESTION


async def test_a_name_given_meanwhile_stays(path: Path) -> None:
    engine = engine_with(Script(pieces=("A ", "title"), hold_after=1))
    app = app_with(path, engine, ui=MODEL_TITLES)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION)
        await wait_until(pilot, lambda: engine.live == ("title-1",))
        app.chat.saved.rename_open("mine")
        engine.release.set()
        await wait_until(pilot, lambda: "title-1" in engine.finished)
        await pilot.pause(0.2)
        assert app.chat.conversation.title == "mine"
    assert chats_on_disk(path)[0].title == "mine"


async def test_a_stopped_answer_is_no_ground_for_one(path: Path) -> None:
    engine = engine_with(Script(pieces=("A title",)), Script(pieces=("a", "b"), hold_after=1))
    app = app_with(path, engine, ui=MODEL_TITLES)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, QUESTION, wait=False)
        await wait_until(pilot, lambda: app.chat.conversation.turns[0].answer == "a")
        await pilot.pause(0.2)
        assert title_calls(engine) == [], "not during an answer"
        await pilot.press("escape")
        await pilot.pause(0.2)
    assert title_calls(engine) == []


async def test_an_engine_with_other_work_is_not_asked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(Script(pieces=("A title",)))
    app = app_with(path, engine, ui=MODEL_TITLES)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        other = engine.generate("of a server", PARAMS, request_id="other")
        await anext(other)
        await ask(app, pilot, QUESTION)
        await pilot.pause(0.3)
        assert title_calls(engine) == []
        await other.aclose()
        await wait_until(pilot, lambda: app.chat.conversation.title == "A title")
