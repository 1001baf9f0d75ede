"""The model picker: what it lists, fetching with progress, changing, and going back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import make_model_info
from foreign_server import chunk, done, foreign_server, model_list
from remote_chat import ask as ask_remote
from remote_chat import chat_of, remote_app
from textual.widgets import Input, OptionList
from tui_harness import (
    MODEL,
    FrozenApp,
    TimedEngine,
    ask,
    chat_engine,
    ready,
    type_text,
    wait_until,
)

from termgen.config import UIConfig
from termgen.errors import DownloadError, EngineError, TermgenError
from termgen.tui.chat.widgets.prompt import Prompt
from termgen.tui.models import ModelScreen, caution, choice_row, needs_words
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.spans import row_text, row_width
from termgen.vocabulary.model_shelf import ModelChoice, Needs, Report, Switch

GB = 10**9
ROOM = Needs(weights_bytes=GB, working_bytes=GB // 10, room_bytes=8 * GB)
SMALL = ModelChoice("smollm2-135m", "org/small", GB // 10, is_current=True, needs=ROOM)
OTHER = ModelChoice("other", "/models/other.gguf", 2 * GB, needs=ROOM)
REMOTE = ModelChoice("qwen3-0.6b", "Qwen/Qwen3-0.6B", 152 * 10**7, is_here=False, needs=ROOM)
HUGE = ModelChoice("huge", "/models/huge", 100 * GB, needs=replace(ROOM, weights_bytes=200 * GB))


class FakeShelf:
    """A shelf of fake engines; tests set its failures."""

    def __init__(self, *choices: ModelChoice) -> None:
        self._choices = list(choices)
        self.done: list[str] = []
        self.fetch_error: TermgenError | None = None
        self.failure: str | None = None
        self.switch_error: TermgenError | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.stopped = 0
        self.repositories = [
            ModelChoice("org/a-GGUF", "12,345 downloads", is_here=False, is_repository=True),
            ModelChoice(
                "org/odd-GGUF", is_here=False, is_repository=True, problem="'bert' is not supported"
            ),
        ]

    async def choices(self) -> list[ModelChoice]:
        return self._choices

    async def look_up(self, name: str) -> ModelChoice:
        if name == "nonsense":
            raise EngineError("unknown model 'nonsense'")
        return next((c for c in self._choices if c.name == name), replace(REMOTE, name=name))

    can_search = True

    async def search(self, words: str) -> list[ModelChoice]:
        self.done.append(f"search {words}")
        if self.fetch_error is not None:
            raise self.fetch_error
        return self.repositories

    async def files(self, name: str) -> list[ModelChoice]:
        self.done.append(f"files {name}")
        small = replace(REMOTE, name=f"{name}:a-Q4_K_M.gguf", title="a-Q4_K_M")
        return [small, replace(small, name=f"{name}:a-Q8_0.gguf", title="a-Q8_0", is_best=True)]

    offered: ModelChoice | None = None

    async def offer(self) -> ModelChoice | None:
        return self.offered

    async def remove(self, name: str) -> int:
        self.done.append(f"remove {name}")
        if self.fetch_error is not None:
            raise self.fetch_error
        self._choices = [choice for choice in self._choices if choice.name != name]
        return 10**9

    async def fetch(self, name: str, report: Report) -> None:
        self.done.append(f"fetch {name}")
        report(f"fetching {name}", 0.42)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        if self.fetch_error is not None:
            raise self.fetch_error

    async def switch(self, name: str, report: Report) -> Switch:
        self.done.append(f"switch {name}")
        if self.switch_error is not None:
            raise self.switch_error
        running = MODEL.model_id if self.failure else name
        engine = TimedEngine(
            model=make_model_info(model_id=running, default_params={"temperature": 0.125})
        )
        return Switch(engine, self.failure)


def picker_app(*choices: ModelChoice) -> tuple[FrozenApp, FakeShelf]:
    shelf = FakeShelf(*(choices or (SMALL, OTHER, REMOTE, HUGE)))
    return FrozenApp(chat_engine(), models=shelf), shelf


async def opened(app: Any, pilot: Any) -> ModelScreen:
    await wait_until(pilot, lambda: isinstance(app.screen, ModelScreen))
    screen = app.screen
    assert isinstance(screen, ModelScreen)
    await wait_until(pilot, lambda: screen.query_one(OptionList).option_count > 0)
    await pilot.pause()
    return screen


def lines(screen: ModelScreen) -> list[str]:
    models = screen.query_one(OptionList)
    options = [models.get_option_at_index(i) for i in range(models.option_count)]
    return [str(option.prompt) for option in options if not option.disabled]


def headers(screen: ModelScreen) -> list[str]:
    models = screen.query_one(OptionList)
    options = [models.get_option_at_index(i) for i in range(models.option_count)]
    return [str(option.prompt).strip() for option in options if option.disabled]


def message(screen: ModelScreen) -> str:
    return " ".join(screen.query_one("#models-message", Canvas).text.split())


async def test_another_model_goes_on_with_the_conversation() -> None:
    app, shelf = picker_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "first")
        chat, before = app.chat, app.client
        await pilot.press("f5")
        screen = await opened(app, pilot)
        assert lines(screen)[0].startswith("● smollm2-135m") and "100 MB" in lines(screen)[0]
        assert "fits" in lines(screen)[1] and "too large" in lines(screen)[2]
        assert [line.split()[0] for line in lines(screen)[1:]] == ["other", "huge", "qwen3-0.6b"]
        assert headers(screen) == ["on this machine · 3 models, 102.1 GB", "to fetch"]
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: app.screen is chat)
        await wait_until(pilot, lambda: "other answers from here on" in chat.transcript.plain_text)
        assert shelf.done == ["switch other"] and app.client is not before
        assert "other float32" in chat.status.text
        await ask(app, pilot, "second")
        engine = app.client
        assert isinstance(engine, TimedEngine)
        prompt = engine.calls[0].prompt
        assert [m["content"] for m in prompt.messages][::2] == ["first", "second"]  # type: ignore[union-attr]
        assert engine.calls[0].params.temperature == 0.125, "the new model's own default"
        await pilot.press("f2")
        await wait_until(pilot, lambda: app.screen is app._dashboard)
        assert app.dashboard._client is engine, "it watches the new engine"


async def test_fetching_shows_how_far_it_is_and_can_be_stopped() -> None:
    app, shelf = picker_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        chat = app.chat
        shelf.go_on.clear()
        await pilot.press("f5")
        screen = await opened(app, pilot)
        await pilot.press("end", "enter")
        await pilot.pause()
        assert "⏎ again fetches 1.5 GB" in message(screen) and shelf.done == []
        await pilot.press("enter")
        await wait_until(pilot, lambda: "42%" in message(screen))
        await pilot.press("escape")
        await wait_until(pilot, lambda: shelf.stopped == 1)
        await wait_until(pilot, lambda: "fetching was stopped" in message(screen))
        shelf.go_on.set()
        shelf.fetch_error = DownloadError("the network is gone")
        await pilot.press("enter", "enter")
        await wait_until(pilot, lambda: "the network is gone" in message(screen))
        shelf.fetch_error = None
        await pilot.press("enter", "enter")
        await wait_until(pilot, lambda: app.screen is chat)
        assert shelf.done[-2:] == ["fetch qwen3-0.6b", "switch qwen3-0.6b"]


async def test_a_model_that_does_not_start_leaves_the_former_one() -> None:
    app, shelf = picker_app()
    shelf.failure = "the file is damaged"
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        chat = app.chat
        await pilot.press("f5")
        await opened(app, pilot)
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: app.screen is chat)
        await wait_until(pilot, lambda: "the file is damaged" in chat.transcript.plain_text)
        assert "smollm2-135m answers as before" in chat.transcript.plain_text
        await ask(app, pilot, "still?")
        assert "Hello" in chat.transcript.plain_text


async def test_no_engine_at_all_leaves_the_list() -> None:
    app, shelf = picker_app()
    shelf.switch_error = EngineError("neither starts")
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press("f5")
        screen = await opened(app, pilot)
        await pilot.press("down", "down", "enter")
        await pilot.pause()
        assert "too large for the memory; ⏎ again tries" in message(screen)
        await pilot.press("enter")
        await wait_until(pilot, lambda: "neither starts" in message(screen))
        shelf.switch_error = None
        await pilot.press("home", "down", "enter")
        await wait_until(pilot, lambda: app.client is not app.engine)


async def test_what_is_typed_filters_the_list() -> None:
    app, shelf = picker_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        chat = app.chat
        await pilot.press("f5")
        screen = await opened(app, pilot)
        assert len(lines(screen)) == 4
        await type_text(pilot, "oth")
        await wait_until(pilot, lambda: len(lines(screen)) == 1)
        await pilot.press("backspace", "z", "q")
        await wait_until(pilot, lambda: lines(screen) == [])
        assert "no model has these words" in message(screen)
        await pilot.press("enter", "escape")
        await wait_until(pilot, lambda: len(lines(screen)) == 4)
        await type_text(pilot, "OTHER")
        await wait_until(pilot, lambda: len(lines(screen)) == 1)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is chat)
        assert shelf.done == ["switch other"]


async def test_models_by_name() -> None:
    app, shelf = picker_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        chat = app.chat
        await type_text(pilot, "/model nonsense")
        await pilot.press("enter")
        screen = await opened(app, pilot)
        await wait_until(pilot, lambda: "unknown model" in message(screen))
        await pilot.press("escape")
        await type_text(pilot, "/model other")
        await pilot.press("enter")
        await wait_until(pilot, lambda: shelf.done == ["switch other"])
        await wait_until(pilot, lambda: app.screen is chat)
        chat.prompt.insert("/model org/new")
        await pilot.press("enter")
        screen = await opened(app, pilot)
        await wait_until(pilot, lambda: "org/new: ⏎ again fetches" in message(screen))
        assert lines(screen)[-2].startswith("  org/new"), "to fetch, and marked"
        await pilot.press("enter")
        await wait_until(pilot, lambda: shelf.done[-1] == "switch org/new")


async def test_an_answer_under_way_is_stopped_first_and_kept() -> None:
    from fake_engine import Script

    shelf = FakeShelf(SMALL, OTHER)
    app = FrozenApp(chat_engine(Script(hold_after=2)), models=shelf)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why?", wait=False)
        chat = app.chat
        await wait_until(pilot, lambda: chat.conversation.last_answer == "Hello,")
        await pilot.press("f5")
        await opened(app, pilot)
        assert chat.is_streaming, "looking changes nothing"
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: app.screen is chat)
        assert not chat.is_streaming and chat.conversation.last_answer == "Hello,"
        assert app.engine.aborted == ["chat-1"]


async def test_where_the_model_stays() -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press("f5")
        await pilot.pause()
        assert app.screen is app.chat


async def test_models_of_a_server() -> None:
    frames = (chunk("yes", finish="stop"), done())
    async with foreign_server(*frames, models=model_list("m1", "m2")) as server:
        app = remote_app(server.url)
        async with app.run_test(size=(100, 30)) as pilot:
            chat = await chat_of(app, pilot)
            await pilot.press("f5")
            screen = await opened(app, pilot)
            assert [line.split()[0] for line in lines(screen)] == ["●", "m2"]
            await pilot.press("down", "enter")
            await wait_until(pilot, lambda: app.screen is chat)
            await ask_remote(chat, pilot, "hello?")
            assert server.bodies[-1]["model"] == "m2"


@pytest.mark.parametrize("width", [40, 72, 110])
def test_lines_fit(width: int) -> None:
    for choice in (SMALL, OTHER, REMOTE, HUGE, replace(OTHER, name="n" * 200)):
        assert row_width(choice_row(choice, width)) == width
    for size in (66, 110):
        assert "too large" in row_text(choice_row(HUGE, size))
    assert row_text(choice_row(HUGE, 110)).rstrip().endswith("too large /models/huge")
    assert caution(OTHER) == ""


def test_experts_in_main_memory_are_named() -> None:
    needs = replace(ROOM, weights_bytes=20 * GB, main_bytes=13 * GB)
    assert needs_words(replace(OTHER, needs=needs)) == (
        "weights 20.0 GB + steps 100 MB = 20.1 GB of 8.0 GB free, 13.0 GB of experts in main memory"
    )
    assert "fits" in row_text(choice_row(replace(OTHER, needs=needs), 110))


async def test_the_needs_of_the_marked_model_are_explained() -> None:
    needs = Needs(
        weights_bytes=49 * GB // 10,
        held_as="int8",
        kv_bytes=11 * GB // 10,
        context=32_768,
        working_bytes=GB // 2,
        room_bytes=21 * GB,
        tokens_per_s=12.4,
    )
    fits = replace(OTHER, name="q4", quantization="Q4_K_M", needs=needs, is_best=True)
    short = replace(OTHER, name="short", needs=replace(needs, room_bytes=6 * GB, tokens_per_s=2.7))
    old = replace(OTHER, name="old", problem="the architecture 'bert' is not supported", needs=None)
    app, shelf = picker_app(SMALL, fits, short, old, REMOTE)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("f5")
        screen = await opened(app, pilot)
        words = "weights 1.0 GB + steps 100 MB = 1.1 GB of 8.0 GB free"
        await wait_until(pilot, lambda: message(screen) == words)
        assert lines(screen)[1].startswith("★ q4") and "Q4_K_M   ≈5.4 GB" in lines(screen)[1]
        assert "≤12/s" in lines(screen)[1] and "≤2.7/s" in lines(screen)[2]
        await pilot.press("down")
        words = (
            "weights 4.9 GB (int8) + KV cache 1.1 GB for 32,768 tokens + steps 500 MB = 6.5 GB of "
            "21.0 GB free · at most 12 tokens/s · ★ best for this machine"
        )
        await wait_until(pilot, lambda: message(screen) == words)
        await pilot.press("down")
        await wait_until(pilot, lambda: "6.0 GB free, with a shorter context" in message(screen))
        await pilot.press("down")
        words = "cannot run: the architecture 'bert' is not supported"
        await wait_until(pilot, lambda: message(screen) == words)
        assert words in lines(screen)[3]
        await pilot.press("enter", "enter")
        await pilot.pause()
        assert message(screen) == f"old {words}" and shelf.done == []
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "⏎ again" in message(screen))
        await pilot.press("home")
        await wait_until(pilot, lambda: message(screen).startswith("weights 1.0 GB + steps"))


async def test_the_hub_is_searched() -> None:
    app, shelf = picker_app()
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        chat = app.chat
        await pilot.press("f5")
        screen = await opened(app, pilot)
        await pilot.press("ctrl+f")
        await wait_until(pilot, lambda: "type words to search" in message(screen))
        await type_text(pilot, "tiny q4")
        await wait_until(pilot, lambda: "searches the hub" in message(screen))
        shelf.fetch_error = DownloadError("cannot search the hub: no route to host")
        await pilot.press("ctrl+f")
        await wait_until(pilot, lambda: "no route to host" in message(screen))
        shelf.fetch_error = None
        await pilot.press("ctrl+f")
        await wait_until(pilot, lambda: headers(screen) == ["repositories of the hub"])
        assert shelf.done == ["search tiny q4"] * 2
        assert "org/a-GGUF" in lines(screen)[0] and "12,345 downloads" in lines(screen)[0]
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "cannot run: 'bert' is not supported" in message(screen))
        await pilot.press("up", "enter")
        await wait_until(pilot, lambda: headers(screen) == ["to fetch"])
        assert "★ a-Q8_0" in lines(screen)[1]
        await pilot.press("escape")
        await wait_until(pilot, lambda: headers(screen) == ["repositories of the hub"])
        await pilot.press("enter")
        await wait_until(pilot, lambda: headers(screen) == ["to fetch"])
        await pilot.press("enter")
        await wait_until(pilot, lambda: "a-Q8_0: ⏎ again fetches" in message(screen))
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is chat)
        assert shelf.done[-2:] == ["fetch org/a-GGUF:a-Q8_0.gguf", "switch org/a-GGUF:a-Q8_0.gguf"]


async def test_a_search_without_results_says_so() -> None:
    app, shelf = picker_app()
    shelf.repositories = []
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press("f5")
        screen = await opened(app, pilot)
        await pilot.press("x", "ctrl+f")
        await wait_until(pilot, lambda: "the hub has no GGUF models" in message(screen))
        await pilot.press("escape", "escape")
        await wait_until(pilot, lambda: app.screen is app.chat)


async def test_a_fetched_model_is_deleted_after_a_question() -> None:
    own = replace(OTHER, name="own", is_own=True)
    app, shelf = picker_app(SMALL, own, OTHER)
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press("f5")
        screen = await opened(app, pilot)
        await pilot.press("delete", "delete")
        await wait_until(pilot, lambda: "is in use" in message(screen))
        await pilot.press("end", "delete", "delete")
        await wait_until(pilot, lambda: "other was not fetched by termgen" in message(screen))
        await pilot.press("up", "delete")
        await wait_until(pilot, lambda: "again deletes 2.0 GB" in message(screen))
        await pilot.press("up", "down", "delete")
        await wait_until(pilot, lambda: "again deletes 2.0 GB" in message(screen))
        assert shelf.done == [], "moving away takes the question back"
        shelf.fetch_error = DownloadError("own cannot be deleted: it is read only")
        await pilot.press("delete")
        await wait_until(pilot, lambda: "read only" in message(screen))
        shelf.fetch_error = None
        await pilot.press("delete", "delete")
        await wait_until(pilot, lambda: "own was deleted: 1.0 GB freed" in message(screen))
        assert shelf.done == ["remove own"] * 2 and len(lines(screen)) == 2


PICTURED = (
    replace(SMALL, quantization="Q4_1", needs=replace(ROOM, tokens_per_s=136.4, held_as="int8")),
    replace(
        OTHER,
        name="ollama:qwen3:8b",
        detail="Ollama",
        quantization="Q4_K",
        is_best=True,
        needs=replace(
            ROOM,
            weights_bytes=49 * GB // 10,
            held_as="int8",
            kv_bytes=GB,
            context=32_768,
            room_bytes=21 * GB,
            tokens_per_s=12.4,
        ),
    ),
    replace(
        OTHER,
        name="lmstudio:org/big-GGUF/big",
        title="big-00001-of-00003",
        problem="it is in 3 parts: join them with `llama-gguf-split --merge FIRST-PART NEW.gguf`",
        needs=None,
    ),
    HUGE,
    replace(REMOTE, quantization="16 bit"),
)


async def opened_for_a_picture(pilot: Any) -> Any:
    """The picker, opened with f5, without a blinking cursor."""
    await ready(pilot.app, pilot)
    for prompt in pilot.app.screen.query(Prompt):
        prompt.cursor_blink = False
    await pilot.press("f5")
    return await opened(pilot.app, pilot)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_the_picker_in_pictures(snap_compare: Any, size: tuple[int, int]) -> None:
    async def open_it(pilot: Any) -> None:
        screen = await opened_for_a_picture(pilot)
        await pilot.press("down")
        await wait_until(pilot, lambda: "best for this machine" in message(screen))
        await pilot.pause()

    assert snap_compare(picker_app(*PICTURED)[0], terminal_size=size, run_before=open_it)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_the_hub_in_pictures(snap_compare: Any, size: tuple[int, int]) -> None:
    async def open_it(pilot: Any) -> None:
        screen = await opened_for_a_picture(pilot)
        await pilot.press("a", "ctrl+f")
        await wait_until(pilot, lambda: headers(screen) == ["repositories of the hub"])
        await pilot.pause()

    assert snap_compare(picker_app()[0], terminal_size=size, run_before=open_it)


@pytest.mark.parametrize("size", [(80, 24), (40, 12)], ids=str)
async def test_a_better_model_is_offered_in_the_empty_chat(size: tuple[int, int]) -> None:
    app, shelf = picker_app()
    shelf.offered = REMOTE
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        chat = app.chat
        if size[0] == 80:
            words = "f5 fetches qwen3-0.6b (1.5 GB), the best for this machine"
            await wait_until(pilot, lambda: words in chat.transcript.plain_text)
        await wait_until(pilot, lambda: app._offered == REMOTE.name)
        await pilot.press("f5")
        screen = await opened(app, pilot)
        await wait_until(pilot, lambda: "⏎ again" in message(screen))
        assert shelf.done == [], "it is fetched after a question only"
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is chat)
        assert shelf.done == ["fetch qwen3-0.6b", "switch qwen3-0.6b"]
        assert "fetches" not in chat.transcript.plain_text
        await pilot.press("f5")
        screen = await opened(app, pilot)
        assert "again" not in message(screen), "it is offered once"


async def test_nothing_is_said_where_there_is_nothing_better() -> None:
    app, shelf = picker_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await pilot.pause()
        assert "fetches" not in app.chat.transcript.plain_text and app._offered == ""


async def test_a_letter_that_is_bound_is_no_text() -> None:
    shelf = FakeShelf(SMALL, OTHER)
    app = FrozenApp(chat_engine(), models=shelf, ui=UIConfig(keys=("models.close=q",)))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await pilot.press("f5")
        screen = await opened(app, pilot)
        await pilot.press("o")
        assert screen.query_one("#models-filter", Input).value == "o"
        await pilot.press("q")
        assert screen.query_one("#models-filter", Input).value == "", "which is closed first"
        await pilot.press("q")
        await wait_until(pilot, lambda: app.screen is app.chat)
