"""docs/api.md matches the code: its tables, and the fields that the parsers read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from termgen.api.document import ENDPOINTS, rewritten
from termgen.api.sampling import GUIDED
from termgen.vocabulary.sampling_params import COLUMNS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_the_page_is_what_the_code_would_write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run `python -m termgen.api.document docs/api.md`"
    assert page.count("<!-- generated: ") == 5 and "| `temperature` |" in page


def attributes_read() -> set[str]:
    """Names of attributes that the parsers read, those given to getattr by a table included."""
    names = {*GUIDED, *COLUMNS}
    for path in (PAGE.parents[1] / "termgen" / "api").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names |= {node.attr} if node.value.id in ("body", "conversation") else set()
    return names


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_is_described_and_read(endpoint: str) -> None:
    body = ENDPOINTS[endpoint]
    for name, field in body.fields.items():
        assert field.doc is not None, f"describe {name} where it is declared"
        assert name not in body.refused and name not in body.harmless
    assert body.fields.keys() - attributes_read() == {"model"}, "nothing reads these"


def test_names_are_described_once_and_fit_a_table() -> None:
    declared = [(name, field) for body in ENDPOINTS.values() for name, field in body.fields.items()]
    docs = {(name, field.doc) for name, field in declared}
    assert len(docs) == len({name for name, _ in declared})
    for _, doc in docs:
        assert doc is not None
        texts = (doc.meaning, doc.values or "", doc.default or "")
        assert not any("|" in text or "\n" in text for text in texts)


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
    makers = {"unavailable", "_forbidden", "_refusal"}
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
