"""A block that is still being written: what comes costs no more the longer it is.

What later text cannot change is settled: it is parsed once and its rows are parts, as those of
closed blocks are. `markdown_stream` hands over what has come since. No Textual.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from markdown_it.tree import SyntaxTreeNode

from termgen.tui.paint.code_panel import (
    code_foot,
    code_header,
    is_coloured_by_line,
    language_of,
    open_code_rows,
)
from termgen.tui.paint.markdown import (
    Cells,
    block_types,
    copy_env,
    inline_spans,
    table_lines,
    table_rows,
    units_of,
    wanted_widths,
)
from termgen.tui.paint.parts import PART_CHARS, Make, Part, rows_of
from termgen.tui.paint.spans import Row, Span, wrap

LONG_BLOCK = 4096
"""Characters of a paragraph from which its beginning is set aside."""
KEPT_OPEN = 1024
"""Characters at the end of a paragraph that are not set aside."""
LONG_TABLE = 2048
"""Characters of a table from which on its columns stay as they are."""
_STAND_IN = "x "
"""Goes before the rest of a paragraph, which could else be taken for another block's beginning."""


class LongParagraph:
    """A paragraph that grows. Until it is complete and rendered as a whole, a mark that opens in
    the settled part and closes behind it is shown as typed."""

    kind = "paragraph"

    def __init__(self, start: int, *, gap: bool, before: Row) -> None:
        """gap: whether a blank row goes before it."""
        self.end = self._start = start
        """`end`: of what is set aside, in the source."""
        self._gap, self._before = gap, before
        self._part: Part | None = None

    @property
    def parts(self) -> list[Part]:
        return [self._part] if self._part is not None else []

    @property
    def settled_rows(self) -> list[Row]:
        """Rows of the settled part without the last one, in which the rest continues."""
        return self._part.rows[:-1] if self._part is not None else []

    @property
    def last_row(self) -> Row:
        if self._part is None or not self._part.rows:
            return ()
        row = self._part.rows[-1]
        return row[len(self._before) :]

    def rest(self, source: str) -> str:
        return (_STAND_IN if self._part is not None else "") + source[self.end :]

    def goes_on(self, source: str) -> bool:
        """True if these complete lines still belong to this block alone."""
        return block_types(self.rest(source)) == ["paragraph_open"]

    def settle(self, source: str, env: dict[str, Any], width: int) -> bool:
        """Settle all but the end of a long paragraph. env: the references before it. True if some
        text was settled."""
        part = self._part
        is_laid_out = part is None or part.width == width
        if len(source) - self.end > LONG_BLOCK and is_laid_out:
            cut = self._cut(source)
            if cut is not None:
                self._set_aside(source, cut, env, width)
        return self._part is not None

    def _cut(self, source: str) -> int | None:
        """Position of a single blank within a line, at which the text can be cut."""
        at = len(source) - KEPT_OPEN
        while (at := source.rfind(" ", self.end + 1, at)) > 0:
            before, after = source[at - 1], source[at + 1]
            if not (before.isspace() or after.isspace() or before == "\\"):
                return at
        return None

    def _set_aside(self, source: str, cut: int, env: dict[str, Any], width: int) -> None:
        units = units_of(self.rest(source[:cut]), copy_env(env))
        if len(units) != 1 or units[0].node.type != self.kind:
            return
        fresh = self.rows(units[0].node, width)
        make = partial(_paragraph, source[self._start : cut], copy_env(env), gap=self._gap)
        if self._part is None:
            self._part = Part(make, 0, before=self._before)
            fresh = [(), *fresh] if self._gap else fresh
        else:
            del self._part.rows[-1:]
        self._part.grow(make, cut + 1 - self.end, fresh, width)
        self.end = cut + 1

    def rows(self, node: SyntaxTreeNode, width: int) -> list[Row]:
        """Rows of the unfinished line."""
        spans = inline_spans(node, "text", "")
        if self._part is not None:
            text, role = spans[0]
            rest: list[Span] = [(text.removeprefix(_STAND_IN), role), *spans[1:]]
            spans = [*self.last_row, (" ", "text"), *rest]
        return wrap(spans, width)


