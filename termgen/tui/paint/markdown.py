"""Markdown to rows.

CommonMark with tables and strikethrough; raw HTML is text. What is given is already safe for the
terminal (`sanitize`). A text that still grows is `markdown_stream`'s, which renders it unit by
unit. No Textual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len

from termgen.tui.paint.code_panel import CodeBlock, code_rows, is_code, language_of
from termgen.tui.paint.links import is_link, split_links
from termgen.tui.paint.spans import Row, Span, fit, merge, row_width, wrap

BULLETS = "•◦▪"
MIN_COLUMN = 4
NUMBER_INDENT = 4

Cells = list[list[Span]]
"""A line of a table."""

parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_blocks = MarkdownIt("commonmark", {"html": False}).enable("table")
_blocks.core.ruler.disable("inline")
for _each in (parser, _blocks):
    _each.parse("x")  # makes its rules: two threads must not be at that at once


def render(source: str, width: int) -> list[Row]:
    """The whole of `source` at once."""
    rows: list[Row] = []
    for unit in units_of(source, {}):
        add_unit(rows, unit, width, live=False)
    return rows


def code_blocks(source: str) -> list[CodeBlock]:
    """Code blocks, in the order of the numbers in their headers."""
    root = SyntaxTreeNode(parser.parse(source, {}))
    return [CodeBlock(language_of(node), node.content) for node in root.walk() if is_code(node)]


def block_types(source: str) -> list[str]:
    """Types of the top-level blocks; their text is not parsed."""
    tokens = _blocks.parse(source)
    return [token.type for token in tokens if not token.level and token.nesting >= 0]


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of markdown that is frozen at once: a top-level block, or one item of a top-level
    list."""

    node: SyntaxTreeNode
    line: int
    gap: bool
    """True if a blank row precedes it (unless it is the first)."""
    lines: Sequence[str]
    """The source."""
    number: int | None = None
    """The item's number in an ordered list."""


def units_of(
    source: str, env: dict[str, Any], *, number: int | None = None, code_blocks: int = 0
) -> list[Unit]:
    """The units of `source`. number: that of the next item, if the text before ends with a list.
    code_blocks: number of code blocks before `source`."""
    lines = source.split("\n")
    units: list[Unit] = []
    root = SyntaxTreeNode(parser.parse(source, env))
    for index, node in enumerate(filter(is_code, root.walk()), code_blocks + 1):
        node.meta["number"] = index
    for node in root.children:
        line = node.map[0] if node.map else 0
        if node.type not in ("bullet_list", "ordered_list"):
            units.append(Unit(node, line, True, lines))
            continue
        items = _items(node, lines, number=None if units else number)
        units.append(replace(items[0], gap=True))
        units += items[1:]
    return units


def _items(node: SyntaxTreeNode, lines: Sequence[str], *, number: int | None = None) -> list[Unit]:
    ordered = node.type == "ordered_list"
    start = int(node.attrs.get("start", 1)) if number is None else number
    items: list[Unit] = []
    for index, item in enumerate(node.children):
        line = item.map[0] if item.map else 0
        gap = index > 0 and not lines[line - 1].strip(" >")
        items.append(Unit(item, line, gap, lines, start + index if ordered else None))
    return items


def copy_env(env: dict[str, Any]) -> dict[str, Any]:
    """The references of what still changes must not stay."""
    return {key: copy(value) for key, value in env.items()}


def add_unit(rows: list[Row], unit: Unit, width: int, *, live: bool) -> None:
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


def _item(unit: Unit, width: int, *, live: bool, depth: int) -> list[Row]:
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
    return wrap(inline_spans(node, "text", ""), width)


def _heading(node: SyntaxTreeNode, width: int) -> list[Row]:
    level = int(node.tag[1:])
    flags = {1: "bu", 2: "b"}.get(level, "bi" if level > 3 else "b")
    role = "heading" if level <= 3 else "text"
    return wrap(inline_spans(node, role, flags), width)


def _rule(node: SyntaxTreeNode, width: int) -> list[Row]:
    return [(("─" * min(width, 40), "border"),)]


def _table(node: SyntaxTreeNode, width: int) -> list[Row]:
    lines, aligns = table_lines(node)
    return table_rows(lines, wanted_widths(lines), aligns, width, has_head=True)


def table_lines(node: SyntaxTreeNode) -> tuple[list[Cells], list[str]]:
    """A table's lines, head first, and the alignment of its columns."""
    lines = [row for part in node.children for row in part.children]
    cells = [[_table_cell(cell, "b") for cell in lines[0].children]]
    cells += [[_table_cell(cell, "") for cell in line.children] for line in lines[1:]]
    return cells, [str(cell.attrs.get("style", "")) for cell in lines[0].children]


def wanted_widths(lines: Sequence[Cells], before: Sequence[int] = ()) -> list[int]:
    """Widths at which these lines, and those of `before`, need no wrapping."""
    if not lines:
        return list(before)
    least = before or [MIN_COLUMN] * len(lines[0])
    return [
        max(width, *(_widest(line[i]) for line in lines if i < len(line)))
        for i, width in enumerate(least)
    ]


def table_rows(
    lines: Sequence[Cells],
    wanted: Sequence[int],
    aligns: Sequence[str],
    width: int,
    *,
    has_head: bool = False,
) -> list[Row]:
    """Columns as wide as they want, shrunk in proportion when the line is too short. The head is
    the first line, where there is one."""
    widths = _column_widths(wanted, width - 3 * (len(wanted) - 1))
    rows: list[Row] = []
    for index, line in enumerate(lines):
        rows += _table_line(line, widths, aligns)
        if has_head and not index:
            rows.append(merge([("─┼─".join("─" * w for w in widths), "border")]))
    return [fit(row, width) if row_width(row) > width else row for row in rows]


def _table_cell(cell: SyntaxTreeNode, flags: str) -> list[Span]:
    return list(inline_spans(cell, "text", flags))


def _widest(spans: Sequence[Span]) -> int:
    text = "".join(text for text, _ in spans)
    return max((cell_len(line) for line in text.split("\n")), default=0)


def _column_widths(wanted: Sequence[int], room: int) -> list[int]:
    widths = list(wanted)
    while sum(widths) > room and max(widths) > MIN_COLUMN:
        widths[widths.index(max(widths))] -= 1
    return widths


def _table_line(cells: Cells, widths: Sequence[int], aligns: Sequence[str]) -> list[Row]:
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


def inline_spans(node: SyntaxTreeNode, role: str, flags: str) -> list[Span]:
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
