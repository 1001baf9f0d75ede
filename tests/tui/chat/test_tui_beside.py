"""`/beside`: one question to two models, whose answers stream side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_store_harness import loaded
from fake_engine import Script
from test_tui_sessions import app_with
from textual.pilot import Pilot
from tui_harness import FrozenApp, TimedEngine, ask, chat_engine, ready, wait_until

from termgen.config import UIConfig
from termgen.errors import EngineError, RequestError
from termgen.tui.chat import beside_screen as beside_module
from termgen.tui.chat.beside_screen import BesideScreen
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.state.conversation import AnswerState

SIZE = (120, 34)


@pytest.fixture(autouse=True)
def _esc_closes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "STOP_GRACE_S", -1.0)


class OtherEngine(TimedEngine):
    closed = 0

    async def aclose(self) -> None:
        self.closed += 1


def other_engine(script: Script, **model: Any) -> OtherEngine:
    there = chat_engine(model_id="big-model", **model)
    return OtherEngine(script=script, model=there.model)


class Others:
    """Two servers of the settings; only `big` answers."""

    def __init__(self, engine: OtherEngine) -> None:
        self.engine = engine

    @property
    def names(self) -> list[tuple[str, str]]:
        return [("big", "http://gpu:8000"), ("api", "https://a.example/v1 m")]

    async def open(self, wanted: str) -> OtherEngine:
        if wanted != "big":
            raise EngineError(f"no server at {wanted}")
        return self.engine


def small_engine(**script: Any) -> TimedEngine:
    return chat_engine(
        lambda call: Script(pieces=("small ", f"answer to {call.request_id}"), **script)
    )


def app_beside(engine: TimedEngine, other: OtherEngine, **options: Any) -> FrozenApp:
    return FrozenApp(engine, others=Others(other), **options)


async def compared(app: FrozenApp, pilot: Pilot[Any], wanted: str = "big") -> BesideScreen:
    await ask(app, pilot, f"/beside {wanted}", wait=False)
    await wait_until(pilot, lambda: isinstance(app.screen, BesideScreen))
    await pilot.pause()
    assert isinstance(app.screen, BesideScreen)
    return app.screen


def texts(screen: BesideScreen) -> list[str]:
    return [column.sheet.plain_text for column in screen.columns]


def notes(app: FrozenApp) -> str:
    return "\n".join(note.message for note in app._notifications)


async def test_both_answer_the_same_and_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    other = other_engine(Script(pieces=("a ", "big ", "answer")))
    engine = small_engine()
    app = app_with(path, engine, others=Others(other), ui=UIConfig(system_prompt="Be brief."))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        await ask(app, pilot, "second")
        screen = await compared(app, pilot)
        await wait_until(pilot, lambda: not screen.is_streaming)
        small, big = texts(screen)
        assert "smollm2-135m" in small and "small answer" in small and "tok/s" in small
        assert "big-model" in big and "a big answer" in big
        [asked] = other.calls
        assert asked.prompt == engine.calls[-1].prompt
        said = [message["content"] for message in asked.prompt.messages]
        assert said[0] == "Be brief." and said[1] == "first" and said[-1] == "second"
        assert len(said) == 4, "the answer that is there is not shown to them"
        await pilot.press("right", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        turns = app.chat.conversation.turns
        assert [turn.answer for turn in turns][-1] == "a big answer"
        assert turns[-1].model_id == "big-model" and len(turns[-1].siblings) == 2
        assert "‹2/2›" in app.chat.transcript.plain_text
        assert "a big answer" in app.chat.transcript.plain_text
        await wait_until(pilot, lambda: other.closed == 1)
        await ask(app, pilot, "third")
        assert [m["content"] for m in engine.calls[-1].prompt.messages][-2:] == [
            "a big answer",
            "third",
        ]
        session_id = app.chat.conversation.session_id
    database = ChatDatabase(path)
    kept = loaded(database, session_id).turns[1]
    assert (kept.answer, kept.model_id, kept.state) == (
        "a big answer",
        "big-model",
        AnswerState.DONE,
    )
    database.close()


async def test_esc_stops_both_and_then_closes() -> None:
    other = other_engine(Script(pieces=("b1 ", "b2"), hold_after=1))
    engine = small_engine()
    app = app_beside(engine, other)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        app.chat.prompt.insert("")
        engine._script = Script(pieces=("s1 ", "s2"), hold_after=1)
        screen = await compared(app, pilot)
        await wait_until(pilot, lambda: "b1" in texts(screen)[1] and "s1" in texts(screen)[0])
        await pilot.press("enter")
        await wait_until(pilot, lambda: "still being written" in notes(app))
        await pilot.press("escape")
        await wait_until(pilot, lambda: len(engine.aborted) == 1 and len(other.aborted) == 1)
        assert not screen.is_streaming and all("■ stopped" in text for text in texts(screen))
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert len(app.chat.conversation.turns[0].siblings) == 1
        await wait_until(pilot, lambda: other.closed == 1)


async def test_an_answer_that_was_stopped_can_be_kept_and_one_without_text_not() -> None:
    other = other_engine(Script(waits_in_queue=True))
    app = app_beside(small_engine(), other)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        screen = await compared(app, pilot)
        await wait_until(pilot, lambda: not screen.columns[0].is_streaming)
        await pilot.press("escape", "tab", "enter")
        await wait_until(pilot, lambda: "no answer to keep here" in notes(app))
        await pilot.press("left", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert app.chat.conversation.turns[0].answer == "small answer to beside-1"


async def test_one_that_fails_says_why_and_the_other_goes_on() -> None:
    other = other_engine(Script(raises=RequestError("the prompt is too long\x1b[2J")))
    app = app_beside(small_engine(), other)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        screen = await compared(app, pilot)
        await wait_until(pilot, lambda: not screen.is_streaming)
        small, big = texts(screen)
        assert "small answer" in small and "the prompt is too long" in big and "✗ failed" in big
        assert "\x1b" not in big


async def test_what_cannot_be_asked_is_said() -> None:
    app = app_beside(small_engine(), other_engine(Script()))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/beside big")
        assert "ask something first" in notes(app)
        await ask(app, pilot, "first")
        await ask(app, pilot, "/beside api")
        await wait_until(pilot, lambda: "no server at api" in notes(app))
        await ask(app, pilot, "/beside")
        shown = " ".join(app.chat.transcript.plain_text.split())
        assert "big (http://gpu:8000), api (https://a.example/v1 m)" in shown
        assert [name for name, _ in app.chat.beside.names] == ["big", "api"]
    app = FrozenApp(small_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/beside big")
        assert "none are named" in app.chat.transcript.plain_text


async def test_each_model_has_its_own_parameters_but_for_those_of_the_user() -> None:
    other = other_engine(Script(pieces=("b",)), default_params={"temperature": 0.1, "top_k": 7})
    engine = small_engine()
    app = app_beside(engine, other, ui=UIConfig(top_p=0.5))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        screen = await compared(app, pilot)
        await wait_until(pilot, lambda: not screen.is_streaming)
        here, there = engine.calls[-1].params, other.calls[0].params
        assert (here.top_p, there.top_p) == (0.5, 0.5)
        assert (there.temperature, there.top_k) == (0.1, 7) != (here.temperature, here.top_k)


async def test_a_chat_that_has_gone_on_keeps_nothing() -> None:
    app = app_beside(small_engine(), other_engine(Script(pieces=("b",))))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        chat = app.chat
        screen = await compared(app, pilot)
        await wait_until(pilot, lambda: not screen.is_streaming)
        chat.conversation.remove(chat.conversation.turns[0])
        await pilot.press("enter")
        await wait_until(pilot, lambda: "the answer is not kept" in notes(app))
        assert chat.conversation.turns == []


@pytest.mark.parametrize(("width", "beside"), [(120, True), (80, False)])
async def test_narrow_terminals_have_one_above_the_other(width: int, beside: bool) -> None:
    app = app_beside(small_engine(), other_engine(Script(pieces=("b " * 900,))))
    async with app.run_test(size=(width, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        screen = await compared(app, pilot)
        await wait_until(pilot, lambda: not screen.is_streaming)
        await pilot.pause()
        left, right = (column.region for column in screen.columns)
        assert (left.y == right.y) == beside and (left.x == right.x) != beside
        assert not left.overlaps(right) and min(left.height, right.height) >= 8
        sheet = screen.columns[1].sheet
        await pilot.press("tab", "pageup")
        await pilot.pause()
        assert not sheet.at_end
        await pilot.click(screen.columns[0].sheet, offset=(4, 1))
        await wait_until(pilot, lambda: screen.columns[0].has_class("-marked"))
