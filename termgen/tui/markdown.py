"""Markdown to rows, and a stream of it that costs the same however long it has become.

CommonMark with tables and strikethrough; raw HTML is text. `StreamingMarkdown` freezes the rows
of every block that later text cannot change any more and renders only the open tail. Its text is
already safe for the terminal (`sanitize`). No Textual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len

from termgen.tui.code_panel import CodeBlock, code_rows, is_code, language_of
from termgen.tui.links import is_link, split_links
from termgen.tui.spans import Row, Span, fit, merge, row_width, wrap

BULLETS = "•◦▪"
MIN_COLUMN = 4
NUMBER_INDENT = 4

_parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def render(source: str, width: int) -> list[Row]:
    """The whole of `source` at once."""
    rows: list[Row] = []
    for unit in _units(source, {}):
        _add(rows, unit, width, live=False)
    return rows


def code_blocks(source: str) -> list[CodeBlock]:
    """In the order of the numbers in their headers."""
    root = SyntaxTreeNode(_parser.parse(source, {}))
    return [CodeBlock(language_of(node), node.content) for node in root.walk() if is_code(node)]


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
            self._reset(self._width)

    def rows(self, width: int) -> list[Row]:
        if width != self._width:
            self._reset(width)
        if self._rendered_chars != len(self.source):
            self._update()
        return self._frozen + self._tail

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

    def _update(self) -> None:
        self._rendered_chars = len(self.source)
        if self.finished:
            self._frozen = render(self.source, self._width)
            return
        newline = self.source.rfind("\n") + 1
        if newline > self._seen_newline:
            self._seen_newline = newline
            self._freeze(newline)
        # A copy of the references: those of a tail that still changes must not stay.
        env = {key: dict(value) for key, value in self._env.items()}
        text, blocks = self.source[self._frozen_chars :], self._num_code_blocks
        units = _units(text, env, number=self._number, code_blocks=blocks)
        self._tail = [()] if self._frozen and self._gap and units else []
        for unit in units:
            gap = unit is not units[0] and unit.gap
            _add(self._tail, replace(unit, gap=gap), self._width, live=unit is units[-1])

    def _freeze(self, end: int) -> None:
        """Freeze all units of the complete lines but the last: that one may still grow.

        Only complete lines are looked at, since half a line may be taken for something else.
        """
        text = self.source[self._frozen_chars : end]
        blocks = self._num_code_blocks
        units = _units(text, self._env, number=self._number, code_blocks=blocks)
        if len(units) < 2:
            return
        first, last = units[0], units[-1]
        for unit in units[:-1]:
            gap = self._gap if unit is first else unit.gap
            _add(self._frozen, replace(unit, gap=gap), self._width, live=False)
            self._num_code_blocks += sum(map(is_code, unit.node.walk()))
        lines = text.split("\n")
        self._frozen_chars += sum(len(line) + 1 for line in lines[: last.line])
        self._gap, self._number = last.gap, last.number


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is frozen at once: a top-level block, or one item of a top-level list."""

    node: SyntaxTreeNode
    line: int
    gap: bool
    """Whether a blank row goes before it (unless it is the first)."""
    lines: Sequence[str]
    """The source."""
    number: int | None = None
    """Its number in an ordered list."""


def _units(
    source: str, env: dict[str, Any], *, number: int | None = None, code_blocks: int = 0
) -> list[_Unit]:
    """What comes before `source` has so many code blocks, and ends with a list whose next item
    would have this number, if it is given."""
    lines = source.split("\n")
    units: list[_Unit] = []
    root = SyntaxTreeNode(_parser.parse(source, env))
    for index, node in enumerate(filter(is_code, root.walk()), code_blocks + 1):
        node.meta["number"] = index
    for node in root.children:
        line = node.map[0] if node.map else 0
        if node.type not in ("bullet_list", "ordered_list"):
            units.append(_Unit(node, line, True, lines))
            continue
        items = _items(node, lines, number=None if units else number)
        units.append(replace(items[0], gap=True))
        units += items[1:]
    return units


