"""The guides name existing files, the commands of CI, and true line counts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_path_is_there() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    paths = [text for text in re.findall(r"`([^`\s]+)`", prose) if "/" in text and "*" not in text]
    links = re.findall(r"\]\(([^):#]+)\)", prose)
    assert len(paths) > 60 and links
    assert [path for path in (*paths, *links) if not (ROOT / path).exists()] == []


def test_names_in_backticks_are_in_the_files_beside_them() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    num_names = 0
    for cell, text in rows:
        files = [ROOT / path for path in re.findall(r"`([^`]+)`", cell)]
        sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`(_?[A-Za-z]+(?:_[A-Z]+)*)`", text):
            num_names += 1
            assert name in sources or name == "id", f"{name} is not in {cell}"
    assert num_names >= 10


def test_checks_are_those_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    ci = ci.replace('"$venv/bin/', ".venv/bin/").replace('" ', " ").replace("--quiet ", "")
    for check in (
        ".venv/bin/ruff check .",
        ".venv/bin/mypy",
        "install -c constraints.txt -e '.[test]'",
    ):
        assert check in PAGE and check in ci, check


def num_lines(path: str, name: str | None = None) -> int:
    """Lines of a file, or of the class or function of that name in it."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if name is None:
        return len(text.splitlines())
    (node,) = (n for n in ast.parse(text).body if getattr(n, "name", None) == name)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_the_price_of_one_process_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "why-one-process.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (`.*`) \| (\d+) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 3
    for cell, told in rows:
        lines = sum(num_lines(*place.split(":")) for place in re.findall(r"`([^`]+)`", cell))
        assert lines == pytest.approx(int(told), rel=0.1), cell
    for path in re.findall(r"`(termgen/[^`:]+)", page):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", ["README.md", *GUIDES])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(file), f"{page} links to {target}"


def anchors(file: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
