"""Chats on disk: everything written is read again, whatever happens to the file meanwhile."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chat_store_harness import (
    PARAMS,
    keep,
    loaded,
    running,
    shape,
    talk_of,
)

from termgen.errors import ChatStoreError
from termgen.tools.calls import CallState, ToolCall
from termgen.tui.chat.saved.autosave import CHARS_PER_S, SAVE_EVERY_S, Autosave
from termgen.tui.chat.saved.chat_db import MIGRATIONS, ChatDatabase
from termgen.tui.chat.saved.chat_records import (
    all_turns,
    as_json,
    as_markdown,
    conversation_of,
    from_json,
    restored_params,
    session_record,
    turn_record,
)
from termgen.tui.chat.saved.chat_store import ChatStore, store_path
from termgen.tui.chat.state.conversation import AnswerState, Conversation
from termgen.tui.chat.state.tool_rounds import ToolRound
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams


def test_any_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "chats.sqlite3"
    for number in range(8):
        talk = Conversation(system_prompt=rng.choice([None, "be\nbrief"]))
        for step in range(30):
            turns = talk.turns
            beside = rng.choice([None, *turns])
            turn = talk.ask(rng.choice(["again", f"q{step} ünï \x00"]), now_s=0.0, beside=beside)
            turn.answer = f"a{step}" * rng.randrange(3)
            turn.state = rng.choice([AnswerState.DONE, AnswerState.STOPPED, AnswerState.FAILED])
            if rng.random() < 0.4:
                talk.switch(rng.choice(talk.turns), rng.choice((-1, 1)))
        database = ChatDatabase(path)
        keep(database, talk)
        database.close()
        database = ChatDatabase(path)
        again = loaded(database, talk.session_id)
        assert shape(again) == shape(talk), number
        assert again.system_prompt == talk.system_prompt and again.title == talk.title
        assert len(database.sessions()) == number + 1
        database.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_turns_that_are_above_each_other_are_a_tree_all_the_same(order: tuple[int, ...]) -> None:
    """A failing disk or an export made by hand may hold such turns. None is left out."""
    talk = talk_of("one", "two", "three")
    records = [turn_record(talk, turn) for turn in talk.turns]
    records[0] = replace(records[0], parent_id=records[2].turn_id)
    mixed = [records[i] for i in order]
    again = conversation_of(session_record(talk, PARAMS), mixed)
    again.check_integrity()
    assert {turn.question for turn in all_turns(again)} == {"one", "two", "three"}
    alone = replace(records[1], parent_id=records[1].turn_id)
    again = conversation_of(session_record(talk, PARAMS), [alone])
    assert [turn.question for turn in again.turns] == ["two"]


def test_figures_and_parameters_come_back(tmp_path: Path) -> None:
    talk = talk_of("one")
    stats = talk.turns[0].stats
    stats.prompt_tokens, stats.cached_tokens, stats.output_tokens = 40, 16, 21
    stats.ttft_s, stats._first_s, stats.ended_s = 0.25, 50.0, 52.0
    stats.finish_reason = FinishReason.LENGTH
    database = ChatDatabase(None)
    keep(database, talk)
    session, turns = database.load(talk.session_id)
    found = conversation_of(session, turns).turns[0]
    assert (found.stats.prompt_tokens, found.stats.cached_tokens) == (40, 16)
    assert found.stats.decode_rate == pytest.approx(10) and found.stats.ttft_s == 0.25
    assert found.stats.finish_reason is FinishReason.LENGTH
    assert restored_params(session.params, SamplingParams(max_tokens=5)) == PARAMS
    assert restored_params({"temperature": "hot"}, PARAMS) == PARAMS
    assert restored_params({"temperature": 0.5}, PARAMS).seed == 7


@pytest.mark.parametrize("use_fts", [True, False])
def test_search_finds_titles_questions_and_answers(use_fts: bool) -> None:
    database = ChatDatabase(None, use_fts=use_fts)
    assert database.has_fts == use_fts
    for question in ("Paged attention in ten lines", "A haiku about GPUs", "日本語の質問です"):
        keep(database, talk_of(question))

    def titles(words: str) -> list[str]:
        return [summary.title for summary in database.sessions(words)]

    assert titles("") == ["日本語の質問です", "A haiku about GPUs", "Paged attention in ten lines"]
    assert titles("HAIKU gpus") == ["A haiku about GPUs"]
    assert titles("answered") == titles("")
    assert titles("質問") == ["日本語の質問です"]
    assert titles("haiku attention") == []
    for awkward in ('"', "100%", "a_b", "OR", "NEAR(", "-x", "haiku*", "col:x", "()"):
        assert isinstance(titles(awkward), list)
    found = database.sessions("ten")[0]
    assert "ten lines, answered" in found.excerpt and found.num_turns == 1
    turn = talk_of("x").turns[0]
    turn.answer = "was"
    database.remove_turn(turn.turn_id)


def test_the_index_follows_every_change() -> None:
    database = ChatDatabase(None)
    talk = talk_of("first")
    keep(database, talk)
    turn = talk.turns[0]
    turn.answer = "changed completely"
    database.save_turn(turn_record(talk, turn))
    assert database.sessions("changed") and not database.sessions("answered")
    database.remove_turn(turn.turn_id)
    assert not database.sessions("changed")


def test_a_sqlite_without_fts_goes_on_with_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    for use_fts, question in ((True, "one"), (False, "two"), (True, "three")):
        database = ChatDatabase(path, use_fts=use_fts)
        keep(database, talk_of(question))
        assert [s.title for s in database.sessions(question)] == [question]
        database.close()
    database = ChatDatabase(path)
    assert [s.title for s in database.sessions("two")] == ["two"]  # indexed afterwards
    database.close()


def test_delete_rename_and_restore() -> None:
    database = ChatDatabase(None)
    talk = talk_of("one")
    keep(database, talk)
    database.rename(talk.session_id, "better")
    keep(database, talk)  # a later turn does not undo the name
    assert [s.title for s in database.sessions()] == ["better"]
    database.delete(talk.session_id)
    assert database.sessions() == []
    with pytest.raises(ChatStoreError, match="deleted"):
        database.load(talk.session_id)
    database.restore(talk.session_id)
    assert [s.title for s in database.sessions()] == ["better"]


def test_what_was_deleted_is_gone_after_a_day(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    database = ChatDatabase(path)
    talk, other = talk_of("one"), talk_of("two")
    keep(database, talk)
    keep(database, other)
    database.delete(talk.session_id)
    database.close()
    raw = sqlite3.connect(path)
    raw.execute("UPDATE sessions SET deleted_s = deleted_s - 90000")
    raw.commit()
    raw.close()
    database = ChatDatabase(path)
    database.restore(talk.session_id)
    assert [s.title for s in database.sessions()] == ["two"]
    assert not database.sessions("one") and database.sessions("two")
    database.close()
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT question FROM turns").fetchall() == [("two",)], "what was said, too"
    raw.close()


def test_migrations_bring_an_old_file_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    database = ChatDatabase(path)
    keep(database, talk_of("one"))
    database.close()
    newer = (*MIGRATIONS, ("ALTER TABLE sessions ADD COLUMN star INTEGER DEFAULT 5",))
    database = ChatDatabase(path, migrations=newer)
    assert database._connection.execute("SELECT star FROM sessions").fetchall() == [(5,)]
    database.close()
    with pytest.raises(ChatStoreError, match="newer termgen"):
        ChatDatabase(path)
    failing = (*newer, ("CREATE TABLE half (x)", "NONSENSE"))
    with pytest.raises(sqlite3.Error):
        ChatDatabase(path, migrations=failing)
    database = ChatDatabase(path, migrations=newer)  # no partial state
    assert [s.title for s in database.sessions()] == ["one"]
    database.close()


async def test_text_is_saved_while_it_streams(tmp_path: Path) -> None:
    now_s = 0.0
    store = ChatStore(tmp_path / "new folder" / "chats.sqlite3")
    async with running(store):
        autosave = Autosave(store, clock=lambda: now_s)
        talk = Conversation()
        turn = talk.ask("why", now_s=0.0)
        autosave.asked(talk, turn, PARAMS)

        async def on_disk() -> str:
            """The answer as another process reads it, were the terminal killed now."""
            await store.read(lambda _database: None)
            other = ChatDatabase(store.path)
            answer = loaded(other, talk.session_id).turns[0].answer
            other.close()
            return answer

        for piece in range(10):
            now_s += SAVE_EVERY_S / 4
            turn.answer += str(piece)
            autosave.streamed(talk, turn)
        assert await on_disk() == "01234567"
        autosave.flush()
        assert await on_disk() == "0123456789"
        again = loaded(ChatDatabase(store.path), talk.session_id)
        assert again.turns[0].state is AnswerState.STOPPED  # it was cut short


async def test_long_results_of_tools_are_not_written_every_second(tmp_path: Path) -> None:
    now_s, writes = 0.0, []
    store = ChatStore(tmp_path / "chats.sqlite3")
    async with running(store):
        autosave = Autosave(store, clock=lambda: now_s)
        talk = Conversation()
        turn = talk.ask("why", now_s=0.0)
        autosave.asked(talk, turn, PARAMS)
        put = store.put
        store.put = lambda *arguments: (writes.append(now_s), put(*arguments))  # type: ignore[assignment]
        result = "x" * CHARS_PER_S * 4
        turn.rounds.append(ToolRound(calls=[ToolCall("t", "{}", CallState.DONE, result)]))
        for _ in range(40):
            now_s += SAVE_EVERY_S / 4
            autosave.streamed(talk, turn)
        assert writes == [5.0, 10.0]
        autosave.ended(talk, turn)
        await store.read(lambda _database: None)
        again = loaded(ChatDatabase(store.path), talk.session_id)
        assert again.turns[0].rounds[0].calls[0].result == result


async def test_close_writes_what_waits(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.sqlite3")
    talk = talk_of("one", "two")
    async with running(store) as autosave:
        autosave.save_all(talk, PARAMS)
        autosave.rename(talk.session_id, "named")
        with pytest.raises(ChatStoreError, match="deleted"):
            await store.read(lambda database: database.load("nothing"))
    with pytest.raises(ChatStoreError, match="closed"):
        await store.read(lambda database: database.sessions())
    database = ChatDatabase(store.path)
    assert shape(loaded(database, talk.session_id)) == shape(talk)
    assert database.sessions()[0].title == "named"
    database.close()


def test_export_and_import() -> None:
    talk = talk_of("one", "two", system_prompt="be\nbrief")
    other = talk.ask("uno", now_s=0.0, beside=talk.turns[0])
    other.answer = "`x`\x1b"
    records = [turn_record(talk, turn) for turn in all_turns(talk)]
    text = as_json(session_record(talk, PARAMS), records)
    session, turns = from_json(text)
    again = conversation_of(session, turns)
    assert shape(again) == shape(talk) and again.system_prompt == "be\nbrief"
    assert restored_params(session.params, SamplingParams()) == PARAMS
    markdown = as_markdown(session, talk)
    assert markdown.startswith("# one\n\nSystem prompt:\n\n> be\n> brief\n\n## You\n\nuno\n\n")
    assert "two" not in markdown  # another branch


async def test_text_that_is_not_quite_text_is_kept_escaped(tmp_path: Path) -> None:
    """A model cannot write this, but an imported file can hold it."""
    talk = talk_of("half \ud83d a pair")
    text = as_json(session_record(talk, PARAMS), [turn_record(talk, t) for t in talk.turns])
    again = conversation_of(*from_json(text))
    store = ChatStore(tmp_path / "chats.sqlite3")
    async with running(store) as autosave:
        autosave.save_all(again, PARAMS)
        session, turns = await store.read(lambda database: database.load(talk.session_id))
    assert turns[0].question == session.title == "half \\ud83d a pair" and store.trouble == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:50], "not JSON"),
        (lambda text: "[" * 100_000, "not JSON"),
        (lambda text: "[]", "no exported chat"),
        (lambda text: text.replace('"version": 1', '"version": 9'), "version"),
        (lambda text: text.replace('"question"', '"q"'), r'turns\[0\]" has no "question"'),
        (lambda text: text.replace('"answer": "one', '"answer": 5, "x": "'), '"answer" is not'),
        (lambda text: text.replace('"state": "done"', '"state": "odd"'), "odd"),
        (lambda text: text.replace('"output_tokens": 0', '"output_tokens": "x"'), "turns"),
        (lambda text: re.sub('"asked_s": [0-9.]+', '"asked_s": 1e300', text), '"asked_s" is not'),
        (lambda text: re.sub('"asked_s": [0-9.]+', '"asked_s": NaN', text), '"asked_s" is not'),
        (lambda text: text.replace('"turns": [', '"turns": 5, "y": ['), "must be a list"),
    ],
)
def test_a_bad_import_says_what_is_wrong(change: Callable[[str], str], words: str) -> None:
    talk = talk_of("one")
    text = as_json(session_record(talk, PARAMS), [turn_record(talk, t) for t in talk.turns])
    with pytest.raises(ChatStoreError, match=words):
        from_json(change(text))


def test_the_place_of_the_file() -> None:
    assert store_path("off") is None
    assert store_path("~/x.db") == Path.home() / "x.db"
    default = store_path(None)
    assert default is not None and default.name == "chats.sqlite3" and "termgen" in default.parts