def _items(node: SyntaxTreeNode, lines: Sequence[str], *, number: int | None = None) -> list[_Unit]:
    ordered = node.type == "ordered_list"
    start = int(node.attrs.get("start", 1)) if number is None else number
    items: list[_Unit] = []
    for index, item in enumerate(node.children):
        line = item.map[0] if item.map else 0
        gap = index > 0 and not lines[line - 1].strip(" >")
        items.append(_Unit(item, line, gap, lines, start + index if ordered else None))
    return items


def _add(rows: list[Row], unit: _Unit, width: int, *, live: bool) -> None:
    if rows and unit.gap:
        rows.append(())
    if unit.node.type == "list_item":
        rows.extend(_item(unit, width, live=live, depth=0))
    else:
        rows.extend(_block(unit.node, unit.lines, width, live=live))


def _block(
    node: SyntaxTreeNode, lines: Sequence[str], width: int, *, live: bool, depth: int = 0
) -> list[Row]:
    if is_code(node):
        return code_rows(node, width, live=live)
    if node.type in ("bullet_list", "ordered_list"):
        rows: list[Row] = []
        items = _items(node, lines)
        for item in items:
            if rows and item.gap:
                rows.append(())
            rows += _item(item, width, live=live and item is items[-1], depth=depth)
        return rows
    if node.type == "blockquote":
        return _quote(node, lines, width, live=live)
    renderer = _RENDERERS.get(node.type)
    if renderer is not None:
        return renderer(node, width)
    return wrap([(node.content, "text")], width)


def _quote(node: SyntaxTreeNode, lines: Sequence[str], width: int, *, live: bool) -> list[Row]:
    rows: list[Row] = []
    for child in node.children:
        if rows:
            rows.append(())
        rows += _block(child, lines, max(1, width - 2), live=live and child is node.children[-1])
    return [(("▎ ", "faint"), *_recolour(row, "muted")) for row in rows or [()]]


def _item(unit: _Unit, width: int, *, live: bool, depth: int) -> list[Row]:
    bullet = BULLETS[min(depth, len(BULLETS) - 1)]
    mark = f"{unit.number}. ".rjust(NUMBER_INDENT) if unit.number is not None else f"{bullet} "
    indent = len(mark)
    rows: list[Row] = []
    for child in unit.node.children:
        open_child = live and child is unit.node.children[-1]
        inner = _block(child, unit.lines, max(1, width - indent), live=open_child, depth=depth + 1)
        if rows and child.type not in ("bullet_list", "ordered_list"):
            rows.append(())
        rows += inner
    first: Span = (mark, "accent")
    if not rows:
        return [(first,)]
    blank: Span = (" " * indent, "text")
    return [(first, *rows[0]), *((blank, *row) if row else () for row in rows[1:])]


def _paragraph(node: SyntaxTreeNode, width: int) -> list[Row]:
    return wrap(_inline_children(node, "text", ""), width)


def _heading(node: SyntaxTreeNode, width: int) -> list[Row]:
    level = int(node.tag[1:])
    flags = {1: "bu", 2: "b"}.get(level, "bi" if level > 3 else "b")
    role = "heading" if level <= 3 else "text"
    return wrap(_inline_children(node, role, flags), width)


def _rule(node: SyntaxTreeNode, width: int) -> list[Row]:
    return [(("─" * min(width, 40), "border"),)]


def _table(node: SyntaxTreeNode, width: int) -> list[Row]:
    """Columns as wide as their content, shrunk in proportion when the line is too short."""
    lines = [row for part in node.children for row in part.children]
    heads = [_table_cell(cell, "b") for cell in lines[0].children]
    body = [[_table_cell(cell, "") for cell in line.children] for line in lines[1:]]
    aligns = [str(cell.attrs.get("style", "")) for cell in lines[0].children]
    wanted = [
        max(MIN_COLUMN, *(_widest(line[i]) for line in [heads, *body] if i < len(line)))
        for i in range(len(heads))
    ]
    widths = _column_widths(wanted, width - 3 * (len(heads) - 1))
    rows = _table_line(heads, widths, aligns)
    rows.append(merge([("─┼─".join("─" * w for w in widths), "border")]))
    for line in body:
        rows += _table_line(line, widths, aligns)
    return [fit(row, width) if row_width(row) > width else row for row in rows]


