"""docs/api.md matches the code: its tables, and the fields that the parsers read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from termgen.api.chat import parse_chat
from termgen.api.completions import parse_completion
from termgen.api.document import IGNORED, REFUSED, rewritten, taken
from termgen.api.parameter_types import CHAT, COMPLETIONS
from termgen.api.parameters import GROUPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


class Watched(dict[str, Any]):
    """Records the keys that are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def asked(endpoint: str) -> set[str]:
    parse: Any = parse_chat if endpoint == CHAT else parse_completion
    body = Watched({"messages": [{"role": "user", "content": "x"}], "prompt": "x"})
    parse(body, model="m", defaults={})
    return body.asked


def test_the_page_is_what_the_code_would_write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run `python -m termgen.api.document docs/api.md`"
    assert page.count("<!-- generated: ") == 4 and "| `temperature` |" in page


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_every_field_that_is_read_is_described(endpoint: str) -> None:
    described = taken(endpoint).keys()
    read = asked(endpoint) - REFUSED[endpoint].keys() - IGNORED[endpoint]
    assert read - described == set(), "describe these in termgen/api/parameters.py"
    assert described - read == set(), "nothing reads these"


def test_names_are_described_once_and_fit_a_table() -> None:
    names = [p.name for group in GROUPS for p in group.parameters]
    assert len(names) == len(set(names))
    for group in GROUPS:
        for p in group.parameters:
            assert not any("|" in text or "\n" in text for text in (p.values, p.meaning, p.default))


def _own_code(node: ast.ClassDef) -> Iterator[str]:
    """The code that an error class declares."""
    for line in node.body:
        target = line.target if isinstance(line, ast.AnnAssign) else None
        target = line.targets[0] if isinstance(line, ast.Assign) else target
        if isinstance(target, ast.Name) and target.id == "code":
            value = line.value  # type: ignore[union-attr]
            if isinstance(value, ast.Constant):
                yield str(value.value)


def codes_in_the_code() -> set[str]:
    """The codes given to errors, by keyword or as the first argument of their constructors."""
    codes = {"invalid_value", "method_not_allowed"}
    makers = {"unavailable", "_refusal"}
    package = PAGE.parents[1] / "termgen"
    alone = (package / "errors.py", package / "system" / "helper_process.py")
    for path in (*package.glob("api/*.py"), *package.glob("serving/*.py"), *alone):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                codes |= set(_own_code(node))
            if not isinstance(node, ast.Call):
                continue
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given += node.args[:1] if name in makers else []
            codes |= {str(v.value) for v in given if isinstance(v, ast.Constant) and v.value}
    return codes


def test_every_code_of_an_error_is_described_and_no_other() -> None:
    errors = PAGE.read_text(encoding="utf-8").partition("## Errors")[2].partition("## Examples")[0]
    rows = re.findall(r"^\| \d{3} \| (.*?) \|", errors, re.MULTILINE)
    described = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    codes = codes_in_the_code() | {"invalid_schema", "grammar_queue_full"}
    assert codes == described
