"""A chat that never ends, on the screen: summaries in place of older turns, and what goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_harness import SIZE, sent, shown
from fake_engine import FakeEngine, GenerateCall, Script, render
from test_tui_full_context import FarEngine
from textual.pilot import Pilot
from tui_harness import MODEL, FrozenApp, ask, chat_engine, pieces, ready, wait_until

from termgen.client import ChatPrompt
from termgen.config import UIConfig
from termgen.errors import ContextLengthError, EngineError, RequestError
from termgen.tui.chat.context_panel import ContextPanel
from termgen.tui.chat.saved.chat_store import ChatStore, Resume, find_session
from termgen.tui.chat.state.context_policy import ContextPolicy
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.formatting import count

LONG = "x" * 400
SUMMARY = "They spoke of the letter x, which the user sends often."
GOOD = Script(pieces=pieces(SUMMARY))


def is_order(call: GenerateCall) -> bool:
    assert isinstance(call.prompt, ChatPrompt)
    return str(call.prompt.messages[-1]["content"]).startswith("Summarise the conversation")


def summing_engine(summary: Script = GOOD) -> FakeEngine:
    def script(call: GenerateCall) -> Script:
        return summary if is_order(call) else Script(pieces=("an answer ",) * 3)

    return chat_engine(script, max_model_len=4096)


def summing_app(engine: FakeEngine, policy: str = "summarise", **more: Any) -> FrozenApp:
    ui = UIConfig(system_prompt="be brief", max_tokens=64, context_policy=policy)
    return FrozenApp(engine, ui=ui, **more)


def orders(engine: FakeEngine) -> list[GenerateCall]:
    return [call for call in engine.calls if is_order(call)]


async def fill(app: FrozenApp, pilot: Pilot[Any], engine: FakeEngine, *, wait: bool = True) -> int:
    """Ask until the next question is the one before which a summary is made, and ask that."""
    for number in range(1, 30):
        await ask(app, pilot, f"q{number} {LONG}", wait=wait)
        if orders(engine):
            return number
    raise AssertionError("it never filled")


def words(app: FrozenApp) -> str:
    return " ".join(shown(app).split())


async def test_a_summary_stands_for_the_turns_between(tmp_path: Path) -> None:
    path, engine = tmp_path / "chats.sqlite3", summing_engine()
    app = summing_app(engine, chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        number = await fill(app, pilot, engine)
        chat = app.chat.conversation
        cut = chat.cut
        text = f"Turns 2-{cut.upto} are no longer sent: the context is full. The model's summary of"
        assert f"{text} turns 2-{cut.upto} is sent instead: {SUMMARY}" in words(app)
        assert "The model summarises" not in words(app)
        system, *others = sent(engine)
        heading = f"Summary of turns 2-{cut.upto}, made by the model:"
        assert system == ("system", f"be brief\n\n{heading}\n{SUMMARY}")
        asked = [content.split()[0] for role, content in others if role == "user"]
        assert asked == ["q1", *(f"q{n}" for n in range(cut.upto + 1, number + 1))]
        assert len(orders(engine)) == 1 and orders(engine)[0].params.stop == ()
        assert f"turns 2-{cut.upto} summarised" in app.chat.status.text
        await ask(app, pilot, f"/export {tmp_path / 'a.md'}")
        await ask(app, pilot, f"/export {tmp_path / 'a.json'}")
        await wait_until(pilot, lambda: (tmp_path / "a.json").exists())
    markdown = (tmp_path / "a.md").read_text()
    assert f"*Turns 2-{cut.upto} are no longer sent.*" in markdown
    assert f"<summary>{heading[:-1]}</summary>\n\n> {SUMMARY}" in markdown
    exported = json.loads((tmp_path / "a.json").read_text())
    assert [one["figures"]["cut"] for one in exported["turns"] if "cut" in one["figures"]]

    again = summing_engine()
    app = summing_app(
        again, "ask", chats=ChatStore(path), resume=Resume(find_session(path, ""), {})
    )
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: bool(app.chat.conversation.turns))
        assert app.chat.conversation.policy is ContextPolicy.SUMMARISE
        assert app.chat.conversation.cut == cut and SUMMARY in words(app)
        await ask(app, pilot, "and now")
        assert sent(again)[0] == system and not orders(again)
        await ask(app, pilot, f"/import {tmp_path / 'a.json'}")
        await wait_until(pilot, lambda: len(app.chat.conversation.turns) == number)
        assert app.chat.conversation.cut == cut
        await ask(app, pilot, "/fit off")
        assert app.chat.conversation.cut.summary is None and "sent again" in words(app)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (Script(pieces=("",)), "it is empty"),
        (Script(pieces=("one more word ",) * 3000), "it did not come to an end"),
        (Script(pieces=("go on ",) * 30), "it repeats itself"),
        (Script(pieces=("a", "b"), fail_after=1), "it could not be written (the step failed)"),
        (Script(raises=EngineError("no")), "it could not be written (no)"),
    ],
)
async def test_a_summary_that_is_none(script: Script, why: str) -> None:
    engine = summing_engine(script)
    app = summing_app(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        number = await fill(app, pilot, engine)
        assert f"The model's summary is not used: {why}." in words(app)
        cut = app.chat.conversation.cut
        assert f"Turns 1-{cut.upto} are no longer sent: the context is full." in words(app)
        assert cut.summary is None and sent(engine)[-1][1].startswith(f"q{number} ")
        assert app.chat.conversation.turns[-1].answer and not app.chat.prompt.text
        for more in range(7):
            await ask(app, pilot, f"more{more} {LONG}")
        assert app.chat.conversation.cut.upto > cut.upto
        assert len(orders(engine)) == 1, "it is not tried again by itself"


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_a_summary_can_be_stopped(key: str) -> None:
    engine = summing_engine(Script(pieces=("They ", "spoke "), hold_after=1))
    app = summing_app(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for number in range(1, 30):
            app.chat.prompt.insert(f"q{number} {LONG}")
            await pilot.press("enter")
            await wait_until(
                pilot, lambda: not app.chat.is_streaming or app.chat.dialogue.fitting.is_summarising
            )
            if app.chat.is_streaming:
                break
        await wait_until(pilot, lambda: "esc stops it. They" in words(app))
        assert "The model summarises turns 2-" in words(app)
        await pilot.press(key)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        await wait_until(pilot, lambda: bool(engine.aborted))
        await pilot.pause()
        assert app.chat.prompt.text == f"q{number} {LONG}"
        assert "The summary was stopped, and nothing was sent." in words(app)
        assert "The model summarises" not in words(app)
        chat = app.chat.conversation
        assert len(chat.turns) == number - 1 and chat.num_left_out == 0
        chat.check_integrity()
        engine._script = Script(pieces=("fine",))
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(chat.turns) == number and not app.chat.is_streaming)
        assert chat.turns[-1].answer == "fine"


async def test_compact_by_hand() -> None:
    engine = summing_engine()
    app = summing_app(engine, "ask")
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/compact")
        assert not engine.calls
        for number in range(1, 6):
            await ask(app, pilot, f"q{number} {LONG}")
        await ask(app, pilot, "/compact the letter")
        order = orders(engine)[0].prompt
        assert isinstance(order, ChatPrompt)
        assert order.messages[-1]["content"].endswith("concerns this: the letter")
        assert "are no longer sent. The model's summary of turns 2-" in words(app)
        assert "is sent instead: " + SUMMARY in words(app)
        await ask(app, pilot, "next")
        assert sent(engine)[0][1].endswith(SUMMARY) and sent(engine)[-1] == ("user", "next")
        assert "Summarise" not in str(sent(engine)), "the order is no message of the chat"
        before = app.chat.conversation.cut
        await pilot.press("alt+up", "alt+up", "alt+up", "alt+e")  # among what was summarised
        await pilot.pause()
        app.chat.prompt.text = "another"
        await pilot.press("enter")
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert "Summary of" not in str(sent(engine)) and app.chat.conversation.cut != before


async def test_what_is_asked_during_compact_waits_for_it() -> None:
    engine = summing_engine(Script(pieces=pieces(SUMMARY), hold_after=1))
    app = summing_app(engine, "ask")
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for number in range(1, 6):
            await ask(app, pilot, f"q{number} {LONG}")
        await ask(app, pilot, "/compact", wait=False)
        await ask(app, pilot, "waiting", wait=False)
        assert app.chat.is_streaming and len(app.chat.conversation.turns) == 5
        engine.release.set()
        await wait_until(pilot, lambda: len(app.chat.conversation.turns) == 6)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert sent(engine)[0][1].endswith(SUMMARY) and sent(engine)[-1] == ("user", "waiting")
        engine.release.clear()
        await ask(app, pilot, "/compact", wait=False)
        await pilot.press("escape")
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert "The summary was stopped; everything is sent as before." in words(app)


async def test_the_panel_says_what_the_context_holds_and_takes_a_policy() -> None:
    engine = summing_engine()
    app = summing_app(engine, "drop")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        for number in range(1, 12):
            await ask(app, pilot, f"q{number} {LONG}")
        meter = app.chat.dialogue.fitting.meter
        assert meter is not None and meter.cost is not None
        cost = meter.cost
        await pilot.press("alt+k")
        await wait_until(pilot, lambda: isinstance(app.screen, ContextPanel))
        panel = app.screen.query_one("#context-meter", Canvas)
        await wait_until(pilot, lambda: "history" in panel.text)
        text = " ".join(panel.text.split())
        assert "system prompt 7 " in text and "files 0 " in text and "The model reads 4,096" in text
        assert f"before turn {cost.number} made it read {cost.tokens:,} tokens" in text
        await pilot.press("down", "enter")
        await pilot.pause()
        assert app.chat.conversation.policy is ContextPolicy.ENDS
        assert "the first turn and the last ones are sent" in words(app)
        short = f"sys 7 chat {count(meter.history)} free {count(meter.free)}"
        assert short in app.chat.status.text


async def test_unknown_words_after_fit_are_refused() -> None:
    app = summing_app(summing_engine(), "ask")
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/fit most")
        assert app.chat.conversation.policy is ContextPolicy.ASK
        for word, policy in (("ends", ContextPolicy.ENDS), ("summarise", ContextPolicy.SUMMARISE)):
            await ask(app, pilot, f"/fit {word}")
            assert app.chat.conversation.policy is policy


async def test_two_windows_on_one_chat(tmp_path: Path) -> None:
    """A summary made in one window is that of the other, too."""
    path, engine = tmp_path / "chats.sqlite3", summing_engine()
    app = summing_app(engine, chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, f"q0 {LONG}")
        await app.chats.read(lambda _: None)
        other_engine = summing_engine()
        resume = Resume(find_session(path, ""), {})
        other = summing_app(other_engine, chats=ChatStore(path), resume=resume)
        async with other.run_test(size=SIZE) as second:
            await ready(other, second)
            await wait_until(second, lambda: bool(other.chat.conversation.turns))
            await fill(app, pilot, engine)
            await app.chats.read(lambda _: None)
            other.chat.saved.look_for_others()
            cut = app.chat.conversation.cut
            await wait_until(second, lambda: other.chat.conversation.cut == cut)
            assert SUMMARY in " ".join(shown(other).split())
            await ask(other, second, "from the other")
            assert sent(other_engine)[0] == sent(engine)[0] and not orders(other_engine)


def far_engine(*, takes_system: bool) -> FarEngine:
    """A server that neither counts tokens nor tells its limit."""

    def script(call: GenerateCall) -> Script:
        if len(render(call.prompt)) > 4000:
            return Script(raises=ContextLengthError("the request exceeds the context"))
        assert isinstance(call.prompt, ChatPrompt)
        if call.prompt.messages[0]["role"] == "system" and not takes_system:
            return Script(raises=RequestError("System role not supported"))
        return GOOD if is_order(call) else Script(pieces=("an answer ",) * 3)

    return FarEngine(script=script, model=replace(MODEL, max_model_len=0))


@pytest.mark.parametrize("takes_system", [True, False])
async def test_a_server_that_counts_nothing(takes_system: bool) -> None:
    engine = far_engine(takes_system=takes_system)
    app = FrozenApp(engine, ui=UIConfig(context_policy="summarise"))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        number = await fill(app, pilot, engine)
        cut = app.chat.conversation.cut
        assert len(orders(engine)) == 1 and len(app.chat.conversation.turns) == number
        assert app.chat.conversation.turns[-1].answer and cut.num_left_out
        assert (cut.summary is not None) == takes_system
        said = "The model takes no system message: the summary is no longer sent."
        assert (said in words(app)) != takes_system
        for more in range(4):
            await ask(app, pilot, f"more{more} {LONG}")
            assert not app.chat.prompt.text
