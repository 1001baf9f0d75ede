"""A code block on the screen: a panel of its own colour below a header with language and number.

The renderer of markdown gives every code block a number, `meta["number"]` of its node. No Textual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len

from termgen.tui.paint.spans import Row, Span, fit, merge, wrap_hard

if TYPE_CHECKING:
    from pygments.lexer import Lexer  # type: ignore[import-untyped]


COPY_ROLE = "link@code"
"""Role of the words in a header that copy the block; no text has it."""
COLOURED_AS_ONE = 12_000
"""Characters up to which a complete block is coloured anew, as a whole: it takes as long as a frame
may. A longer one stays as it was while it grew."""

MAX_HIGHLIGHTED_CHARS = 100_000
"""Beyond this a block is shown plain."""

_ROLES = {
    "Keyword": "syn-keyword",
    "Keyword.Type": "syn-type",
    "Name.Builtin": "syn-type",
    "Name.Class": "syn-type",
    "Name.Exception": "syn-type",
    "Name.Function": "syn-function",
    "Name.Decorator": "syn-function",
    "Name.Tag": "syn-keyword",
    "Name.Attribute": "syn-function",
    "Operator": "syn-operator",
    "Operator.Word": "syn-keyword",
    "Punctuation": "syn-operator",
    "Literal.String": "syn-string",
    "Literal.Number": "syn-number",
    "Comment": "syn-comment/i",
    "Comment.Preproc": "syn-keyword",
    "Generic.Deleted": "bad",
    "Generic.Inserted": "good",
    "Generic.Heading": "heading",
    "Generic.Subheading": "muted",
}


@dataclass(frozen=True, slots=True)
class CodeBlock:
    language: str
    code: str


def is_code(node: SyntaxTreeNode) -> bool:
    return node.type in ("fence", "code_block")


def language_of(node: SyntaxTreeNode) -> str:
    words = node.info.split(maxsplit=1)
    return words[0] if words else ""


def code_header(language: str, number: int, width: int) -> Row:
    """The language, and the block's number with the word that copies it."""
    copy: Span = (f"[{number}] copy", COPY_ROLE)
    label: Span = (f" {language}", "muted@code")
    room = width - cell_len(copy[0]) - 1
    if room < 1:
        return fit((label,), width, "text@code")
    return (*fit((label,), room, "text@code"), copy, (" ", "text@code"))


def code_rows(node: SyntaxTreeNode, width: int, *, live: bool) -> list[Row]:
    """A panel of its own background below a header."""
    language = language_of(node)
    code = node.content.removesuffix("\n")
    rows: list[Row] = [code_header(language, node.meta["number"], width)]
    if live or is_coloured_by_line(len(code)):
        rows += open_code_rows(code.split("\n"), language, width)
    else:
        for coloured in highlight(code, language):
            rows += _code_line(coloured, width)
    rows.append(code_foot(width))
    return rows


def is_coloured_by_line(num_chars: int) -> bool:
    """True if a complete block of this size keeps the colours it had while it grew."""
    return COLOURED_AS_ONE < num_chars <= MAX_HIGHLIGHTED_CHARS


def open_code_rows(lines: Sequence[str], language: str, width: int) -> list[Row]:
    return [row for line in lines for row in _open_code_line(line, language, width)]


def code_foot(width: int) -> Row:
    return fit((), width, "text@code")


@lru_cache(maxsize=4096)
def _open_code_line(line: str, language: str, width: int) -> tuple[Row, ...]:
    """A line of a block that still grows, or is long, is coloured once, on its own."""
    return tuple(_code_line(highlight(line, language)[0], width))


def _code_line(line: Row, width: int) -> list[Row]:
    rows: list[Row] = []
    for piece in wrap_hard(line, max(1, width - 2)):
        spans = [(" ", "text@code"), *((text, _on_code(role)) for text, role in piece)]
        rows.append(fit(spans, width, "text@code"))
    return rows


def _on_code(role: str) -> str:
    name, slash, flags = role.partition("/")
    return f"{name}@code{slash}{flags}"


# Source code to coloured spans, through Pygments.
#
# Pygments and its lexers are imported on first use: a chat without code never pays for them.


def highlight(code: str, language: str) -> list[Row]:
    """One row per line of `code`."""
    lexer = _lexer(language) if len(code) <= MAX_HIGHLIGHTED_CHARS else None
    if lexer is None:
        return [((line, "code-text"),) for line in code.split("\n")]
    rows: list[list[tuple[str, str]]] = [[]]
    for token, value in lexer.get_tokens(code):
        role = _role(token)
        first, *others = value.split("\n")
        rows[-1].append((first, role))
        rows.extend([(part, role)] for part in others)
    lines = code.count("\n") + 1
    return [merge(row) for row in rows[:lines]] + [()] * (lines - len(rows))


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    if not language:
        return None
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
    from pygments.util import ClassNotFound  # type: ignore[import-untyped]

    try:
        # Pygments drops leading blank lines and adds a final newline by default.
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


@lru_cache(maxsize=256)
def _role(token: Any) -> str:
    """The role of the nearest ancestor that has one."""
    while token:
        role = _ROLES.get(str(token).removeprefix("Token."))
        if role is not None:
            return role
        token = token.parent
    return "code-text"
