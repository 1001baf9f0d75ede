"""A chat with a full context says so in plain words and can go on without its oldest turns."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_harness import SIZE, sent, shown
from fake_engine import FakeEngine, Script, render
from textual.pilot import Pilot
from tui_harness import MODEL, FrozenApp, TimedEngine, ask, chat_engine, ready, wait_until

from termgen.client import Prompt
from termgen.config import UIConfig
from termgen.errors import ContextLengthError, RequestError
from termgen.remote.failures import failure_of
from termgen.tui.chat.saved.chat_store import ChatStore, Resume, find_session
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

LIMIT = 2048
"""Limit in tokens, which are bytes here."""
LONG = "x" * 300


class FarEngine(TimedEngine):
    """A remote server that neither counts tokens nor reports its limit."""

    def _checked_prompt(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        return render(prompt)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        raise RequestError("no /tokenize here")


def far_engine() -> FarEngine:
    def script(call: Any) -> Script:
        if len(render(call.prompt)) > LIMIT - 100:
            return Script(raises=ContextLengthError("the request exceeds the context"))
        return Script(pieces=("an answer ",) * 5)

    return FarEngine(script=script, model=replace(MODEL, max_model_len=0))


def questions(engine: FakeEngine) -> list[str]:
    return [content.split()[0] for role, content in sent(engine) if role == "user"]


async def fill(app: FrozenApp, pilot: Pilot[Any]) -> int:
    """Ask until a question does not fit; returns the number of that question."""
    for number in range(1, 30):
        await ask(app, pilot, f"q{number} {LONG}")
        if app.chat.prompt.text:
            return number
    raise AssertionError("it never filled")


@pytest.mark.parametrize("make", [chat_engine, far_engine])
async def test_a_full_chat_goes_on_without_its_oldest_turns(make: Any) -> None:
    engine = make()
    app = FrozenApp(engine, ui=UIConfig(system_prompt="be brief"))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        number = await fill(app, pilot)
        text = shown(app)
        assert "The context is full" in text and "alt+g goes on without the oldest turns" in text
        assert "maximum context length" not in text and "completion" not in text
        assert app.chat.prompt.text == f"q{number} {LONG}"
        await pilot.press("alt+g")
        await wait_until(pilot, lambda: len(app.chat.conversation.turns) == number)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        left_out = app.chat.conversation.num_left_out
        assert 1 <= left_out < number
        assert questions(engine) == [f"q{n}" for n in range(left_out + 1, number + 1)]
        assert sent(engine)[0] == ("system", "be brief")
        which = "Turn 1 is" if left_out == 1 else f"Turns 1-{left_out} are"
        assert f"{which} no longer sent: the context is full." in shown(app)
        assert f"from turn {left_out + 1}" in app.chat.status.text
        for more in range(1, 8):
            await ask(app, pilot, f"more{more} {LONG}")
            assert app.chat.prompt.text == "", "it goes on by itself from here"
        assert app.chat.conversation.num_left_out > left_out
        assert questions(engine)[-1] == "more7" and sent(engine)[0] == ("system", "be brief")
        await ask(app, pilot, "/fit off")
        assert "Every turn is sent again" in shown(app)
        await ask(app, pilot, "last")
        assert "The context is full" in shown(app) and app.chat.prompt.text == "last"


async def test_max_tokens_gives_way_before_the_chat_does() -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine, ui=UIConfig(max_tokens=1500))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "one")
        assert engine.calls[-1].params.max_tokens == 1500
        engine._script = lambda call: (
            Script(pieces=("ok",))
            if call.params.max_tokens is None
            else Script(raises=ContextLengthError("too many"))
        )
        await ask(app, pilot, f"two {LONG}")
        text = " ".join(shown(app).split())
        assert "max_tokens 1500 is more than the context leaves" in text and "✗" not in text
        assert len(app.chat.conversation.turns) == 2


async def test_one_message_that_is_too_long_says_so() -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "short")
        await ask(app, pilot, "/fit")
        await ask(app, pilot, "y" * 3000)
        text = shown(app)
        assert "This message is too long." in text and "no longer sent" not in text
        assert app.chat.prompt.text == "y" * 3000
        assert app.chat.conversation.num_left_out == 0
        app.chat.prompt.text = ""
        await ask(app, pilot, "go on")
        assert questions(engine) == ["short", "go"]


async def test_an_answer_that_ends_with_the_context_offers_the_same() -> None:
    script = Script(pieces=tuple("x" * (LIMIT - 20)), finish_reason=FinishReason.LENGTH)
    app = FrozenApp(chat_engine(script))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q")
        stats = app.chat.conversation.turns[0].stats
        assert stats.context_tokens >= LIMIT - 1, stats.context_tokens
        assert "The context is full" in shown(app) and "alt+g" in shown(app)


async def test_what_is_left_out_is_kept_with_the_chat(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = FrozenApp(chat_engine(), chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        number = await fill(app, pilot)
        await pilot.press("alt+g")
        await wait_until(pilot, lambda: len(app.chat.conversation.turns) == number)
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        left_out = app.chat.conversation.num_left_out
    engine = chat_engine(Script(pieces=("ok",)))
    resume = Resume(find_session(path, ""), {})
    app = FrozenApp(engine, chats=ChatStore(path), resume=resume)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: bool(app.chat.conversation.turns))
        await ask(app, pilot, "again")
        assert len(questions(engine)) == number + 1 - app.chat.conversation.num_left_out
        assert app.chat.conversation.num_left_out >= left_out > 0


async def test_what_is_sent_always_fits() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    engine = chat_engine(lambda _call: Script(pieces=tuple("z" * rng.randrange(1, 200))))
    app = FrozenApp(engine, ui=UIConfig(max_tokens=64))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/fit")
        for number in range(20):
            await ask(app, pilot, f"q{number} " + "x" * rng.randrange(400))
            chat = app.chat.conversation
            assert not app.chat.prompt.text, seed
            assert len(render(engine.calls[-1].prompt)) <= LIMIT - 64, seed
            assert questions(engine)[-1] == f"q{number}", seed
            assert len(questions(engine)) == number + 1 - chat.num_left_out, seed


@pytest.mark.parametrize(
    "error",
    [
        {"message": "too long", "code": "context_length_exceeded"},
        {"message": "no", "code": 400, "type": "exceed_context_size_error"},
        {"message": "the request exceeds the available context size (4096 tokens)", "code": 400},
        {"message": "This model's maximum context length is 4096 tokens."},
        {"message": "The input (9000 tokens) is longer than the model's context length (4096)."},
    ],
)
def test_servers_that_say_it_in_their_own_way_are_understood(error: dict[str, Any]) -> None:
    raw = json.dumps({"error": error}).encode()
    failure = failure_of("http://x", "/v1/chat/completions", 400, raw, {}, sent_key=True)
    assert isinstance(failure, ContextLengthError)


def test_other_refusals_are_no_full_context() -> None:
    raw = json.dumps({"error": {"message": "temperature: context must be set"}}).encode()
    failure = failure_of("http://x", "/v1/chat/completions", 400, raw, {}, sent_key=True)
    assert isinstance(failure, RequestError) and not isinstance(failure, ContextLengthError)


@pytest.mark.parametrize("stays", [True, False])
async def test_the_view_follows_an_answer_below_a_notice(stays: bool) -> None:
    """The notice about turns left out is put above a question that is being answered. A view of an
    earlier place stays there."""
    engine = chat_engine()
    app = FrozenApp(engine, ui=UIConfig())
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await fill(app, pilot)
        lines = tuple(f"line {n}\n\n" for n in range(40))
        engine._script = Script(pieces=lines, delay_s=0.01)
        await pilot.press("alt+g")
        transcript = app.chat.transcript
        await wait_until(pilot, lambda: "no longer sent" in shown(app))
        if not stays:
            await pilot.press("shift+pageup")
            await pilot.pause()
            place = transcript.scroll_offset.y
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        await pilot.pause()
        assert "line 39" in shown(app)
        if stays:
            assert transcript.at_end and "more below" not in app.chat.status.text
        else:
            assert transcript.scroll_offset.y == place < transcript.max_scroll_y
