"""Saved chats on the screen: the list, opening, names, files, bad files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_store_harness import PARAMS, keep, loaded, talk_of
from fake_engine import Script
from test_tui_branches import numbered_engine, said
from test_tui_chat import sent, shown
from textual.pilot import Pilot
from tui_harness import NOON, FrozenApp, ask, chat_engine, pieces, ready, type_text, wait_until

from termgen.config import UIConfig
from termgen.errors import ConfigError
from termgen.tui.chat.saved.chat_db import ChatDatabase, SessionSummary
from termgen.tui.chat.saved.chat_store import ChatStore, Resume, find_session
from termgen.tui.chat.state.conversation import AnswerState
from termgen.tui.chat.widgets.session_panel import age_group, session_rows
from termgen.tui.paint.spans import row_text, row_width
from termgen.vocabulary.sampling_params import SamplingParams

WIDE = (120, 34)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.sqlite3"


def app_with(path: Path, engine: Any = None, **kwargs: Any) -> FrozenApp:
    return FrozenApp(engine or numbered_engine(), chats=ChatStore(path), **kwargs)


def listed(app: FrozenApp) -> str:
    return app.chat.panel.session_list.text


async def lists(app: FrozenApp, pilot: Pilot[Any], condition: Callable[[str], bool]) -> None:
    await wait_until(pilot, lambda: condition(listed(app)))


def messages(app: FrozenApp) -> list[str]:
    return [notification.message for notification in app._notifications]


def chats_on_disk(path: Path) -> list[SessionSummary]:
    database = ChatDatabase(path)
    found = database.sessions()
    database.close()
    return found


async def test_a_chat_is_there_after_a_restart(path: Path) -> None:
    app = app_with(path, ui=UIConfig(system_prompt="be brief", temperature=0.2))
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await pilot.press("alt+r")
        await wait_until(pilot, lambda: "answer1" in shown(app) and not app.chat.is_streaming)
        before = shown(app)
    summary = chats_on_disk(path)[0]
    assert (summary.title, summary.num_turns, summary.model_id) == ("q0", 2, "smollm2-135m")
    engine = chat_engine(Script(pieces=("more",)))
    resume = Resume(find_session(path, ""), {})
    app = app_with(path, engine, resume=resume)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: "answer1" in shown(app))
        assert shown(app) == before and "‹2/2›" in before and "tok/s" in before
        await ask(app, pilot, "q1")
        assert sent(engine) == [
            ("system", "be brief"),
            ("user", "q0"),
            ("assistant", "answer1."),
            ("user", "q1"),
        ]
        assert engine.calls[-1].params.temperature == 0.2
        await pilot.press("alt+up", "alt+up", "alt+left")
        assert said(app) == ["q0", "answer0"]
    database = ChatDatabase(path)
    talk = loaded(database, resume.session_id)
    database.close()
    assert [turn.answer for turn in talk.turns] == ["answer0."]
    assert len(talk.turns[0].siblings[1].children) == 1


async def test_flags_of_the_command_line_beat_what_a_chat_was_held_with(path: Path) -> None:
    database = ChatDatabase(path)
    keep(database, talk_of("q0", system_prompt="old"))
    database.close()
    resume = Resume(find_session(path, "q0"), {"system_prompt": "new", "temperature": 0.9})
    engine = numbered_engine()
    app = app_with(path, engine, resume=resume)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await wait_until(pilot, lambda: "q0, answered" in shown(app))
        await ask(app, pilot, "q1")
        assert sent(engine)[0] == ("system", "new")
        params = engine.calls[-1].params
        assert (params.temperature, params.stop, params.seed) == (0.9, ("END",), 7)


async def test_the_panel_lists_searches_and_opens(path: Path) -> None:
    app = app_with(path, ui=UIConfig(temperature=0.0))
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await pilot.press("ctrl+b")
        await lists(app, pilot, lambda text: "No chats yet" in text)
        await pilot.press("ctrl+b")
        assert not app.chat.panel.display and app.focused is app.chat.prompt
        for question in ("q0 whales", "q1 ships", "q2 tides"):
            await pilot.press("ctrl+n")
            await ask(app, pilot, question)
        await pilot.press("ctrl+b")
        await lists(app, pilot, lambda text: "q0 whales" in text)
        rows = [row.strip() for row in listed(app).split("\n") if row.strip()]
        told = [row.split() for row in rows[1:4]]
        assert [(*row[:-2], row[-1]) for row in told] == [
            ("▸●", "q2", "tides", "1"),
            ("q1", "ships", "1"),
            ("q0", "whales", "1"),
        ]
        assert all(re.fullmatch(r"\d\d:\d\d", row[-2]) for row in told)
        assert app.chat.transcript.size.width < 90  # beside it, not over it
        await pilot.press("slash", *"whal")
        await lists(app, pilot, lambda text: "q1 ships" not in text and "whales" in text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: said(app) == ["q0", "answer0"])
        assert app.focused is app.chat.prompt and app.chat.panel.display
        await ask(app, pilot, "q5")
        assert said(app) == ["q0", "answer0", "q5", "answer3"]
        await pilot.press("ctrl+b", "ctrl+b")
        await lists(app, pilot, lambda text: "q2 tides" in text)
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: said(app) == ["q2", "answer2"])


async def test_a_narrow_panel_covers_the_chat_until_one_is_opened(path: Path) -> None:
    app = app_with(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await pilot.press("ctrl+n")
        await ask(app, pilot, "/sessions")
        await lists(app, pilot, lambda text: "q0" in text)
        assert app.chat.panel.size.width > 70
        assert "smollm2-135m" in listed(app)
        await pilot.press("enter")
        await wait_until(pilot, lambda: said(app) == ["q0", "answer0"])
        assert not app.chat.panel.display
        await pilot.press("ctrl+b", "escape")
        assert not app.chat.panel.display and app.focused is app.chat.prompt


async def test_rename_delete_and_undo(path: Path) -> None:
    app = app_with(path)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await ask(app, pilot, "/rename About whales")
        await pilot.press("ctrl+b")
        await lists(app, pilot, lambda text: "About whales" in text)
        await pilot.press("f6")
        app.chat.panel.name_field.value = ""
        await type_text(pilot, "ships")
        await pilot.press("enter")
        await lists(app, pilot, lambda text: "ships" in text and "whales" not in text)
        await pilot.press("f6", "x", "escape")
        assert "ships" in listed(app) and app.focused is app.chat.panel.session_list
        await pilot.press("delete")
        await lists(app, pilot, lambda text: "No chats yet" in text)
        assert app.chat.conversation.turns == [] and "is ready" in shown(app)
        assert any("deleted: ships" in message for message in messages(app))
        await pilot.press("ctrl+z")
        await lists(app, pilot, lambda text: "ships" in text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: said(app) == ["q0", "answer0"])
    assert [chat.title for chat in chats_on_disk(path)] == ["ships"]


async def test_a_terminal_that_closes_mid_stream_keeps_the_text(path: Path) -> None:
    engine = chat_engine(Script(pieces=pieces("Long prompts used to block all"), hold_after=5))
    app = app_with(path, engine)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why", wait=False)
        await wait_until(pilot, lambda: app.chat.conversation.turns[0].stats.output_tokens == 5)
        app.exit()  # as SIGHUP does
    database = ChatDatabase(path)
    turn = loaded(database, database.sessions()[0].session_id).turns[0]
    database.close()
    assert (turn.question, turn.answer) == ("why", "Long prompts used to")
    assert turn.state is AnswerState.STOPPED


async def test_a_refused_first_question_leaves_no_chat(path: Path) -> None:
    from termgen.errors import ContextLengthError

    engine = chat_engine(Script(raises=ContextLengthError("too long")))
    app = app_with(path, engine)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        assert await app.chats.read(lambda database: database.sessions()) == []
        engine._script = Script(pieces=("fine",))
        app.chat.prompt.text = "q1"
        await ask(app, pilot, "")
    assert [(chat.title, chat.num_turns) for chat in chats_on_disk(path)] == [("q1", 1)]


async def test_a_broken_file_is_told_and_the_chat_goes_on(path: Path) -> None:
    path.write_bytes(b"no database" * 500)
    app = app_with(path)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await wait_until(pilot, lambda: any("broken" in m for m in messages(app)))
    assert [chat.title for chat in chats_on_disk(path)] == ["q0"]
    assert len(list(path.parent.glob("chats.broken-*"))) == 1


async def test_a_file_that_breaks_later_gets_the_whole_chat_again(path: Path) -> None:
    app = app_with(path)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await ask(app, pilot, "q1")

        def break_it(_database: ChatDatabase) -> None:
            error = sqlite3.DatabaseError("malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

        with pytest.raises(Exception, match="malformed"):
            await app.chats.read(break_it)
        await ask(app, pilot, "q2")
        assert any("set" in m or "broken" in m for m in messages(app))
    assert [(chat.title, chat.num_turns) for chat in chats_on_disk(path)] == [("q0", 3)]


async def test_export_asks_before_it_replaces_and_import_opens(path: Path, tmp_path: Path) -> None:
    app = app_with(path)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "/export x.md")
        await ask(app, pilot, "q0")
        await pilot.press("alt+e")
        app.chat.prompt.text = "q1"
        await ask(app, pilot, "")
        notes, whole = tmp_path / "my notes.md", tmp_path / "chat.json"
        await ask(app, pilot, f"/export {notes}")
        await wait_until(pilot, lambda: notes.exists() and "Exported to" in shown(app))
        assert notes.read_text() == "# q0\n\n## You\n\nq1\n\n## smollm2-135m\n\nanswer1.\n"
        notes.write_text("mine")
        await ask(app, pilot, f"/export md {notes}")
        await wait_until(pilot, lambda: any("is there already" in m for m in messages(app)))
        assert notes.read_text() == "mine"
        await ask(app, pilot, f"/export -f {notes}")
        await wait_until(
            pilot, lambda: "over the file that was there" in shown(app).replace("\n  ", " ")
        )
        assert notes.read_text().startswith("# q0")
        await ask(app, pilot, f"/export json {whole}")
        await wait_until(pilot, whole.exists)
        await ask(app, pilot, f"/export pdf {tmp_path}/x.pdf")
        await ask(app, pilot, f"/export {tmp_path}/none/x.md")
        await ask(app, pilot, f"/import {tmp_path}/none.json")
        await wait_until(pilot, lambda: sum("cannot be" in m for m in messages(app)) == 2)
        assert any("/export [-f]" in m or "/export [md|json]" in m for m in messages(app))
        await pilot.press("ctrl+n")
        await ask(app, pilot, f"/import {whole}")
        await wait_until(pilot, lambda: said(app) == ["q1", "answer1"])
        await pilot.press("alt+left")
        assert said(app) == ["q0", "answer0"]
        assert sorted(os.listdir(tmp_path)) == [
            "chat.json",
            path.name,
            *(name for name in sorted(os.listdir(tmp_path)) if name.startswith(path.name + "-")),
            "my notes.md",
        ]
    assert [chat.title for chat in chats_on_disk(path)] == ["q0", "q0"]
    document = json.loads(whole.read_text())
    assert document["format"] == "termgen-chat" and len(document["turns"]) == 2


async def test_without_a_file_chats_last_as_long_as_the_program(tmp_path: Path) -> None:
    app = FrozenApp(numbered_engine())
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "q0")
        await pilot.press("ctrl+n", "ctrl+b")
        await lists(app, pilot, lambda text: "q0" in text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: said(app) == ["q0", "answer0"])
    assert app.chats.path is None


def test_the_command_line_finds_a_chat(path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_session(path, "")
    with pytest.raises(ConfigError, match="off"):
        find_session(None, "")
    database = ChatDatabase(path)
    talks = [talk_of(question) for question in ("Whales", "Ships of old", "Ships of now")]
    for talk in talks:
        keep(database, talk)
    database.close()
    assert find_session(path, "") == talks[-1].session_id
    assert find_session(path, "whales") == talks[0].session_id
    assert find_session(path, "old") == talks[1].session_id
    assert find_session(path, talks[1].session_id[:12]) == talks[1].session_id
    with pytest.raises(ConfigError, match="may be any of 'Ships of now'"):
        find_session(path, "ships")
    with pytest.raises(ConfigError, match="no chat is called 'trains'"):
        find_session(path, "trains")
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(ConfigError, match="leave --continue"):
        find_session(path, "")


def test_rows_of_the_list_fit_and_are_grouped() -> None:
    day = 86_400
    sessions = [
        SessionSummary(str(i), f"title {i} 日本\x1b", NOON - age * day, "model", 3, "said it" * 30)
        for i, age in enumerate((0, 0.2, 1, 5, 20, 90, 700))
    ]
    for width in (10, 34, 80):
        rows = session_rows(sessions, width, selected=1, open_id="2", now_s=NOON, has_focus=True)
        assert all(row_width(listed.row) <= width for listed in rows)
        text = "\n".join(row_text(listed.row) for listed in rows)
        assert "\x1b" not in text
    headings = [row_text(listed.row) for listed in rows if listed.index is None and listed.row]
    assert headings == ["today", "yesterday", "this week", "this month", "earlier"]
    midnight = datetime(2026, 3, 14).timestamp()
    assert age_group(midnight, NOON) == "today" and age_group(midnight - 1, NOON) == "yesterday"


def test_what_a_chat_was_held_with_is_whole() -> None:
    assert SamplingParams(temperature=0.3, stop=("END",), seed=7) == PARAMS


def test_chats_of_one_title_are_told_apart() -> None:
    hour, day = 3600.0, 86_400.0
    times = [NOON, NOON - hour, NOON - 2 * day, NOON - 20 * day, NOON - 400 * day]
    chats = [
        SessionSummary(str(i), "Hello", then, "m", 1, "", 5 - i) for i, then in enumerate(times)
    ]
    other = SessionSummary("x", "a title that is much too long for the list", NOON, "m", 2, "")
    listed_rows = session_rows(
        [*chats, other], 34, selected=0, open_id="", now_s=NOON, has_focus=False
    )
    rows = [row_text(each.row) for each in listed_rows if each.index is not None]
    assert [row.split()[:2] for row in rows[:5]] == [["Hello", f"({5 - i})"] for i in range(5)]
    assert "12:00" in rows[0] and "11:00" in rows[1] and "Thu 12:00" in rows[2]
    assert "22 Feb" in rows[3] and "7 Feb 2025" in rows[4]
    assert "12:00" in rows[5] and "(" not in rows[5] and row_width(listed_rows[-1].row) == 34
    assert len(set(rows)) == 6


@pytest.mark.parametrize("width", [34, 78, 120])
def test_a_long_title_leaves_its_number_and_gets_all_the_room(width: int) -> None:
    title = "how do I write a scheduler that never stops a decode " * 3
    chat = SessionSummary("1", title, NOON, "a-model", 12, "", 2)
    (_, listed) = session_rows([chat], width, selected=0, open_id="", now_s=NOON, has_focus=False)
    text = row_text(listed.row)
    assert row_width(listed.row) == width and "… (2) " in text and "12:00  12 " in text
    assert text[: text.index("…")].strip() == title[: text.index("…") - 3].strip()
    assert "  " not in text[: text.index(" (2)")].strip(), "no room is left between them"
    assert text.split(" (2) ")[1].lstrip().startswith(("12:00", "a-model"))
    assert len(text) - len(text.split(" (2) ")[1]) >= width - (36 if width >= 60 else 12)


def test_a_chat_is_found_by_the_name_that_the_list_shows(path: Path) -> None:
    database = ChatDatabase(path)
    talks = [talk_of(title) for title in ("Hi", "hi", "other", "hi")]
    for talk in talks:
        keep(database, talk)
    ids = [talk.session_id for talk in talks]
    names = [session.name for session in database.sessions()]
    assert names == ["hi (3)", "other", "hi (2)", "Hi (1)"]
    assert [s.name for s in database.sessions("other")] == ["other"]
    database.close()
    assert find_session(path, "hi (2)") == ids[1] and find_session(path, "HI (1)") == ids[0]
    with pytest.raises(ConfigError, match=r"may be any of 'hi \(3\)'"):
        find_session(path, "hi")


async def test_a_search_under_way_survives_the_end_of_the_list() -> None:
    app = FrozenApp(chat_engine(Script(pieces=("ok",))))
    async with app.run_test(size=(120, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "hi")
        await pilot.press("ctrl+b")
        await pilot.pause()
        searching = asyncio.create_task(app.chat.saved._listing(0.05, False))
        await asyncio.sleep(0.01)
        app.chat.panel.display = False
        await app.chat.panel.remove_children()
        await searching


async def test_a_fork_goes_on_beside_the_chat_before(path: Path) -> None:
    app = app_with(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        await pilot.press("alt+v")
        assert messages(app) == ["there is nothing to go on from yet"]
        for question in ("q0", "q1", "q2"):
            await ask(app, pilot, question)
        await pilot.press("alt+r")  # another answer beside, which stays where it is
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        first = app.chat.conversation
        await pilot.press("alt+up", "alt+up", "alt+v")
        await wait_until(pilot, lambda: app.chat.conversation is not first)
        fork = app.chat.conversation
        assert [turn.question for turn in fork.turns] == ["q0", "q1"]
        assert fork.title == "q0 (fork)" and "A new chat, with 2 questions" in shown(app)
        assert not {t.turn_id for t in fork.turns} & {t.turn_id for t in first.turns}
        assert [t.answer for t in fork.turns] == [t.answer for t in first.turns[:2]]
        await ask(app, pilot, "instead")
        await ask(app, pilot, "/fork")
        await wait_until(pilot, lambda: app.chat.conversation is not fork)
        assert app.chat.conversation.title == "q0 (fork)"
        second = app.chat.conversation
        app.engine._script = lambda _: Script(pieces=("x ",) * 1000, delay_s=0.02)
        await ask(app, pilot, "a long one", wait=False)
        await wait_until(pilot, lambda: app.chat.is_streaming)
        await pilot.press("alt+v", "escape")
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert "an answer is being written" in messages(app)[-1]
        assert app.chat.conversation is second
    kept = {(one.title, one.num_turns) for one in chats_on_disk(path)}
    assert kept == {("q0", 4), ("q0 (fork)", 3), ("q0 (fork)", 4)}
    again = app_with(path, resume=Resume(find_session(path, "q0 (fork) (1)"), {}))
    async with again.run_test(size=WIDE) as pilot:
        await ready(again, pilot)
        await wait_until(pilot, lambda: bool(again.chat.conversation.turns))
        await ask(again, pilot, "more")
        assert sent(again.engine)[-1] == ("user", "more")


async def test_a_search_opens_a_chat_where_its_words_are(path: Path) -> None:
    app = app_with(path)
    async with app.run_test(size=WIDE) as pilot:
        await ready(app, pilot)
        for number in range(8):
            await ask(app, pilot, f"q{number} " + ("whales" if number in (1, 3) else "ships"))
        long = app.chat.conversation
        await pilot.press("ctrl+n")
        await ask(app, pilot, "another")
        await pilot.press("ctrl+b", "slash", *"whales")
        await lists(app, pilot, lambda text: "another" not in text and "q0" in text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.chat.conversation.session_id == long.session_id)
        await wait_until(pilot, lambda: app.chat.dialogue.marked is not None)
        assert app.chat.dialogue.marked.question == "q3 whales"
        await wait_until(pilot, lambda: not app.chat.transcript.at_end)
        # the same from within that chat
        await pilot.press("ctrl+b", "ctrl+b", "slash", *"q1")
        await lists(app, pilot, lambda text: "another" not in text)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.chat.dialogue.marked.question == "q1 whales")
