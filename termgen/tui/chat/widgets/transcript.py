"""The transcript: everything said in a chat, as one scrolling sheet of cached strips.

The screen adds entries; an entry turns itself into rows for a width. Only rows that differ from the
screen are drawn again, so a streamed answer costs its open tail. Long entries are laid out in a
thread, the last one first; until then they keep their old rows or a placeholder. The sheet follows
the tail until the user scrolls up. Text can be selected with the mouse.
"""

from __future__ import annotations

import asyncio
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Protocol, runtime_checkable

from rich.cells import cell_len
from textual.binding import Binding
from textual.events import Click
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from termgen.tui.chat.widgets.entries import AnswerEntry
from termgen.tui.chat.widgets.messages import EntryClicked
from termgen.tui.chat.widgets.word_marks import WordMarks
from termgen.tui.paint.palette import Palette
from termgen.tui.paint.parts import Job
from termgen.tui.paint.spans import Row, row_text

# Entries of the transcript that take long to become rows, such as a long answer at a new width.
#
# They are laid out in a thread, which yields to the screen's every tenth of a millisecond, so that
# no frame waits for a table of a thousand rows. The thread only turns text into rows; all state of
# the entries is changed in the screen's thread.

AT_ONCE = 2048
"""Characters laid out within a frame, in about 8 ms; the thread does the rest."""

MAX_TEXT_WIDTH = 96
SIDE_MARGIN = 2
_PLACE: tuple[Row, ...] = ((), (("…", "faint"),))
"""Placeholder for an entry without rows."""


@runtime_checkable
class LongEntry(Protocol):
    """An entry that estimates its layout work and can be laid out in a thread."""

    def __call__(self, width: int, *, at_once: int | None = None) -> Sequence[Row]:
        """Lay out at most the last `at_once` characters, if given. The others keep their old rows,
        or have none yet."""

    def num_chars_to_do(self, width: int) -> int:
        """0: all rows are laid out."""

    def job(self, width: int) -> Job | None:
        """A part of the outstanding layout, the last part first."""


class LayoutWork:
    """Entries still to be laid out; the newest is taken first."""

    def __init__(self, done: Callable[[LongEntry], None]) -> None:
        """`done` is called with each entry laid out; the width may have changed by then."""
        self._done = done
        self._waiting: dict[LongEntry, int] = {}
        """Width by entry."""
        self.is_running = False
        """Set by the caller of `run`."""

    def add(self, entry: LongEntry, width: int) -> None:
        self._waiting.pop(entry, None)  # moves it to the front
        self._waiting[entry] = width

    def clear(self) -> None:
        self._waiting.clear()

    async def run(self) -> None:
        """Lay out until no entry waits."""
        try:
            while self._waiting:
                entry, width = self._waiting.popitem()
                job = entry.job(width)
                if job is not None:
                    put = await asyncio.to_thread(job)
                    put()
                self._done(entry)
        finally:
            self.is_running = False


Entry = Callable[[int], Sequence[Row]]
"""Rows for a width in cells."""


