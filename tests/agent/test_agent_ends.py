"""How prompts of `termgen acp` are cancelled in every phase, and how the process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

acp = pytest.importorskip("acp")

from acp.schema import McpServerStdio  # noqa: E402
from acp_harness import (  # noqa: E402
    HARNESS,
    NOISY,
    ONCE,
    AcpClient,
    Agent,
    agent_process,
    engine_of,
    is_alive,
    local_agent,
    raw_agent,
)
from fake_engine import FakeEngine  # noqa: E402
from fake_script import Script  # noqa: E402
from server_harness import eventually, serving  # noqa: E402
from tool_samples import hermes  # noqa: E402

QUICK_S = 8.0
"""Long on a busy machine, and nothing beside what is waited for in these tests."""
ENDS_S = 12.0
SERVER = McpServerStdio(
    name="own", command=sys.executable, args=[str(HARNESS / "mcp_server.py")], env=[]
)
SLOW = hermes("own_slow", '{"seconds": 600}')
PROCESS = hermes("own_process", "{}")


async def cancelled(agent: Agent, session: str, asked: asyncio.Task) -> None:  # type: ignore[type-arg]
    """Cancel the prompt; it must end so at once."""
    started = time.monotonic()
    await agent.call.cancel(session_id=session)
    answer = await asyncio.wait_for(asked, QUICK_S * 3)
    assert answer.stop_reason == "cancelled"
    assert time.monotonic() - started < QUICK_S


@asynccontextmanager
async def asking(
    folder: Path, engine: FakeEngine, client: AcpClient, *servers: McpServerStdio
) -> AsyncGenerator[tuple[Agent, str, asyncio.Task], None]:  # type: ignore[type-arg]
    async with (
        serving(engine) as server,
        local_agent(folder, "--url", server.url, client=client) as agent,
    ):
        session = await agent.session(*servers)
        yield agent, session, asyncio.create_task(agent.ask(session, "go"))


async def test_cancelled_while_the_engine_starts(tmp_path: Path) -> None:
    async with agent_process(tmp_path, program=NOISY, START_S="600") as agent:
        session = await agent.session()
        asked = asyncio.create_task(agent.ask(session, "go"))
        client = agent.client
        await client.until(lambda: client.text(session, "agent_thought_chunk"))
        assert "not ready yet (reading weights)" in client.text(session, "agent_thought_chunk")
        await cancelled(agent, session, asked)
        started = time.monotonic()
    # the start holds up the end of the process neither
    assert agent.process.returncode == 0 and time.monotonic() - started < QUICK_S


async def test_cancelled_in_prefill(tmp_path: Path) -> None:
    engine = engine_of(Script(first_delay_s=600.0), "Next.")
    async with asking(tmp_path, engine, AcpClient()) as (agent, session, asked):
        await eventually(lambda: bool(engine.live))
        await cancelled(agent, session, asked)
        await eventually(lambda: len(engine.aborted) == 1)
        assert (await agent.ask(session, "next")).stop_reason == "end_turn"
        # a question that got no answer is one message with the next, as in the chat
        (message,) = engine.calls[-1].prompt.messages  # type: ignore[union-attr]
        assert message["content"] == "go\n\nnext"


async def test_cancelled_while_it_streams(tmp_path: Path) -> None:
    engine = engine_of(Script(pieces=("One", " two", " three"), hold_after=2), "Next.")
    client = AcpClient()
    async with asking(tmp_path, engine, client) as (agent, session, asked):
        await client.until(lambda: client.text(session) == "One two")
        await cancelled(agent, session, asked)
        await eventually(lambda: len(engine.aborted) == 1)
        await agent.ask(session, "next")
        contents = [m["content"] for m in engine.calls[-1].prompt.messages]  # type: ignore[union-attr]
        assert contents == ["go", "One two", "next"]


async def test_cancelled_while_tools_start(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    hanging = McpServerStdio(name="hung", command="sleep", args=["600"], env=[])
    engine = engine_of("Next.")
    async with asking(tmp_path, engine, AcpClient(), hanging) as (agent, session, asked):
        await asyncio.sleep(0.5)
        assert not engine.calls
        await cancelled(agent, session, asked)


@pytest.mark.parametrize("word", [None, ""])
async def test_cancelled_while_the_user_is_asked(tmp_path: Path, word: str | None) -> None:
    """A notification does it, and so does the answer to the question."""
    pytest.importorskip("mcp")
    engine = engine_of(PROCESS, "Next.")
    client = AcpClient(word)
    async with asking(tmp_path, engine, client, SERVER) as (agent, session, asked):
        await client.until(lambda: client.asked)
        if word is None:
            await cancelled(agent, session, asked)
        else:
            assert (await asked).stop_reason == "cancelled"
        assert client.story(session) == ["call: own_process {} > pending > failed"]
        assert (await agent.ask(session, "next")).stop_reason == "end_turn"


async def test_cancelled_while_a_tool_runs(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    engine = engine_of(SLOW, "Next.")
    client = AcpClient(ONCE)
    async with asking(tmp_path, engine, client, SERVER) as (agent, session, asked):
        await client.until(lambda: client.shown(session, "tool_call_update"))
        await cancelled(agent, session, asked)
        (line,) = client.story(session)
        assert line.endswith("> pending > in_progress > failed")
        assert (await agent.ask(session, "next")).stop_reason == "end_turn"


async def test_a_second_prompt_waits_for_none(tmp_path: Path) -> None:
    engine = engine_of(Script(pieces=("One", " two"), hold_after=1))
    client = AcpClient()
    async with asking(tmp_path, engine, client) as (agent, session, asked):
        await client.until(lambda: client.text(session))
        with pytest.raises(acp.RequestError, match="answers a prompt already"):
            await agent.ask(session, "another")
        await agent.call.cancel(session_id="unknown")  # is nothing
        engine.release.set()
        assert (await asked).stop_reason == "end_turn"


async def pid_of_server(agent: Agent, session: str) -> int:
    """The id of the process of the session's MCP server, which it was asked for."""
    await agent.client.until(
        lambda: [u for u in agent.client.shown(session, "tool_call_update") if u.content]
    )
    done = [u for u in agent.client.shown(session, "tool_call_update") if u.content]
    return int(done[0].content[0].content.text)


