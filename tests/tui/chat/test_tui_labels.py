"""Pins and tags of saved chats: in the store, in the list, by commands, in exports."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from chat_store_harness import keep, loaded, talk_of
from fake_engine import Script
from test_tui_sessions import app_with, lists, messages
from tui_harness import ask, chat_engine, ready, wait_until

from termgen.errors import RequestError
from termgen.tui.chat.saved.chat_db import APPLICATION_ID, MIGRATIONS, ChatDatabase
from termgen.tui.chat.saved.chat_records import fork_of
from termgen.tui.chat.state.labels import (
    MAX_TAGS,
    Labels,
    labels_of,
    parse_tags,
    split_search,
)

WIDE = (120, 34)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.sqlite3"


def engine_ok() -> object:
    return chat_engine(Script(pieces=("an ", "answer")))


def labels_on_disk(path: Path) -> dict[str, Labels]:
    """Labels by the title of the chat."""
    database = ChatDatabase(path)
    titles = {session.session_id: session.title for session in database.sessions()}
    found = {titles.get(key, "?"): labels for key, labels in database.labels().items()}
    database.close()
    return found


@pytest.mark.parametrize(
    ("argument", "add", "remove"),
    [
        ("Work", ["work"], []),
        ("#work -#Home -b.c_d", ["work"], ["home", "b.c_d"]),
        ("", [], []),
        ("ünï 日本", ["ünï", "日本"], []),
    ],
)
def test_tags_are_read(argument: str, add: list[str], remove: list[str]) -> None:
    assert parse_tags(argument) == (add, remove)


@pytest.mark.parametrize("argument", ["a b!", "--", "-", "#", "x" * 33, "a\x1b[31m", "a/b"])
def test_what_is_no_tag_is_named(argument: str) -> None:
    with pytest.raises(RequestError, match="is no tag") as caught:
        parse_tags(argument)
    assert argument.split()[-1] in str(caught.value)


def test_labels_of_an_export_made_by_hand() -> None:
    assert labels_of({}) == labels_of({"tags": "a", "pinned": "yes"}) == Labels()
    params = {"tags": ["B", "a", 3, "no way", None, "\x1b"], "pinned": True}
    assert labels_of(params) == Labels(True, ("a", "b"))
    assert labels_of(Labels(True, ("a",)).as_params()) == Labels(True, ("a",))
    assert len(labels_of({"tags": [f"t{n}" for n in range(99)]}).tags) == MAX_TAGS
    with pytest.raises(RequestError, match="at most 20 tags, not 21"):
        Labels().with_tags([f"t{n}" for n in range(21)], ())


def test_the_store_finds_chats_by_tags_and_lists_pinned_ones_first(path: Path) -> None:
    database = ChatDatabase(path)
    talks = {name: talk_of(name) for name in ("old", "middle", "new")}
    for talk in talks.values():
        keep(database, talk)
    ids = {name: talk.session_id for name, talk in talks.items()}
    database.pin(ids["old"], True)
    for name, tag in (("old", "work"), ("middle", "work"), ("middle", "urgent")):
        database.tag(ids[name], tag, True)

    def titles(words: str = "", **options: bool) -> list[str]:
        return [session.title for session in database.sessions(words, **options)]

    assert titles() == ["new", "middle", "old"], "the last one is the last one"
    assert titles(pinned_first=True) == ["old", "new", "middle"]
    assert titles("#wo") == ["middle", "old"] and titles("#work #URG") == ["middle"]
    assert titles("#work old") == ["old"] and titles("#work answered") == ["middle", "old"]
    assert titles("#") == ["middle", "old"] and titles("#none") == []
    assert database.tags() == {"work": 2, "urgent": 1}
    assert loaded(database, ids["old"]).labels == Labels(True, ("work",))
    keep(database, talks["old"])
    assert loaded(database, ids["old"]).labels == Labels(True, ("work",)), "another window's stay"
    database.tag(ids["middle"], "work", False)
    database.pin(ids["old"], False)
    assert database.sessions("#urgent")[0].tags == ("urgent",)
    assert not loaded(database, ids["old"]).labels.is_pinned
    database.delete(ids["middle"])
    assert database.tags() == {"work": 1}
    database._connection.execute("UPDATE sessions SET deleted_s = 1 WHERE deleted_s IS NOT NULL")
    database.close()
    database = ChatDatabase(path)
    assert set(database.labels()) == {ids["old"]}, "labels go with their chat"
    database.close()


def test_a_file_of_the_version_before_gets_labels(path: Path) -> None:
    connection = sqlite3.connect(path)
    for statements in MIGRATIONS[:2]:
        for statement in statements:
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 2")
    connection.execute("INSERT INTO sessions VALUES ('s1', 'one', 1, 1, 'm', NULL, '{}', NULL)")
    connection.commit()
    connection.close()
    database = ChatDatabase(path)
    database.tag("s1", "a", True)
    assert [(each.title, each.tags) for each in database.sessions("#a")] == [("one", ("a",))]
    database.close()


def test_a_fork_keeps_the_tags() -> None:
    talk = talk_of("one", "two")
    talk.labels = Labels(True, ("a",))
    assert fork_of(talk, talk.turns[0]).labels == Labels(False, ("a",))


async def test_commands_pin_and_tag_the_open_chat(path: Path) -> None:
    app = app_with(path, engine_ok())
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        for early in ("/pin", "/tag work"):
            await ask(app, pilot, early)
        assert "a chat can be pinned from its first question on" in messages(app)
        assert "a chat can have tags from its first question on" in messages(app)
        await ask(app, pilot, "one")
        await ask(app, pilot, "/tag work #Urgent")
        await ask(app, pilot, "/tag -urgent home")
        await ask(app, pilot, "/pin")
        await ask(app, pilot, "/tag -never")
        assert "this chat has no tag #never" in messages(app)
        await ask(app, pilot, "/tag a!b")
        assert any("a!b is no tag" in message for message in messages(app))
        await wait_until(
            pilot, lambda: labels_on_disk(path) == {"one": Labels(True, ("home", "work"))}
        )
        await pilot.press("ctrl+n")
        await ask(app, pilot, "two")
        await ask(app, pilot, "/tag home")
        await ask(app, pilot, "/tag")
        await wait_until(pilot, lambda: "Of all chats" in app.chat.transcript.plain_text)
        assert "Tags of this chat: #home. Of all chats: #home 2, #work 1." in (
            app.chat.transcript.plain_text
        )
        assert dict(app.chat.saved.tag_arguments()).keys() == {"work", "-home"}
        await ask(app, pilot, "/tag -home")
        assert "Tags of this chat: none." in app.chat.transcript.plain_text
    assert labels_on_disk(path) == {"one": Labels(True, ("home", "work"))}


async def test_the_list_shows_pins_and_tags_and_filters_by_them(path: Path) -> None:
    app = app_with(path, engine_ok())
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        for question in ("first", "second"):
            await pilot.press("ctrl+n")
            await ask(app, pilot, question)
            await ask(app, pilot, f"/tag t-{question}")
        await pilot.press("ctrl+b")
        await lists(app, pilot, lambda text: "first" in text and "#t-second" in text)
        await pilot.press("down", "f7")
        await lists(app, pilot, lambda text: text.strip().startswith("pinned"))
        rows = [row.strip() for row in app.chat.panel.session_list.text.splitlines() if row.strip()]
        assert rows[1].startswith("▸") and "first" in rows[1] and rows[2] == "#t-first"
        assert rows[3] == "today" and "second" in rows[4]
        await pilot.press("number_sign", *"t-se")
        await lists(app, pilot, lambda text: "first" not in text)
        await pilot.press("enter")
        assert app.chat.conversation.title == "second" and app.chat.dialogue.marked is None
        await pilot.press("ctrl+b", "ctrl+b", "number_sign", *"nil")
        await lists(app, pilot, lambda text: "No chat has '#nil'" in text)
        await pilot.press("escape")
        await lists(app, pilot, lambda text: "first" in text)
        await pilot.press("home", "f7")
        await lists(app, pilot, lambda text: "pinned" not in text)
    assert labels_on_disk(path)["first"] == Labels(False, ("t-first",))


async def test_labels_are_in_exports(path: Path, tmp_path: Path) -> None:
    app = app_with(path, engine_ok())
    file = tmp_path / "chat.json"
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await ask(app, pilot, "/tag work")
        await ask(app, pilot, "/pin")
        await ask(app, pilot, f"/export {file}")
        await wait_until(pilot, file.exists)
    other = tmp_path / "other.sqlite3"
    app = app_with(other, engine_ok())
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, f"/import {file}")
        await wait_until(pilot, lambda: app.chat.conversation.title == "one")
        assert app.chat.conversation.labels == Labels(True, ("work",))
    assert labels_on_disk(other) == {"one": Labels(True, ("work",))}


async def test_another_windows_tags_are_seen(path: Path) -> None:
    app = app_with(path, engine_ok())
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await ask(app, pilot, "/tag mine")
        session_id = app.chat.conversation.session_id
        await wait_until(pilot, lambda: "one" in labels_on_disk(path))
        other = ChatDatabase(path)
        other.tag(session_id, "theirs", True)
        other.close()
        app.chat.saved.look_for_others()
        await wait_until(pilot, lambda: app.chat.conversation.labels.tags == ("mine", "theirs"))


def test_a_search_has_tags_and_words() -> None:
    assert split_search(" #Wo two  #x three") == (["wo", "x"], ["two", "three"])
