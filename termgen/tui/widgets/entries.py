"""Entries of the transcript: a question, a streamed answer, a notice from termgen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from termgen.client import ModelInfo
from termgen.tui.answer_form import as_markdown, json_opening
from termgen.tui.conversation import AnswerState, Turn
from termgen.tui.key_hints import KeyOf
from termgen.tui.markdown_stream import StreamingMarkdown
from termgen.tui.parts import Job, Part, job_for, lay_out, num_chars_to_do, rows_of
from termgen.tui.render.chat import (
    answer_footer,
    answer_header,
    marked_keys,
    notice_rows,
    question_header,
    question_rows,
    waiting_row,
    with_cursor,
)
from termgen.tui.sanitize import StreamCleaner, clean
from termgen.tui.spans import Row
from termgen.tui.widgets.thoughts import ThoughtRows

_INDENT: Row = (("  ", "text"),)


class QuestionEntry:
    def __init__(self, turn: Turn, key_of: KeyOf) -> None:
        self.turn = turn
        self._keys = marked_keys(key_of)
        make = partial(question_rows, turn.question, turn.attachments)
        self._parts = [Part(make, len(turn.question))]
        self.is_marked = False
        """The browse cursor is on this turn."""

    def __call__(self, width: int, *, at_once: int | None = None) -> Sequence[Row]:
        lay_out(self._parts, width, at_once)
        rows = rows_of(self._parts)
        header = question_header(width, marked=self._keys if self.is_marked else None)
        return [header, *rows] if rows else []

    def num_chars_to_do(self, width: int) -> int:
        return num_chars_to_do(self._parts, width)

    def job(self, width: int) -> Job | None:
        return job_for(self._parts, width)


class AnswerEntry:
    """`feed` the text as it arrives, then `close`. Work is proportional to the open tail, not to
    the length."""

    def __init__(
        self,
        turn: Turn,
        model: ModelInfo,
        key_of: KeyOf,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._turn = turn
        self._name = turn.model_id or model.model_id
        self._clock = clock
        self._cleaner = StreamCleaner()
        self._markdown = StreamingMarkdown(before=_INDENT)
        self._markdown.append(json_opening(turn.form))
        fold_key = key_of("chat.thoughts")
        self._thoughts = ThoughtRows(turn.thought, fold_key=fold_key, before=_INDENT)

    @property
    def turn(self) -> Turn:
        return self._turn

    @property
    def has_thoughts(self) -> bool:
        return bool(self._turn.thought.text)

    def fold_thoughts(self) -> None:
        """Toggle the fold."""
        self._thoughts.toggle()

    def feed(self, text: str) -> None:
        self._markdown.append(self._cleaner.feed(text))

    def close(self) -> None:
        if self._markdown.finished:
            return
        if json_opening(self._turn.form):  # rows shown during the stream get their indents
            self._markdown = StreamingMarkdown(before=_INDENT)
            self._markdown.append(clean(as_markdown(self._turn.form, self._turn.answer)))
        else:
            self._markdown.append(self._cleaner.finish())
        self._markdown.finish()

    def num_chars_to_do(self, width: int) -> int:
        thoughts = self._thoughts.num_chars_to_do(width - 2)
        return thoughts + self._markdown.num_chars_to_do(width - 2)

    def job(self, width: int) -> Job | None:
        return self._markdown.job(width - 2) or self._thoughts.job(width - 2)

    def __call__(self, width: int, *, at_once: int | None = None) -> Sequence[Row]:
        turn = self._turn
        header = answer_header(self._name, turn, width)
        body = self._body(width - 2, at_once)
        if turn.state is not AnswerState.STREAMING:
            if not body and self.num_chars_to_do(width):
                return []
            gap: list[Row] = [()] if body else []
            return [header, *body, *gap, (*_INDENT, *answer_footer(turn, width - 2))]
        if not turn.stats.output_tokens:
            return [header, (*_INDENT, *waiting_row(turn, self._clock()))]
        return [header, *with_cursor(body)]

    def _body(self, width: int, at_once: int | None) -> list[Row]:
        to_do = self._markdown.num_chars_to_do(width)
        answer = self._markdown.rows(width, at_once=at_once)
        left = max(0, at_once - to_do) if at_once is not None else None
        thoughts = self._thoughts(width, at_once=left)
        gap: list[Row] = [()] if len(thoughts) > 1 and answer else []
        return thoughts + gap + answer


class NoticeEntry:
    """A message from termgen. `role` is `bad` for errors, otherwise `accent`."""

    def __init__(self, text: str, *, role: str = "accent", sign: str = "·", hint: str = "") -> None:
        self._text, self._role, self._sign, self._hint = text, role, sign, hint

    def __call__(self, width: int) -> Sequence[Row]:
        return notice_rows(self._text, width, role=self._role, sign=self._sign, hint=self._hint)
