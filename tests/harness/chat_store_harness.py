"""Made-up chats for the tests of their store, and the messages it posted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from termgen.tui.chat.saved.autosave import Autosave
from termgen.tui.chat.saved.chat_db import ChatDatabase
from termgen.tui.chat.saved.chat_records import (
    all_turns,
    conversation_of,
    session_record,
    turn_record,
)
from termgen.tui.chat.saved.chat_store import ChatStore
from termgen.tui.chat.state.conversation import AnswerState, Conversation
from termgen.vocabulary.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.3, stop=("END",), seed=7)


def talk_of(*questions: str, system_prompt: str | None = None) -> Conversation:
    talk = Conversation(system_prompt=system_prompt)
    for question in questions:
        turn = talk.ask(question, now_s=0.0, model_id="m-1")
        turn.answer, turn.state = f"{question}, answered", AnswerState.DONE
    return talk


def keep(database: ChatDatabase, talk: Conversation) -> None:
    with database.transaction():
        database.save_session(session_record(talk, PARAMS))
        for turn in all_turns(talk):
            database.save_turn(turn_record(talk, turn))


def shape(talk: Conversation) -> list[tuple[object, ...]]:
    """Everything about a tree that the store keeps."""
    return [
        (t.turn_id, t.parent and t.parent.question, t.place, t.question, t.answer, t.model_id)
        for t in all_turns(talk)
    ] + [tuple(turn.turn_id for turn in talk.turns)]


def loaded(database: ChatDatabase, session_id: str) -> Conversation:
    talk = conversation_of(*database.load(session_id))
    talk.check_integrity()
    return talk


class Told:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.replaced = 0

    def count(self) -> None:
        self.replaced += 1


@asynccontextmanager
async def running(store: ChatStore, told: Told | None = None) -> AsyncIterator[Autosave]:
    told = told or Told()
    store.start(report=told.messages.append, replaced=told.count)
    try:
        yield Autosave(store)
    finally:
        await store.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