def _paragraph(text: str, env: dict[str, Any], width: int, *, gap: bool) -> list[Row]:
    spans: list[Span] = []
    for unit in units_of(text, copy_env(env)):
        spans += inline_spans(unit.node, "text", "")
    return [*([()] if gap else []), *wrap(spans, width)]


class OpenTable:
    """Every line is parsed once. Columns are as wide as what has come wants until it is long; then
    they stay until it is complete and rendered as a whole.
    """

    kind = "table"

    def __init__(
        self, head: str, end: int, env: dict[str, Any], width: int, *, gap: bool, before: Row
    ) -> None:
        """head: its first two lines, which end there in the source."""
        self.end = end
        """End of the settled lines in the source."""
        self._head = head
        self._lines, self._aligns = table_lines(units_of(head, copy_env(env))[0].node)
        """Lines of the last part."""
        self._wanted = self._columns = wanted_widths(self._lines)
        """Widths that the settled lines need, and those shown."""
        self._num_chars = len(head)
        self._gap, self._before = gap, before
        self.parts: list[Part] = []
        self._begin_part().lay_out(width)

    @property
    def is_long(self) -> bool:
        return self._num_chars > LONG_TABLE

    @property
    def settled_rows(self) -> list[Row]:
        return rows_of(self.parts)

    def rest(self, source: str) -> str:
        return self._head + source[self.end :]

    def goes_on(self, source: str) -> bool:
        """True if these complete lines belong to this block alone."""
        return block_types(self.rest(source)) == ["table_open"]

    def settle(self, source: str, env: dict[str, Any], width: int) -> None:
        """Settle the lines up to a blank one. source: complete lines only."""
        lines = source[self.end :].split("\n")
        num_lines = next(i for i, line in enumerate(lines) if not line.strip())
        text = "".join(f"{line}\n" for line in lines[:num_lines])
        if text:
            node = units_of(self._head + text, copy_env(env))[0].node
            self.end += len(text)
            self._take(table_lines(node)[0][1:], len(text), width)

    def is_final(self, width: int) -> bool:
        """True if all rows stay as they are when nothing more comes. Lays out the rows of a short
        table for that."""
        if not self.is_long:
            self._fit(self._wanted, width)
        return self._columns == self._wanted and all(part.width == width for part in self.parts)

    def rows(self, node: SyntaxTreeNode, width: int) -> list[Row]:
        """Rows of the unfinished line, which may need wider columns."""
        lines = table_lines(node)[0][1:]
        if not self.is_long:
            self._fit(wanted_widths(lines, self._wanted), width)
        return table_rows(lines, self._columns, self._aligns, width)

    def _take(self, lines: Sequence[Cells], num_chars: int, width: int) -> None:
        part, was_long = self.parts[-1], self.is_long
        if was_long and (part.num_chars > PART_CHARS or part.width != width):
            self._lines = []
            part = self._begin_part()
            part.width = width
        self._lines = [*self._lines, *lines]
        self._wanted = wanted_widths(lines, self._wanted)
        self._num_chars += num_chars
        make = self._make(is_first=len(self.parts) == 1)
        if part.width == width:
            fresh = table_rows(lines, self._columns, self._aligns, width)
            part.grow(make, num_chars, fresh, width)
        else:
            part.change(make, part.num_chars + num_chars)
        if self.is_long and not was_long:
            self._fit(self._wanted, width)

    def _fit(self, columns: list[int], width: int) -> None:
        """Lay out all rows of a short table for these column widths."""
        [part] = self.parts
        if columns != self._columns:
            self._columns = columns
            part.change(self._make(is_first=True), part.num_chars)
        if part.width != width:
            part.lay_out(width)

    def _begin_part(self) -> Part:
        part = Part(self._make(is_first=not self.parts), 0, before=self._before)
        self.parts.append(part)
        return part

    def _make(self, *, is_first: bool) -> Make:
        """The function that makes the last part's rows."""
        return partial(
            _table_part,
            tuple(self._lines),
            tuple(self._columns),
            self._aligns,
            has_head=is_first,
            gap=is_first and self._gap,
        )


