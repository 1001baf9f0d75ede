"""Prompts that the user keeps: listed, taken, filled in, kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chat_harness import SIZE, sent, shown
from fake_engine import Script
from tui_harness import FrozenApp, ask, chat_engine, ready, type_text, wait_until

from termgen.errors import RequestError
from termgen.tui.chat.prompts_panel import PromptsPanel
from termgen.tui.chat.state import prompt_library
from termgen.tui.chat.state.prompt_library import keep, kept_prompts, next_variable, unfilled


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "prompts"
    monkeypatch.setattr(prompt_library, "folder", lambda: folder)
    monkeypatch.setattr("termgen.tui.chat.prompts_panel.folder", lambda: folder)
    return folder


def test_files_are_prompts_and_others_are_left_out(library: Path) -> None:
    assert kept_prompts() == []
    library.mkdir()
    (library / "b.md").write_text("Explain {{what}}.\n")
    (library / "A long name.md").write_text("\ufeffHello")
    (library / "empty.md").write_text(" \n")
    (library / "other.txt").write_text("no")
    (library / "binary.md").write_bytes(b"\xff\xfe\x00")
    (library / "folder.md").mkdir()
    (library / "gone.md").symlink_to(library / "nowhere")
    found = [(prompt.name, prompt.text) for prompt in kept_prompts()]
    assert found == [("A long name", "Hello"), ("b", "Explain {{what}}.")]


def test_a_prompt_is_kept_once(library: Path) -> None:
    path = keep("review", "Look at this:\n{{code}}")
    assert path == library / "review.md" and kept_prompts()[0].text == "Look at this:\n{{code}}"
    for name, text, fault in (
        ("review", "x", "there is a prompt review already"),
        ("", "x", "a prompt's name"),
        ("../x", "x", "a prompt's name"),
        (".hidden", "x", "a prompt's name"),
        ("a" * 61, "x", "a prompt's name"),
        ("long", "x" * 70_000, "at most 64 KiB"),
    ):
        with pytest.raises(RequestError, match=fault):
            keep(name, text)
    assert os.listdir(library) == ["review.md"]
    library.chmod(0o500)
    if os.geteuid():
        with pytest.raises(RequestError, match="the prompt cannot be kept: Permission denied"):
            keep("other", "x")
    library.chmod(0o700)


def test_variables_are_found_in_turn() -> None:
    text = "{{ a }} and {{b c}}, {{}} {x} {{ a }}"
    assert unfilled(text) == ["{{ a }}", "{{b c}}"]
    assert next_variable(text, 0) == (0, 7) and next_variable(text, 7) == (12, 19)
    assert next_variable(text, 36) == (0, 7) and next_variable("none", 0) is None


async def test_a_prompt_is_taken_and_filled_in() -> None:
    keep("translate", "Translate into {{language}}:\n{{text}}")
    keep("other", "Something else")
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await type_text(pilot, "a draft")
        await pilot.press("alt+p")
        await wait_until(pilot, lambda: isinstance(app.screen, PromptsPanel))
        await type_text(pilot, "translate")
        await pilot.press("enter")
        await wait_until(pilot, lambda: not isinstance(app.screen, PromptsPanel))
        prompt = app.chat.prompt
        assert prompt.selected_text == "{{language}}"
        await type_text(pilot, "French")
        await pilot.press("enter")  # asks first: a variable is left
        await wait_until(pilot, lambda: len(app._notifications) == 1)
        message = next(iter(app._notifications)).message
        assert message.startswith("{{text}} is to be filled in")
        assert prompt.text == "Translate into French:\n{{text}}" and not engine.calls
        await pilot.press("tab")
        assert prompt.selected_text == "{{text}}"
        await type_text(pilot, "one")
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(engine.calls))
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert sent(engine)[-1] == ("user", "Translate into French:\none")
        await pilot.press("up", "up", "up")  # the first one goes to the first of two lines
        assert prompt.text == "a draft", "the draft before is in the history"
        prompt.set_text("")
        await ask(app, pilot, "templates have {{these}} too")
        assert sent(engine)[-1] == ("user", "templates have {{these}} too"), "not a kept prompt"


async def test_the_last_question_is_kept() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/prompts")
        assert "No prompt is kept yet" in shown(app)
        await ask(app, pilot, "/prompts save x")
        assert "there is no question" in next(iter(app._notifications)).message
        await ask(app, pilot, "Say it again")
        await ask(app, pilot, "/prompts save again")
        assert "Kept as" in shown(app) and kept_prompts()[0].text == "Say it again"
        app.chat.prompt.insert("/prompts agai")
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, PromptsPanel))
        await pilot.press("escape")
        await wait_until(pilot, lambda: not isinstance(app.screen, PromptsPanel))
