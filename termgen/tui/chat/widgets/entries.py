"""Entries of the transcript: a question, a streamed answer, a notice from termgen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from termgen.client import ModelInfo
from termgen.tui.chat.state.answer_form import as_markdown, json_opening
from termgen.tui.chat.state.conversation import AnswerState, Turn
from termgen.tui.chat.state.thoughts import Thought
from termgen.tui.chat.widgets.chat_rows import (
    answer_footer,
    answer_header,
    marked_keys,
    notice_rows,
    question_header,
    question_rows,
    waiting_row,
    with_cursor,
)
from termgen.tui.keys.keymap import KeyOf
from termgen.tui.paint.formatting import count
from termgen.tui.paint.markdown_stream import StreamingMarkdown
from termgen.tui.paint.parts import (
    PART_CHARS,
    Job,
    Part,
    indented,
    job_for,
    lay_out,
    num_chars_to_do,
    rows_of,
)
from termgen.tui.paint.sanitize import StreamCleaner, clean
from termgen.tui.paint.spans import Row, Span, spread, wrap

FOLD_ROLE = "muted@background"
"""Role of the line that folds and unfolds the thoughts; no text uses it."""
_EDGE: Span = ("│ ", "faint")

_INDENT: Row = (("  ", "text"),)


class ThoughtRows:
    """Reads a growing `Thought`. Work is proportional to what is open, not to the length."""

    def __init__(self, thought: Thought, *, fold_key: str, before: Row = ()) -> None:
        """`fold_key` folds and unfolds; `before` precedes every row."""
        self._thought = thought
        self._fold_key = fold_key
        self._before = before
        self._is_open: bool | None = None
        """None until the user has chosen."""
        self._cleaner = StreamCleaner()
        self._num_read = 0
        self._line = ""
        """The last, unfinished line."""
        self._parts: list[Part] = []
        self._lines = ""
        """Finished lines of the last part."""

    @property
    def is_open(self) -> bool:
        return not self._thought.is_over if self._is_open is None else self._is_open

    def toggle(self) -> None:
        self._is_open = not self.is_open

    def num_chars_to_do(self, width: int) -> int:
        if not self.is_open:
            return 0
        self._read()
        return num_chars_to_do(self._parts, width)

    def job(self, width: int) -> Job | None:
        return job_for(self._parts, width) if self.is_open else None

    def __call__(self, width: int, *, at_once: int | None = None) -> list[Row]:
        """Lay out up to `at_once` characters now; the rest keeps its old rows until a `job` has
        run."""
        thought = self._thought
        if not thought.text:
            return []
        head = (*self._before, *self._head(width))
        if not self.is_open:
            return [head]
        self._read()
        lay_out(self._parts, width, at_once)
        return [head, *rows_of(self._parts), *indented(_wrapped(self._line, width), self._before)]

    def _head(self, width: int) -> Row:
        thought = self._thought
        sign = "▾" if self.is_open else "▸"
        words = "thought for" if thought.is_over else "thinking"
        seconds = f"{thought.seconds:.1f} s"
        left: Span = (f"{sign} {words} {seconds} · {count(thought.num_tokens)} tok", FOLD_ROLE)
        return spread([left], [(self._fold_key, "faint")], width)

    def _read(self) -> None:
        text = self._thought.text
        if self._num_read == len(text):
            return
        *lines, self._line = (self._line + self._cleaner.feed(text[self._num_read :])).split("\n")
        self._num_read = len(text)
        for line in lines:
            if not self._parts or self._parts[-1].num_chars >= PART_CHARS:
                self._lines = ""
                self._parts.append(Part(partial(_wrapped, ""), 0, before=self._before))
            self._lines += f"{line}\n"
            self._parts[-1].change(partial(_wrapped, self._lines[:-1]), len(self._lines))


def _wrapped(lines: str, width: int) -> list[Row]:
    room = max(1, width - 2)
    return [(_EDGE, *row) for line in lines.split("\n") for row in wrap([(line, "muted")], room)]


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
