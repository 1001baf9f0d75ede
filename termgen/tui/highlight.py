"""Source code to coloured spans, through Pygments.

Pygments and its lexers are imported on first use: a chat without code never pays for them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from termgen.tui.spans import Row, merge

if TYPE_CHECKING:
    from pygments.lexer import Lexer  # type: ignore[import-untyped]

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
        # Pygments drops leading blank lines and adds a final newline unless told not to.
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
