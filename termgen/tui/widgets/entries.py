"""Entries of the transcript: a question, an answer that streams, a notice of ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from termgen.client import ModelInfo
from termgen.tui.answer_form import as_markdown, json_opening
from termgen.tui.conversation import AnswerState, Turn
from termgen.tui.key_hints import KeyOf
from termgen.tui.markdown import render
from termgen.tui.markdown_stream import StreamingMarkdown
from termgen.tui.render.chat import (
    answer_footer,
    answer_header,
    marked_keys,
    notice_rows,
    question_rows,
    waiting_row,
    with_cursor,
)
from termgen.tui.sanitize import StreamCleaner, clean
from termgen.tui.spans import Row, Span
from termgen.tui.widgets.layout_work import Job
from termgen.tui.widgets.thoughts import ThoughtRows

INDENT: Span = ("  ", "text")


class QuestionEntry:
    def __init__(self, turn: Turn, key_of: KeyOf) -> None:
        self._turn = turn
        self._keys = marked_keys(key_of)
        self._rows: tuple[tuple[int, bool], Sequence[Row]] | None = None
        self.is_marked = False
        """The cursor is at this turn."""

    def __call__(self, width: int) -> Sequence[Row]:
        key = (width, self.is_marked)
        if self._rows is None or self._rows[0] != key:
            self._rows = key, self._lay_out(width, marked=self._keys if self.is_marked else None)
        return self._rows[1]

    def _lay_out(self, width: int, *, marked: str | None) -> Sequence[Row]:
        turn = self._turn
        return question_rows(turn.question, width, attachments=turn.attachments, marked=marked)

    def num_chars_to_do(self, width: int) -> int:
        is_done = self._rows is not None and self._rows[0][0] == width
        return 0 if is_done else len(self._turn.question)

    def job(self, width: int) -> Job:
        return partial(self._lay_out, width, marked=None)  # it may be marked or not by then

    def take(self, width: int, rows: Sequence[Row]) -> None:
        self._rows = (width, False), rows


class AnswerEntry:
    """Feed it the text as it comes, then `close` it. Costs its open tail, not its length."""

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
        self._markdown = StreamingMarkdown()
        self._markdown.append(json_opening(turn.form))
        self._thoughts = ThoughtRows(turn.thought, fold_key=key_of("chat.thoughts"))
        self._indented: list[Row] = []
        self._indented_for: tuple[int, bool] = (0, False)

    @property
    def turn(self) -> Turn:
        return self._turn

    @property
    def has_thoughts(self) -> bool:
        return bool(self._turn.thought.text)

    def fold_thoughts(self) -> None:
        """Open or fold them, whichever they are not."""
        self._thoughts.toggle()

    def feed(self, text: str) -> None:
        self._markdown.append(self._cleaner.feed(text))

    def close(self) -> None:
        if self._markdown.finished:
            return
        if json_opening(self._turn.form):  # what was shown as it came gets its indents
            self._markdown = StreamingMarkdown()
            self._markdown.append(clean(as_markdown(self._turn.form, self._turn.answer)))
        else:
            self._markdown.append(self._cleaner.finish())
        self._markdown.finish()

    def num_chars_to_do(self, width: int) -> int:
        return self._markdown.num_chars_to_do(width - 2)

    def job(self, width: int) -> Job:
        return partial(render, self._markdown.source, width - 2)

    def take(self, width: int, rows: Sequence[Row]) -> None:
        self._markdown.take(width - 2, rows)
        self._indented_for = (0, False)

    def __call__(self, width: int) -> Sequence[Row]:
        turn = self._turn
        header = answer_header(self._name, turn, width)
        body = self._with_thoughts(self._body(width - 2), width - 2)
        if turn.state is not AnswerState.STREAMING:
            gap: list[Row] = [()] if body else []
            return [header, *body, *gap, (INDENT, *answer_footer(turn, width - 2))]
        if not turn.stats.output_tokens:
            return [header, (INDENT, *waiting_row(turn, self._clock()))]
        return [header, *with_cursor(body)]

    def _with_thoughts(self, body: list[Row], width: int) -> list[Row]:
        thoughts = [_indent(row) for row in self._thoughts(width)]
        gap: list[Row] = [()] if len(thoughts) > 1 and body else []
        return thoughts + gap + body

    def _body(self, width: int) -> list[Row]:
        """Rows that are frozen in the markdown are indented once."""
        rows = self._markdown.rows(width)
        frozen = self._markdown.num_frozen_rows
        key = (width, self._markdown.finished)
        if key != self._indented_for:
            self._indented, self._indented_for = [], key
        self._indented += [_indent(row) for row in rows[len(self._indented) : frozen]]
        return self._indented + [_indent(row) for row in rows[frozen:]]


def _indent(row: Row) -> Row:
    return (INDENT, *row) if row else row


class NoticeEntry:
    """A message of ours. `role` is `bad` for errors, `accent` otherwise."""

    def __init__(self, text: str, *, role: str = "accent", sign: str = "·", hint: str = "") -> None:
        self._text, self._role, self._sign, self._hint = text, role, sign, hint

    def __call__(self, width: int) -> Sequence[Row]:
        return notice_rows(self._text, width, role=self._role, sign=self._sign, hint=self._hint)
