"""A stream of markdown that costs the same however long it has become.

The rows of blocks that later text cannot change any more are parts; only the open tail is rendered
anew. A long paragraph and every table are `open_blocks`' until they are complete. The transcript's
entries ask for the rows in each frame. No Textual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from termgen.tui.paint.code_panel import code_foot, is_code
from termgen.tui.paint.markdown import Unit, add_unit, block_types, copy_env, units_of
from termgen.tui.paint.open_blocks import LONG_BLOCK, LongParagraph, OpenCode, OpenTable
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
from termgen.tui.paint.spans import Row

OpenBlock = LongParagraph | OpenTable | OpenCode


@dataclass(frozen=True, slots=True)
class Place:
    """Start of a block, and its context."""

    at: int = 0
    gap: bool = False
    """True if a blank row precedes it."""
    number: int | None = None
    """Number of the next item, within a list."""
    num_code_blocks: int = 0

    def lay_out(self, text: str, env: dict[str, Any], width: int) -> list[Row]:
        """Lay out the text from here on as closed blocks."""
        blocks = self.num_code_blocks
        units = units_of(text, copy_env(env), number=self.number, code_blocks=blocks)
        return self.rows(units, width, live=False)

    def rows(self, units: list[Unit], width: int, *, live: bool) -> list[Row]:
        rows: list[Row] = [()] if self.gap and units else []
        for index, unit in enumerate(units):
            is_live = live and index == len(units) - 1
            add_unit(rows, replace(unit, gap=unit.gap and index > 0), width, live=is_live)
        return rows


class StreamingMarkdown:
    """Append text, ask for `rows(width)` as often as the screen is drawn.

    Invariant: after `finish`, `rows(width) == render(source, width)`; before it they differ at
    most in references that are defined later, in the colours of an open code block and in the
    columns of a long table.
    """

    def __init__(self, *, before: Row = ()) -> None:
        """`before` goes before every row that is not blank."""
        self.source = ""
        self.finished = False
        self._before = before
        self._parts: list[Part] = []
        """Closed blocks, up to the start of the tail."""
        self._place = Place()
        self._growing: tuple[Part, Place] | None = None
        """The last part, and where it begins."""
        self._open: OpenBlock | None = None
        """The open block at the start of the tail."""
        self._tail: list[Row] = []
        self._seen_newline = 0
        self._env: dict[str, Any] = {}
        self._drawn: tuple[int, int, Row] = (0, 0, ())
        """(width, source length, preceding row) that `_tail` was rendered for."""

    def append(self, text: str) -> None:
        assert not self.finished
        self.source += text

    def finish(self) -> None:
        """No more text will come. A reference that is defined late may be used in what is closed;
        else that stays."""
        if self.finished:
            return
        place, shown = self._place, self._tail
        if self._open is not None:
            shown = [*self._open.settled_rows, *shown]
        if self._env.get("references") or "]:" in self.source[place.at :]:
            place, shown = Place(), [*rows_of(self._parts), *shown]
            self._parts = []
        text = self.source[place.at :]
        make = partial(place.lay_out, text, copy_env(self._env))
        if text:
            self._parts.append(Part(make, len(text), before=self._before, shown=shown))
        self.finished, self._open, self._tail = True, None, []

    def rows(self, width: int, *, at_once: int | None = None) -> list[Row]:
        """Rows for this width.

        at_once: at most so many characters of closed blocks with another width are laid out, the
        last ones; None for all. The rest keeps its rows until its `job` is done.
        """
        if at_once is not None and width != self._drawn[0] and not self.finished:
            at_once -= len(self.source) - (
                self._open.end if self._open is not None else self._place.at
            )
        at_once = lay_out(self._all_parts, width, at_once)
        if not self.finished:
            self._update(width)
            lay_out(self._all_parts, width, at_once)
        settled = self._open.settled_rows if self._open is not None else []
        return [*rows_of(self._parts), *settled, *self._tail]

    def num_chars_to_do(self, width: int) -> int:
        """Characters of closed blocks whose rows have another width."""
        return num_chars_to_do(self._all_parts, width)

    def job(self, width: int) -> Job | None:
        return job_for(self._all_parts, width)

    @property
    def num_frozen_rows(self) -> int:
        """Leading rows that stay as they are at this width; all of them once finished."""
        return sum(len(part.rows) for part in self._parts)

    @property
    def _all_parts(self) -> list[Part]:
        return self._parts + (self._open.parts if self._open is not None else [])

    def _update(self, width: int) -> None:
        last_row = self._open.last_row if isinstance(self._open, LongParagraph) else ()
        if (width, len(self.source), last_row) == self._drawn:
            return
        if self._open is None or not self._go_on(self._open, width):
            self._update_tail(width)
        last_row = self._open.last_row if isinstance(self._open, LongParagraph) else ()
        self._drawn = width, len(self.source), last_row

    def _update_tail(self, width: int) -> None:
        end = self.source.rfind("\n") + 1
        if len(self.source) - end > LONG_BLOCK and self.source.endswith("\n\n", 0, end):
            end = len(self.source)  # a line that begins a block, whatever it will be
        if end > self._seen_newline:
            self._seen_newline = end
            self._close(end, width)
        if self._begin_paragraph(width):
            return
        units = self._parse_tail(self.source[self._place.at :])
        if not self._begin_block(units, width):
            rows = self._place.rows(units, width, live=True)
            self._tail = indented(rows, self._before)

    def _parse_tail(self, text: str) -> list[Unit]:
        place = self._place
        blocks = place.num_code_blocks
        return units_of(text, copy_env(self._env), number=place.number, code_blocks=blocks)

    def _close(self, end: int, width: int) -> None:
        """Close all units of the complete lines but the last: that one may still grow.

        Half a line is not looked at, since it may be taken for something else; but one that is long
        already, after a blank line, ends what was before it whatever it is.
        """
        place = self._place
        text = self.source[place.at : end]
        types = block_types(text)
        if len(types) < 2 and types[:1] not in (["bullet_list_open"], ["ordered_list_open"]):
            return
        blocks = place.num_code_blocks
        units = units_of(text, self._env, number=place.number, code_blocks=blocks)
        if len(units) < 2:
            return
        *closed, last = units
        blocks += sum(is_code(node) for unit in closed for node in unit.node.walk())
        at = place.at + _num_chars(text, last.line)
        part, begin = self._growing or (None, place)
        if part is None or part.width != width or part.num_chars >= PART_CHARS:
            part, begin = None, place
        make = partial(begin.lay_out, self.source[begin.at : at], copy_env(self._env))
        if part is None:
            part = Part(make, 0, before=self._before)
            self._parts.append(part)
        part.grow(make, at - place.at, place.rows(closed, width, live=False), width)
        self._growing = part, begin
        self._place = Place(at, last.gap, last.number, blocks)

    def _begin_paragraph(self, width: int) -> bool:
        place = self._place
        text = self.source[place.at :]
        if len(text) <= LONG_BLOCK or block_types(text) != ["paragraph_open"]:
            return False
        paragraph = LongParagraph(place.at, gap=place.gap, before=self._before)
        if not paragraph.settle(self.source, self._env, width):
            return False
        self._open = paragraph
        return self._go_on(paragraph, width)

    def _begin_block(self, units: list[Unit], width: int) -> bool:
        """Begin an open block, if the tail is a table or a fence with a complete head that goes
        on."""
        kind = units[0].node.type if units else None
        if kind not in (OpenTable.kind, OpenCode.kind):
            return False
        place, first = self._place, units[0]
        complete = self.source[: self.source.rfind("\n") + 1]
        num_lines = first.line + (2 if kind == OpenTable.kind else 1)
        at = place.at + _num_chars("\n".join(first.lines), num_lines)
        if at > len(complete):
            return False
        units_of("\n".join(first.lines[: first.line]), self._env)  # references before it
        head = "".join(f"{line}\n" for line in first.lines[first.line : num_lines])
        block: OpenBlock
        if kind == OpenTable.kind:
            block = OpenTable(head, at, self._env, width, gap=place.gap, before=self._before)
        else:
            number = place.num_code_blocks + 1
            block = OpenCode(head, at, number, width, gap=place.gap, before=self._before)
        if not block.goes_on(complete):
            return False
        self._open = block
        return self._go_on(block, width)

    def _go_on(self, block: OpenBlock, width: int) -> bool:
        """True if the tail still begins with the open block."""
        complete = self.source[: self.source.rfind("\n") + 1]
        if not block.goes_on(complete):
            self._end(block, complete, width)
            return False
        is_long = isinstance(block, LongParagraph)
        block.settle(self.source if is_long else complete, self._env, width)
        units = self._parse_tail(block.rest(self.source))
        if units[0].node.type != block.kind:  # for what its unfinished line looks like
            units = self._parse_tail(block.rest(complete))
        rows = block.rows(units[0].node, width)
        if len(units) > 1:
            rows += Place(gap=units[1].gap).rows(units[1:], width, live=True)
        self._tail = indented(rows, self._before)
        return True

    def _end(self, block: OpenBlock, complete: str, width: int) -> None:
        """Close the open block with these complete lines. If all its rows change, a `job` makes
        them, and the old ones are shown until then."""
        self._open, self._seen_newline = None, 0
        place = self._place
        if isinstance(block, OpenCode):
            block.settle(complete, self._env, width)
            end = complete.index("\n", block.end) + 1
            following = Place(end, gap=True, num_code_blocks=place.num_code_blocks + 1)
            fresh = [code_foot(width)]
        else:
            text = block.rest(complete)
            units = units_of(text, self._env)
            if len(units) < 2 or units[0].node.type != block.kind:
                return
            end = block.end + _num_chars(text, units[1].line) - len(block.rest(""))
            following = Place(end, units[1].gap, units[1].number, place.num_code_blocks)
            if isinstance(block, LongParagraph):
                if not _is_paragraph(self.source[place.at : end]):
                    return  # with what was set aside it is something else
                fresh = block.rows(units[0].node, width)
            else:
                block.settle(self.source[:end], self._env, width)
                fresh = []
        make = partial(place.lay_out, self.source[place.at : end], copy_env(self._env))
        is_final = not isinstance(block, LongParagraph) and block.is_final(width)
        shown = [*block.settled_rows, *indented(fresh, self._before)]
        part = Part(make, end - place.at, before=self._before, shown=shown)
        part.width = width if is_final else 0
        self._parts.append(part)
        self._growing, self._place = None, following


def _is_paragraph(text: str) -> bool:
    """Alone, without a definition of a reference before it."""
    return "]:" not in text and block_types(text) == ["paragraph_open"]


def _num_chars(text: str, num_lines: int) -> int:
    """Characters of the first lines."""
    return sum(len(line) + 1 for line in text.split("\n")[:num_lines])
