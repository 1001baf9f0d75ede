"""Finding in a chat: the outline of its questions, words, and going there."""

from __future__ import annotations

from typing import Any

from fake_engine import Script
from textual.pilot import Pilot
from textual.widgets import Input, OptionList
from tui_harness import FrozenApp, ask, chat_engine, pieces, ready, wait_until

from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.lists.find_panel import FindPanel as Panel
from termgen.tui.chat.lists.find_panel import Hit, find
from termgen.tui.chat.state.conversation import Turn

SIZE = (80, 24)
ANSWERS = {
    "What is a tiger?": "A large cat.\n" * 30,
    "And its weight": "Up to 300 kg, says the **Zoo**.",
    "Who said so?": "The zoo of Basel.",
}


def turn(question: str, answer: str = "") -> Turn:
    return Turn(question, answer)


def test_words_may_be_in_the_question_or_the_answer() -> None:
    turns = [
        turn("Red\nand blue", "green"),
        turn("Straße?", "x" * 50 + " the GREEN one " + "y" * 200),
    ]
    assert find(turns, "") == [Hit(0, "Red and blue"), Hit(1, "Straße?")]
    assert find(turns, "BLUE red") == [Hit(0, "Red and blue")]
    assert find(turns, "red green") == [Hit(0, "Red and blue", "", "green", "")]
    hit = find(turns, "straße green")[0]
    assert hit.place == 1 and hit.word == "GREEN" and hit.before.endswith("x the ")
    assert len(hit.before) == 30 and len(hit.after) == 120
    assert find(turns, "red one") == [] and find(turns, ".") == []
    assert find([turn("(a+b)*", "")], "(a+b)*")


def test_control_codes_stay_in_the_chat() -> None:
    [hit] = find([turn("a\x1b[2Jb", "c\x1b[31m\x07word\x9b5m")], "word")
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for text in hit[1:] for char in text)


async def opened(app: FrozenApp, pilot: Pilot[Any]) -> Panel:
    await wait_until(pilot, lambda: isinstance(app.screen, Panel))
    await pilot.pause()
    assert isinstance(app.screen, Panel)
    return app.screen


def listed(panel: Panel) -> list[str]:
    options = panel.query_one(OptionList)
    return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]


def said(app: FrozenApp) -> list[str]:
    return [note.message for note in app._notifications]


async def test_a_question_is_found_and_marked() -> None:
    engine = chat_engine(
        lambda call: Script(pieces=pieces(ANSWERS[call.prompt.messages[-1]["content"]]))
    )
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("f8")
        await wait_until(pilot, lambda: "nothing was asked in this chat yet" in said(app))
        for question in ANSWERS:
            await ask(app, pilot, question)
        chat = app.chat
        assert chat.transcript.at_end
        await pilot.press("f8")
        panel = await opened(app, pilot)
        assert [line.split(maxsplit=1) for line in listed(panel)] == [
            [f"{i}", question] for i, question in enumerate(ANSWERS, 1)
        ]
        assert panel.query_one(OptionList).highlighted == 2
        await pilot.press("z", "o", "o")
        await pilot.pause()
        assert [line.split()[0] for line in listed(panel)] == ["2", "3"]
        assert listed(panel)[0].endswith("says the **Zoo**.")
        await pilot.press("f8", "f8", "enter")  # round to the last one
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        turns = chat.conversation.turns
        assert chat.dialogue.marked is turns[2]
        await pilot.press("f8")
        panel = await opened(app, pilot)
        await pilot.press("up", "up", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await pilot.pause()
        assert chat.dialogue.marked is turns[0] and not chat.transcript.at_end
        assert chat.transcript.scroll_offset.y <= 2
        await pilot.press("f8")
        panel = await opened(app, pilot)
        assert panel.query_one(OptionList).highlighted == 0, "it begins at the marked one"
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert chat.dialogue.marked is turns[0]


async def test_the_command_begins_with_words() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        await ask(app, pilot, "/find nowhere", wait=False)
        panel = await opened(app, pilot)
        assert panel.query_one(Input).value == "nowhere" and listed(panel) == []
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert app.chat.dialogue.marked is None


async def test_a_chat_that_changed_behind_the_list_is_left_alone() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        chat = app.chat
        await pilot.press("f8")
        panel = await opened(app, pilot)
        chat.action_new_chat()
        panel.dismiss((0, ""))
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert app.chat.dialogue.marked is None
