"""`termgen chat --inline`: the scrollback, exit codes, and piped input."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from fake_engine import FakeEngine, Script
from foreign_server import chunk, done, foreign_server, model_list
from tui_harness import ANSWER, pieces

from termgen.commands import cli, inline_command
from termgen.config import EngineConfig, UIConfig
from termgen.errors import EngineError
from termgen.tui.paint.inline import MarkdownWriter, PlainWriter
from termgen.tui.paint.markdown import render
from termgen.tui.paint.spans import row_text

_SEQUENCE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[([\d;]*)m|(\n)|([^\x1b\n]+)")


class Screen:
    """A minimal terminal: lines, moving up, erasing below. Lines that scrolled off are gone."""

    def __init__(self, height: int) -> None:
        self.lines = [""]
        self.height = height

    def write(self, raw: str) -> None:
        assert "\x1b" not in _SEQUENCE.sub("", raw), "a sequence that the writer should not use"
        for match in _SEQUENCE.finditer(raw):
            number, command, _, newline, text = match.groups()
            if command == "A":
                assert int(number) < self.height, "it moves above the screen"
                self._row = len(self.lines) - 1 - int(number)
            elif command == "J":
                del self.lines[self._row :]
                self.lines.append("")
            elif newline:
                self.lines.append("")
            elif text:
                self.lines[-1] += text


def written(
    parts: Sequence[str], *, size: tuple[int, int] = (60, 24), colour: bool = True
) -> tuple[list[str], str]:
    """The scrollback's contents at the end, and everything that was written."""
    raw, now = io.StringIO(), iter(range(10**6))
    writer = MarkdownWriter(raw, colour=colour, size=lambda: size, clock=lambda: float(next(now)))
    for part in parts:
        writer.feed(part)
    writer.close("12 tok")
    screen = Screen(size[1])
    screen.write(raw.getvalue())
    return [line.rstrip() for line in screen.lines], raw.getvalue()


LONG = ANSWER + "\n" + "\n".join(f"{i}. item *{i}* and `code`" for i in range(40)) + "\n\n" + ANSWER


@pytest.mark.parametrize("size", [(60, 24), (24, 6), (200, 50)])
def test_what_stays_is_the_whole_answer(size: tuple[int, int]) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(5):
        parts, rest = [], LONG
        while rest:
            n = chance.randint(1, 30)
            parts.append(rest[:n])
            rest = rest[n:]
        lines, _ = written(parts, size=size)
        rows = render(LONG, min(100, size[0] - 1))
        assert lines == [*(row_text(row).rstrip() for row in rows), "12 tok", ""]


def test_a_paragraph_longer_than_the_screen() -> None:
    text = "word " * 300 + "\n\nend\n"
    lines, _ = written(pieces(text, 9), size=(24, 6))
    assert lines == [*(row_text(row).rstrip() for row in render(text, 23)), "12 tok", ""]


def test_colours_and_control_bytes() -> None:
    evil = "**bold** \x1b]0;owned\x07 `x`\n"
    _, raw = written([evil])
    assert "\x1b[1mbold\x1b[0m" in raw and "\x1b]" not in raw and "\x07" not in raw
    _, mono = written([evil + "```python\nx = 1  # why\n```\n"], colour=False)
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", mono) for code in found.split(";")}
    assert codes <= {"0", "1", "2", "3"}, "attributes only"


def test_plain_text_is_the_text() -> None:
    raw = io.StringIO()
    writer = PlainWriter(raw)
    for part in ("**a", "**\n", "b"):
        writer.feed(part)
    writer.close("12 tok")
    assert raw.getvalue() == "**a**\nb\n"


async def test_an_answer_with_the_chats_settings() -> None:
    engine, raw = FakeEngine(), io.StringIO()
    ui = UIConfig(system_prompt="Be brief.", temperature=0.3, max_tokens=5)
    assert await inline_command.answer(engine, "why?", ui, PlainWriter(raw)) == 0
    assert raw.getvalue() == "Hello, world! \n"
    call = engine.calls[0]
    assert [m["content"] for m in call.prompt.messages] == ["Be brief.", "why?"]  # type: ignore[union-attr]
    assert (call.params.temperature, call.params.max_tokens) == (0.3, 5)


async def test_ctrl_c_stops_and_keeps_the_text() -> None:
    engine, raw = FakeEngine(script=Script(hold_after=2)), io.StringIO()
    before = signal.getsignal(signal.SIGINT)
    task = asyncio.create_task(inline_command.answer(engine, "why?", UIConfig(), PlainWriter(raw)))
    while "," not in raw.getvalue():
        await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)
    assert await task == 130
    assert raw.getvalue() == "Hello,\n" and engine.aborted == [inline_command.REQUEST_ID]
    signal.signal(signal.SIGINT, before)


