"""Settings of a chat: saved when they change, and sent as far as a server knows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from chat_harness import shown
from chat_store_harness import keep, loaded, talk_of
from fake_engine import Script
from foreign_server import ForeignServer, chunk, done, foreign_server
from remote_chat import ask as ask_remote
from remote_chat import chat_of, remote_app
from textual.pilot import Pilot
from textual.widgets import Input
from tui_harness import (
    FrozenApp,
    ask,
    chat_engine,
    ready,
    wait_until,
)

from termgen.config import UIConfig
from termgen.tui.chat.chat_screen import ChatScreen
from termgen.tui.chat.panels import SamplingPanel, SystemPromptPanel
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.saved.chat_records import restored_params
from termgen.tui.chat.saved.chat_store import ChatStore, Resume, find_session
from termgen.tui.chat.state.conversation import Conversation
from termgen.vocabulary.sampling_params import SamplingParams

SIZE = (120, 34)


def on_disk(path: Path) -> tuple[SamplingParams, str | None]:
    """The settings that another program would read now."""
    database = ChatDatabase(path)
    session, _ = database.load(find_session(path, ""))
    database.close()
    return restored_params(session.params, SamplingParams()), session.system_prompt


async def set_temperature(app: FrozenApp, pilot: Pilot[Any], text: str) -> None:
    await pilot.press("f3")
    await wait_until(pilot, lambda: isinstance(app.screen, SamplingPanel))
    app.screen.query_one("#temperature", Input).value = text
    await pilot.press("enter")
    await wait_until(pilot, lambda: isinstance(app.screen, ChatScreen))


async def test_settings_are_saved_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    app = FrozenApp(chat_engine(Script(pieces=("fine",))), chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await set_temperature(app, pilot, "0.3")
        await ask(app, pilot, "q0")
        assert app.engine.calls[-1].params.temperature == 0.3, "set before there was a question"
        await set_temperature(app, pilot, "0.9")
        await wait_until(pilot, lambda: on_disk(path)[0].temperature == 0.9)
        await pilot.press("f4")
        await wait_until(pilot, lambda: isinstance(app.screen, SystemPromptPanel))
        await pilot.press(*"brief", "ctrl+s")
        await wait_until(pilot, lambda: on_disk(path)[1] == "brief")
        await ask(app, pilot, "/system be long")
        await wait_until(pilot, lambda: on_disk(path)[1] == "be long")
        await ask(app, pilot, "/system off")
        await wait_until(pilot, lambda: on_disk(path)[1] is None)
        assert len(app.engine.calls) == 1, "no question was needed"


async def test_a_chat_that_set_nothing_takes_what_the_model_has_now(tmp_path: Path) -> None:
    """The former model's defaults are not imposed on another one."""
    path = tmp_path / "chats.sqlite3"
    own = {"temperature": 0.2, "top_k": 20}
    first = chat_engine(Script(pieces=("fine",)), default_params=own)
    app = FrozenApp(first, chats=ChatStore(path))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        app.chat.settings.set(replace(app.chat.settings.params, seed=7))
        await ask(app, pilot, "q0")
        assert first.calls[-1].params.top_k == 20
    engine = chat_engine(Script(pieces=("fine",)))
    resume = Resume(find_session(path, ""), {})
    app = FrozenApp(engine, chats=ChatStore(path), resume=resume, ui=UIConfig(top_p=0.5))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: "q0" in shown(app))
        await ask(app, pilot, "q1")
        params = engine.calls[-1].params
        assert (params.temperature, params.top_k, params.seed, params.top_p) == (0.7, 0, 7, 0.5)


def old_chat(path: Path, talk: Conversation) -> Resume:
    """Store a chat as older versions did: with every value, even those that the user never set."""
    database = ChatDatabase(path)
    keep(database, talk)
    params = '{"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7}'
    with database.transaction():
        database._connection.execute("UPDATE sessions SET params = ?", (params,))
    database.close()
    return Resume(talk.session_id, {})


async def ask_old_chat(server: ForeignServer, path: Path) -> tuple[list[str], list[str], Any]:
    resume = old_chat(path, talk_of("q0"))
    app = remote_app(server.url, chats=ChatStore(path), resume=resume)
    async with app.run_test(size=SIZE) as pilot:
        chat = await chat_of(app, pilot)
        await wait_until(pilot, lambda: "q0, answered" in chat.transcript.plain_text)
        await ask_remote(chat, pilot, "q1")
        await ask_remote(chat, pilot, "q2")
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: len(server.bodies) == 3 and not chat.is_streaming)
        lines = [line.strip() for line in chat.transcript.plain_text.split("\n")]
        return lines, [chat.status.text], chat.settings.params


async def test_what_a_server_does_not_know_is_left_out_and_said(tmp_path: Path) -> None:
    async with foreign_server(chunk("fine", finish="stop"), done()) as server:
        lines, (status,), params = await ask_old_chat(server, tmp_path / "chats.sqlite3")
    for body in server.bodies:
        assert (body["temperature"], body["top_p"], body["seed"]) == (0.6, 0.9, 7)
        assert not {"top_k", "min_p", "repetition_penalty"} & set(body)
    (said,) = [line for line in lines if "Left out" in line]
    assert said == "· Left out, as the server of m1 knows no top_k 40, min_p 0.05."
    assert lines.index(said) < lines.index("▎ q1"), "before the first question it concerns"
    assert "seed 7" in status and "top_k" not in status
    assert (params.top_k, params.min_p) == (40, 0.05), "they are still the chat's"
    assert not any("✗" in line for line in lines)


async def test_llama_cpp_is_told_what_it_knows(tmp_path: Path) -> None:
    async with foreign_server(chunk("fine", finish="stop"), done(), owner="llamacpp") as server:
        lines, _, _ = await ask_old_chat(server, tmp_path / "chats.sqlite3")
    assert [(body["top_k"], body["min_p"]) for body in server.bodies] == [(40, 0.05)] * 3
    assert not any("Left out" in line for line in lines)


async def test_a_branch_is_called_so_in_a_chat_that_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    talk = talk_of("why")
    branch = talk.ask("why", now_s=0.0, beside=talk.turns[0], model_id="m-1")
    branch.answer, branch.num_kept_tokens = "because", 4
    database = ChatDatabase(path)
    keep(database, talk)
    assert loaded(database, talk.session_id).turns[0].num_kept_tokens == 4
    database.close()
    app = FrozenApp(chat_engine(), chats=ChatStore(path), resume=Resume(find_session(path, ""), {}))
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: "because" in shown(app))
        assert "‹2/2›  branched" in shown(app)
