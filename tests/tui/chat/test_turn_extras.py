"""Thoughts, files, forms and branches of turns are saved with a chat, and are in its exports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from termgen.errors import ChatStoreError
from termgen.tui.chat.saved.chat_records import (
    as_json,
    as_markdown,
    conversation_of,
    from_json,
    restored_params,
    session_record,
    turn_record,
)
from termgen.tui.chat.state.attachments import Attachment, with_files
from termgen.tui.chat.state.conversation import AnswerState, Conversation
from termgen.tui.chat.state.thoughts import Thought
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams


def held() -> Conversation:
    talk = Conversation()
    turn = talk.ask("why?", now_s=0.0)
    turn.answer = "yes"
    turn.thought = Thought("Hm.", 3, 1.5)
    turn.attachments = (Attachment("a.py", "x = 1\n"), Attachment("b", "é"))
    turn.form = StructuredOutputsParams(choice=("yes", "no"))
    turn.num_kept_tokens = 3
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
        assert new.num_kept_tokens == old.num_kept_tokens
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
        {"kept_tokens": "3"},
        {"kept_tokens": -1},
    ],
)
def test_an_import_with_nonsense_is_refused(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("termgen.tui.chat.saved.chat_records.extras_of", lambda _turn: wrong)
    with pytest.raises(ChatStoreError, match=r"turns\[0\]"):
        from_json(exported(held()))


def test_a_chat_brings_its_parameters_and_leaves_the_others() -> None:
    now = SamplingParams(temperature=0.1, stop_token_ids=(7,))
    back = restored_params({"temperature": 0.9, "stop": ["END"]}, now)
    assert (back.temperature, back.stop, back.stop_token_ids) == (0.9, ("END",), (7,))


def test_a_chat_tells_which_parameters_were_set() -> None:
    own = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    record = session_record(Conversation(), replace(own, seed=7, stop=("END",)), own=own)
    assert record.params["top_k"] == 20
    kept = json.loads(json.dumps(record.params))
    elsewhere = SamplingParams(temperature=0.1)
    assert restored_params(kept, elsewhere) == replace(elsewhere, seed=7, stop=("END",))
    del kept["set"]  # by an older version: with every setting
    assert restored_params(kept, elsewhere) == replace(own, seed=7, stop=("END",))
    kept["set"] = 3
    assert restored_params(kept, elsewhere) == replace(own, seed=7, stop=("END",))


def test_markdown_folds_files_and_thoughts() -> None:
    talk = held()
    turn = talk.turns[0]
    turn.thought = Thought("Hm.\n\n```py\nx </DETAILS>", 3, 1.5)
    turn.attachments += (Attachment("a<b>\n.md", "```\ny\n```\n"),)
    session = session_record(talk, SamplingParams())
    text = as_markdown(session, talk)
    sent = str(turn.messages()[0]["content"])
    for file in turn.attachments:
        assert with_files("", [file]).strip() in text and with_files("", [file]).strip() in sent
    assert "Attached: a.py (6 bytes)</summary>\n\na.py:\n```py\nx = 1\n```\n\n</details>" in text
    assert "<summary>Attached: a&lt;b&gt; .md (10 bytes)</summary>" in text
    assert (
        "## Answer\n\n<details>\n<summary>Thought for 1.5 s, 3 tokens</summary>\n\n"
        "> Hm.\n>\n> ```py\n> x &lt;/DETAILS>\n\n</details>\n\nyes\n" in text
    )
    assert text.lower().count("</details>") == 1 + len(turn.attachments)
    places = [text.index(words) for words in ("Attached", "\n\nwhy?\n", "Thought", "\nyes\n")]
    assert places == sorted(places)
    turn.answer = ""  # stopped while it thought
    assert "Thought for" in as_markdown(session, talk)
    assert exported(talk).count('"text": "Hm.') == 1
