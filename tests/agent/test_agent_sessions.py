"""Sessions of `termgen acp` that are listed, loaded and gone on with, and the choice of a model."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

acp = pytest.importorskip("acp")

from acp_harness import (  # noqa: E402
    NOISY,
    ONCE,
    AcpClient,
    Agent,
    agent_process,
    engine_of,
    local_agent,
)
from fake_script import Script  # noqa: E402
from server_harness import serving  # noqa: E402
from tool_samples import hermes  # noqa: E402

from termgen.tui.chat.saved.chat_db import ChatDatabase  # noqa: E402
from termgen.tui.chat.saved.chat_records import conversation_of  # noqa: E402
from termgen.tui.chat.state.conversation import AnswerState  # noqa: E402

ENGINE = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "256")
READ = hermes("files_read", '{"path": "note.txt"}')
STORY = [
    "user_message: [file]",
    "user_message: Read @shown.txt and the note",
    "thought: Which?",
    "message: I look.",
    'call: files_read {"path": "note.txt"} > completed',
    "message: It says hi.",
    "user_message: And more?",
    "message: No.",
]


async def written(folder: Path) -> str:
    """The id of a chat with a tool, thoughts and a file, that an agent has kept."""
    (folder / "note.txt").write_text("hi")
    engine = engine_of(f"<think>Which?</think>I look.\n{READ}", "It says hi.", "No.")
    client = AcpClient(ONCE)
    async with (
        serving(engine) as server,
        local_agent(folder, "--url", server.url, "--tools", "files", client=client) as agent,
    ):
        session = await agent.session()
        shown = acp.embedded_text_resource((folder / "shown.txt").as_uri(), "shown")
        await agent.ask(session, "Read ", acp.resource_block(shown), " and the note")
        await agent.ask(session, "And more?")
    return session


async def load(agent: Agent, session: str, **more: Any) -> Any:
    folder = str(more.pop("cwd", agent.folder))
    return await agent.call.load_session(cwd=folder, session_id=session, mcp_servers=[], **more)


async def test_a_chat_is_listed_loaded_and_gone_on_with(tmp_path: Path) -> None:
    session = await written(tmp_path)
    engine = engine_of("Still here.")
    async with (
        serving(engine) as server,
        agent_process(tmp_path, "--url", server.url, "--tools", "files") as agent,
    ):
        (listed,) = (await agent.call.list_sessions()).sessions
        assert (listed.session_id, listed.cwd) == (session, str(tmp_path))
        assert listed.title == "Read @shown.txt and the note"
        assert listed.updated_at.endswith("+00:00")
        elsewhere = await agent.call.list_sessions(cwd=str(tmp_path / "elsewhere"))
        assert elsewhere.sessions == []
        answer = await load(agent, session)
        assert answer.config_options[0].id == "model"
        assert agent.client.story(session) == STORY
        await agent.ask(session, "Still?")
        assert agent.client.text(session).endswith("Still here.")
    (sent,) = engine.calls
    roles = [message["role"] for message in sent.prompt.messages]  # type: ignore[union-attr]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "user"]
    with closing(ChatDatabase(tmp_path / "chats.sqlite3")) as database:
        chat = conversation_of(*database.load(session))
    assert [turn.answer for turn in chat.turns] == ["It says hi.", "No.", "Still here."]
    assert chat.folder == str(tmp_path)


async def test_an_open_session_may_be_loaded_again(tmp_path: Path) -> None:
    engine = engine_of("One.", Script(pieces=("Two", "."), hold_after=1), "Three.")
    async with (
        serving(engine) as server,
        local_agent(tmp_path, "--url", server.url) as agent,
    ):
        empty = await agent.session()
        await load(agent, empty)  # nothing was said: it is in no file
        session = await agent.session()
        await agent.ask(session, "one")
        asked = asyncio.create_task(agent.ask(session, "two"))
        await agent.client.until(lambda: agent.client.text(session).endswith("Two"))
        with pytest.raises(acp.RequestError, match="answers a prompt"):
            await load(agent, session)
        engine.release.set()
        await asked
        agent.client.updates.clear()
        await load(agent, session)
        said = ["user_message: one", "message: One.", "user_message: two", "message: Two."]
        assert agent.client.story(session) == said
        agent.client.updates.clear()
        await agent.call.resume_session(cwd=str(tmp_path), session_id=session, mcp_servers=[])
        await agent.ask(session, "three")
        assert agent.client.story(session) == ["message: Three."]  # without what was said before
        assert (await agent.ask(empty, "/system")).stop_reason == "end_turn"


async def test_flags_override_what_a_chat_was_held_with(tmp_path: Path) -> None:
    first = engine_of("One.")
    flags = ("--temperature", "0.25", "--top-p", "0.5")
    async with (
        serving(first) as server,
        local_agent(tmp_path, "--url", server.url, "--system", "Old.", *flags) as agent,
    ):
        session = await agent.session()
        await agent.ask(session, "one")
    second = engine_of("Two.")
    given = ("--system", "New.", "--temperature", "0.75")
    async with (
        serving(second) as server,
        local_agent(tmp_path, "--url", server.url, *given) as agent,
    ):
        await load(agent, session)
        await agent.ask(session, "two")
    (call,) = second.calls
    assert (call.params.temperature, call.params.top_p) == (0.75, 0.5)
    assert call.prompt.messages[0]["content"] == "New."  # type: ignore[union-attr]


async def test_a_chat_of_the_screen_is_listed_for_every_folder(tmp_path: Path) -> None:
    session = await written(tmp_path)
    with closing(sqlite3.connect(tmp_path / "chats.sqlite3")) as database, database:
        database.execute("UPDATE sessions SET params = '{}'")  # the screen names no folder
    async with serving(engine_of()) as server:
        async with local_agent(tmp_path, "--url", server.url) as agent:
            (listed,) = (await agent.call.list_sessions(cwd="/elsewhere")).sessions
            assert (listed.session_id, listed.cwd) == (session, "/elsewhere")
            with pytest.raises(acp.RequestError, match="cursor"):
                await agent.call.list_sessions(cursor="more")


async def test_an_answer_is_saved_before_its_end(tmp_path: Path) -> None:
    engine = engine_of(Script(pieces=("One", " two", " three"), hold_after=2))
    async with serving(engine) as server:
        async with agent_process(tmp_path, "--url", server.url) as agent:
            session = await agent.session()
            asked = asyncio.create_task(agent.ask(session, "go"))
            await agent.client.until(lambda: agent.client.text(session) == "One two")
            assert agent.process.stdin is not None
            agent.process.stdin.close()
            await agent.process.wait()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    with closing(ChatDatabase(tmp_path / "chats.sqlite3")) as database:
        (turn,) = conversation_of(*database.load(session)).turns
    assert (turn.answer, turn.state) == ("One two", AnswerState.STOPPED)


async def test_the_model_of_a_server_is_an_option(tmp_path: Path) -> None:
    engine = engine_of(Script(pieces=("One", "."), hold_after=1), Script(first_delay_s=0.5), "Two.")
    async with (
        serving(engine, served_model_name=("small", "large")) as server,
        local_agent(tmp_path, "--url", server.url) as agent,
    ):
        other = await agent.session()
        answer = await agent.call.new_session(cwd=str(tmp_path), mcp_servers=[])
        (option,) = answer.config_options
        session = answer.session_id
        assert (option.id, option.category, option.current_value) == ("model", "model", "small")
        assert [one.value for one in option.options] == ["small", "large"]

        async def choose(value: str, config_id: str = "model") -> Any:
            return await agent.call.set_config_option(
                config_id=config_id, session_id=session, value=value
            )

        asked = asyncio.create_task(agent.ask(session, "one"))
        await agent.client.until(lambda: agent.client.text(session))
        with pytest.raises(acp.RequestError, match="answers a prompt"):
            await choose("large")
        engine.release.set()
        await asked
        # a prompt that begins while the models are listed comes first
        refused, answered = await asyncio.gather(
            choose("large"), agent.ask(other, "at once"), return_exceptions=True
        )
        assert "answers a prompt" in str(refused) and answered.stop_reason == "end_turn"
        with pytest.raises(acp.RequestError, match="value: there is no model 'huge'"):
            await choose("huge")
        with pytest.raises(acp.RequestError, match="configId: there is no option 'theme'"):
            await choose("large", "theme")
        (option,) = (await choose("large")).config_options
        assert option.current_value == "large"
        # there is one engine: the other session learns of it
        await agent.client.until(lambda: agent.client.shown(other, "config_option_update"))
        (update,) = agent.client.shown(other, "config_option_update")
        assert update.config_options[0].current_value == "large"
        await agent.ask(other, "two")
    with closing(ChatDatabase(tmp_path / "chats.sqlite3")) as database:
        models = {one.title: one.model_id for one in database.sessions()}
    assert models == {"one": "small", "at once": "large"}


async def test_options_follow_an_engine_that_starts_late(tmp_path: Path) -> None:
    async with agent_process(tmp_path, program=NOISY, START_S="2", FAILS="1") as agent:
        answer = await agent.call.new_session(cwd=str(tmp_path), mcp_servers=[])
        assert answer.config_options is None
        session = answer.session_id
        with pytest.raises(acp.RequestError, match="the weights are torn"):
            await agent.ask(session, "one")
        # the next prompt starts it again
        assert (await agent.ask(session, "two")).stop_reason == "end_turn"
        again = await agent.call.new_session(cwd=str(tmp_path), mcp_servers=[])
        assert again.config_options[0].current_value == "fake/model-1"


async def test_an_engine_of_its_own(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """The real one, with two tiny models: answers stream, models change, its end takes no time."""
    for name in ("one", "two"):
        shutil.copytree(tiny_llama_dir, tmp_path / "models" / name)
    first, second = (str(tmp_path / "models" / name) for name in ("one", "two"))
    flags = ("--model", first, "--max-tokens", "8", "--temperature", "0", *ENGINE)
    async with agent_process(tmp_path, *flags) as agent:
        client = agent.client
        session, other = await agent.session(), await agent.session()
        answers = await asyncio.gather(agent.ask(session, "one"), agent.ask(other, "one"))
        assert [answer.stop_reason for answer in answers] == ["max_tokens"] * 2
        assert client.text(session) == client.text(other) != ""
        await client.until(lambda: client.shown(session, "config_option_update"))
        (option,) = client.shown(session, "config_option_update")[-1].config_options
        assert option.current_value == first
        assert [one.value for one in option.options] == [first, second]
        for value in (second, second, first):
            answer = await agent.call.set_config_option(
                config_id="model", session_id=session, value=value
            )
            assert answer.config_options[0].current_value == value
        assert (await agent.ask(other, "two")).stop_reason == "max_tokens"
        started = time.monotonic()
    assert agent.process.returncode == 0 and time.monotonic() - started < 15
