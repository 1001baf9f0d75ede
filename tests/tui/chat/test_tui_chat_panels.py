"""Panels over a chat: sampling, the system prompt, earlier prompts."""

from __future__ import annotations

from typing import Any

from chat_harness import SIZE, sent_messages
from fake_engine import Script
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, TextArea
from tui_harness import FrozenApp, ask, chat_engine, ready, wait_until

from termgen.tui.chat.panels import HistoryPanel, SamplingPanel, SystemPromptPanel


async def test_sampling_is_set_in_a_panel_and_shown() -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        assert "T 0.7" in app.chat.status.text
        await pilot.press("f3")
        panel = await opened(app, pilot, SamplingPanel)
        fields = {field.id: field for field in panel.query(Input).results(Input)}
        assert fields["temperature"].value == "0.7" and fields["top_p"].value == "0.95"
        fields["top_p"].value, fields["stop"].value = "1.5", "END,\\n"
        fields["seed"].focus()
        await pilot.press("7")
        await pilot.press("enter")
        await pilot.pause()
        assert app.screen is panel and app.focused is fields["top_p"]
        notes = {note.id: str(note.render()) for note in panel.query(".note")}
        assert notes["top_p-note"] == "✗ top_p must be in (0, 1], not 1.5"
        fields["top_p"].value = "0.5"
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen is not panel)
        assert "top_p 0.5  seed 7  stop (2)" in app.chat.status.text
        await ask(app, pilot, "one")
        params = engine.calls[-1].params
        assert (params.top_p, params.seed, params.stop) == (0.5, 7, ("END", "\n"))
        await pilot.press("f3")
        panel = await opened(app, pilot, SamplingPanel)
        await pilot.press("ctrl+r", "enter")
        await wait_until(pilot, lambda: app.screen is not panel)
        assert "T 0.7" in app.chat.status.text and "seed" not in app.chat.status.text


async def test_the_system_prompt_has_an_editor_of_many_lines() -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await pilot.press("f4")
        panel = await opened(app, pilot, SystemPromptPanel)
        await pilot.press("a", "enter", "b", "ctrl+s")
        await wait_until(pilot, lambda: app.screen is not panel)
        await ask(app, pilot, "one")
        assert sent_messages(engine)[0] == {"role": "system", "content": "a\nb"}
        await pilot.press("f4")
        panel = await opened(app, pilot, SystemPromptPanel)
        panel.query_one(TextArea).text = ""
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is not panel)
        assert app.chat.conversation.system_prompt == "a\nb"
        await pilot.press("f4")
        panel = await opened(app, pilot, SystemPromptPanel)
        panel.query_one(TextArea).text = ""
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.screen is not panel)
        assert app.chat.conversation.system_prompt is None


async def test_earlier_prompts_are_searched() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for question in ("why is the sky blue", "what is rust", "why is grass green"):
            app.chat.prompt.prompts.add(question)
        await pilot.press("ctrl+r")
        panel = await opened(app, pilot, HistoryPanel)
        found = panel.query_one(OptionList)
        assert found.option_count == 3
        await pilot.press(*"why")
        await pilot.pause()
        assert found.option_count == 2
        await pilot.press("ctrl+r", "enter")
        await wait_until(pilot, lambda: app.screen is not panel)
        assert app.chat.prompt.text == "why is the sky blue"
        await pilot.press("ctrl+r")
        panel = await opened(app, pilot, HistoryPanel)
        await pilot.press(*"zzz", "enter")
        await wait_until(pilot, lambda: app.screen is not panel)
        assert app.chat.prompt.text == "why is the sky blue"


async def opened(app: FrozenApp, pilot: Pilot[Any], kind: type[Any]) -> Any:
    await wait_until(pilot, lambda: isinstance(app.screen, kind))
    await pilot.pause()
    return app.screen


async def test_what_is_opened_is_not_covered_by_notices() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await ready(app, pilot)
        for key in ("f1", "f9", "ctrl+b"):
            app.notify("a notice")
            await wait_until(pilot, lambda: bool(app.screen.query("Toast")))
            await pilot.press(key)
            await wait_until(pilot, lambda: not app.screen.query("Toast"))
            assert len(app._notifications) == 0
            await pilot.press("escape")
            await pilot.pause()


async def test_arrows_go_through_the_values_in_a_small_terminal_too() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=(80, 10)) as pilot:
        await ready(app, pilot)
        await pilot.press("f3")
        panel = await opened(app, pilot, SamplingPanel)
        names = [field.id for field in panel.query(Input)]
        assert panel.query_one("#sampling").max_scroll_y > 0, "not all of them are seen"
        for name in names[1:]:
            await pilot.press("down")
            focused = app.focused
            assert focused is not None and focused.id == name
            await pilot.pause()
            assert panel.query_one("#sampling").region.contains_region(focused.region)
        await pilot.press("up")
        assert app.focused is panel.query_one(f"#{names[-2]}")
