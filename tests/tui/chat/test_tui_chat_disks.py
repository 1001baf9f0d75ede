"""The chat file on full or broken disks, and beside other programs that use it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest
from chat_store_harness import (
    PARAMS,
    Told,
    keep,
    loaded,
    running,
    shape,
    talk_of,
    until,
)

from termgen.errors import ChatStoreError
from termgen.tui.chat.saved.chat_db import MIGRATIONS, ChatDatabase
from termgen.tui.chat.saved.chat_records import (
    all_turns,
    conversation_of,
)
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.state.conversation import Turn


@pytest.mark.parametrize("damage", ["garbage", "middle", "cut"])
async def test_a_broken_file_is_set_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "chats.sqlite3"
    database = ChatDatabase(path)
    for number in range(40):
        keep(database, talk_of(f"question {number} " * 40))
    database.close()
    content = bytearray(path.read_bytes())
    if damage == "garbage":
        content = bytearray(b"no database at all" * 100)
    elif damage == "middle":
        content[4096:20_000] = b"\x5a" * (20_000 - 4096)
    else:
        del content[len(content) // 2 :]
    path.write_bytes(content)
    told = Told()
    store = ChatStore(path)
    async with running(store, told) as autosave:
        talk = talk_of("new")
        autosave.save_all(talk, PARAMS)
        titles = await store.read(lambda database: [s.title for s in database.sessions()])
        assert titles == ["new"]
    aside = list(tmp_path.glob("chats.broken-*.sqlite3"))
    assert len(aside) == 1 and aside[0].read_bytes() == bytes(content)
    assert len(told.messages) == 1 and str(aside[0]) in told.messages[0]


async def test_a_file_that_breaks_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    told = Told()
    store = ChatStore(path)
    talk = talk_of("one")
    async with running(store, told) as autosave:
        autosave.save_all(talk, PARAMS)
        await store.read(
            lambda database: database._connection.execute(
                "PRAGMA wal_checkpoint(TRUNCATE)"
            ).fetchall()
        )
        path.write_bytes(b"x" * path.stat().st_size)

        def break_it(database: ChatDatabase) -> None:
            error = sqlite3.DatabaseError("database disk image is malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

        with pytest.raises(ChatStoreError, match="malformed"):
            await store.read(break_it)
        await until(lambda: told.replaced == 1)
        autosave.save_all(talk, PARAMS)  # as the screen does
        titles = await store.read(lambda database: [s.title for s in database.sessions()])
        assert titles == ["one"]
    assert len(list(tmp_path.glob("chats.broken-*.sqlite3"))) == 1


async def test_a_locked_file_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    told = Told()
    store = ChatStore(path, busy_s=0.02, retry_s=0.05)
    async with running(store, told) as autosave:
        await store.read(lambda _database: None)
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        talk = talk_of("one")
        autosave.save_all(talk, PARAMS)
        await until(lambda: len(told.messages) == 1)
        assert "locked" in told.messages[0] and "the chat goes on" in told.messages[0].lower()
        assert await store.read(lambda database: database.sessions()) == []
        later = talk.ask("two", now_s=0.0)
        autosave.asked(talk, later, PARAMS)
        blocker.execute("ROLLBACK")
        blocker.close()
        await until(lambda: "chats are saved again" in told.messages)
        records = await store.read(lambda database: database.load(talk.session_id))
        assert shape(conversation_of(*records)) == shape(talk)
    assert store.trouble == ""


async def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    told = Told()
    store = ChatStore(tmp_path / "chats.sqlite3", retry_s=0.02)
    talk = talk_of("long " * 20_000)
    limit = "PRAGMA max_page_count = {}"
    async with running(store, told) as autosave:
        await store.read(lambda db: db._connection.execute(limit.format(20)).fetchone())
        autosave.save_all(talk, PARAMS)
        await until(lambda: bool(told.messages))
        assert "full" in told.messages[0]
        await store.read(lambda db: db._connection.execute(limit.format(10_000)).fetchone())
        await until(lambda: "chats are saved again" in told.messages)
    database = ChatDatabase(store.path)
    assert shape(loaded(database, talk.session_id)) == shape(talk)
    database.close()


async def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.sqlite3")
    async with running(store) as autosave:
        await store.read(lambda db: db._connection.execute("PRAGMA max_page_count = 20").fetchone())
        autosave.save_all(talk_of("long " * 20_000), PARAMS)
    assert "cannot be saved" in store.trouble


@pytest.mark.parametrize("kind", ["folder", "foreign", "newer"])
async def test_a_file_that_cannot_be_used_leaves_the_chats_in_memory(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "chats.sqlite3"
    if kind == "folder":
        path.mkdir()
    elif kind == "foreign":
        raw = sqlite3.connect(path)
        raw.execute("CREATE TABLE theirs (x)")
        raw.close()
    else:
        ChatDatabase(path, migrations=(*MIGRATIONS, ("CREATE TABLE more (x)",))).close()
    before = path.read_bytes() if path.is_file() else b""
    told = Told()
    store = ChatStore(path)
    async with running(store, told) as autosave:
        autosave.save_all(talk_of("one"), PARAMS)
        assert len(await store.read(lambda database: database.sessions())) == 1
    assert len(told.messages) == 1 and str(path) in told.messages[0]
    assert not path.is_file() or path.read_bytes() == before


async def test_two_processes_write_one_file(tmp_path: Path) -> None:
    """Two stores, each with its own thread and connection, and one session that both extend."""
    path = tmp_path / "chats.sqlite3"
    first, second = ChatStore(path), ChatStore(path)
    shared = talk_of("shared")
    told = Told()
    async with running(first, told) as one, running(second, told) as two:
        one.save_all(shared, PARAMS)
        records = await first.read(lambda database: database.load(shared.session_id))
        twin = conversation_of(*records)
        mine: list[Turn] = []
        for number in range(30):
            for autosave, talk in ((one, shared), (two, twin)):
                turn = talk.ask(f"q{number}", now_s=0.0, beside=talk.turns[-1] if number else None)
                mine.append(turn)
                autosave.asked(talk, turn, PARAMS)
            autosave.save_all(talk_of(f"own {number}"), PARAMS)
            if number % 10 == 0:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(s.read(lambda database: None) for s in (first, second)))
        sessions, both = await first.read(
            lambda database: (database.sessions(), database.load(shared.session_id))
        )
    assert len(sessions) == 31 and told.messages == []
    merged = conversation_of(*both)
    merged.check_integrity()
    assert {turn.turn_id for turn in all_turns(merged)} >= {turn.turn_id for turn in mine}


def test_several_processes_make_the_file_at_once(tmp_path: Path) -> None:
    """In each run another one changes the journal mode; in one of thirty it is late."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(6)

    def make() -> None:
        for number in range(100):
            barrier.wait()
            try:
                ChatDatabase(tmp_path / f"chats-{number}.sqlite3").close()
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


async def test_a_bug_in_a_write_ends_the_saving_and_nothing_else(tmp_path: Path) -> None:
    told = Told()
    store = ChatStore(tmp_path / "chats.sqlite3")

    def bug(_database: ChatDatabase) -> None:
        raise ZeroDivisionError("ours")

    async with running(store, told):
        store.put("x", bug)
        await until(lambda: bool(told.messages))
        assert told.messages == ["chats are not saved any more: ZeroDivisionError: ours"]
        with pytest.raises(ChatStoreError, match="closed"):
            await store.read(lambda database: database.sessions())


async def test_a_bug_in_a_read_is_an_error_of_that_read(tmp_path: Path) -> None:
    told = Told()
    store = ChatStore(tmp_path / "chats.sqlite3")
    async with running(store, told) as autosave:
        with pytest.raises(ChatStoreError, match="cannot be read: UnicodeEncodeError"):
            await store.read(lambda database: database.find("\ud800"))
        talk = talk_of("still here")
        autosave.save_all(talk, PARAMS)
        found = await store.read(lambda database: database.find(talk.session_id))
        assert found is not None and found[0].title == "still here"
        assert await store.read(lambda database: database.find("unknown")) is None
    assert told.messages == []
