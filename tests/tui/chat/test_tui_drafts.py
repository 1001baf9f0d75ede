"""Drafts that outlive their terminal: kept by one program, taken by one other."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fake_engine import Script
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.saved.drafts import keep_draft, take_draft


def test_each_draft_is_taken_once_the_newest_first(tmp_path: Path) -> None:
    chats = tmp_path / "new folder" / "chats.sqlite3"
    assert take_draft(chats) == ""
    keep_draft(chats, "a lone \ud83d half")
    (chats.parent / "chats.sqlite3.draft-1").write_bytes(b"old \xff")
    os.utime(chats.parent / "chats.sqlite3.draft-1", (1, 1))
    (chats.parent / "chats.sqlite3.draft-2").write_bytes(b"  ")
    with ThreadPoolExecutor(8) as pool:
        taken = [text for text in pool.map(lambda _: take_draft(chats), range(8)) if text]
    assert sorted(taken) == ["a lone ? half", "old \ufffd"]
    assert list(chats.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_draft(tmp_path / "file" / "chats.sqlite3", "text")


async def test_messages_that_wait_are_kept_too(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    endless = Script(pieces=("word ",) * 500, delay_s=0.05)
    app = FrozenApp(chat_engine(endless), chats=ChatStore(path))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "sent", wait=False)
        await wait_until(pilot, lambda: app.chat.is_streaming)
        await ask(app, pilot, "waiting", wait=False)
        app.chat.prompt.insert("typed")
        app._hang_up()
    following = FrozenApp(chat_engine(), chats=ChatStore(path))
    async with following.run_test(size=(100, 30)) as pilot:
        await ready(following, pilot)
        await wait_until(pilot, lambda: following.chat.prompt.text == "waiting\n\ntyped")
    assert take_draft(path) == "", "it was given back, and ctrl+q prints it"


async def test_chats_that_are_kept_nowhere_keep_no_draft(tmp_path: Path) -> None:
    app = FrozenApp(chat_engine(), chats=ChatStore(None))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        app.chat.prompt.insert("typed")
        app._hang_up()
        assert "typed" in str(app._exit_renderables[0]), "it is printed"
    assert list(tmp_path.iterdir()) == []
