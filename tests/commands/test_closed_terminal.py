"""Terminals that close while a program writes to them: the program ends by itself, as it does with
ctrl+q, and loses no text. The exit code shows failures that nothing displays."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from foreign_server import chunk, done, foreign_server
from test_launch import ENGINE, Terminal, environment, terminal

__all__ = ["environment", "terminal"]

Open = Callable[..., Terminal]
WORDS = tuple(f"word{i} " for i in range(600))


def hang_up(screen: Terminal) -> None:
    os.kill(screen.child.pid, signal.SIGHUP)


CLOSINGS = pytest.mark.parametrize("close", [hang_up, Terminal.vanish], ids=["signal", "pty"])


def saved(environment: dict[str, str]) -> tuple[str, str, str]:
    with closing(sqlite3.connect(environment["TERMGEN_CHAT_DB"])) as database:
        (turn,) = database.execute("SELECT question, answer, state FROM turns").fetchall()
    return turn  # type: ignore[no-any-return]


@CLOSINGS
async def test_a_chat_is_saved(
    close: Callable[[Terminal], None], terminal: Open, environment: dict[str, str]
) -> None:
    def chat(url: str) -> Terminal:
        screen = terminal("chat", "--url", url)
        screen.wait_for(lambda _: "Ask anything" in screen.plain)
        screen.send("why\r")
        screen.wait_for(lambda _: "word30" in screen.plain)
        close(screen)
        assert screen.wait() == 0
        return screen

    async with foreign_server(*map(chunk, WORDS), frame_s=0.02) as server:
        screen = await asyncio.to_thread(chat, server.url)
    question, answer, state = saved(environment)
    assert question == "why" and state in ("streaming", "stopped"), "which is read as stopped"
    assert answer == "".join(WORDS[: answer.count("word")]) and "word30" in answer
    assert "Traceback" not in screen.shown


@CLOSINGS
def test_engines_end_with_their_terminal(
    close: Callable[[Terminal], None], terminal: Open, tiny_llama_dir: Path
) -> None:
    """`serve --dashboard`, watched by `top`: the former's terminal closes first, then the
    latter's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = ("--dashboard", "--model", str(tiny_llama_dir), "--port", port)
    server = terminal("serve", *flags, *ENGINE)
    server.wait_for(lambda _: "KV blocks" in server.plain)
    watcher = terminal("top", f"http://127.0.0.1:{port}")
    watcher.wait_for(lambda _: "KV blocks" in watcher.plain)
    for screen in (watcher, server):
        close(screen)
        assert screen.wait() == 0
        assert "Traceback" not in screen.shown


def test_a_chat_with_its_own_engine_is_saved(
    terminal: Open, tiny_llama_dir: Path, environment: dict[str, str]
) -> None:
    screen = terminal("chat", "--model", str(tiny_llama_dir), *ENGINE)
    screen.wait_for(lambda _: "Ask anything" in screen.plain)
    screen.send("why\r")
    screen.wait_for(lambda _: "tok/s" in screen.plain)
    screen.vanish()
    assert screen.wait() == 0
    question, _, state = saved(environment)
    assert question == "why" and state in ("streaming", "stopped", "done")


@CLOSINGS
async def test_a_draft_comes_back_with_the_next_chat(
    close: Callable[[Terminal], None], terminal: Open, environment: dict[str, str], tmp_path: Path
) -> None:
    def chat(url: str) -> None:
        screen = terminal("chat", "--url", url)
        screen.wait_for(lambda _: "Ask anything" in screen.plain)
        screen.send("half a\nquest")
        screen.wait_for(lambda _: "quest" in screen.plain)
        close(screen)
        assert screen.wait() == 0
        (kept,) = tmp_path.glob("*.draft-*")
        assert kept.read_text() == "half a\nquest" and kept.stat().st_mode & 0o77 == 0
        screen = terminal("chat", "--url", url)
        screen.wait_for(lambda _: "quest" in screen.plain and "Ask anything" in screen.plain)
        assert not list(tmp_path.glob("*.draft-*"))
        screen.send("ion\r")
        screen.wait_for(lambda _: "word0" in screen.plain)
        screen.send("\x11")  # ctrl+q
        assert screen.wait() == 0 and "Not sent" not in screen.shown

    async with foreign_server(chunk("word0", finish="stop"), done()) as server:
        await asyncio.to_thread(chat, server.url)
    assert saved(environment)[0] == "half a\nquestion"
