"""The part of CONTRIBUTING.md's language rule that a test can hold: docstrings, comments, pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    file
    for top in ("termgen", "tests", "benchmarks", "examples")
    for file in (ROOT / top).rglob("*.py")
)
FOLDERS = sorted({str(file.relative_to(ROOT).parent) for file in FILES})
PAGES = [
    "README.md",
    "CHANGELOG.md",
    *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md")),
]

OPENING = re.compile(r"(Of|By|As|To be|(In|For|From|At|On|With) which)\b", re.IGNORECASE)
"""Openings that are neither a noun nor a verb."""
PHRASES = re.compile(
    r"\b(whoever|whomever|nobody|somebody|told(?! apart)|likewise|so long(?! as))\b", re.IGNORECASE
)
"""Words for people, and of a dialect of our own: a component has a name, events are reported,
passed or logged to it, and a statement is complete without the one before."""
PRIVATE = re.compile(r"(?<![\w.~])/(home|root|work)/\w")
"""Paths of one machine."""
DIRECTIVE = re.compile(r"#\s*(type:|noqa|ruff:|fmt:|pragma:|!)")

MEANS_PEOPLE: frozenset[tuple[str, str]] = frozenset()
"""(file, phrase): the few places where the words are about people."""


class Text(NamedTuple):
    line: int
    text: str
    opens: bool
    """A docstring or a block comment. A comment behind code may begin with any word."""


def docstrings(source: str) -> Iterator[Text]:
    """Every string that is a statement: of modules, classes, functions and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield Text(node.lineno, " ".join(node.value.value.split()), True)


def comments(source: str) -> Iterator[Text]:
    """Comments, those of adjacent lines joined. A directive of a tool is not prose."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [t for t in tokens if t.type == tokenize.COMMENT and not DIRECTIVE.match(t.string)]
    block: list[tokenize.TokenInfo] = []
    for token, after in pairwise([*found, None]):
        assert token is not None
        block.append(token)
        is_block = not token.line[: token.start[1]].strip()
        goes_on = after is not None and after.start == (token.start[0] + 1, token.start[1])
        if not (is_block and goes_on):
            words = " ".join(part.string.lstrip("#: ").rstrip() for part in block)
            yield Text(block[0].start[0], words, is_block)
            block = []


def faults(source: str, allowed: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """(line, text) of what breaks the rule. allowed: phrases that are about people here."""
    found = []
    for text in sorted([*docstrings(source), *comments(source)]):
        phrases = {match[0].lower() for match in PHRASES.finditer(text.text)}
        if (
            (text.opens and OPENING.match(text.text))
            or phrases - allowed
            or PRIVATE.search(text.text)
        ):
            found.append((text.line, text.text))
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_are_plain(folder: str) -> None:
    found = []
    for file in (ROOT / folder).glob("*.py"):
        name = str(file.relative_to(ROOT))
        allowed = frozenset(phrase for path, phrase in MEANS_PEOPLE if path == name)
        for line, text in faults(file.read_text(encoding="utf-8"), allowed):
            found.append(f"{name}:{line}: {text[:160]}")
    assert not found, "see Language in CONTRIBUTING.md\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_the_component(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    found = [text[max(0, m.start() - 60) : m.end() + 60] for m in PHRASES.finditer(text)]
    assert found == []


def test_every_exception_is_used() -> None:
    for name, phrase in MEANS_PEOPLE:
        source = (ROOT / name).read_text(encoding="utf-8")
        assert PHRASES.fullmatch(phrase) and faults(source) != faults(source, frozenset({phrase}))


@pytest.mark.parametrize(
    "source",
    [
        '"""Of its rest."""',
        '"""\nBy kind, and by length.\n"""',
        'class A:\n    """As it is drawn."""',
        'class A:\n    size: int = 3\n    """From which on a part grows."""',
        'class A:\n    def __init__(self):\n        self.a = 3\n        """Of the last part."""',
        'def f():\n    """For which width it is."""',
        'async def f():\n    """In which chat, and what."""',
        'def f():\n    r"""To be raised again."""',
        'def f():\n    """of one frame"""',
        'LIMIT = 3\n"""At which it stops."""',
        "# Of equal logits any may come first.\nx = 1",
        "def f():\n    # In which order does not matter:\n    # both are read.\n    return 1",
        "x = 1  # noqa: E501\n# By rows, then by columns.\ny = 2",
        "#: As in the paper.\nx = 1",
        '"""Rows that nobody reads."""',
        '"""A queue. Whoever reads it\nclears it."""',
        "x = 1  # somebody may wait",
        "# The row is free: to be\n# used by somebody else.\nx = 1",
        '"""The core is told of it."""',
        '"""The listeners are\ntold first."""',
        "# as measured in /home/me/runs\nx = 1",
    ],
)
def test_what_breaks_the_rule_is_found(source: str) -> None:
    assert len(faults(source)) == 1


def test_faults_name_their_lines() -> None:
    source = (
        '"""Rows."""\n\nx = 1\n"""Of x."""\n# By hand,\n# and nobody looked.\ny = [\n    # of y\n]'
    )
    assert faults(source) == [(4, "Of x."), (5, "By hand, and nobody looked."), (8, "of y")]


@pytest.mark.parametrize(
    "source",
    [
        '"""Offsets of rows."""',
        '"""Assigns slots. By then the step has landed."""',
        '"""Rows, by name of the file."""',
        'x = "Of nobody"',
        'print("""By somebody""")',
        "x = 1  # of 5 ms",
        "x = 1  # as C does it\n# Rows are sorted.",
        "# Sorted rows.\n# By then all are read.\nx = 1",
        "x = 1  # type: ignore[arg-type]",
        '"""A strip whose rows are told apart, as long as they differ."""',
        '"""Files below ~/home/x and termgen/home/y."""',
    ],
)
def test_what_keeps_the_rule_is_not_found(source: str) -> None:
    assert faults(source) == []


def test_phrases_about_people_may_be_allowed() -> None:
    source = '"""Nobody logs in."""\n# Whoever it is.'
    assert faults(source, frozenset({"nobody"})) == [(2, "Whoever it is.")]
    assert faults('"""Of nobody."""', frozenset({"nobody"}))
