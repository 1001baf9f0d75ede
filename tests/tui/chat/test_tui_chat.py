"""The chat screen: its display and its requests."""

from __future__ import annotations

import pytest
from chat_harness import SIZE, sent, shown
from fake_engine import GenerateCall, Script
from textual.events import Paste
from tui_harness import (
    ANSWER,
    MODEL,
    FrozenApp,
    ask,
    chat_engine,
    pieces,
    ready,
    type_text,
    wait_until,
)

from termgen.config import UIConfig
from termgen.errors import ContextLengthError, EngineError
from termgen.tui.chat.state.conversation import AnswerState
from termgen.tui.paint.markdown import render
from termgen.tui.paint.spans import row_text
from termgen.vocabulary.request import FinishReason


async def test_an_empty_chat_explains_itself() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        assert "smollm2-135m float32 is ready" in shown(app)
        assert "ctx" in app.chat.status.text and "0/2.0k" in app.chat.status.text
        assert app.focused is app.chat.prompt


async def test_an_answer_streams_as_markdown_with_its_figures() -> None:
    engine = chat_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why?")
        text = shown(app)
        assert "you" in text and "▎ why?" in text
        expected = [
            row_text(row).rstrip() for row in render(ANSWER, app.chat.transcript.text_width - 2)
        ]
        assert "\n".join(f"  {line}".rstrip() for line in expected) in text
        assert "**" not in text and "every decode" in text
        count = len(pieces(ANSWER))
        assert f"{count} tok · 40.0 tok/s · TTFT 142 ms" in text
        prompt_tokens = len(f"user: why?\nassistant: {''}".encode())
        status = app.chat.status.text
        assert f"{prompt_tokens + count}/2.0k" in status and "40.0 tok/s" in status
        assert app.chat.prompt.text == ""
        assert not app.chat.is_streaming


async def test_history_is_sent_with_the_next_question() -> None:
    engine = chat_engine(Script(pieces=("fine", ".")))
    app = FrozenApp(engine, ui=UIConfig(system_prompt="be brief", temperature=0.0, max_tokens=50))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await ask(app, pilot, "two\nlines")
        assert sent(engine) == [
            ("system", "be brief"),
            ("user", "one"),
            ("assistant", "fine."),
            ("user", "two\nlines"),
        ]
        params = engine.calls[-1].params
        assert (params.temperature, params.max_tokens) == (0.0, 50)
        assert engine.calls[0].request_id != engine.calls[1].request_id


async def test_text_shows_while_it_streams() -> None:
    engine = chat_engine(Script(pieces=pieces(ANSWER), hold_after=12))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why", wait=False)
        await wait_until(pilot, lambda: "every decode" in shown(app))
        assert app.chat.is_streaming
        assert shown(app).rstrip().endswith("▍")
        engine.release.set()
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert "▍" not in shown(app)


async def test_waiting_for_the_first_token_is_shown() -> None:
    engine = chat_engine(Script(hold_after=0))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why", wait=False)
        assert "reading the prompt 0.0 s" in shown(app)
        engine.now_s += 2.5
        await wait_until(pilot, lambda: "reading the prompt 2.5 s" in shown(app))


async def test_escape_stops_and_keeps_the_text() -> None:
    engine = chat_engine(Script(pieces=pieces("Long prompts used to block all"), hold_after=5))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why", wait=False)
        await wait_until(
            pilot, lambda: "Long prompts used to" in app.chat.conversation.turns[0].answer
        )
        await pilot.press("escape")
        assert not app.chat.is_streaming
        await wait_until(pilot, lambda: len(engine.aborted) == 1)
        assert "Long prompts used to" in shown(app)
        assert "■ stopped · 5 tok" in shown(app)
        assert app.chat.conversation.turns[0].state is AnswerState.STOPPED
        engine._script = Script(pieces=("ok",))
        await ask(app, pilot, "go on")
        assert ("assistant", "Long prompts used to") in sent(engine)


async def test_ctrl_c_stops_then_quits() -> None:
    engine = chat_engine(Script(hold_after=2))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why", wait=False)
        await wait_until(pilot, lambda: bool(app.chat.conversation.turns[0].answer))
        await pilot.press("ctrl+c")
        assert not app.chat.is_streaming and app.is_running
        await pilot.press("ctrl+c")
        assert app.is_running and not app._exit
        await pilot.press("ctrl+c")
        assert app._exit
    assert app.stopped == 1


async def test_a_request_error_returns_the_question() -> None:
    error = ContextLengthError("This model's maximum context length is 2048 tokens.")
    engine = chat_engine(Script(raises=error))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "a long one")
        text = shown(app)
        assert "✗ This message is too long. The context is full" in text
        assert "the model reads 2,048 tokens at most" in text
        assert "back in the prompt" in text and "oldest turns" not in text
        assert app.chat.prompt.text == "a long one"
        assert app.chat.conversation.turns == []
        engine._script = Script(pieces=("ok",))
        await pilot.press("enter")
        await wait_until(pilot, lambda: "ok" in shown(app))
        assert sent(engine) == [("user", "a long one")]


