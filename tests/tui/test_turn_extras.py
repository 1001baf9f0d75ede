"""Thoughts, files and forms of turns are kept with a chat."""

from __future__ import annotations

from typing import Any

import pytest

from termgen.engine.sampling_params import SamplingParams
from termgen.engine.structured_outputs import StructuredOutputsParams
from termgen.errors import ChatStoreError
from termgen.tui.attachments import Attachment
from termgen.tui.chat_records import (
    as_json,
    conversation_of,
    from_json,
    restored_params,
    session_record,
    turn_record,
)
from termgen.tui.conversation import AnswerState, Conversation
from termgen.tui.thoughts import Thought


def held() -> Conversation:
    talk = Conversation()
    turn = talk.ask("why?", now_s=0.0)
    turn.answer = "yes"
    turn.thought = Thought("Hm.", 3, 1.5)
    turn.attachments = (Attachment("a.py", "x = 1\n"), Attachment("b", "é"))
    turn.form = StructuredOutputsParams(choice=("yes", "no"))
    turn.end(AnswerState.DONE)
    talk.ask("and?", now_s=1.0).end(AnswerState.STOPPED)
    return talk


def exported(talk: Conversation) -> str:
    records = [turn_record(talk, turn) for turn in talk.turns]
    return as_json(session_record(talk, SamplingParams()), records)


def test_they_come_back_as_they_were() -> None:
    talk = held()
    back = conversation_of(*from_json(exported(talk)))
    for old, new in zip(talk.turns, back.turns, strict=True):
        assert (new.thought, new.attachments) == (old.thought, old.attachments)
        assert (new.form and new.form.value) == (old.form and old.form.value)
    assert back.prompt() == talk.prompt()


@pytest.mark.parametrize(
    "wrong",
    [
        {"thought": {"text": 3}},
        {"thought": [1]},
        {"files": [{"name": "a"}]},
        {"files": "ab"},
        {"form": {"json": "{"}},
        {"form": {"shape": "round"}},
    ],
)
def test_an_import_with_nonsense_is_refused(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termgen.tui.chat_records.extras_of", lambda _turn: wrong)
    with pytest.raises(ChatStoreError, match=r"turns\[0\]"):
        from_json(exported(held()))


def test_a_chat_brings_its_parameters_and_leaves_the_others() -> None:
    now = SamplingParams(temperature=0.1, stop_token_ids=(7,))
    back = restored_params({"temperature": 0.9, "stop": ["END"]}, now)
    assert (back.temperature, back.stop, back.stop_token_ids) == (0.9, ("END",), (7,))
