"""The chat's other features: their display and their requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_harness import SIZE, sent_messages, shown
from fake_engine import Script
from textual.events import Paste
from textual.pilot import Pilot
from tui_harness import FrozenApp, ask, chat_engine, pieces, ready, type_text, wait_until

from termgen.errors import ContextLengthError
from termgen.tui.chat.state.attachments import MAX_BYTES
from termgen.tui.chat.widgets.completion import Completion
from termgen.vocabulary.request import FinishReason

THINKS = ("<think>", "\n", "Let me", " see", ".\n", "</think>", "\n\n", "Yes", ".")
CODE = "First:\n\n```python\nprint(1)\n```\n\nthen\n\n```sh\nls\n```\n"


def told(app: FrozenApp) -> str:
    return "\n".join(str(note.message) for note in app._notifications)


def lists_files(app: FrozenApp) -> bool:
    return app.chat.query_one(Completion).display


async def click_text(app: FrozenApp, pilot: Pilot[Any], text: str) -> None:
    """Click the last row that shows the text."""
    transcript = app.chat.transcript
    lines = transcript.plain_text.split("\n")
    line = max(y for y, row in enumerate(lines) if text in row)
    offset = (transcript.margin + lines[line].index(text) + 1, line - transcript.scroll_offset.y)
    await pilot.click(transcript, offset=offset)
    await pilot.pause()


# -- thoughts ------------------------------------------------------------------------------


async def test_thoughts_are_open_while_written_and_folded_after() -> None:
    engine = chat_engine(Script(pieces=THINKS, hold_after=4))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "sure?", wait=False)
        await wait_until(pilot, lambda: "│ Let me see" in shown(app))
        assert "▾ thinking" in shown(app)
        engine.release.set()
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert "▸ thought for 0.1 s · 5 tok" in shown(app)
        assert "Let me see" not in shown(app) and "think>" not in shown(app)
        assert "\n  Yes.\n" in shown(app) and "9 tok" in shown(app)
        await pilot.press("ctrl+t")
        assert "│ Let me see.\n\n  Yes." in shown(app)
        await click_text(app, pilot, "▾ thought")
        assert "Let me see" not in shown(app)


async def test_thoughts_go_back_as_such_and_are_not_copied() -> None:
    engine = chat_engine(Script(pieces=THINKS))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "sure?")
        await ask(app, pilot, "/copy", wait=False)
        assert app.clipboard == "Yes."
        await ask(app, pilot, "really?")
        assert sent_messages(engine)[1] == {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_content": "Let me see.",
        }


async def test_stopped_thoughts_stay() -> None:
    engine = chat_engine(Script(pieces=THINKS, hold_after=4))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "sure?", wait=False)
        await wait_until(pilot, lambda: "Let me see" in shown(app))
        await pilot.press("escape")
        assert "▸ thought for" in shown(app) and "■ stopped" in shown(app)
        engine._script = Script(pieces=("ok",))
        await ask(app, pilot, "again")
        assert sent_messages(engine) == [{"role": "user", "content": "sure?\n\nagain"}]


# -- code blocks ---------------------------------------------------------------------------


async def test_code_blocks_are_copied_by_key_click_and_command() -> None:
    app = FrozenApp(chat_engine(Script(pieces=pieces(CODE))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "how?")
        assert "python" in shown(app) and "[2] copy" in shown(app)
        await pilot.press("alt+2")
        assert app.clipboard == "ls\n"
        await click_text(app, pilot, "[1] copy")
        assert app.clipboard == "print(1)\n"
        await ask(app, pilot, "/code 2", wait=False)
        assert app.clipboard == "ls\n"
        await pilot.press("alt+3")
        assert "the last answer has 2 code blocks" in told(app)
        assert app.chat.prompt.text == ""


async def test_a_code_block_is_saved_to_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = FrozenApp(chat_engine(Script(pieces=pieces(CODE))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "how?")
        await ask(app, pilot, "/save 1 my code.py", wait=False)
        assert (tmp_path / "my code.py").read_text() == "print(1)\n"
        assert "Code block 1 is in my code.py." in shown(app)
        await ask(app, pilot, "/save 2 my code.py", wait=False)
        assert "is there already" in told(app)
        await ask(app, pilot, "/save 2 no/such/folder.sh", wait=False)
        assert "No such file" in told(app)
        await ask(app, pilot, "/save", wait=False)
        assert "which code block?" in told(app)
        assert (tmp_path / "my code.py").read_text() == "print(1)\n"


# -- files ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scheduler.py").write_text("x = 1\n" * 200)
    (tmp_path / "notes.md").write_text("hello\n")
    (tmp_path / "picture.bin").write_bytes(b"\0\1")
    return tmp_path


async def test_a_file_is_completed_shown_and_sent(folder: Path) -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await type_text(pilot, "why @")
        await pilot.pause()
        completion = app.chat.query_one(Completion)
        assert completion.text.split() == "▸ notes.md tab takes it picture.bin scheduler.py".split()
        await pilot.press("down", "down")
        await pilot.press("tab")
        await pilot.pause()
        assert app.chat.prompt.text == "why @scheduler.py "
        assert not completion.display and app.focused is app.chat.prompt
        await pilot.press("enter")
        await wait_until(pilot, lambda: "ok" in shown(app))
        assert "▎ why @scheduler.py\n▎ ▤ scheduler.py 1.2kB\n" in shown(app)
        assert "x = 1" not in shown(app)
        content = sent_messages(engine)[0]["content"]
        assert content.startswith("scheduler.py:\n```py\nx = 1\n")
        assert content.endswith("```\n\nwhy @scheduler.py ")
        await ask(app, pilot, "and?")
        assert (
            sent_messages(engine)[0]["content"] == content
            and sent_messages(engine)[2]["content"] == "and?"
        )


async def test_escape_closes_the_list_and_the_arrows_are_the_prompts_again(folder: Path) -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "see @notes.md")
        await type_text(pilot, "@no")
        await pilot.pause()
        assert lists_files(app)
        await pilot.press("escape")
        assert not lists_files(app)
        await pilot.press("up")
        await pilot.pause()
        assert app.chat.prompt.text == "see @notes.md" and not lists_files(app)


async def test_files_are_attached_and_dropped_by_command(folder: Path) -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/attach notes.md", wait=False)
        assert app.chat.prompt.border_title == "▤ notes.md 6B"
        await ask(app, pilot, "/attach picture.bin", wait=False)
        assert "picture.bin is a binary file" in told(app)
        await ask(app, pilot, "/attach gone", wait=False)
        assert "gone: No such file" in told(app)
        await ask(app, pilot, "what?")
        assert sent_messages(engine)[0]["content"] == "notes.md:\n```md\nhello\n```\n\nwhat?"
        assert not app.chat.prompt.border_title
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: len(engine.calls) == 2 and not app.chat.is_streaming)
        assert "hello" in sent_messages(engine)[0]["content"]
        await ask(app, pilot, "/attach notes.md", wait=False)
        await ask(app, pilot, "/attach off", wait=False)
        await ask(app, pilot, "bare")
        assert sent_messages(engine)[-1]["content"] == "bare"


async def test_a_file_that_cannot_go_keeps_the_question_in_the_prompt(folder: Path) -> None:
    engine = chat_engine()
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "see @picture.bin", wait=False)
        assert engine.calls == [] and app.chat.prompt.text == "see @picture.bin"
        assert "picture.bin is a binary file" in told(app)


async def test_files_of_a_refused_question_come_back(folder: Path) -> None:
    engine = chat_engine(Script(raises=ContextLengthError("too long")))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/attach notes.md", wait=False)
        await ask(app, pilot, "see @scheduler.py")
        assert app.chat.prompt.text == "see @scheduler.py"
        assert app.chat.prompt.border_title == "▤ notes.md 6B  ▤ scheduler.py 1.2kB"
        text = app.chat.transcript.plain_text
        assert "/attach off leaves the files" in text and "oldest turns" not in text


async def test_a_paste_of_a_megabyte_becomes_a_file() -> None:
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        text = "line of text\n" * (1_000_000 // 13)
        app.post_message(Paste(text))
        await pilot.pause()
        assert app.chat.prompt.text == ""
        assert app.chat.prompt.border_title == "▤ pasted-1.txt 1.0MB"
        app.post_message(Paste("x" * MAX_BYTES))
        await pilot.pause()
        assert "at most 2.0 MiB" in told(app)
        engine._script = Script(raises=ContextLengthError("too long"))
        await ask(app, pilot, "sum it up")
        assert app.chat.prompt.border_title == "▤ pasted-1.txt 1.0MB"
        content = sent_messages(engine)[0]["content"]
        assert len(content) > len(text) and "pasted-1.txt:\n```txt\nline of text\n" in content


# -- forms of answers ----------------------------------------------------------------------


def scripts(*answers: Sequence[str]) -> Any:
    left = iter(answers)
    return lambda _call: Script(pieces=next(left))


async def test_a_schema_is_asked_for_and_the_answer_shown_with_indents() -> None:
    engine = chat_engine(scripts(('{"na', 'me":"Ada"}'), ("hi",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, '/schema {"type": "object"}', wait=False)
        assert "JSON schema" in app.chat.status.text
        await ask(app, pilot, "who?")
        wanted = engine.calls[-1].params.structured_outputs
        assert wanted is not None and wanted.json == '{"type":"object"}'
        assert '"name": "Ada"' in shown(app) and "[1] copy" in shown(app)
        assert "✓ JSON schema · 2 tok" in shown(app)
        await pilot.press("alt+1")
        assert app.clipboard == '{\n  "name": "Ada"\n}\n'
        await ask(app, pilot, "/schema off", wait=False)
        assert "JSON schema" not in app.chat.status.text
        await ask(app, pilot, "hello")
        assert engine.calls[-1].params.structured_outputs is None


async def test_an_answer_that_was_cut_off_says_so() -> None:
    script = Script(pieces=('{"a', '": '), finish_reason=FinishReason.LENGTH)
    app = FrozenApp(chat_engine(script))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, '/schema {"type": "object"}', wait=False)
        await ask(app, pilot, "who?")
        assert "✗ not complete: JSON schema" in shown(app) and '{"a":' in shown(app)


async def test_forms_that_are_wrong_change_nothing() -> None:
    engine = chat_engine(Script(pieces=("no",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/choice yes|no", wait=False)
        for wrong in ("/schema {", "/schema gone.json", "/choice a||b"):
            await ask(app, pilot, wrong, wait=False)
        assert "not valid JSON" in told(app) and "gone.json: No such" in told(app)
        await ask(app, pilot, "sure?")
        wanted = engine.calls[-1].params.structured_outputs
        assert wanted is not None and wanted.choice == ("yes", "no")
        assert "✓ one of 2" in shown(app)