def _table_cell(cell: SyntaxTreeNode, flags: str) -> list[Span]:
    return list(_inline_children(cell, "text", flags))


def _widest(spans: Sequence[Span]) -> int:
    text = "".join(text for text, _ in spans)
    return max((cell_len(line) for line in text.split("\n")), default=0)


def _column_widths(wanted: list[int], room: int) -> list[int]:
    widths = list(wanted)
    while sum(widths) > room and max(widths) > MIN_COLUMN:
        widths[widths.index(max(widths))] -= 1
    return widths


def _table_line(cells: list[list[Span]], widths: list[int], aligns: list[str]) -> list[Row]:
    wrapped = [wrap(cell, width) for cell, width in zip(cells, widths, strict=False)]
    wrapped += [[()]] * (len(widths) - len(wrapped))
    height = max(len(lines) for lines in wrapped)
    rows: list[Row] = []
    for y in range(height):
        spans: list[Span] = []
        for index, lines in enumerate(wrapped):
            if index:
                spans.append((" │ ", "border"))
            spans += _aligned(lines[y] if y < len(lines) else (), widths[index], aligns[index])
        rows.append(tuple(spans))
    return rows


def _aligned(row: Row, width: int, align: str) -> Row:
    free = max(0, width - row_width(row))
    left = free if "right" in align else free // 2 if "center" in align else 0
    return fit(((" " * left, "text"), *row), width)


def _inline_children(node: SyntaxTreeNode, role: str, flags: str) -> list[Span]:
    spans: list[Span] = []
    for inline in node.children:
        for child in inline.children:
            _inline(child, role, flags, spans)
    return spans


def _inline(node: SyntaxTreeNode, role: str, flags: str, out: list[Span]) -> None:
    if node.type in ("softbreak", "hardbreak"):
        out.append(("\n", role))  # a model that breaks a line means it
    elif node.type == "code_inline":
        out.append((node.content, _styled("syn-string@code", flags)))
    elif node.type in ("strong", "em", "s"):
        flag = {"strong": "b", "em": "i", "s": "s"}[node.type]
        merged = flags if flag in flags else flags + flag
        for child in node.children:
            _inline(child, role, merged, out)
    elif node.type == "link":
        inner: list[Span] = []
        for child in node.children:
            _inline(child, "link", flags + "u", inner)
        href = str(node.attrs.get("href", ""))
        address = f" {href}" if is_link(href) else ""
        out.extend((text, name + address) for text, name in inner)
        if href and href != "".join(text for text, _ in inner):
            out.append((f" ({href})", "muted" + address))
    elif node.type == "image":
        out.append((f"🖼 {node.content or node.attrs.get('src', '')}", "muted"))
    elif node.type == "text" and role != "link":
        for text, has_address in split_links(node.content):
            name = f"{_styled('link', flags + 'u')} {text}" if has_address else _styled(role, flags)
            out.append((text, name))
    else:
        out.append((node.content, _styled(role, flags)))


def _styled(role: str, flags: str) -> str:
    return f"{role}/{flags}" if flags else role


def _recolour(row: Row, role: str) -> Row:
    """Plain text of a quotation in a quieter colour."""
    return tuple(
        (text, role + name[4:]) if name == "text" or name.startswith("text/") else (text, name)
        for text, name in row
    )


_RENDERERS: dict[str, Callable[[SyntaxTreeNode, int], list[Row]]] = {
    "paragraph": _paragraph,
    "heading": _heading,
    "hr": _rule,
    "table": _table,
}
