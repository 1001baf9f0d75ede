"""Typing on a real terminal: from the first frame, after clicks, and with ctrl+c."""

from __future__ import annotations

import asyncio
import sqlite3
import termios
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from foreign_server import chunk, done, foreign_server
from test_launch import ENGINE, Terminal, environment, terminal

__all__ = ["environment", "terminal"]

Open = Callable[..., Terminal]
CLICKS = "".join(f"\x1b[<0;{x};{y}M\x1b[<0;{x};{y}m" for x, y in ((30, 4), (50, 5), (60, 12)))
"""Clicks of the left button, on a transcript."""
CTRL_C, CTRL_Q, UP, ESC = "\x03", "\x11", "\x1b[A", "\x1b"


def questions(environment: dict[str, str]) -> list[str]:
    with closing(sqlite3.connect(environment["TERMGEN_CHAT_DB"])) as database:
        return [row[0] for row in database.execute("SELECT question FROM turns ORDER BY number")]


def answered(environment: dict[str, str]) -> list[str]:
    """Questions whose answer has ended: ctrl+c would stop a running one."""
    wanted = "SELECT question FROM turns WHERE state = 'done' ORDER BY number"
    with closing(sqlite3.connect(environment["TERMGEN_CHAT_DB"])) as database:
        made = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'turns'").fetchone()
        return [row[0] for row in database.execute(wanted)] if made else []


def test_what_is_typed_while_the_model_loads_is_sent(
    terminal: Open, tiny_llama_dir: Path, environment: dict[str, str]
) -> None:
    screen = terminal("chat", "--model", str(tiny_llama_dir), "--max-tokens", "8", *ENGINE)
    screen.wait_for(lambda _: "sends it when the model is loaded" in screen.plain)
    screen.send("why not\r")
    screen.send("cherry jk2")
    screen.wait_for(lambda _: "TTFT" in screen.plain)
    screen.send("!\r")
    screen.wait_for(lambda _: screen.plain.count("TTFT") > 1 and "cherry jk2!" in screen.plain)
    screen.send(CTRL_Q)
    assert screen.wait() == 0
    assert questions(environment) == ["why not", "cherry jk2!"]
    assert "Traceback" not in screen.shown


async def test_clicks_tab_and_ctrl_c_lose_nothing(
    terminal: Open, environment: dict[str, str]
) -> None:
    def chat(url: str) -> None:
        screen = terminal("chat", "--url", url)
        screen.wait_for(lambda _: "Ask anything" in screen.plain)
        screen.send("one\r")
        screen.wait_for(lambda _: answered(environment) == ["one"])
        screen.send(CLICKS + "\twhy\tc2\r")
        screen.wait_for(lambda _: answered(environment) == ["one", "whyc2"])
        screen.send("a draft")
        screen.wait_for(lambda _: "a draft" in screen.plain)
        screen.send(CTRL_C)
        screen.wait_for(lambda _: "again to quit" in screen.plain)
        screen.send(UP + "\r")
        screen.wait_for(lambda _: answered(environment)[2:] == ["a draft"])
        screen.send(CTRL_C + CTRL_C)
        assert screen.wait() == 0
        assert "Traceback" not in screen.shown

    async with foreign_server(chunk("an answer", finish="stop"), done()) as server:
        await asyncio.to_thread(chat, server.url)
    assert questions(environment) == ["one", "whyc2", "a draft"]


async def test_alt_keys_of_a_plain_terminal_are_commands(
    terminal: Open, environment: dict[str, str]
) -> None:
    def chat(url: str) -> None:
        screen = terminal("chat", "--url", url)
        screen.wait_for(lambda _: "Ask anything" in screen.plain)
        screen.send("one\r")
        screen.wait_for(lambda _: answered(environment) == ["one"])
        screen.send(ESC + "r")
        screen.wait_for(lambda _: answered(environment) == ["one", "one"])
        screen.send("two" + ESC + "\rlines\r")
        screen.wait_for(lambda _: answered(environment)[2:] == ["two\nlines"])
        screen.send(CTRL_Q)
        assert screen.wait() == 0

    async with foreign_server(chunk("an answer", finish="stop"), done()) as server:
        await asyncio.to_thread(chat, server.url)
    assert questions(environment) == ["one", "one", "two\nlines"]


def has_echo(screen: Terminal) -> bool:
    assert screen._main is not None
    return bool(termios.tcgetattr(screen._main)[3] & termios.ECHO)


async def test_keys_before_the_screen_are_not_echoed_but_kept(
    terminal: Open, environment: dict[str, str]
) -> None:
    def chat(url: str) -> None:
        screen = terminal("chat", "--url", url)
        end = time.monotonic() + 30
        while has_echo(screen):  # the interpreter itself is still starting
            assert time.monotonic() < end
        screen.send("early")
        screen.wait_for(lambda _: "Ask anything" in screen.plain and "early" in screen.plain)
        before, opened, _ = screen.shown.partition("\x1b[?1049h")
        assert opened and "early" not in before
        screen.send("\r")
        screen.wait_for(lambda _: answered(environment) == ["early"])
        screen.send(CTRL_Q)
        assert screen.wait() == 0 and has_echo(screen)

    async with foreign_server(chunk("an answer", finish="stop"), done()) as server:
        await asyncio.to_thread(chat, server.url)


def test_a_terminal_has_its_echo_back_after_an_error(terminal: Open) -> None:
    screen = terminal("chat", "--theme", "nope")
    assert screen.wait() == 2 and has_echo(screen)
