"""`termgen chat --url`: a chat with a remote server, and its engine screen."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Script
from foreign_server import chunk, done, foreign_server
from remote_chat import ask, chat_of, remote_app
from server_harness import serving
from tui_harness import (
    ANSWER,
    MODEL,
    busy_snapshot,
    chat_engine,
    pieces,
    wait_until,
)

from termgen.commands import cli
from termgen.commands.remote_command import RemoteTarget
from termgen.commands.settings import SettingLayers
from termgen.errors import ConfigError, OverloadedError
from termgen.tui.dashboard.dashboard import DashboardScreen
from termgen.tui.paint.spans import row_width
from termgen.tui.silent import HEADLINE, SilentScreen, silent_rows

SIZE = (100, 30)


async def test_a_termgen_server_is_chatted_with_and_watched() -> None:
    engine = chat_engine()
    engine.scripted_snapshot = busy_snapshot()
    async with serving(engine) as server:
        app = remote_app(server.url)
        async with app.run_test(size=SIZE) as pilot:
            chat = await chat_of(app, pilot)
            # from the event stream: more than the list of models has
            assert "smollm2-135m float32 is ready" in chat.transcript.plain_text
            assert "2.0k tokens of context" in chat.transcript.plain_text
            await ask(chat, pilot, "why?")
            assert "every decode" in chat.transcript.plain_text
            assert chat.conversation.last_answer == ANSWER
            stats = chat.conversation.turns[0].stats
            assert stats.prompt_tokens and stats.output_tokens == len(pieces(ANSWER))
            await pilot.press("f2")
            await wait_until(pilot, lambda: isinstance(app.screen, DashboardScreen))
            screen = app.screen
            assert isinstance(screen, DashboardScreen)
            await wait_until(pilot, lambda: screen.view.num_running == 4)
            await pilot.press("1")
            await wait_until(pilot, lambda: app.screen is chat)


async def test_esc_stops_the_answer_over_there() -> None:
    engine = FakeEngine(script=Script(hold_after=3), model=MODEL)
    async with serving(engine) as server:
        app = remote_app(server.url)
        async with app.run_test(size=SIZE) as pilot:
            chat = await chat_of(app, pilot)
            await ask(chat, pilot, "why?", wait=False)
            await wait_until(pilot, lambda: chat.conversation.last_answer == "Hello, wor")
            await pilot.press("escape")
            await wait_until(pilot, lambda: bool(engine.aborted))
            assert "■ stopped" in chat.transcript.plain_text


async def test_a_foreign_server_shows_no_engine_and_may_vanish() -> None:
    async with foreign_server(chunk("Good "), chunk("day"), None) as server:
        app = remote_app(server.url)
        async with app.run_test(size=SIZE) as pilot:
            chat = await chat_of(app, pilot)
            text = chat.transcript.plain_text
            assert "m1 is ready" in text and server.url.removeprefix("http://") in text
            assert "0 tokens" not in text
            await ask(chat, pilot, "hello?")
            text = chat.transcript.plain_text
            assert "Good day" in text and "✗ failed" in text and "was lost" in text
            assert "ctx 2" in chat.status.text
            await server.aclose()
            await ask(chat, pilot, "still there?")
            assert "no server at" in chat.transcript.plain_text
            assert chat.prompt.text == "still there?"
            await pilot.press("f2")
            await wait_until(pilot, lambda: isinstance(app.screen, SilentScreen))
            await pilot.pause()
            assert "/v1/events" not in server.paths, "no key of ours is shown to it"
            await pilot.press("escape")
            await wait_until(pilot, lambda: app.screen is chat)
            await pilot.press("f1")
            await pilot.pause()


async def test_a_busy_server_says_when() -> None:
    engine = chat_engine(Script(raises=OverloadedError("full", code="x", retry_after_s=12)))
    async with serving(engine, api_key=("k",)) as server:
        app = remote_app(server.url, api_key="k")
        async with app.run_test(size=SIZE) as pilot:
            chat = await chat_of(app, pilot)
            await ask(chat, pilot, "why?")
            assert "try again in 12 s" in " ".join(chat.transcript.plain_text.split())
            await pilot.press("f2")  # a server with keys hides its engine from other clients
            await wait_until(pilot, lambda: isinstance(app.screen, SilentScreen))


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (30, 10)])
def test_the_silent_screen_fits(size: tuple[int, int]) -> None:
    rows = silent_rows("http://x is not a termgen server.", *size)
    assert max(map(row_width, rows)) <= size[0]
    assert HEADLINE in " ".join("".join(t for t, _ in row).strip() for row in rows)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--api-key", "k"], "--api-key needs --url"),
        (["--url", "http://x", "--max-model-len", "99"], "--max-model-len has no effect with"),
        (["--url", "ftp://x"], "url must be like http://127.0.0.1:8000"),
    ],
)
def test_flags_that_make_no_sense(
    argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_need_terminal", lambda *_: None)
    assert cli.main(["chat", *argv]) == 2
    assert words in capsys.readouterr().err


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from termgen.commands.remote_command import read_target

    monkeypatch.setenv("OPENAI_API_KEY", "from there")
    layers = SettingLayers(flags={"model": "m2"}, environ={})
    assert read_target("http://x", None, layers) == RemoteTarget("http://x", "from there", "m2")
    assert read_target("http://x", "mine", layers).api_key == "mine"
    with pytest.raises(ConfigError, match="--device has no effect"):
        read_target("http://x", None, SettingLayers(flags={"device": "cpu"}, environ={}))


SCRIPT = """
import asyncio, sys
from termgen.commands import cli
from termgen.tui.remote_app import RemoteApp
from termgen.tui.chat.chat_screen import ChatScreen

