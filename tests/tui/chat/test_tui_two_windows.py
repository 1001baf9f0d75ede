"""Two windows on one chat: a question in one appears in the other, and every branch is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_harness import shown
from chat_store_harness import loaded
from test_tui_branches import numbered_engine
from tui_harness import FrozenApp, ask, ready, wait_until

from termgen.tui.chat import saved_chats
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.saved.chat_records import turn_record
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.state.conversation import AnswerState, Turn

SIZE = (110, 40)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_chats, "OTHERS_S", 0.05)


def other_asks(
    path: Path, question: str, answer: str, *, after: int, state: AnswerState = AnswerState.DONE
) -> Turn:
    """Write as a second window would that has read only the first turns of the path."""
    database = ChatDatabase(path)
    talk = loaded(database, database.sessions()[0].session_id)
    beside = talk.turns[after] if after < len(talk.turns) else None
    turn = talk.ask(question, now_s=0.0, beside=beside, model_id="other")
    turn.answer = answer
    turn.end(state)
    with database.transaction():
        database.save_turn(turn_record(talk, turn))
    database.close()
    return turn


async def test_the_other_window_goes_on_here_too(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = FrozenApp(numbered_engine(), chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await app.chats.read(lambda _database: None)  # it is written
        turn = other_asks(path, "from elsewhere", "half an", after=1, state=AnswerState.STREAMING)
        await wait_until(pilot, lambda: "half an" in shown(app))
        assert "Another window has gone on with this chat: a turn." in shown(app)
        database = ChatDatabase(path)
        talk = loaded(database, database.sessions()[0].session_id)
        talk.turns[1].answer = "half an answer, now whole"
        talk.turns[1].end(AnswerState.DONE)
        with database.transaction():
            database.save_turn(turn_record(talk, talk.turns[1]))
        database.close()
        await wait_until(pilot, lambda: "now whole" in shown(app))
        assert shown(app).count("from elsewhere") == 1
        await ask(app, pilot, "q2")
        questions = [each.question for each in app.chat.conversation.turns]
        assert questions == ["q0", "from elsewhere", "q2"]
        assert app.chat.conversation.turns[1].turn_id == turn.turn_id
        app.chat.conversation.check_integrity()
        assert shown(app).count("Another window") == 1


async def test_both_asking_at_once_is_told(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = FrozenApp(numbered_engine(), chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await ask(app, pilot, "q1")
        await app.chats.read(lambda _database: None)
        other_asks(path, "from elsewhere", "another answer", after=1)
        await wait_until(pilot, lambda: "Another window has asked at the same place" in shown(app))
        assert "‹1/2›" in shown(app) and "another answer" not in shown(app)
        await pilot.press("alt+right")
        assert "another answer" in shown(app) and "‹2/2›" in shown(app)
        app.chat.conversation.check_integrity()


async def test_this_windows_own_writes_are_no_news(tmp_path: Path) -> None:
    app = FrozenApp(numbered_engine(), chats=ChatStore(tmp_path / "chats.sqlite3"))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for number in range(3):
            await ask(app, pilot, f"q{number}")
            await pilot.pause(0.12)
        assert "Another window" not in shown(app)