class Transcript(ScrollView, can_focus=False):
    """Takes the focus in browse mode only, and never by a click."""

    FOCUS_ON_CLICK = False
    BINDINGS = [
        Binding(
            "i,enter",
            "screen.focus_prompt",
            "Back to typing",
            id="chat.write",
            tooltip="From browse mode back to the prompt",
        ),
        Binding(
            "up",
            "scroll_up",
            "Scroll up",
            show=False,
            id="transcript.up",
            tooltip="The transcript one line up",
        ),
        Binding(
            "down",
            "scroll_down",
            "Scroll down",
            show=False,
            id="transcript.down",
            tooltip="The transcript one line down",
        ),
        Binding(
            "pageup",
            "page_up",
            "Previous page",
            show=False,
            id="transcript.page_up",
            tooltip="The transcript one page up",
        ),
        Binding(
            "pagedown",
            "page_down",
            "Next page",
            show=False,
            id="transcript.page_down",
            tooltip="The transcript one page down",
        ),
        Binding(
            "home,g",
            "scroll_home",
            "Start",
            show=False,
            id="transcript.start",
            tooltip="To the beginning of the transcript",
        ),
        Binding(
            "end,G",
            "scroll_end",
            "End",
            show=False,
            id="transcript.end",
            tooltip="To the end of the transcript",
        ),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._palette: Palette | None = None
        self._entries: list[Entry] = []
        self._starts: list[int] = []
        self._rows: list[Row] = []
        self._strips: list[Strip | None] = []
        self._empty: Callable[[int, int], Sequence[Row]] | None = None
        self._follows = True
        """A flag, because a resize moves the end before the old position can be compared with
        it."""
        self._laid_width = 0
        """The width that the rows were laid out for."""
        self._work = LayoutWork(self._laid_out)
        self._marks: WordMarks | None = None

    @property
    def text_width(self) -> int:
        return max(8, min(MAX_TEXT_WIDTH, self.size.width - 2 * SIDE_MARGIN))

    @property
    def margin(self) -> int:
        return max(0, (self.outer_size.width - self.text_width) // 2)

    @property
    def at_end(self) -> bool:
        return self.scroll_offset.y >= self.max_scroll_y

    @property
    def plain_text(self) -> str:
        """The whole text, for tests."""
        return "\n".join(row_text(row).rstrip() for row in self._rows)

    def set_palette(self, palette: Palette) -> None:
        self._palette = palette
        self._strips = [None] * len(self._rows)
        self.refresh()

    def set_empty(self, painter: Callable[[int, int], Sequence[Row]]) -> None:
        """Show a painter's rows (for a width and height) while there are no entries."""
        self._empty = painter
        self._layout_all()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def set_entries(self, entries: Sequence[Entry]) -> None:
        """Show these entries. Leading ones that are shown already are not laid out again. A view of
        the end stays at the end."""
        follow = self.at_end
        pairs = zip(self._entries, entries, strict=False)
        same = next((i for i, (old, new) in enumerate(pairs) if old is not new), None)
        if same is None:
            same = min(len(self._entries), len(entries))
        self._entries = list(entries)
        if not entries:
            self._work.clear()
        if not entries or not self._starts:
            self._layout_all()
            return
        start = self._starts[same] if same < len(self._starts) else len(self._rows)
        del self._starts[same:]
        fresh: list[Row] = []
        for rows in self._rows_of(range(same, len(entries)), {}):
            self._starts.append(start + len(fresh))
            fresh += rows
        self._replace_from(start, fresh)
        if follow:
            self.to_end()

    def add(self, entry: Entry) -> None:
        """Append an entry and scroll to the end of the sheet."""
        self.set_entries([*self._entries, entry])
        self.to_end()

    def clear(self) -> None:
        self.set_entries(())

    def to_end(self) -> None:
        self.scroll_end(animate=False, immediate=True)

    def bring_into_view(self, entry: Entry) -> None:
        """Scroll as little as possible to show where `entry` begins, or all of it if it fits."""
        if entry not in self._entries or not self.size.height:
            return
        index = self._entries.index(entry)
        top, bottom = self._starts[index], self._end(index)
        offset = self.scroll_offset.y
        wanted = min(top, max(offset, bottom - self.size.height))
        if wanted != offset:
            self.scroll_to(y=wanted, animate=False, immediate=True)

    def mark_words(self, words: Sequence[str], entries: Sequence[Entry]) -> None:
        """Mark words in some entries until `unmark`, and show the first one."""
        self._marks = WordMarks(words, entries)
        self._strips = [None] * len(self._rows)
        self.refresh()
        self._show_first_mark()

    def unmark(self) -> bool:
        """True if words were marked."""
        if self._marks is None:
            return False
        self._marks = None
        self._strips = [None] * len(self._rows)
        self.refresh()
        return True

    @property
    def has_marks(self) -> bool:
        return self._marks is not None

    def _show_first_mark(self) -> None:
        """Scroll to the first marked word, unless it is in view. Long entries may not be laid out
        yet: it is looked for again when they are."""
        marks = self._marks
        assert marks is not None, "called for them"
        lines = (
            line
            for index, entry in enumerate(self._entries)
            if entry in marks.entries
            for line in self._text_lines(index)
            if marks.is_in(self._rows[line])
        )
        line = next(lines, None)
        if line is None:
            return
        marks.is_shown = True
        top, height = self.scroll_offset.y, self.size.height
        if not top <= line < top + height:
            above = max(0, line - height // 3)
            self.scroll_to(y=above, animate=False, immediate=True)

    def _text_lines(self, index: int) -> range:
        """Lines of an entry between the blank line and the header above, and its last line: that of
        an answer has its figures."""
        end = self._end(index)
        return range(self._starts[index] + 2, end - isinstance(self._entries[index], AnswerEntry))

    def update(self, entry: Entry, *, at_once: int = AT_ONCE) -> None:
        """Redraw a changed `entry`. Rows below it keep their place on the screen."""
        if entry not in self._entries:
            return
        follow, offset = self.at_end, self.scroll_offset.y
        index = self._entries.index(entry)
        start, old_end = self._starts[index], self._end(index)
        [fresh] = self._rows_of([index], {index: self._rows[start:old_end]}, at_once)
        moved = start + len(fresh) - old_end
        self._replace_from(start, [*fresh, *self._rows[old_end:]])
        for later in range(index + 1, len(self._starts)):
            self._starts[later] += moved
        if follow:
            self.to_end()
        elif moved and old_end <= offset:
            self.scroll_to(y=offset + moved, animate=False, immediate=True)

    def _laid_out(self, entry: LongEntry) -> None:
        if self.is_attached:
            self.update(entry, at_once=0)
            if self._marks is not None and not self._marks.is_shown:
                self._show_first_mark()

    def _end(self, index: int) -> int:
        return self._starts[index + 1] if index + 1 < len(self._starts) else len(self._rows)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follows = self.at_end

    def on_resize(self) -> None:
        follow = self._follows
        if self._entries and self.text_width == self._laid_width:  # the margin changes
            self._strips = [None] * len(self._rows)
            self.virtual_size = Size(self.size.width, len(self._rows))
            self.refresh()
        else:
            self._layout_all()
        if follow:
            self.to_end()

    def _layout_all(self) -> None:
        """Entries too long to lay out at once keep their rows of the former width."""
        known = {i: self._rows[s : self._end(i)] for i, s in enumerate(self._starts)}
        self._starts = []
        rows: list[Row] = []
        for entry_rows in self._rows_of(range(len(self._entries)), known):
            self._starts.append(len(rows))
            rows += entry_rows
        self._laid_width = self.text_width
        if not self._entries and self._empty is not None and self.size.height:
            rows = list(self._empty(self.text_width, self.size.height))
        self._rows, self._strips = rows, [None] * len(rows)
        self.virtual_size = Size(self.size.width, len(rows))
        self.refresh()

    def _rows_of(
        self, indexes: Sequence[int], known: Mapping[int, Sequence[Row]], at_once: int = AT_ONCE
    ) -> list[Sequence[Row]]:
        """Rows of the entries at `indexes`, each after a blank row. The last entries are laid out
        now, within `at_once` characters; the others keep their old rows until the thread has laid
        them out."""
        width, left = self.text_width, at_once
        found: list[Sequence[Row]] = []
        waiting: list[LongEntry] = []
        for index in reversed(indexes):
            entry = self._entries[index]
            if isinstance(entry, LongEntry):
                to_do = entry.num_chars_to_do(width)
                rows = entry(width, at_once=left)
                left = max(0, left - to_do)
                if entry.num_chars_to_do(width):
                    waiting.append(entry)
            else:
                rows = entry(width)
            found.append([(), *rows] if rows else known.get(index, _PLACE))
        for entry in reversed(waiting):  # the thread starts with the last one added
            self._work.add(entry, width)
        if waiting and not self._work.is_running:
            self._work.is_running = True
            self.run_worker(self._work.run(), group="layout")
        return found[::-1]

    def _replace_from(self, start: int, fresh: list[Row]) -> None:
        """Replace the rows from `start` on by `fresh`, and redraw those that differ."""
        old = self._rows[start:]
        same = next(
            (
                i
                for i in count()
                if i >= len(old)
                or i >= len(fresh)
                or (old[i] is not fresh[i] and old[i] != fresh[i])
            ),
            0,
        )
        if same == len(old) == len(fresh):
            return
        first = start + same
        self._rows[first:] = fresh[same:]
        self._strips[first:] = [None] * (len(fresh) - same)
        if len(self._rows) != self.virtual_size.height:
            self.virtual_size = Size(self.size.width, len(self._rows))
        top = max(0, first - self.scroll_offset.y)
        if top < self.size.height:
            self.refresh(Region(0, top, self.size.width, self.size.height - top))

    def on_click(self, event: Click) -> None:
        line = self.scroll_offset.y + event.y
        if line >= len(self._rows) or not self._starts or self.text_selection is not None:
            return
        column = event.x - self.margin
        for text, role in self._rows[line]:
            if 0 <= column < cell_len(text):
                entry = self._entries[bisect_right(self._starts, line) - 1]
                self.post_message(EntryClicked(entry, (text, role)))
                return
            column -= cell_len(text)
        if self._rows[line]:  # beyond the end of the line
            entry = self._entries[bisect_right(self._starts, line) - 1]
            self.post_message(EntryClicked(entry, ("", "")))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        line = self.scroll_offset.y + y
        if self._palette is None or line >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        selection = self.text_selection
        if selection is not None:
            span = selection.get_span(line)
            if span is not None:
                return self._selected(line, span).apply_offsets(0, line)
        strip = self._strips[line]
        if strip is None:
            row = ((" " * self.margin, "text"), *self._rows[line])
            if self._marks is not None:
                row = self._marked(line, row)
            strip = self._strips[line] = self._palette.strip(row, width)
        return strip.apply_offsets(0, line)

    def _marked(self, line: int, row: Row) -> Row:
        assert self._marks is not None
        index = bisect_right(self._starts, line) - 1
        if index < 0 or self._entries[index] not in self._marks.entries:
            return row
        return self._marks.on(row) if line in self._text_lines(index) else row

    def _selected(self, line: int, span: tuple[int, int]) -> Strip:
        """The line with the selection's background on its selected part."""
        assert self._palette is not None
        start, end = span
        row: list[tuple[str, str]] = []
        position = 0
        for text, role in ((" " * self.margin, "text"), *self._rows[line]):
            stop = len(text) + position if end < 0 else end
            a, b = max(0, start - position), max(0, stop - position)
            row += [(text[:a], role), (text[a:b], "text@select"), (text[max(a, b) :], role)]
            position += len(text)
        return self._palette.strip(tuple(piece for piece in row if piece[0]), self.size.width)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        indent = " " * self.margin
        lines = [indent + row_text(row) for row in self._rows]
        text = selection.extract("\n".join(lines))
        first, newline, rest = text.partition("\n")
        rest = textwrap.dedent(rest)
        return "\n".join(line.rstrip() for line in (first + newline + rest).split("\n")), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()
