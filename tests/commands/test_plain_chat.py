"""`termgen chat --plain`: a chat in lines, without a single escape sequence."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import nobodys_settings, one_line_error, run
from fake_engine import FakeEngine, Script, make_model_info
from server_harness import ANSWER, serving
from test_generate_remote import in_thread, loading_until_asked

from termgen.commands.launch import EngineHolder
from termgen.commands.plain_chat import PLAIN_HELP, run_plain
from termgen.commands.shelf.local_shelf import LocalShelf
from termgen.config import EngineConfig, UIConfig
from termgen.errors import ContextLengthError, EngineError
from termgen.tools.toolbox import Toolbox
from termgen.tui.chat.saved.chat_records import read_chat


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with nobodys_settings(monkeypatch, tmp_path):
        yield


def chat(
    engine: FakeEngine,
    typed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    toolbox: Toolbox | None = None,
    shelf: Any = None,
    **ui: str,
) -> str:
    stopped: list[bool] = []

    async def start() -> FakeEngine:
        return engine

    async def stop() -> None:
        stopped.append(True)

    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    shelf = shelf or LocalShelf(EngineHolder(EngineConfig()))
    assert run_plain(start, stop, UIConfig(**ui), shelf, toolbox=toolbox) == 0
    assert stopped == [True]
    shown = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in shown)
    return shown


def asked(engine: FakeEngine) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in call.prompt.messages] for call in engine.calls]


def test_a_chat_goes_on_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    typed = "one\n\n/help\n two \\\nlines\n/new\nthree\n/quit\nnever\n"
    shown = chat(engine, typed, monkeypatch, capsys, system_prompt="Be brief.")
    system = ("system", "Be brief.")
    first = [system, ("user", "one")]
    assert asked(engine) == [
        first,
        [*first, ("assistant", ANSWER), ("user", " two \nlines")],
        [system, ("user", "three")],
    ]
    assert shown.count(ANSWER + "\n") == 3
    assert "/quit         leave" in shown and "A new chat." in shown


def test_what_is_no_command_is_said_and_paths_are_questions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    shown = chat(engine, "/qiut\n/etc/passwd?\nlast", monkeypatch, capsys)
    assert "Not sent: there is no command /qiut, but /quit." in shown
    assert asked(engine)[0] == [("user", "/etc/passwd?")]
    assert asked(engine)[1][-1] == ("user", "last"), "a last line without its end counts"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EngineError("a step failed"), "No answer: a step failed"),
        (ContextLengthError("4097 tokens"), "The chat has filled the model's context: /new"),
    ],
)
def test_a_question_that_fails_is_forgotten_and_the_chat_goes_on(
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakeEngine()
    generate, left = engine.generate, [error]

    def failing(*args: object, **kwargs: object) -> object:
        if left:
            raise left.pop()
        return generate(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "generate", failing)
    shown = chat(engine, "bad\ngood\n", monkeypatch, capsys)
    assert words in shown and asked(engine) == [[("user", "good")]]


def test_what_a_model_writes_drives_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = ["\x1b[2J", "\x1b]0;title\x07", "a\r", "\nb", "\x9b31m", "\u202eabc"]
    shown = chat(FakeEngine(script=Script(pieces=hostile)), "x\n", monkeypatch, capsys)
    assert "a\nb" in shown and "\x1b" not in shown and "\u202e" not in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--inline", "x"], "exclude each other"),
        (["--continue"], "--plain keeps no chat"),
        (["--session", "a"], "--plain keeps no chat"),
        (["--theme", "termgen-dark"], "--theme has no effect with --plain"),
        (["--chat-db", "x"], "--chat-db has no effect with --plain"),
        (["a question"], "needs --inline"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in one_line_error(capsys, "chat", "--plain", *flags)


def test_piped_lines_are_asked_of_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    with in_thread(lambda: serving(engine)) as url:
        code, out, err = run(capsys, "chat", "--plain", "--url", url)
    assert (code, err) == (0, "") and out.count(ANSWER) == 2 and len(engine.calls) == 2


class DumbTerminal:
    """`termgen` in a terminal that only prints lines."""

    def __init__(self, *argv: str) -> None:
        self._main, side = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "termgen", *argv],
            stdin=side,
            stdout=side,
            stderr=side,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(side)
        self.shown = b""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._main, 4096):
                self.shown += part
        except OSError:
            pass  # the other side is closed

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait_for(self, pattern: bytes) -> None:
        end = time.monotonic() + 60
        while not re.search(pattern, self.shown):
            assert time.monotonic() < end, self.shown
            time.sleep(0.01)

    def interrupt_until_it_ends(self) -> None:
        """Press Ctrl-C again when it got lost: Python takes note of a signal that comes just
        before a read only after the read."""
        for _ in range(10):
            self.child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(timeout=6)
                return

    def end(self) -> int:
        code = self.child.wait(timeout=60)
        self._reading.join(10)
        os.close(self._main)
        assert b"\x1b" not in self.shown and b"Traceback" not in self.shown
        return code


def test_a_dumb_terminal_gets_plain_lines() -> None:
    engine = FakeEngine(script=Script(pieces=["x"] * 10_000, delay_s=0.005))

    with in_thread(lambda: loading_until_asked(engine)) as url:
        terminal = DumbTerminal("chat", "--url", url)
        terminal.wait_for(rb"the server: loading weights")
        terminal.wait_for(rb"You: $")
        terminal.type("why\n")
        terminal.wait_for(rb"Answer:\r\nxxxx")
        terminal.child.send_signal(signal.SIGINT)
        terminal.wait_for(rb"x\r\nStopped.\r\nYou: $")
        terminal.type("\x04")
        assert terminal.end() == 0
        terminal = DumbTerminal("chat", "--url", url)
        terminal.wait_for(rb"You: $")
        terminal.interrupt_until_it_ends()
        assert terminal.end() == 130


@pytest.mark.parametrize("argv", [["top"], ["serve", "--dashboard"], ["bench", "serve", "--watch"]])
def test_screens_are_refused_in_plain_words(argv: list[str]) -> None:
    terminal = DumbTerminal(*argv)
    assert terminal.end() == 2
    assert b"draws a screen, which this terminal (TERM=dumb) cannot show; " in terminal.shown
    assert terminal.shown.count(b"\n") == 1


def test_one_question_on_a_dumb_terminal_is_plain_too() -> None:
    with in_thread(lambda: serving(FakeEngine(script=Script(pieces=["**a", "** `b`"])))) as url:
        terminal = DumbTerminal("chat", "--inline", "why", "--url", url)
        assert terminal.end() == 0
    assert terminal.shown == b"**a** `b`\r\n"


def test_help_names_every_command() -> None:
    for command in ("/new", "/system", "/retry", "/fit", "/compact", "/context", "/help", "/quit"):
        assert command in PLAIN_HELP


def test_files_go_with_a_question_and_missing_ones_are_asked_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.bin").write_bytes(b"\0")
    engine = FakeEngine()
    typed = "see @a.py\nsee @gone.py\nsee @b.bin\n/sytem x\n/sytem x\n"
    shown = chat(engine, typed, monkeypatch, capsys)
    questions = [messages[-1][1] for messages in asked(engine)]
    assert questions == ["a.py:\n```py\nx = 1\n```\n\nsee @a.py", "/sytem x"]
    assert "With a.py." in shown and "Not sent: there is no file gone.py." in shown
    assert "Not sent: b.bin is a binary file" in shown
    assert "Not sent: there is no command /sytem, but /system." in shown


def test_the_system_prompt_and_another_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    typed = "/retry\n/system Be brief.\none\n/retry\n/system\n/system off\ntwo\n"
    shown = chat(engine, typed, monkeypatch, capsys)
    system, one = ("system", "Be brief."), ("user", "one")
    answer = ("assistant", ANSWER)
    assert asked(engine) == [[system, one], [system, one], [one, answer, ("user", "two")]]
    assert "There is no answer to replace yet." in shown
    assert shown.count("System prompt: Be brief.") == 2 and "System prompt: none" in shown


def test_a_full_context_goes_on_without_the_oldest_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    generate = engine.generate

    def small(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if len(prompt.messages) > 3:
            raise ContextLengthError("too long")
        return generate(prompt, *args, **kwargs)

    monkeypatch.setattr(engine, "generate", small)
    shown = chat(engine, "one\ntwo\nthree\n/fit\nfour\n", monkeypatch, capsys)
    assert "/new begins another one, /fit leaves out the oldest turns." in shown
    assert "In a full context the oldest turns are not sent." in shown
    assert "Turns 1-2 are no longer sent: the context is full." in shown
    questions = [[text for role, text in each if role == "user"] for each in asked(engine)]
    assert questions == [["one"], ["one", "two"], ["three"], ["three", "four"]]


def summing() -> FakeEngine:
    def script(call: Any) -> Script:
        is_order = call.prompt.messages[-1]["content"].startswith("Summarise")
        return Script(pieces=("They ", "counted.") if is_order else ("yes",) * 8)

    return FakeEngine(script=script, model=make_model_info(max_model_len=2048))


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("drop", r"Turns 1-\d are no longer sent: the context is full.\n"),
        ("ends", r"Turns 2-\d are no longer sent: the context is full.\n"),
        (
            "summarise",
            r"The model summarises turns (2-\d)\. Ctrl-C stops it\.\n"
            r"Turns \1 are no longer sent: the context is full\. The model's summary of turns \1 "
            r"is sent instead:\nThey counted\.\n",
        ),
    ],
)
def test_a_policy_keeps_the_chat_going(
    policy: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = summing()
    typed = "".join(f"{number} {'x' * 250}\n" for number in range(1, 12)) + "/context\n"
    shown = chat(engine, typed, monkeypatch, capsys, system_prompt="S", context_policy=policy)
    assert re.search(line, shown), shown
    assert shown.count("yes" * 8) == 11 and "Not sent" not in shown
    assert asked(engine)[-1][-1][1].startswith("11 ") and asked(engine)[-1][0][0] == "system"
    assert re.search(r"free +[\d,]+\nThe model reads 2,048 tokens", shown)
    assert "Leaving turns out before turn" in shown


def test_compact_in_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = summing()
    typed = f"/compact\n1 {'x' * 200}\n2 {'x' * 200}\n3\n/compact the x\n4\n/fit off\n5\n/fit all\n"
    shown = chat(engine, typed, monkeypatch, capsys)
    assert "There is nothing to summarise yet." in shown and "/fit goes on without" in shown
    assert "Turn 2 is no longer sent. The model's summary of turn 2 is sent instead:" in shown
    order, after, last = asked(engine)[-3:]
    assert order[-1][1].endswith("concerns this: the x")
    heading = "Summary of turn 2, made by the model:\nThey counted."
    assert after[0] == ("system", heading) and after[-1] == ("user", "4")
    assert len(last) == 9 and last[0][0] == "user", "all five are sent again"


def test_a_message_that_is_too_long_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = summing()
    shown = chat(engine, f"{'x' * 3000}\nshort\n", monkeypatch, capsys)
    assert "This message is too long. With the system prompt it has 3,0" in shown
    assert asked(engine)[-1] == [("user", "short")]


def test_a_chat_and_its_code_go_to_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = FakeEngine(script=Script(pieces=("Like this:\n", "```py\nx = 1\n```\n")))
    typed = (
        "/export a.md\n/save 1 a.py\nhow?\n/export a.md\n/export a.md\n/export -f a.md\n"
        "/export b.json\n/export b.txt\n/export gone/b.md\n"
        "/save 1 a.py\n/save 1 a.py\n/save 2 c.py\n/save 99999999999 c.py\n/save a.py\n"
        "/save 1 gone/a.py\n/save 1 a\0b\n"
    )
    shown = chat(engine, typed, monkeypatch, capsys)
    assert len(engine.calls) == 1, "none of these is a question"
    for words in (
        "There is nothing to export yet.",
        "the last answer has 0 code blocks",
        "Exported to a.md.\nNot exported: a.md is there already",
        "Exported to a.md, over the file that was there.",
        "Exported to b.json.\nNot exported: ",
        "Not exported: gone/b.md cannot be written: No such file or directory",
        "Code block 1 is in a.py.\nNot saved: a.py is there already",
        "Not saved: the last answer has 1 code blocks\n" * 2,
        "Not saved: which block, and where to? /save N PATH",
        "Not saved: gone/a.py cannot be written: No such file or directory",
    ):
        assert words in shown
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    written = (tmp_path / "a.md").read_text()
    assert "## You\n\nhow?" in written and "```py\nx = 1\n```" in written
    session, turns = read_chat(tmp_path / "b.json")
    assert session.title == "how?" and [turn.question for turn in turns] == ["how?"]
    names = {path.name for path in tmp_path.iterdir() if path.suffix in (".md", ".json", ".py")}
    assert names == {"a.md", "a.py", "b.json"}