async def drive(app):
    async with app.run_test() as pilot:
        while not isinstance(app.screen, ChatScreen) and app.return_code is None:
            await pilot.pause(0.01)
        if app.return_code is None:
            app.screen.prompt.insert("hi")
            await pilot.press("enter")
            while app.screen.is_streaming:
                await pilot.pause(0.01)
            print(app.screen.conversation.last_answer)

RemoteApp.run = lambda self: asyncio.run(drive(self))
cli._need_terminal = lambda *_: None
print(cli.main(["chat", "--url", sys.argv[1]]))
print(sorted({"torch", "transformers", "starlette"} & sys.modules.keys()))
"""


async def test_the_whole_command_loads_no_torch(tmp_path: Path) -> None:
    async def run(url: str) -> list[str]:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await child.communicate()
        assert b"Traceback" not in err, err.decode()
        return out.decode().split("\n")[:-1]

    async with foreign_server(chunk("yes", finish="stop"), done()) as server:
        gone = server.url
        assert await run(server.url) == ["yes", "0", "[]"]
    assert (await run(gone))[-2:] == ["2", "[]"]


async def test_in_a_browser_it_speaks_through_pipes() -> None:
    """textual-serve starts it like this, once for each visitor; the page gets the focus later."""
    driver = {"TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver"}
    async with foreign_server(chunk("yes", finish="stop"), done()) as server:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "termgen", "chat", "--url", server.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **driver, "COLUMNS": "100", "ROWS": "30"},
        )
        assert child.stdout is not None and child.stdin is not None
        shown = b""

        async def wait_for(words: bytes) -> None:
            nonlocal shown
            while words not in shown:
                data = await child.stdout.read(65536)  # type: ignore[union-attr]
                assert data, (await child.communicate())[1].decode()
                shown += data

        def send(kind: bytes, payload: bytes) -> None:
            assert child.stdin is not None
            child.stdin.write(kind + len(payload).to_bytes(4, "big") + payload)

        async with asyncio.timeout(30):
            await wait_for(b"Ask anything")
            send(b"D", b"hi\r")
            await wait_for(b"TTFT")
            send(b"M", json.dumps({"type": "quit"}).encode())
            _, errors = await child.communicate()
    assert child.returncode == 0 and b"Traceback" not in errors
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
