"""`termgen acp` beside the chat's screen: one store, and a terminal instead of an editor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("acp")

from acp_harness import agent_process, engine_of
from server_harness import serving
from test_launch import Terminal, environment, terminal

__all__ = ["environment", "terminal"]

Open = Callable[..., Terminal]
CTRL_D, CTRL_Q = "\x04", "\x11"


async def test_the_chat_goes_on_with_a_session(terminal: Open, tmp_path: Path) -> None:
    engine = engine_of("<think>Of what?</think>It is blue.", "And now grey.", "Grey it was.")

    def chat(url: str, session: str) -> None:
        screen = terminal("chat", "--url", url, "--session", session)
        screen.wait_for(lambda _: "It is blue." in screen.plain)
        assert "Of the sky" in screen.plain
        screen.send("And now?\r")
        screen.wait_for(lambda _: "And now grey." in screen.plain)
        screen.send(CTRL_Q)
        assert screen.wait() == 0

    async with serving(engine) as server:
        async with agent_process(tmp_path, "--url", server.url) as agent:
            session = await agent.session()
            await agent.ask(session, "Of the sky, what is the colour?")
        await asyncio.to_thread(chat, server.url, session)
        async with agent_process(tmp_path, "--url", server.url) as agent:
            await agent.call.load_session(cwd=str(tmp_path), session_id=session, mcp_servers=[])
            assert agent.client.story(session) == [
                "user_message: Of the sky, what is the colour?",
                "thought: Of what?",
                "message: It is blue.",
                "user_message: And now?",
                "message: And now grey.",
            ]
            # the folder was kept by the chat
            (listed,) = (await agent.call.list_sessions(cwd=str(tmp_path))).sessions
            assert listed.session_id == session
            assert (await agent.call.list_sessions(cwd="/elsewhere")).sessions == []


def test_on_a_terminal_it_says_what_it_is(terminal: Open) -> None:
    screen = terminal("acp", "--url", "http://127.0.0.1:9")
    screen.wait_for(lambda _: "an editor starts it" in screen.plain)
    screen.send(CTRL_D)
    assert screen.wait() == 0