@pytest.mark.parametrize("way", ["end of input", "SIGTERM", "SIGKILL", "close"])
async def test_no_server_is_left(tmp_path: Path, way: str) -> None:
    """Not even while a tool runs."""
    pytest.importorskip("mcp")
    engine = engine_of(PROCESS, SLOW)
    client = AcpClient(ONCE, ONCE)
    async with (
        serving(engine) as target,
        agent_process(tmp_path, "--url", target.url, client=client) as agent,
    ):
        session = await agent.session(SERVER)
        asked = asyncio.create_task(agent.ask(session, "go"))
        pid = await pid_of_server(agent, session)
        await client.until(
            lambda: len(client.story(session)) == 2 and "in_pro" in client.story(session)[1]
        )
        assert is_alive(pid)
        started, process = time.monotonic(), agent.process
        if way == "close":
            await agent.call.close_session(session_id=session)
            assert (await asked).stop_reason == "cancelled"
            with pytest.raises(acp.RequestError, match="no session"):
                await agent.ask(session, "still there?")
        elif way == "end of input":
            assert process.stdin is not None
            process.stdin.close()
            assert await asyncio.wait_for(process.wait(), 20) == 0
        else:
            process.send_signal(getattr(signal, way))
            code = await asyncio.wait_for(process.wait(), 20)
            assert code == (143 if way == "SIGTERM" else -signal.SIGKILL)
        await eventually(lambda: not is_alive(pid))
        assert time.monotonic() - started < ENDS_S
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_client_that_does_not_read_is_left_in_time(tmp_path: Path) -> None:
    pieces = ("word " * 20_000,) * 40
    async with (
        serving(engine_of(Script(pieces=pieces))) as server,
        raw_agent(tmp_path, "--url", server.url) as agent,
    ):
        await agent.request("initialize", protocolVersion=1)
        answer = await agent.request("session/new", 2, cwd=str(tmp_path), mcpServers=[])
        session = answer["result"]["sessionId"]
        prompt = [{"type": "text", "text": "go"}]
        params = {"sessionId": session, "prompt": prompt}
        transport = agent.process.stdout._transport  # type: ignore[union-attr]
        transport.pause_reading()
        await agent.send({"jsonrpc": "2.0", "id": 3, "method": "session/prompt", "params": params})
        await asyncio.sleep(0.5)
        assert agent.process.stdin is not None
        started = time.monotonic()
        agent.process.stdin.close()
        # ended, though a pipe is full: asked of the kernel, as the pipe is not read to its end
        await eventually(lambda: not is_alive(agent.process.pid), 10)
        assert time.monotonic() - started < ENDS_S
        transport.resume_reading()


async def test_a_client_that_has_gone_ends_it(tmp_path: Path) -> None:
    """The output is closed, the input is not."""
    reading, writing = os.pipe()
    into, out_of = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *NOISY, "acp"),
        stdin=reading,
        stdout=out_of,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "TERMGEN_CHAT_DB": "off"},
    )
    os.close(reading)
    os.close(out_of)
    os.close(into)
    os.write(
        writing, b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}\n'
    )
    _, errors = await asyncio.wait_for(process.communicate(), 15)
    os.close(writing)
    assert process.returncode == 0 and b"Traceback" not in errors, errors
