"""A stream of markdown that costs the same however long it has become.

The rows of every block that later text cannot change any more are frozen, and only the open tail is
rendered. A paragraph or a table that grows long without an end is `LongBlock`'s: its beginning is
rendered once. The transcript's entries ask for the rows in each frame. No Textual.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from markdown_it.tree import SyntaxTreeNode

from termgen.tui.code_panel import is_code
from termgen.tui.markdown import (
    Unit,
    add_unit,
    block_types,
    inline_spans,
    render,
    table_rows,
    units_of,
)
from termgen.tui.spans import Row, Span, wrap

LONG_BLOCK = 4096
"""Characters of a paragraph or a table from which its beginning is set aside."""
KEPT_OPEN = 1024
"""Characters at its end that are not."""
_STAND_IN = "x "
"""Goes before the rest of a paragraph, which could else be taken for another block's beginning."""
_PARAGRAPH, _TABLE = "paragraph", "table"


class LongBlock:
    """The open tail while it is one long paragraph or table. Rows of its beginning are set aside:
    what comes later changes them no more. Until the block is complete and rendered as a whole, a
    table keeps the columns it began with, and a mark that is opened in what is set aside and
    closed behind it is shown as it is written.
    """

    def __init__(self, kind: str, start: int, width: int) -> None:
        self.kind = kind
        self.end = start
        """Of what is set aside, in the source."""
        self._width = width
        self._head = ""
        """Stands for what is set aside where the rest is parsed."""
        self._rows: list[Row] = []
        self._last_row: Row = ()
        """Of a paragraph: the row that its rest goes on in."""
        self._widths: list[int] | None = None
        self._num_head_rows = 0

    def rest(self, source: str) -> str:
        return self._head + source[self.end :]

    def goes_on(self, source: str) -> bool:
        """Whether these complete lines are still of this block alone."""
        return block_types(self.rest(source)) == [f"{self.kind}_open"]

    def rows(self, node: SyntaxTreeNode) -> list[Row]:
        """All of the block; `node` is its rest."""
        return self._rows + self._render(node)

    def set_aside(self, source: str, env: dict[str, Any]) -> bool:
        """All but its end; `env` has the references before it. Whether that could be done."""
        cut = self._table_cut(source) if self.kind == _TABLE else self._paragraph_cut(source)
        if cut is None:
            return False
        units = units_of(self._head + source[self.end : cut], _copy_of(env))
        if len(units) != 1 or units[0].node.type != self.kind:
            return False
        rows = self._render(units[0].node)
        if self.kind == _TABLE:
            if not self._head:
                self._keep_head(units[0])
        else:
            *rows, self._last_row = rows
            self._head = _STAND_IN
            cut += 1
        self._rows += rows
        self.end = cut
        return True

    def _keep_head(self, unit: Unit) -> None:
        self._head = "\n".join(unit.lines[unit.line : unit.line + 2]) + "\n"
        node = units_of(self._head, {})[0].node
        self._num_head_rows = len(table_rows(node, self._width, self._widths)[0])

    def _table_cut(self, source: str) -> int | None:
        """Behind a line that is not of the table's head."""
        begin = self.end
        if not self._head:
            while source[begin] == "\n":
                begin += 1
            for _ in range(2):
                begin = source.find("\n", begin) + 1
        cut = source.rfind("\n", begin, len(source) - KEPT_OPEN) + 1
        return cut or None

    def _paragraph_cut(self, source: str) -> int | None:
        """At a single blank within a line, which is only a blank."""
        at = len(source) - KEPT_OPEN
        while (at := source.rfind(" ", self.end + 1, at)) > 0:
            before, after = source[at - 1], source[at + 1]
            if not (before.isspace() or after.isspace() or before == "\\"):
                return at
        return None

    def _render(self, node: SyntaxTreeNode) -> list[Row]:
        """The rest of it."""
        if self.kind == _TABLE:
            rows, self._widths = table_rows(node, self._width, self._widths)
            return rows[self._num_head_rows :]
        spans = inline_spans(node, "text", "")
        if self._head:
            text, role = spans[0]
            rest: list[Span] = [(text.removeprefix(_STAND_IN), role), *spans[1:]]
            spans = [*self._last_row, (" ", "text"), *rest]
        return wrap(spans, self._width)