async def test_a_refused_question_leaves_the_figures_of_the_answer_before() -> None:
    engine = chat_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        before = app.chat.status.text
        assert f"{app.chat.conversation.context_tokens}/2.0k" in before
        engine._script = Script(raises=ContextLengthError("too long"))
        await ask(app, pilot, "go on")
        assert app.chat.status.text == before
        assert "goes on without the oldest turns" in shown(app)


@pytest.mark.parametrize(
    "script",
    [
        Script(pieces=pieces("some words came"), fail_after=2, error=EngineError("out of memory")),
        Script(pieces=pieces("some words came"), raise_after=2, error=EngineError("out of memory")),
    ],
)
async def test_an_engine_error_keeps_what_was_written(script: Script) -> None:
    app = FrozenApp(chat_engine(script))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        text = shown(app)
        assert "some wor" in text and "✗ failed · 2 tok" in text and "✗ out of memory" in text
        assert app.chat.prompt.text == ""
        assert app.chat.conversation.turns[0].answer == "some wor"


async def test_a_dead_engine_says_what_to_do() -> None:
    engine = chat_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        engine.healthy = False
        await ask(app, pilot, "why")
        assert "✗ the engine thread has stopped" in shown(app)
        assert "start again" in shown(app)
        assert app.chat.prompt.text == "why"


async def test_the_question_goes_before_a_draft_that_was_begun() -> None:
    engine = chat_engine(Script(raise_after=0, hold_after=0, error=EngineError("no")))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first", wait=False)
        await type_text(pilot, "draft")
        engine.release.set()
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert app.chat.prompt.text == "first\ndraft"


async def test_clear_and_new_chat() -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine, ui=UIConfig(system_prompt="first"))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/system second")
        assert "System prompt: second" in shown(app)
        await ask(app, pilot, "one")
        await pilot.press("ctrl+l")
        assert "is ready" in shown(app)
        await ask(app, pilot, "two")
        assert sent(engine) == [("system", "second"), ("user", "two")]
        await pilot.press("ctrl+n")
        await ask(app, pilot, "three")
        assert sent(engine) == [("system", "first"), ("user", "three")]


async def test_clear_while_streaming_stops_it() -> None:
    engine = chat_engine(Script(hold_after=2))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one", wait=False)
        await ask(app, pilot, "/clear", wait=False)
        await wait_until(pilot, lambda: len(engine.aborted) == 1)
        assert "is ready" in shown(app) and app.chat.conversation.turns == []


async def test_retry_asks_again() -> None:
    answers = iter((Script(pieces=("bad",)), Script(pieces=("good",))))
    engine = chat_engine(lambda _call: next(answers))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: "good" in shown(app))
        assert "bad" not in shown(app)
        assert sent(engine) == [("user", "one")]


async def test_system_prompt_is_shown_and_removed() -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/system")
        assert "There is no system prompt" in shown(app)
        await ask(app, pilot, "/system x")
        await ask(app, pilot, "/system off")
        await ask(app, pilot, "one")
        assert sent(engine) == [("user", "one")]


async def test_a_mistyped_command_is_not_sent() -> None:
    engine = chat_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/claer")
        assert engine.calls == [] and app.chat.prompt.text == "/claer"


async def test_the_prompt_lists_commands_while_one_is_typed() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await type_text(pilot, "/c")
        await pilot.pause()
        completion = app.chat.area.completion
        names = [line.replace("▸", "").split()[0] for line in completion.text.splitlines()]
        assert names == ["/clear", "/copy", "/code", "/choice", "/compact", "/context"]
        await type_text(pilot, "l")
        await pilot.pause()
        assert completion.text.startswith("▸ /clear  begin anew")
        await pilot.press("backspace", "backspace", "backspace")
        await pilot.pause()
        assert not completion.display and "send" in str(app.chat.prompt.border_subtitle)


async def test_prompt_history() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        prompt = app.chat.prompt
        await ask(app, pilot, "one")
        await ask(app, pilot, "two\nlines")
        await type_text(pilot, "draft")
        await pilot.press("up")
        assert prompt.text == "two\nlines"
        await pilot.press("up")  # from its last line to its first
        assert prompt.text == "two\nlines"
        await pilot.press("up")
        assert prompt.text == "one"
        await pilot.press("up")
        assert prompt.text == "one"
        await pilot.press("down")
        assert prompt.text == "two\nlines"
        await pilot.press("down")
        assert prompt.text == "draft"


async def test_a_paste_goes_into_the_prompt() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        app.post_message(Paste("two\nlines"))
        await pilot.pause()
        assert app.chat.prompt.text == "two\nlines"


async def test_a_length_limit_is_told() -> None:
    script = Script(pieces=("a", "b"), finish_reason=FinishReason.LENGTH)
    app = FrozenApp(chat_engine(script))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        assert "■ length limit · 2 tok" in shown(app)


async def test_each_call_has_the_request_of_this_chat() -> None:
    calls: list[GenerateCall] = []
    engine = chat_engine(lambda call: (calls.append(call), Script(pieces=("x",)))[1])
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "a")
        assert calls[0].request_id == "chat-1"
        assert MODEL.model_id in shown(app)
