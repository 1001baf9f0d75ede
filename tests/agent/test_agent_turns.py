"""`termgen acp`, driven by the protocol's own client: turns, tools, permission."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

acp = pytest.importorskip("acp")

from acp.schema import EnvVariable, HttpHeader, HttpMcpServer, McpServerStdio  # noqa: E402
from acp_harness import (  # noqa: E402
    ALWAYS,
    HARNESS,
    ONCE,
    REJECT,
    AcpClient,
    agent_process,
    engine_of,
    local_agent,
)
from fake_script import Script  # noqa: E402
from server_harness import serving  # noqa: E402
from tool_samples import hermes  # noqa: E402

from termgen.errors import EngineError  # noqa: E402
from termgen.tui.chat.saved.chat_store import find_session  # noqa: E402

LIST = hermes("files_list", "{}")


def messages_of(call: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in call.prompt.messages]


async def test_a_turn_with_a_tool_and_its_permission(tmp_path: Path) -> None:
    """In a process of its own, as an editor starts it."""
    engine = engine_of(
        f"<think>Where?</think>Let me look.\n{LIST}", "There is a note.", LIST, "Still there."
    )
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text("hi")
    client = AcpClient(ALWAYS)
    async with (
        serving(engine) as server,
        agent_process(tmp_path, "--url", server.url, "--tools", "files", client=client) as agent,
    ):
        session = await agent.session(cwd=tmp_path / "work")
        answer = await agent.ask(session, "What is here?")
        assert answer.stop_reason == "end_turn" and answer.usage.output_tokens == 2
        assert client.story(session) == [
            "thought: Where?",
            "message: Let me look.",
            "call: files_list {} > pending > in_progress > completed",
            "message: There is a note.",
        ]
        (title,) = client.shown(session, "session_info_update")
        assert title.title == "What is here?"
        (asked,) = client.asked
        assert (asked.title, asked.kind, asked.raw_input) == ("files_list {}", "read", {})
        done = client.shown(session, "tool_call_update")[-1]
        assert done.tool_call_id == asked.tool_call_id
        assert done.content[0].content.text == "note.txt 2"
        # allowed for good: the same tool is not asked about again
        await agent.ask(session, "And now?")
        assert len(client.asked) == 1
        assert client.text(session).endswith("Still there.")
        (used,) = client.shown(session, "usage_update")[-1:]
        assert used.size == 4096 and 0 < used.used < 4096
    roles = [message["role"] for message in messages_of(engine.calls[-1])]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    for words in ("What is here?", session):  # as `termgen chat --session` finds it
        assert find_session(tmp_path / "chats.sqlite3", words) == session
    with closing(sqlite3.connect(tmp_path / "chats.sqlite3")) as database:
        rows = database.execute("SELECT question, answer, state FROM turns").fetchall()
    assert rows == [
        ("What is here?", "There is a note.", "done"),
        ("And now?", "Still there.", "done"),
    ]


async def test_a_rejected_call_is_reported_to_the_model(tmp_path: Path) -> None:
    engine = engine_of(LIST, "Then not.")
    client = AcpClient(REJECT)
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url, "--tools", "files", client=client) as agent,
    ):
        session = await agent.session()
        assert (await agent.ask(session, "look")).stop_reason == "end_turn"
    assert client.story(session) == [
        "call: files_list {} > pending > failed",
        "message: Then not.",
    ]
    assert "denied" in messages_of(engine.calls[-1])[-1]["content"]


async def test_two_sessions_at_once(tmp_path: Path) -> None:
    """Each has its own conversation, folder, tools and approvals."""
    holding = Script(pieces=("one ", "two"), hold_after=1)
    engine = engine_of(LIST, "Seen.", holding, LIST, "Seen too.")
    client = AcpClient(ALWAYS, REJECT)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("")
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url, "--tools", "files", client=client) as agent,
    ):
        first, second = [await agent.session(cwd=tmp_path / name) for name in ("a", "b")]
        await agent.ask(first, "one")
        held = asyncio.create_task(agent.ask(first, "two"))
        await client.until(lambda: client.text(first).endswith("one"))
        # `always` was said in the first session only
        await agent.ask(second, "three")
        assert len(client.asked) == 2 and not held.done()
        engine.release.set()
        assert (await held).stop_reason == "end_turn"
        listed = client.shown(first, "tool_call_update")[-1].content[0].content.text
        assert listed == "a.txt 0"
    asked = [
        [m["content"] for m in messages_of(call) if m["role"] == "user"] for call in engine.calls
    ]
    assert asked == [["one"], ["one"], ["one", "two"], ["three"], ["three"]]


async def test_blocks_of_a_prompt(tmp_path: Path) -> None:
    engine = engine_of("Read.")
    (tmp_path / "linked.py").write_text("x = 1\n")
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url, "--system", "Be brief.") as agent,
    ):
        session = await agent.session()
        embedded = acp.embedded_text_resource((tmp_path / "b c.txt").as_uri(), "not on a disk")
        await agent.ask(
            session,
            "Compare ",
            acp.resource_link_block("linked.py", (tmp_path / "linked.py").as_uri()),
            " with ",
            acp.resource_block(embedded),
            " and ",
            acp.resource_link_block("page", "https://example.org/page"),
        )
    system, user = messages_of(engine.calls[0])
    assert system["content"] == "Be brief."
    assert user["content"] == (
        "linked.py:\n```py\nx = 1\n```\n\nb c.txt:\n```txt\nnot on a disk\n```\n\n"
        'Compare @linked.py with @"b c.txt" and page (https://example.org/page)'
    )


async def test_servers_of_the_client(tmp_path: Path) -> None:
    """Over standard streams and HTTP, with what the client has given them."""
    pytest.importorskip("mcp")
    script = str(HARNESS / "mcp_server.py")
    port = tmp_path / "port"
    other = await asyncio.create_subprocess_exec(
        sys.executable, script, "http", str(port), "sesame", stderr=asyncio.subprocess.DEVNULL
    )
    calls = (
        hermes("My_server_place", '{"name": "WORD"}'),
        hermes("far_echo", '{"text": "hi"}'),
    )
    engine = engine_of(calls[0] + "\n" + calls[1], "Done.", "Listed.")
    client = AcpClient(ONCE, ONCE)
    try:
        async with (
            serving(engine) as server,
            local_agent(tmp_path, "--url", server.url, client=client) as agent,
        ):
            while not port.exists():
                await asyncio.sleep(0.02)
            session = await agent.session(
                McpServerStdio(
                    name="My server",
                    command=sys.executable,
                    args=[script],
                    env=[EnvVariable(name="WORD", value="${HOME}")],
                ),
                HttpMcpServer(
                    type="http",
                    name="far",
                    url=f"http://127.0.0.1:{port.read_text()}/mcp",
                    headers=[HttpHeader(name="x-token", value="sesame")],
                ),
            )
            await agent.ask(session, "call them")
            results = [
                update.content[0].content.text
                for update in client.shown(session, "tool_call_update")
                if update.content
            ]
            assert sorted(results) == sorted([f"{tmp_path} ${{HOME}}", "echo hi"])
            assert [call.kind for call in client.asked] == ["other", "other"]
            await agent.ask(session, "/mcp")
            assert "My_server: ready" in client.text(session)
    finally:
        other.kill()
        await other.wait()


async def test_commands_are_answered_without_the_model(tmp_path: Path) -> None:
    engine = engine_of("Hello.", "Again.")
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url) as agent,
    ):
        session = await agent.session()
        (listed,) = agent.client.shown(session, "available_commands_update")
        assert {one.name for one in listed.available_commands} == {"system", "fit", "rename", "mcp"}
        await agent.ask(session, "/rename Early")
        await agent.ask(session, "hi")
        await agent.ask(session, "/system Be kind.")
        await agent.ask(session, "/rename Greeting")
        await agent.ask(session, "/theme nord")
        await agent.ask(session, "/mcp")
        await agent.ask(session, "more")
        said = agent.client.text(session)
        for words in (
            "from its first question on",
            "System prompt: Be kind.",
            "This chat is called: Greeting",
            "/theme is for the screen",
            "There are no tools",
        ):
            assert words in said, words
        assert agent.client.shown(session, "session_info_update")[-1].title == "Greeting"
    assert len(engine.calls) == 2
    assert [m["role"] for m in messages_of(engine.calls[1])] == [
        *("system", "user", "assistant", "user")
    ]
    assert find_session(tmp_path / "chats.sqlite3", "Greeting") == session


async def test_a_full_context_says_what_to_do(tmp_path: Path) -> None:
    engine = engine_of("One.", "Two.", "Three.", *["Four."] * 3, max_model_len=100)
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url) as agent,
    ):
        session = await agent.session()
        for question in ("first question", "second question"):
            await agent.ask(session, question)
        with pytest.raises(acp.RequestError, match="/fit goes on without the oldest turns"):
            await agent.ask(session, "third question " + "x" * 30)
        await agent.ask(session, "/fit")
        answer = await agent.ask(session, "third question " + "x" * 30)
        assert answer.stop_reason == "end_turn"
        assert "no longer sent: the context is full" in agent.client.text(
            session, "agent_thought_chunk"
        )
    last = messages_of(engine.calls[-1])
    assert last[-1]["content"].startswith("third") and last[0]["content"] != "first question"
    # what is left out is kept with the chat, and so is its end
    wide, folder = engine_of("Four.", "Five.", max_model_len=2000), str(tmp_path)
    async with serving(wide) as server:
        for question, num_messages in (("4", len(last) + 2), ("5", 9)):
            async with local_agent(tmp_path, "--url", server.url) as agent:
                await agent.call.load_session(cwd=folder, session_id=session, mcp_servers=[])
                await agent.ask(session, question)
                assert len(messages_of(wide.calls[-1])) == num_messages
                await agent.ask(session, "/fit off")


async def test_a_chat_may_begin_with_a_policy(tmp_path: Path) -> None:
    """The first turn stays, and a question that is too long alone says so."""
    engine = engine_of(*["One."] * 30, max_model_len=160)
    policy = ("--context-policy", "ends")
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url, *policy) as agent,
    ):
        session = await agent.session()
        for number in range(8):
            answer = await agent.ask(session, f"question {number}")
            assert answer.stop_reason == "end_turn"
        sent = [message["content"] for message in messages_of(engine.calls[-1])]
        assert sent[0] == "question 0" and sent[-1] == "question 7" and len(sent) < 15
        said = agent.client.text(session, "agent_thought_chunk")
        assert "no longer sent: the context is full" in said
        with pytest.raises(acp.RequestError, match="With the system prompt it has"):
            await agent.ask(session, "x" * 400)
        assert (await agent.ask(session, "well")).stop_reason == "end_turn"


@pytest.mark.parametrize("after", [0, 2])
async def test_an_engine_that_fails_is_an_error_of_the_prompt(tmp_path: Path, after: int) -> None:
    failing = Script(
        pieces=("a ", "b ", "c"), fail_after=after, error=EngineError("the step failed")
    )
    engine = engine_of(failing, "Well again.")
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url) as agent,
    ):
        session = await agent.session()
        with pytest.raises(acp.RequestError, match="the step failed"):
            await agent.ask(session, "first")
        assert (await agent.ask(session, "second")).stop_reason == "end_turn"
    # a question without any answer is taken back, as in the chat
    asked = [m["content"] for m in messages_of(engine.calls[1]) if m["role"] == "user"]
    assert asked == (["second"] if not after else ["first", "second"])


async def test_the_length_limit_is_a_stop_reason(tmp_path: Path) -> None:
    engine = engine_of(Script(pieces=("a ", "b ", "c ", "d")))
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url, "--max-tokens", "2") as agent,
    ):
        session = await agent.session()
        assert (await agent.ask(session, "count")).stop_reason == "max_tokens"
        assert agent.client.text(session) == "a b "