class StreamingMarkdown:
    """Append text, ask for `rows(width)` as often as the screen is drawn.

    Invariant: after `finish`, `rows(width) == render(source, width)`; before it they differ at
    most in references that are defined later and in the colours of an open code block.
    """

    def __init__(self) -> None:
        self.source = ""
        self.finished = False
        self._reset(0)

    def append(self, text: str) -> None:
        assert not self.finished
        self.source += text

    def finish(self) -> None:
        """No more text will come."""
        if not self.finished:
            self.finished = True
            self._rendered_chars = -1

    def rows(self, width: int) -> list[Row]:
        if width != self._width:
            self._reset(width)
        if self._rendered_chars != len(self.source):
            self._update()
        return self._frozen + self._tail

    def num_chars_to_do(self, width: int) -> int:
        """How much is rendered when the rows of a finished text are asked for, about 4 ms for a
        thousand. Of a text that still grows: 0, as it has to be shown."""
        if not self.finished or (width == self._width and self._rendered_chars >= 0):
            return 0
        return len(self.source) - (self._frozen_chars if width == self._width else 0)

    def take(self, width: int, rows: Sequence[Row]) -> None:
        """What `render` made of the source of a finished text, in another thread."""
        assert self.finished
        self._reset(width)
        self._frozen += rows
        self._frozen_chars = self._rendered_chars = len(self.source)

    @property
    def num_frozen_rows(self) -> int:
        """Leading rows that stay as they are at this width; all of them once finished."""
        return len(self._frozen)

    def _reset(self, width: int) -> None:
        self._width = width
        self._frozen: list[Row] = []
        self._tail: list[Row] = []
        self._frozen_chars = self._seen_newline = 0
        self._rendered_chars = -1
        self._gap = False
        self._number: int | None = None  # before the tail's first unit, and its number
        self._num_code_blocks = 0  # in what is frozen
        self._env: dict[str, Any] = {}
        self._long: LongBlock | None = None

    def _update(self) -> None:
        self._rendered_chars = len(self.source)
        if self.finished:
            self._render_end()
        elif not (self._long and self._update_long(self._long)):
            self._update_tail()

    def _update_tail(self) -> None:
        self._long = None
        end = self.source.rfind("\n") + 1
        if len(self.source) - end > LONG_BLOCK and self.source.endswith("\n\n", 0, end):
            end = len(self.source)  # a line that begins a block, whatever it will be
        if end > self._seen_newline:
            self._seen_newline = end
            self._freeze(end)
        text = self.source[self._frozen_chars :]
        if len(text) > LONG_BLOCK and self._begin_long(text):
            return
        units = self._parse_tail(text)[0]
        self._tail = [()] if self._frozen and self._gap and units else []
        for unit in units:
            gap = unit is not units[0] and unit.gap
            add_unit(self._tail, replace(unit, gap=gap), self._width, live=unit is units[-1])

    def _parse_tail(self, text: str) -> tuple[list[Unit], bool]:
        """Of the tail; and whether there are references, in it or before it."""
        env = _copy_of(self._env)
        units = units_of(text, env, number=self._number, code_blocks=self._num_code_blocks)
        return units, bool(env.get("references"))

    def _render_end(self) -> None:
        """A reference that is defined late may be used in what is frozen; else that stays."""
        units, has_references = self._parse_tail(self.source[self._frozen_chars :])
        self._tail, self._long = [], None
        if has_references:
            self._frozen = render(self.source, self._width)
            return
        for unit in units:
            gap = self._gap if unit is units[0] else unit.gap
            add_unit(self._frozen, replace(unit, gap=gap), self._width, live=False)

    def _begin_long(self, text: str) -> bool:
        kind = "".join(block_types(text)).removesuffix("_open")
        if kind not in (_PARAGRAPH, _TABLE):
            return False
        long = LongBlock(kind, self._frozen_chars, self._width)
        if not long.set_aside(self.source, self._env):
            return False
        self._long = long
        return self._update_long(long)

    def _update_long(self, long: LongBlock) -> bool:
        """Whether the tail still is, or begins with, the long block."""
        complete = self.source[: self.source.rfind("\n") + 1]
        if not long.goes_on(complete):
            return False
        if len(self.source) - long.end > LONG_BLOCK:
            long.set_aside(self.source, self._env)
        units = self._parse_tail(long.rest(self.source))[0]
        if units[0].node.type != long.kind:  # for what its unfinished line looks like
            units = self._parse_tail(long.rest(complete))[0]
        self._tail = [()] if self._frozen and self._gap else []
        self._tail += long.rows(units[0].node)
        for unit in units[1:]:
            add_unit(self._tail, unit, self._width, live=unit is units[-1])
        return True

    def _freeze(self, end: int) -> None:
        """Freeze all units of the complete lines but the last: that one may still grow.

        Half a line is not looked at, since it may be taken for something else; but one that is long
        already, after a blank line, ends what was before it whatever it is.
        """
        text = self.source[self._frozen_chars : end]
        types = block_types(text)
        if len(types) < 2 and types[:1] not in (["bullet_list_open"], ["ordered_list_open"]):
            return
        blocks = self._num_code_blocks
        units = units_of(text, self._env, number=self._number, code_blocks=blocks)
        if len(units) < 2:
            return
        first, last = units[0], units[-1]
        for unit in units[:-1]:
            gap = self._gap if unit is first else unit.gap
            add_unit(self._frozen, replace(unit, gap=gap), self._width, live=False)
            self._num_code_blocks += sum(map(is_code, unit.node.walk()))
        lines = text.split("\n")
        self._frozen_chars += sum(len(line) + 1 for line in lines[: last.line])
        self._gap, self._number = last.gap, last.number


def _copy_of(env: dict[str, Any]) -> dict[str, Any]:
    """The references of a tail that still changes must not stay."""
    return {key: copy(value) for key, value in env.items()}
