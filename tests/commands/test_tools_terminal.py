"""Tools in the program, on a real terminal: keys, a real MCP server, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, make_model_info
from fake_script import GenerateCall
from server_harness import serving
from test_launch import Terminal, environment, terminal
from tool_samples import KNOWS_TOOLS, hermes
from tui_harness import pieces

__all__ = ["environment", "terminal"]

pytest.importorskip("mcp")
Open = Callable[..., Terminal]
SERVER = Path(__file__).parents[1] / "harness" / "mcp_server.py"
PAUSE_S = 0.9
"""Longer than the pause after which a key is meant for the box."""
CTRL_Q = "\x11"


def calls_of(environment: dict[str, str]) -> list[tuple[str, str, str]]:
    with closing(sqlite3.connect(environment["TERMGEN_CHAT_DB"])) as database:
        rows = database.execute("SELECT figures FROM turns").fetchall()
    rounds = [one for row in rows for one in json.loads(row[0]).get("rounds", ())]
    return [(c["name"], c["state"], c["result"]) for one in rounds for c in one["calls"]]


def config_in(folder: Path) -> str:
    path = folder / "config.toml"
    command = json.dumps([sys.executable, str(SERVER)])
    path.write_text(f'[mcp.own]\ncommand = {command}\nprotocol = "legacy"\n')
    return str(path)


def word(screen: Terminal, title: str, key: str) -> None:
    """Answer the box with this title, after a pause."""
    screen.wait_for(lambda _: title in screen.plain)
    end = time.monotonic() + PAUSE_S
    while time.monotonic() < end:
        screen._read(0.1)
    screen.send(key)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def engine_of(*texts: str) -> FakeEngine:
    left = list(texts)

    def script(_: GenerateCall) -> Script:
        return Script(pieces=pieces(left.pop(0)))

    return FakeEngine(script=script, model=make_model_info(tool_format=KNOWS_TOOLS))


async def test_calls_are_answered_by_keys(
    terminal: Open, environment: dict[str, str], tmp_path: Path
) -> None:
    def chat(url: str) -> None:
        screen = terminal(
            *("chat", "--url", url, "--tools", "files", "--config", config_in(tmp_path))
        )
        screen.wait_for(lambda _: "Ask anything" in screen.plain)
        screen.send("look\r")
        word(screen, "may own do this?", "y")
        word(screen, "may files do this?", "n")
        screen.wait_for(lambda _: "All seen." in screen.plain)
        screen.send(CTRL_Q)
        assert screen.wait() == 0
        assert "Traceback" not in screen.shown

    texts = (hermes("own_process", "{}"), hermes("files_list", "{}"), "All seen.")
    engine = engine_of(*texts)
    async with serving(engine) as server:
        await asyncio.to_thread(chat, server.url)
    first, second = calls_of(environment)
    assert first[:2] == ("own_process", "done") and second[:2] == ("files_list", "denied")
    assert not is_alive(int(first[2]))
    sent: Any = engine.calls[-1].prompt
    assert [message["role"] for message in sent.messages] == [
        *("user", "assistant", "tool", "assistant", "tool")
    ]


async def test_a_server_does_not_outlive_a_program_that_is_killed(
    terminal: Open, environment: dict[str, str], tmp_path: Path
) -> None:
    def chat(url: str) -> int:
        screen = terminal("chat", "--url", url, "--config", config_in(tmp_path))
        screen.wait_for(lambda _: "Ask anything" in screen.plain)
        screen.send("look\r")
        word(screen, "may own do this?", "y")
        screen.wait_for(lambda _: "Seen." in screen.plain)
        screen.wait_for(lambda _: calls_of(environment))
        pid = int(calls_of(environment)[0][2])
        assert is_alive(pid)
        os.kill(screen.child.pid, signal.SIGKILL)
        screen.child.wait()
        return pid

    async with serving(engine_of(hermes("own_process", "{}"), "Seen.")) as server:
        pid = await asyncio.to_thread(chat, server.url)
    end = time.monotonic() + 5
    while is_alive(pid):
        assert time.monotonic() < end, "an orphan"
        await asyncio.sleep(0.02)
