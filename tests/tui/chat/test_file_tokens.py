"""The edge of the prompt says how many tokens a file takes, before the question is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, make_memory_ledger
from foreign_server import foreign_server
from remote_chat import chat_of, remote_app
from server_harness import serving
from tui_harness import FrozenApp, ask, chat_engine, ready, type_text, wait_until

from termgen.errors import EngineError
from termgen.tui.chat.state.attachments import read_file, with_name
from termgen.tui.chat.widgets import file_tokens

SIZE = (100, 30)


class Counting:
    """An engine that notes what it tokenises."""

    def __init__(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        self.fails = False
        of_engine = engine.tokenize

        async def tokenize(prompt: Any, **options: bool) -> list[int]:
            self.texts.append(prompt)
            if self.fails:
                raise EngineError("the tokenizer has ended")
            return await of_engine(prompt, **options)

        monkeypatch.setattr(engine, "tokenize", tokenize)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_tokens, "PAUSE_S", 0.02)
    (tmp_path / "a.py").write_text("x = 1\n" * 200)
    (tmp_path / "picture.bin").write_bytes(b"\0\1")
    return tmp_path


def edge(app: Any) -> str:
    return edge_of(app.chat)


def edge_of(chat: Any) -> str:
    return str(chat.prompt.border_title or "")


async def test_tokens_are_counted_once_and_again_when_the_file_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = chat_engine(Script(pieces=("ok",)), memory=make_memory_ledger())
    counting = Counting(engine, monkeypatch)
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await type_text(pilot, "why @a.py ")
        await wait_until(pilot, lambda: "tok" in edge(app))
        sent = with_name(read_file("a.py"))
        assert edge(app) == "▤ a.py 1.2k tok" and counting.texts == [sent]
        await type_text(pilot, "does it loop?")
        assert edge(app) == "▤ a.py 1.2k tok" and len(counting.texts) == 1
        (folder / "a.py").write_text("x = 1\n" * 250)
        await type_text(pilot, "?")
        await wait_until(pilot, lambda: edge(app) == "▤ a.py 1.5k tok")
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(engine.calls) and not app.chat.is_streaming)
        assert not edge(app)
        await ask(app, pilot, "/attach a.py", wait=False)
        await wait_until(pilot, lambda: edge(app) == "▤ a.py 1.5k tok")


async def test_what_cannot_be_counted_has_its_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = chat_engine(memory=make_memory_ledger())
    counting = Counting(engine, monkeypatch)
    counting.fails = True
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await type_text(pilot, "see @picture.bin @a.py ")
        await wait_until(pilot, lambda: len(counting.texts) == 1)
        await pilot.pause(0.2)
        assert edge(app) == "▤ picture.bin 2B  ▤ a.py 1.2kB"
        assert len(counting.texts) == 1, "it is not tried again and again"
        assert not app._notifications


async def test_a_server_of_ours_counts_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    counting = Counting(engine, monkeypatch)
    async with serving(engine) as server:
        app = remote_app(server.url)
        async with app.run_test(size=SIZE) as pilot:
            chat = await chat_of(app, pilot)
            chat.prompt.insert("why @a.py ")
            await wait_until(pilot, lambda: edge_of(chat) == "▤ a.py 1.2k tok")
            chat.prompt.insert("does it loop?")
            await pilot.pause(0.2)
        assert counting.texts == [with_name(read_file("a.py"))], "once, and as it will be sent"
    assert not engine.calls


async def test_nothing_of_a_file_goes_to_other_servers_before_the_question(folder: Path) -> None:
    async with foreign_server() as server:
        app = remote_app(server.url)
        async with app.run_test(size=SIZE) as pilot:
            chat = await chat_of(app, pilot)
            chat.prompt.insert("why @a.py ")
            await pilot.pause(0.3)
            assert edge_of(chat) == "▤ a.py 1.2kB"
        assert set(server.paths) <= {"/v1/models", "/v1/events"}