async def test_a_failure_keeps_the_text() -> None:
    engine, raw = FakeEngine(script=Script(fail_after=2)), io.StringIO()
    with pytest.raises(EngineError, match="the step failed"):
        await inline_command.answer(engine, "why?", UIConfig(), PlainWriter(raw))
    assert raw.getvalue() == "Hello,\n"


def pipe_in(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


@pytest.mark.parametrize(
    ("words", "piped", "question"),
    [
        ("explain", b"", "explain"),
        (None, b"why?\n", "why?\n"),
        ("explain", b"x = 1\n", "standard input:\n```\nx = 1\n```\n\nexplain"),
        ("explain", b"```\r\na\r\n```", "standard input:\n````\n```\na\n```\n````\n\nexplain"),
    ],
)
def test_what_is_asked(
    words: str | None, piped: bytes, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, piped)
    assert inline_command.read_question(words) == question


@pytest.mark.parametrize(
    ("argv", "piped", "words"),
    [
        ([], b"", "no question"),
        (["--inline"], b"  ", "no question"),
        (["--inline", "q"], b"\xff\xfe", "standard input is not UTF-8"),
        (["--inline", "q"], b"x" * (2**21 + 1), "standard input is larger than 2 MiB"),
        (["--inline", "q", "--theme", "termgen-dark"], b"", "--theme has no effect with --inline"),
        (["--inline", "q", "--url", "x", "--dtype", "float32"], b"", "--dtype has no effect"),
        (["question"], b"", "needs --inline; a model is named with --model"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str],
    piped: bytes,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe_in(monkeypatch, piped)
    assert cli.main(["chat", *(argv or ["--inline"])]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1


def test_with_an_engine_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    class Holder:
        def __init__(self, config: EngineConfig) -> None:
            self.config = config
            done.append(f"{config.model} {config.capture_in_background}")

        async def start(self, on_progress: Callable[[str, float], None]) -> FakeEngine:
            return FakeEngine()

        async def stop(self) -> None:
            done.append("stopped")

    monkeypatch.setattr("termgen.commands.launch.EngineHolder", Holder)
    monkeypatch.setattr("termgen.library.catalog.ensure_model", lambda *_: done.append("found"))
    pipe_in(monkeypatch, b"")
    assert cli.main(["chat", "--inline", "why?", "--model", "m"]) == 0
    assert capsys.readouterr().out.startswith("Hello, world!")
    assert done == ["m False", "found", "stopped"]


async def run(*argv: str, stdin: bytes = b"", terminal: bool = False) -> tuple[int, str, str]:
    """Run the command in a process of its own; its output goes to a terminal on request."""
    main, side = pty.openpty() if terminal else (None, None)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "termgen", "chat", "--inline", *argv),
        stdin=subprocess.PIPE,
        stdout=side if side is not None else subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "60", "LINES": "24"},
    )
    out, err = await child.communicate(stdin)
    if main is not None and side is not None:
        os.close(side)
        out = b""
        while data := _read(main):
            out += data
        os.close(main)
    return child.returncode or 0, out.decode(), err.decode()


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65536)
    except OSError:  # the other side is closed
        return b""


async def test_the_whole_command_with_a_server() -> None:
    frames = [chunk(part) for part in pieces("# Title\n\n**yes**, `x`\n")]
    async with foreign_server(*frames, chunk("", finish="stop"), done()) as server:
        code, out, err = await run("explain", "--url", server.url, stdin=b"x = 1\n")
        assert (code, out, err) == (0, "# Title\n\n**yes**, `x`\n", "")
        assert server.bodies[0]["messages"] == [
            {"role": "user", "content": "standard input:\n```\nx = 1\n```\n\nexplain"}
        ]
        code, out, err = await run("explain", "--url", server.url, terminal=True)
        screen = Screen(24)
        screen.write(out.replace("\r", ""))
        assert (code, err) == (0, "")
        assert screen.lines[:3] == ["Title", "", "yes, x"] and " tok" in screen.lines[3]
    async with foreign_server(chunk("half"), None, models=model_list("m1")) as server:
        code, out, err = await run("q", "--url", server.url)
        assert (code, out) == (2, "half\n")
        assert err.startswith("termgen: error: the connection to http://127.0.0.1")
        assert err.count("\n") == 1
