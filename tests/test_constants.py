"""Constants stand at the top of their file, before its first function or class."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "termgen"
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]+$")
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def late_constants(source: str) -> list[str]:
    """Constants below a function or class, except those made of what the file defines below too,
    as tables of functions are."""
    body = ast.parse(source).body
    first = next((i for i, node in enumerate(body) if isinstance(node, DEFINITION)), len(body))
    late: dict[str, set[str]] = {}
    defined: set[str] = set()
    for node in body[first:]:
        name = _constant(node)
        if name is not None:
            late[name] = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {name}
        elif isinstance(node, DEFINITION):
            defined.add(node.name)
        else:
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    defined.add(part.id)
    while bound := {name for name, used in late.items() if used & defined} - defined:
        defined |= bound
    return [name for name in late if name not in defined]


def _constant(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign):
        (target, *_) = node.targets
    elif isinstance(node, ast.AnnAssign):
        target = node.target
    else:
        return None
    is_constant = isinstance(target, ast.Name) and CONSTANT.match(target.id)
    return target.id if is_constant and isinstance(target, ast.Name) else None


@pytest.mark.parametrize("file", FILES)
def test_constants_stand_at_the_top(file: str) -> None:
    assert late_constants((PACKAGE / file).read_text(encoding="utf-8")) == []


def test_a_late_constant_is_found() -> None:
    source = (
        "ONE = 1\ndef f(): ...\nTWO = ONE\n_SIX: int = TWO\nTABLE = {'f': f}\nBOTH = TABLE\nT = 2"
    )
    assert late_constants(source) == ["TWO", "_SIX"]