def _table_part(
    lines: Sequence[Cells],
    columns: Sequence[int],
    aligns: Sequence[str],
    width: int,
    *,
    has_head: bool,
    gap: bool,
) -> list[Row]:
    rows = table_rows(lines, columns, aligns, width, has_head=has_head)
    return [(), *rows] if gap else rows


class OpenCode:
    """A fence. Every line is coloured once, on its own; when it is complete, it is coloured as one
    if it is not too long."""

    kind = "fence"

    def __init__(
        self, head: str, end: int, number: int, width: int, *, gap: bool, before: Row
    ) -> None:
        """head: its first line, which ends there in the source."""
        self.end = end
        """End of the settled lines in the source."""
        self._head = head
        node = units_of(head, {})[0].node
        self._language = language_of(node)
        self._closing = re.compile(rf" {{0,3}}{re.escape(node.markup)}{node.markup[0]}*[ \t]*")
        self._num_chars = 0
        """Characters of code so far."""
        self._before = before
        make = partial(_code_part, (), self._language, number=number, gap=gap)
        self.parts = [Part(make, 0, before=before)]
        """The first is the header."""
        self.parts[0].lay_out(width)
        self._lines: list[str] = []
        """Lines of the last part."""

    @property
    def settled_rows(self) -> list[Row]:
        return rows_of(self.parts)

    def rest(self, source: str) -> str:
        return self._head + source[self.end :]

    def goes_on(self, source: str) -> bool:
        """True if none of these complete lines closes the fence."""
        return self._num_lines(source[self.end :]) is None

    def _num_lines(self, text: str) -> int | None:
        """Lines before the closing fence; None if it is not there yet."""
        lines = enumerate(text.split("\n")[:-1])
        return next((i for i, line in lines if self._closing.fullmatch(line)), None)

    def settle(self, source: str, env: dict[str, Any], width: int) -> None:
        """Settle the lines. source: complete lines only."""
        text = source[self.end :]
        lines = text.split("\n")[:-1][: self._num_lines(text)]
        text = "".join(f"{line}\n" for line in lines)
        if not text:
            return
        part = self.parts[-1]
        if len(self.parts) == 1 or part.num_chars > PART_CHARS or part.width != width:
            self._lines = []
            part = Part(partial(_code_part, (), self._language), 0, before=self._before)
            self.parts.append(part)
        node = units_of(self._head + text, copy_env(env))[0].node
        fresh = node.content.split("\n")[:-1]  # without the indent of the fence
        self._lines = [*self._lines, *fresh]
        make = partial(_code_part, tuple(self._lines), self._language)
        part.grow(make, len(text), open_code_rows(fresh, self._language, width), width)
        self._num_chars += sum(len(line) + 1 for line in fresh)
        self.end += len(text)

    def is_final(self, width: int) -> bool:
        """True if all rows stay as they are when nothing more comes."""
        is_laid_out = all(part.width == width for part in self.parts)
        return is_laid_out and is_coloured_by_line(self._num_chars - 1)

    def rows(self, node: SyntaxTreeNode, width: int) -> list[Row]:
        """Rows of the unfinished line, and the foot below it."""
        code = node.content.removesuffix("\n")
        lines = code.split("\n") if code or len(self.parts) == 1 else []
        return [*open_code_rows(lines, self._language, width), code_foot(width)]


def _code_part(
    lines: Sequence[str], language: str, width: int, *, number: int | None = None, gap: bool = False
) -> list[Row]:
    header = [code_header(language, number, width)] if number is not None else []
    return [*([()] if gap else []), *header, *open_code_rows(lines, language, width)]
