"""`termgen chat --web` as a command: an engine of its own, the address, and the end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from cli_harness import nobodys_settings, one_line_error

from termgen.commands.arguments import build_parser
from termgen.commands.web_command import chat_argv

ESCAPES = re.compile(rb"\x1b\[[^A-Za-z]*[A-Za-z]")


async def test_an_engine_answers_in_a_tab(tmp_path: Path, tiny_llama_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "termgen", "chat", "--web", "--web-port", "0"),
        *("--model", str(tiny_llama_dir), "--max-tokens", "8", "--kv-cache-gib", "0.05"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TERMGEN_CHAT_DB": str(tmp_path / "chats.sqlite3")},
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        line = (await process.stdout.readline()).decode()
        url = line.split()[-1]
        assert line.startswith("The chat is at http://127.0.0.1:")
        origin = url.partition("/?")[0]
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(origin, cookie_jar=jar) as session:
            async with session.get(url) as answer:
                assert answer.status == 200
            async with session.ws_connect("/ws", headers={"Origin": origin}) as socket:
                await shown(socket, b"Ask anything")
                await socket.send_json(["stdin", "hello\r"])
                await shown(socket, b"TTFT")
                children = psutil.Process(process.pid).children(recursive=True)
                assert children
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 0
    _, alive = psutil.wait_procs(children, 10)
    assert not alive


async def shown(socket: aiohttp.ClientWebSocketResponse, text: bytes) -> None:
    received = b""
    while text not in ESCAPES.sub(b"", received):
        message = await socket.receive()
        assert message.type is aiohttp.WSMsgType.BINARY, message
        received += message.data


def test_a_tab_gets_the_settings_of_its_chat() -> None:
    line = ["chat", "--web", "--model", "m", "--theme", "termgen-light", "--temperature", "0.5"]
    args = build_parser().parse_args([*line, "--tools", "files", "--continue"])
    argv = chat_argv(args, "http://127.0.0.1:1")
    assert argv[1:6] == ["-m", "termgen", "chat", "--url", "http://127.0.0.1:1"]
    again = build_parser().parse_args(argv[3:])
    assert (again.theme, again.temperature, again.continue_last) == ("termgen-light", 0.5, True)
    assert again.tools == args.tools and not hasattr(again, "model") and not again.web


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (["--open"], "--open needs --web"),
        (["--web-port", "9000"], "--web-port needs --web"),
        (["--web", "--web-port", "70000"], "--web-port must be a port"),
        (["--web", "--plain"], "--web shows a screen in a browser"),
        (["--web", "why"], "--web shows a screen in a browser"),
        (["--web", "--url", "http://127.0.0.1:1", "--model", "m", "--dtype", "float32"], "--dtype"),
    ],
)
def test_wrong_flags_are_one_line(
    line: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with nobodys_settings(monkeypatch, tmp_path):
        assert error in one_line_error(capsys, "chat", *line)


def test_a_missing_package_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    monkeypatch.delitem(sys.modules, "termgen.web.web_server", raising=False)
    with nobodys_settings(monkeypatch, tmp_path):
        text = one_line_error(capsys, "chat", "--web")
    assert "pip install 'termgen[web]'" in text
