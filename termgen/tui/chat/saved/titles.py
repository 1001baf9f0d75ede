"""Titles of chats by the model: how one is asked for, and what it must be like.

Small models copy the question, go on for ever, or answer it. Such a text is refused here, and the
chat keeps the words of its question as its title. No Textual.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from typing import Any

from termgen.client import ChatPrompt, EngineClient
from termgen.errors import EngineError
from termgen.tui.chat.state.conversation import AnswerState, Conversation, Turn, title_of
from termgen.tui.chat.state.sampling_fields import without
from termgen.tui.chat.state.thoughts import read_answer
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams

MODEL, WORDS = "model", "words"
"""Values of the setting `titles`."""
PARAMS = SamplingParams(temperature=0.2, top_p=0.9, max_tokens=16, stop=("\n",))
MAX_CELLS = 60
QUESTION_CHARS, ANSWER_CHARS = 1200, 1200
"""What the model is shown of the first question and its answer, so that a title costs little."""
COPIED_WORDS = 4
"""So many words that begin the question are a copy of it, not a title."""
ORDER_WORDS = 3
"""So many words that are a piece of `ORDER` repeat it."""
MAX_REPEATS = 2
"""How often a word may be there."""
ORDER = (
    "Above are a question and its answer. Write a title for them: at most six words, in their "
    "language. Write only the title."
)
_DECORATION = " \t\"'_#“”‘’«».:-"
_EMPHASIS = re.compile("[*`]")
_LABEL = re.compile(r"title\s*:\s*", re.IGNORECASE)
_WORD = re.compile(r"[\u2e80-\uffff]|\w+")
"""Words, or single characters of scripts that put no blanks between words."""


def first_answered(conversation: Conversation) -> Turn | None:
    """The first turn of the path with a whole answer."""
    for turn in conversation.turns:
        if turn.state is AnswerState.DONE and turn.answer.strip():
            return turn
    return None


def is_by_words(conversation: Conversation) -> bool:
    """True if the title is still the beginning of a first question."""
    return conversation.title in {title_of(turn.question) for turn in conversation.root.children}


def title_prompt(turn: Turn, *, template_kwargs: dict[str, Any]) -> ChatPrompt:
    said = f"Question: {turn.question[:QUESTION_CHARS]}\n\nAnswer: {turn.answer[:ANSWER_CHARS]}"
    messages = [{"role": "user", "content": f"{said}\n\n{ORDER}"}]
    return ChatPrompt(messages, template_kwargs=template_kwargs)


async def read_title(
    client: EngineClient, turn: Turn, *, request_id: str, template_kwargs: dict[str, Any]
) -> str:
    """A title by the model; empty if what it writes is none. Cancelling aborts the request."""
    prompt = title_prompt(turn, template_kwargs=template_kwargs)
    params, _ = without(PARAMS, client.model.unsent_params)
    text, reason = "", None
    answer = read_answer(client, prompt, params, request_id=request_id)
    async with contextlib.aclosing(answer) as stream:
        async for news in stream:
            reason = news.delta.finish_reason
            if reason is FinishReason.ERROR:
                raise news.delta.error or EngineError("the engine failed this request")
            text += news.pieces[1]
    return tidy_title(text, turn.question) if reason is FinishReason.STOP else ""


def tidy_title(text: str, question: str) -> str:
    """The model's line without quotes and marks; empty where it is no title."""
    line = _EMPHASIS.sub("", text).strip()
    line = _LABEL.sub("", line.lstrip(_DECORATION), count=1).strip(_DECORATION)
    if not line or _num_cells(line) > MAX_CELLS:
        return ""
    if any(unicodedata.category(char).startswith("C") for char in line):
        return ""  # a line break, a control code, a mark of direction
    words, asked = _WORD.findall(line.casefold()), _WORD.findall(question.casefold())
    if not words or max(map(words.count, words)) > MAX_REPEATS:
        return ""
    if len(words) >= COPIED_WORDS and words == asked[: len(words)]:
        return ""
    order = _WORD.findall(ORDER.casefold())
    pieces = (order[i : i + len(words)] for i in range(len(order)))
    if len(words) >= ORDER_WORDS and words in pieces:
        return ""
    return " ".join(line.split())


def _num_cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
