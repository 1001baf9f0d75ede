"""The guides name existing files, the commands of CI, and true line counts."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from test_language import comments, docstrings

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


def test_hooks_are_the_checks_of_ci() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    lines = [line.replace('"$venv/bin/', ".venv/bin/").replace('"', "") for line in ci]
    assert hooks == [
        line for line in lines if line.startswith((".venv/bin/ruff", ".venv/bin/mypy"))
    ]


def test_the_newest_release_is_this_version() -> None:
    releases = re.findall(
        r"^## (\d\S*), \d{4}-\d\d-\d\d$", read("CHANGELOG.md"), flags=re.MULTILINE
    )
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert releases[0] == version


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


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


MENTION = re.compile(r"(?<![\w/.*<-])((?:[\w-]+/)*\w+\.py)(?!\w)")
MODULE = re.compile(r"\btermgen((?:\.[a-z_]\w*)+)")
OF_USERS = frozenset({"parser.py", "FILE.py", "a.py"})
"""Names in examples, of files that users have."""
FIELDS = frozenset({".timings"})
"""Fields of answers that look like modules."""
FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.rglob("*.py"), *ROOT.rglob(".github/**/*.yml"))
    if not {"node_modules", ".venv", "build"} & set(path.parts)
)


def is_there(mention: str) -> bool:
    return any(file == mention or file.endswith(f"/{mention}") for file in FILES)


def is_module(dotted: str) -> bool:
    """True for a module of termgen, or a name in one. dotted: without `termgen.`"""
    place = ROOT / "termgen"
    for name in dotted.split("."):
        if (place / f"{name}.py").exists():
            return True
        if not (place / name).is_dir():
            return re.search(rf"\b{name}\b", (place / "__init__.py").read_text()) is not None
        place /= name
    return True


def prose_of(path: Path) -> str:
    """What a reader reads: a page, or the docstrings and comments of a program."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    return "\n".join(part.text for part in (*docstrings(text), *comments(text)))


@pytest.mark.parametrize(
    "file",
    [
        *("README.md", "CONTRIBUTING.md", "termgen/engine/README.md", ".ci/run", *GUIDES),
        *(file for file in FILES if not file.startswith("tests/")),
    ],
)
def test_files_that_prose_names_are_there(file: str) -> None:
    prose = prose_of(ROOT / file)
    assert {m for m in MENTION.findall(prose) if m not in OF_USERS and not is_there(m)} == set()
    assert {m for m in MODULE.findall(prose) if not is_module(m.lstrip("."))} <= FIELDS


def test_a_dead_name_is_found() -> None:
    assert MENTION.findall("see `layers/moe.py` and step.py, not a.pyc") == [
        *("layers/moe.py", "step.py"),
    ]
    assert not is_there("layers/moe.py") and is_there("layers/linear.py")
    assert (
        is_module("serving.app") and is_module("LLM") and is_module("engine.loop.core.EngineCore")
    )
    assert not is_module("serving.generation")


def anchors(file: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
