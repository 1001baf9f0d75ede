"""The chat with a real MCP server: calls, `/mcp`, a server that dies, and what a quit leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from chat_harness import SIZE, sent_messages, shown
from fake_engine import Script
from textual.pilot import Pilot
from tool_samples import KNOWS_TOOLS, hermes
from tui_harness import FrozenApp, ask, chat_engine, pieces, ready, wait_until

from termgen.tools.server_config import McpServer
from termgen.tools.server_tools import McpTools
from termgen.tools.toolbox import Toolbox
from termgen.tui.chat import approval_panel
from termgen.tui.chat.approval_panel import ApprovalPanel
from termgen.tui.chat.chat_screen import ChatScreen

pytest.importorskip("mcp")
HARNESS = Path(__file__).parents[2] / "harness"
GOOD = (sys.executable, str(HARNESS / "mcp_server.py"))
BAD = (sys.executable, str(HARNESS / "mcp_raw_server.py"), "exits at start")


async def answered(app: FrozenApp, pilot: Pilot[Any]) -> None:
    await wait_until(
        pilot, lambda: isinstance(app.screen, ChatScreen) and not app.chat.is_streaming
    )


async def test_a_server_in_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval_panel, "QUIET_S", 0.0)
    texts = [hermes("good_process", "{}"), hermes("good_crash", '{"code": 5}')]
    texts += [hermes("good_echo", '{"text": "hi"}'), "The end."]
    engine = chat_engine(lambda _: Script(pieces=pieces(texts.pop(0))), tool_format=KNOWS_TOOLS)
    servers = (
        McpServer(name="good", command=GOOD, protocol="legacy"),
        McpServer(name="bad", command=BAD, protocol="legacy"),
    )
    app = FrozenApp(engine, toolbox=Toolbox([McpTools(server) for server in servers]))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q", wait=False)
        for _ in range(3):
            await wait_until(pilot, lambda: isinstance(app.screen, ApprovalPanel))
            await pilot.pause()
            panel = app.screen
            await pilot.press("y")
            await wait_until(pilot, lambda panel=panel: app.screen is not panel)
        await answered(app, pilot)
        turn = app.chat.conversation.turns[-1]
        found = [(call.state.value, call.result) for one in turn.rounds for call in one.calls]
        assert [state for state, _ in found] == ["done", "failed", "done"]
        assert "good ended during the call: it ended with code 5" in found[1][1]
        assert found[2][1] == "echo hi" and "The end." in shown(app)
        assert "Error: good ended" in sent_messages(engine)[4]["content"]
        await ask(app, pilot, "/mcp", wait=False)
        await wait_until(pilot, lambda: "good: ready" in shown(app))
        assert "good_echo" in shown(app)
        assert "bad: it ended with code 3; it said: no licence" in shown(app)
        await ask(app, pilot, "/mcp restart good", wait=False)
        await wait_until(pilot, lambda: shown(app).count("good: ready") == 2)
    (process, *_) = app.toolbox.providers
    assert process.state == "ended"
    assert not Path(f"/proc/{found[0][1]}").exists()
