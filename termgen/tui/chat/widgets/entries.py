"""Entries of the transcript: a question, a streamed answer, a notice from termgen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from termgen.client import ModelInfo
from termgen.tools.calls import ToolCall
from termgen.tui.chat.state.answer_form import as_markdown, json_opening
from termgen.tui.chat.state.conversation import AnswerState, Turn
from termgen.tui.chat.state.thoughts import Thought
from termgen.tui.chat.widgets.call_rows import CallRows
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
from termgen.tui.chat.widgets.draft_tint import DraftTint, Ranges
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
    def has_text(self) -> bool:
        return bool(self._thought.text)

    def is_headed(self, text: str) -> bool:
        """True if this is the text of the line that folds and unfolds."""
        return self.has_text and self._words() == text

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
        return spread([(self._words(), FOLD_ROLE)], [(self._fold_key, "faint")], width)

    def _words(self) -> str:
        thought = self._thought
        sign = "▾" if self.is_open else "▸"
        words = "thought for" if thought.is_over else "thinking"
        return f"{sign} {words} {thought.seconds:.1f} s · {count(thought.num_tokens)} tok"

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


class _Section:
    """Thoughts, text and calls of one round; the last one has the answer and, while the model
    writes them, calls."""

    def __init__(self, thought: Thought, calls: Sequence[ToolCall], keys: str, first: int) -> None:
        """first: number of its first call in the answer."""
        self.markdown = StreamingMarkdown(before=_INDENT)
        self.thoughts = ThoughtRows(thought, fold_key=keys, before=_INDENT)
        self.calls = CallRows(calls, fold_key=keys, first=first)
        self.cleaner = StreamCleaner()
        self.tint = DraftTint()

    def feed(self, text: str, drafted: Ranges = ()) -> None:
        """drafted: places of guessed parts in the text."""
        clean_text = self.cleaner.feed(text)
        if drafted and clean_text == text:
            self.tint.add(len(self.markdown.source), drafted)
        self.markdown.append(clean_text)

    def finish(self) -> None:
        if not self.markdown.finished:
            self.markdown.append(self.cleaner.finish())
            self.markdown.finish()

    def num_chars_to_do(self, width: int) -> int:
        return (
            self.thoughts.num_chars_to_do(width)
            + self.markdown.num_chars_to_do(width)
            + self.calls.num_chars_to_do(width)
        )

    def job(self, width: int) -> Job | None:
        return self.calls.job(width) or self.markdown.job(width) or self.thoughts.job(width)

    def rows(self, width: int, at_once: int | None, *, has_tint: bool) -> list[Row]:
        to_do = self.calls.num_chars_to_do(width)
        calls = indented(self.calls(width, at_once=at_once), _INDENT)
        left = max(0, at_once - to_do) if at_once is not None else None
        to_do = self.markdown.num_chars_to_do(width)
        text = self.markdown.rows(width, at_once=left)
        if has_tint:
            text = self.tint.on(text, self.markdown.source)
        left = max(0, left - to_do) if left is not None else None
        thoughts = self.thoughts(width, at_once=left)
        gap: list[Row] = [()] if len(thoughts) > 1 and text else []
        return [*thoughts, *gap, *text, *([()] if text and calls else []), *calls]


class AnswerEntry:
    """`feed` the text as it arrives, `end_round` where the turn does, then `close`. Work is
    proportional to the open tail, not to the length."""

    def __init__(
        self,
        turn: Turn,
        model: ModelInfo,
        key_of: KeyOf,
        *,
        clock: Callable[[], float] = time.perf_counter,
        has_tint: Callable[[], bool] = lambda: False,
    ) -> None:
        """has_tint: whether the parts that were guessed are tinted now."""
        self._turn = turn
        self._has_tint = has_tint
        self._name = turn.model_id or model.model_id
        self._clock = clock
        self._fold_key = key_of("chat.thoughts")
        self._rounds: list[_Section] = []
        for one in turn.rounds:
            section = self._section(one.thought, one.calls)
            section.feed(one.said)
            section.finish()
            self._rounds.append(section)
        self._last = self._section(turn.thought, turn.calls)
        self._last.markdown.append(json_opening(turn.form))

    def _section(self, thought: Thought, calls: Sequence[ToolCall]) -> _Section:
        first = sum(len(section.calls) for section in self._rounds)
        return _Section(thought, calls, self._fold_key, first)

    @property
    def turn(self) -> Turn:
        return self._turn

    @property
    def has_folds(self) -> bool:
        """There are thoughts or calls to open."""
        return bool(self._turn.thought.text or self._turn.rounds or self._turn.calls)

    def fold(self, number: int | None = None) -> None:
        """Open or fold a call by its number, else all thoughts and calls."""
        sections = [*self._rounds, self._last]
        if number is not None:
            for section in sections:
                if section.calls.has(number):
                    section.calls.toggle(number)
            return
        thoughts = [section.thoughts for section in sections if section.thoughts.has_text]
        calls = [section.calls for section in sections]
        is_open = any(one.is_open for one in thoughts) or any(one.is_open for one in calls)
        for rows in thoughts:
            if rows.is_open == is_open:
                rows.toggle()
        for each in calls:
            each.fold_all(not is_open)

    def fold_thoughts(self, text: str) -> None:
        """Toggle the thoughts whose line was clicked."""
        for section in (*self._rounds, self._last):
            if section.thoughts.is_headed(text):
                section.thoughts.toggle()
                return

    def feed(self, text: str, drafted: Ranges = ()) -> None:
        self._last.feed(text, drafted)

    @property
    def has_drafted(self) -> bool:
        """Parts of it are known to have been guessed."""
        return any(section.tint.ranges for section in (*self._rounds, self._last))

    def end_round(self) -> None:
        """Go on below the calls: those of the turn's last round have been written."""
        self._last.finish()
        self._rounds.append(self._last)
        self._last = self._section(self._turn.thought, self._turn.calls)

    def close(self) -> None:
        if len(self._rounds) < len(self._turn.rounds):  # it was stopped while it wrote calls
            self.end_round()
        last = self._last
        if last.markdown.finished:
            return
        if json_opening(self._turn.form):  # rows shown during the stream get their indents
            last.markdown = StreamingMarkdown(before=_INDENT)
            last.tint = DraftTint()  # the text is laid out anew
            last.markdown.append(clean(as_markdown(self._turn.form, self._turn.answer)))
            last.markdown.finish()
        else:
            last.finish()

    def num_chars_to_do(self, width: int) -> int:
        sections = (*self._rounds, self._last)
        return sum(section.num_chars_to_do(width - 2) for section in sections)

    def job(self, width: int) -> Job | None:
        for section in (self._last, *reversed(self._rounds)):
            job = section.job(width - 2)
            if job is not None:
                return job
        return None

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
        return [header, *(body if turn.is_waiting and self._rounds else with_cursor(body))]

    def _body(self, width: int, at_once: int | None) -> list[Row]:
        found: list[list[Row]] = []
        has_tint = self._has_tint()
        for section in (self._last, *reversed(self._rounds)):
            to_do = section.num_chars_to_do(width)
            found.append(section.rows(width, at_once, has_tint=has_tint))
            at_once = max(0, at_once - to_do) if at_once is not None else None
        body: list[Row] = []
        for rows in reversed(found):
            body += [(), *rows] if body and rows else rows
        return body


class NoticeEntry:
    """A message from termgen. `role` is `bad` for errors, otherwise `accent`."""

    def __init__(self, text: str, *, role: str = "accent", sign: str = "·", hint: str = "") -> None:
        self._text, self._role, self._sign, self._hint = text, role, sign, hint

    def show(self, text: str, *, hint: str) -> None:
        """Say this instead. The transcript has to be updated."""
        self._text, self._hint = text, hint

    def __call__(self, width: int) -> Sequence[Row]:
        return notice_rows(self._text, width, role=self._role, sign=self._sign, hint=self._hint)
