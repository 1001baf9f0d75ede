"""Answering again, editing, and switching branches: the chat's display and its requests."""

from __future__ import annotations

import random
import re
from itertools import count

from chat_harness import SIZE, sent, shown
from fake_engine import Script
from lengths import scaled
from tui_harness import FrozenApp, TimedEngine, ask, chat_engine, pieces, ready, wait_until

from termgen.errors import ContextLengthError
from termgen.tui.chat.state.conversation import AnswerState
from termgen.vocabulary.request import FinishReason


def numbered_engine() -> TimedEngine:
    """Answers `answer0`, `answer1`, and so on."""
    numbers = count()
    return chat_engine(lambda _call: Script(pieces=pieces(f"answer{next(numbers)}.")))


def said(app: FrozenApp) -> list[str]:
    """Questions and answers on the screen."""
    return re.findall(r"\b(?:q|answer)\d+\b", shown(app))


async def test_a_retry_keeps_the_first_answer_beside_it() -> None:
    engine = numbered_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        assert "‹" not in shown(app)
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: "answer1" in shown(app) and not app.chat.is_streaming)
        assert said(app) == ["q0", "answer1"] and "‹2/2›" in shown(app)
        assert sent(engine) == [("user", "q0")]
        await pilot.press("alt+left")
        assert said(app) == ["q0", "answer0"] and "‹1/2›" in shown(app)
        await pilot.press("alt+left")
        assert said(app) == ["q0", "answer0"]
        await ask(app, pilot, "q1")
        assert sent(engine) == [("user", "q0"), ("assistant", "answer0."), ("user", "q1")]
        await pilot.press("alt+up", "alt+up", "alt+right")
        assert said(app) == ["q0", "answer1"]
        await pilot.press("alt+left")
        assert said(app) == ["q0", "answer0", "q1", "answer2"]


async def test_an_edited_question_makes_a_branch() -> None:
    engine = numbered_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await ask(app, pilot, "q1")
        app.chat.prompt.insert("a draft")
        await pilot.press("alt+up", "alt+up")
        assert "you" in shown(app) and "◂ alt+e edit" in shown(app)
        await pilot.press("alt+e")
        assert app.chat.prompt.text == "q0"
        assert "esc gives up" in str(app.chat.prompt.border_title)
        await pilot.press("backspace", "2", "enter")
        await wait_until(pilot, lambda: "answer2" in shown(app) and not app.chat.is_streaming)
        assert said(app) == ["q2", "answer2"] and "‹2/2›  edited" in shown(app)
        assert sent(engine) == [("user", "q2")]
        assert app.chat.prompt.text == "a draft" and not app.chat.prompt.border_title
        await pilot.press("alt+left")
        assert said(app) == ["q0", "answer0", "q1", "answer1"]


async def test_escape_gives_an_edit_up() -> None:
    engine = numbered_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        app.chat.prompt.insert("a draft")
        await pilot.press("alt+e", "x", "escape")
        assert app.chat.prompt.text == "a draft" and app.chat.dialogue.editing is None
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(engine.calls) == 2)
        assert sent(engine)[-1] == ("user", "a draft") and len(sent(engine)) == 3


async def test_a_refused_branch_leaves_the_one_before() -> None:
    engine = numbered_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await ask(app, pilot, "q1")
        answers = engine._script
        engine._script = Script(raises=ContextLengthError("too long"))
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: "✗ The context is full" in shown(app))
        assert said(app) == ["q0", "answer0", "q1", "answer1"] and app.chat.prompt.text == ""
        await pilot.press("alt+e")
        await ask(app, pilot, "q7")
        assert said(app)[:4] == ["q0", "answer0", "q1", "answer1"]
        assert app.chat.prompt.text == "q1q7" and app.chat.dialogue.editing is not None
        engine._script = answers
        await pilot.press("enter")
        await wait_until(pilot, lambda: "answer2" in shown(app) and not app.chat.is_streaming)
        assert sent(engine) == [("user", "q0"), ("assistant", "answer0."), ("user", "q1q7")]


async def test_keys_of_branches_say_what_they_need() -> None:
    engine = chat_engine(Script(pieces=("one", "two"), hold_after=1))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        await pilot.press("alt+r", "alt+e", "alt+left", "alt+up")
        await ask(app, pilot, "q0", wait=False)
        await wait_until(pilot, lambda: "one" in shown(app))
        await pilot.press("alt+r")  # stops the first
        await wait_until(pilot, lambda: len(engine.aborted) == 1)
        assert app.chat.conversation.turns[0].siblings[0].state is AnswerState.STOPPED
        await pilot.press("alt+left")
        assert app.chat.conversation.turns[0].place == 1
        messages = [notification.message for notification in app._notifications]
        for expected in ("nothing to answer again", "nothing to edit", "there is one", "esc stops"):
            assert any(expected in message for message in messages), expected


async def test_the_mark_moves_through_the_questions() -> None:
    app = FrozenApp(numbered_engine())
    async with app.run_test(size=(100, 14)) as pilot:
        await ready(app, pilot)
        for number in range(6):
            await ask(app, pilot, f"q{number}")
        transcript = app.chat.transcript
        for expected in (5, 4, 3, 2, 1, 0, 0):
            await pilot.press("alt+up")
            cursor = app.chat.dialogue.current
            assert cursor is not None and cursor.question == f"q{expected}"
            lines = transcript.plain_text.split("\n")
            at = next(i for i, line in enumerate(lines) if "◂" in line)
            assert lines[at + 1].strip() == f"▎ q{expected}"
            top = transcript.scroll_offset.y
            assert top <= at < top + transcript.size.height
        for _ in range(6):
            await pilot.press("alt+down")
        assert "◂" not in shown(app) and transcript.at_end


async def test_what_is_sent_is_what_is_shown() -> None:
    """A random mix of asking, answering again, editing, switching, stopping and refusals."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    numbers = count()
    refused: list[object] = []

    def script(call: object) -> Script:
        if rng.random() < 0.1:
            refused.append(call)
            return Script(raises=ContextLengthError("refused"))
        reason = rng.choice((FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT))
        return Script(pieces=pieces(f"answer{next(numbers)}.", 9), finish_reason=reason)

    engine = chat_engine(script)
    app = FrozenApp(engine)
    async with app.run_test(size=(90, 50)) as pilot:
        await ready(app, pilot)
        for number in range(scaled(12)):
            calls = len(engine.calls)
            app.chat.prompt.text = ""
            for _ in range(rng.randrange(3)):
                await pilot.press(rng.choice(("alt+up", "alt+up", "alt+down")))
            action = rng.choice(("ask", "ask", "alt+r", "alt+e", "alt+left", "alt+right"))
            if action == "alt+e":
                await pilot.press("alt+e")
                app.chat.prompt.text = f"q{number}"
                await pilot.press("enter")
            elif action == "ask":
                app.chat.prompt.text = f"q{number}"
                await pilot.press("enter")
            else:
                await pilot.press(action)
            await wait_until(pilot, lambda: not app.chat.is_streaming)
            await pilot.pause()
            if app.chat.dialogue.editing is not None:
                await pilot.press("escape")
            path = [word for t in app.chat.conversation.turns for word in (t.question, t.answer)]
            assert said(app) == [word.rstrip(".") for word in path]
            if len(engine.calls) > calls and engine.calls[-1] not in refused:
                assert [text for _, text in sent(engine)] == path[:-1] and path[-1]
