"""The branches of a chat as a tree: what it draws, and that Enter shows a branch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chat_store_harness import loaded
from fake_engine import Script
from test_tui_branches import numbered_engine
from test_tui_sessions import app_with
from textual.pilot import Pilot
from textual.widgets import OptionList
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.lists.tree_panel import AGAIN, TreePanel, node_line, tree_of
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.state.conversation import Conversation, Turn
from termgen.tui.paint.spans import row_width

SIZE = (80, 24)


def drawn(root: Turn) -> list[str]:
    return [node.indent + node.words for node in tree_of(root)]


def test_only_branches_are_indented() -> None:
    chat = Conversation()
    assert tree_of(chat.root) == []
    first = chat.ask("one", now_s=0.0)
    second = chat.ask("two", now_s=0.0)
    third = chat.ask("three", now_s=0.0)
    assert drawn(chat.root) == ["one", "two", "three"]
    chat.ask("two, edited", now_s=0.0, beside=second)
    chat.ask("four", now_s=0.0)
    again = chat.ask("two", now_s=0.0, beside=chat.turns[1])
    again.answer = "another\x1b[31m\nanswer"
    assert drawn(chat.root) == [
        "one",
        "├ two",
        "│ three",
        "├ two, edited",
        "│ four",
        f"└ {AGAIN}another\u241b[31m answer",
    ]
    chat.ask("else", now_s=0.0, beside=first)
    assert drawn(chat.root)[:2] == ["├ one", "│ ├ two"] and drawn(chat.root)[-1] == "└ else"
    assert chat.choose_path(third) == [second, first] and chat.turns == [first, second, third]
    assert chat.choose_path(third) == []
    chat.check_integrity()
    chat.remove(second)
    assert not chat.has(third) and chat.has(again)


def test_any_tree_is_listed_whole_and_any_turn_can_be_shown() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    chat = Conversation()
    turns = [chat.ask("q", now_s=0.0)]
    for _ in range(200):
        beside = rng.choice([None, *turns])
        if beside is not None:
            chat.choose_path(beside)
        turns.append(chat.ask(rng.choice("abc"), now_s=0.0, beside=beside))
    nodes = tree_of(chat.root)
    assert sorted(id(node.turn) for node in nodes) == sorted(map(id, turns))
    for node in nodes:
        width = rng.randrange(20, 90)
        line = node_line(node._replace(answer="x題" * 99), width, is_shown=False)
        assert row_width(((line.plain, ""),)) <= width
    for _ in range(50):
        turn = rng.choice(turns)
        chat.choose_path(turn)
        assert turn in chat.turns
        chat.check_integrity()


def test_a_long_chat_is_no_deep_call() -> None:
    chat = Conversation()
    for number in range(3000):
        chat.ask(f"q{number}", now_s=0.0)
        if number % 3 == 0:
            chat.ask("again", now_s=0.0, beside=chat.turns[-1])
    assert len(tree_of(chat.root)) == 4000


async def opened(app: FrozenApp, pilot: Pilot[Any]) -> TreePanel:
    await wait_until(pilot, lambda: isinstance(app.screen, TreePanel))
    await pilot.pause()
    assert isinstance(app.screen, TreePanel)
    return app.screen


def listed(panel: TreePanel) -> list[str]:
    options = panel.query_one(OptionList)
    return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]


async def chat_with_branches(app: FrozenApp, pilot: Pilot[Any]) -> list[Turn]:
    """q0 -> (answer0 -> q1), (answer2, again); q0 edited -> answer3."""
    await ready(app, pilot)
    await ask(app, pilot, "q0")
    await ask(app, pilot, "q1")
    for key in ("alt+r",):
        app.chat.dialogue.mark(app.chat.conversation.turns[0])
        await pilot.press(key)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
    await pilot.press("alt+e")
    app.chat.prompt.text = "q0, edited"
    await pilot.press("enter")
    await wait_until(pilot, lambda: "answer3" in app.chat.transcript.plain_text)
    await wait_until(pilot, lambda: not app.chat.is_streaming)
    return list(app.chat.conversation.root.children)


async def test_enter_shows_the_branch_of_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = app_with(path, numbered_engine())
    async with app.run_test(size=SIZE) as pilot:
        first, again, edited = await chat_with_branches(app, pilot)
        await pilot.press("alt+d")
        panel = await opened(app, pilot)
        assert [" ".join(line.split()) for line in listed(panel)] == [
            "├ ○ q0 answer0.",
            "│ ○ q1 answer1.",
            "├ ○ ↻ answer2.",
            "└ ● q0, edited answer3.",
        ]
        assert panel.query_one(OptionList).highlighted == 3, "it begins at the last one shown"
        await pilot.press("up", "up", "up", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        chat = app.chat
        assert chat.conversation.turns == [first, *first.children]
        assert chat.dialogue.marked is first and "answer1" in chat.transcript.plain_text
        await pilot.press("alt+d")
        panel = await opened(app, pilot)
        await pilot.press(*"answer2", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert chat.conversation.turns == [again] and chat.transcript.has_marks
        await pilot.press("alt+d", "escape")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert chat.conversation.turns == [again]
        await ask(app, pilot, "/tree q0, edited", wait=False)
        await opened(app, pilot)
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert chat.conversation.turns == [edited]
        session_id = chat.conversation.session_id
    database = ChatDatabase(path)
    assert [turn.question for turn in loaded(database, session_id).turns] == ["q0, edited"]
    database.close()


async def test_the_end_of_a_branch_is_shown_without_a_mark() -> None:
    app = FrozenApp(numbered_engine())
    async with app.run_test(size=SIZE) as pilot:
        first, *_ = await chat_with_branches(app, pilot)
        await pilot.press("alt+d")
        await opened(app, pilot)
        await pilot.press("up", "up", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert app.chat.conversation.turns == [first, *first.children]
        assert app.chat.dialogue.marked is None


def notes(app: FrozenApp) -> str:
    return "\n".join(note.message for note in app._notifications)


async def test_an_answer_that_is_written_is_not_left() -> None:
    engine = chat_engine(Script(pieces=("a", "b"), hold_after=1))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await pilot.press("alt+d")
        await wait_until(pilot, lambda: "nothing was asked in this chat yet" in notes(app))
        await ask(app, pilot, "q0", wait=False)
        await wait_until(pilot, lambda: app.chat.is_streaming)
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: len(app.chat.conversation.root.children) == 2)
        await pilot.press("alt+d")
        await opened(app, pilot)
        await pilot.press("up", "enter")
        await wait_until(pilot, lambda: "an answer is being written" in notes(app))
        assert app.chat.conversation.turns == app.chat.conversation.root.children[1:]
        engine.release.set()
        await wait_until(pilot, lambda: not app.chat.is_streaming)


async def test_a_chat_that_changed_behind_the_tree_is_left_alone() -> None:
    app = FrozenApp(numbered_engine())
    async with app.run_test(size=SIZE) as pilot:
        first, _, edited = await chat_with_branches(app, pilot)
        chat = app.chat
        await pilot.press("alt+d")
        panel = await opened(app, pilot)
        chat.conversation.remove(first)
        panel.dismiss((first, ""))
        await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))
        assert chat.conversation.turns == [edited]


async def test_a_search_says_when_its_words_are_on_another_branch(tmp_path: Path) -> None:
    app = app_with(tmp_path / "chats.sqlite3", numbered_engine())
    async with app.run_test(size=(120, 34)) as pilot:
        await chat_with_branches(app, pilot)
        await pilot.press("ctrl+n", "ctrl+b", *"answer2")
        await wait_until(pilot, lambda: "answer2" in app.chat.panel.session_list.text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "on another branch" in app.chat.transcript.plain_text)
        assert "alt+d lists them." in app.chat.transcript.plain_text


@pytest.mark.parametrize("width", [30, 80])
async def test_lines_fit_the_box(width: int) -> None:
    app = FrozenApp(chat_engine(Script(pieces=("word " * 40,))))
    async with app.run_test(size=(width, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "long " * 40)
        await ask(app, pilot, "more " * 40)
        await pilot.press("alt+d")
        panel = await opened(app, pilot)
        options = panel.query_one(OptionList)
        assert options.virtual_size.height == 2, "a line for each turn"
