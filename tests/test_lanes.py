"""The quick lane and the tests of a change (tests/harness/lanes.py, changed.py)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed import affected_tests, changed_files
from file_order import REAL_MODEL, REAL_MODEL_FILES, longest, scope_of, seconds_by_scope
from lanes import LIST, SLOW_S, Measuring, function_of, slow_functions

TESTS = Path(__file__).parent


def functions(path: Path) -> Iterator[tuple[str, bool]]:
    """(name in the list of slow tests, needs a GPU) of each test of a file."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, bool]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield from walk(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("test_"):
                    marks = {ast.unparse(mark) for mark in node.decorator_list}
                    yield f"{prefix}{node.name}", "pytest.mark.gpu" in marks

    return walk(ast.parse(path.read_text()).body, f"{path.relative_to(TESTS)}::")


def test_every_listed_test_exists() -> None:
    listed = slow_functions()
    known = {name for path in TESTS.rglob("test_*.py") for name, _ in functions(path)}
    assert listed.keys() <= known
    assert list(listed) == sorted(listed) and min(listed.values()) >= SLOW_S


def test_the_quick_lane_touches_every_folder() -> None:
    slow = slow_functions()
    quick = {
        path.parent
        for path in TESTS.rglob("test_*.py")
        if any(name not in slow and not on_gpu for name, on_gpu in functions(path))
    }
    assert quick == {path.parent for path in TESTS.rglob("test_*.py")}


def test_listed_tests_are_not_in_it() -> None:
    options = ["-q", "--collect-only", "-m", "not slow", "tests/engine/schedule"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    collected = {function_of(line) for line in done.stdout.splitlines() if "::" in line}
    of_folder = {name for name in slow_functions() if name.startswith("engine/schedule/")}
    assert of_folder and collected and not collected & of_folder


def test_the_longest_file_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "slow.txt"
    path.write_text(
        "a/test_x.py::one 3.0\na/test_x.py::two 3.0\nb/test_x.py::one 5.0\n"
        "c/test_int8.py::one 4.0\ntest_parity.py::one 4.0\n"
    )
    monkeypatch.setattr("lanes.LIST", path)
    files = [
        "q/test_r.py",
        "b/test_x.py",
        "a/test_x.py",
        "c/test_int8.py",
        "test_parity.py",
        "z.py",
    ]
    waiting = list(dict.fromkeys(scope_of(f"tests/{file}") for file in files))
    order = []
    while waiting:
        order.append(longest(waiting, seconds_by_scope()))
        waiting.remove(order[-1])
    others = [f"tests/{file}" for file in ("a/test_x.py", "b/test_x.py", "q/test_r.py", "z.py")]
    assert order == [REAL_MODEL, *others]


def test_files_of_the_real_model_exist() -> None:
    assert set(REAL_MODEL_FILES) <= {path.stem for path in TESTS.rglob("test_*.py")}


def report(name: str, when: str, seconds: float, outcome: str = "passed") -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=f"tests/{name}",
        location=("", None, ""),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]
        longrepr=None,
        when=when,  # type: ignore[arg-type]
        duration=seconds,
    )


def test_the_list_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slow.txt"
    path.write_text("a.py::gone 1.0\na.py::gone_quick 2.0\na.py::skipped 3.0\n")
    monkeypatch.setattr("lanes.LIST", path)
    measuring = Measuring()
    measuring.pytest_runtest_logreport(report("a.py::gone_quick", "call", SLOW_S / 2))
    measuring.pytest_runtest_logreport(report("a.py::skipped", "setup", 9.0, "skipped"))
    for index in range(4):  # short runs, many of them
        name = f"b.py::many[{index}]"
        measuring.pytest_runtest_logreport(report(name, "setup", SLOW_S / 10))
        measuring.pytest_runtest_logreport(report(name, "call", SLOW_S / 4))
    measuring.pytest_sessionfinish()
    assert path.read_text() == f"a.py::skipped 3.0\nb.py::many {1.4 * SLOW_S:.1f}\n"
    assert LIST != path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose branch has left main."""
    files = {
        "termgen/a/one.py": "",
        "termgen/a/two.py": "",
        "tests/harness/base.py": "",
        "tests/harness/more.py": "import base",
        "tests/a/test_one.py": "",
        "tests/a/deeper/test_deep.py": "",
        "tests/b/test_uses_two.py": "def test() -> None:\n    from termgen.a import two",
        "tests/b/test_uses_more.py": "from more import x",
        "tests/b/test_else.py": "import termgen.b",
        "docs/page.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "switch", "-qc", "branch")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", *names, *words], cwd=folder, check=True)


def test_a_changed_module_brings_its_folder_and_its_importers(repository: Path) -> None:
    (repository / "termgen/a/two.py").write_text("x = 1")
    git(repository, "commit", "-qam", "two")
    (repository / "docs/page.md").write_text("more")
    changed = changed_files(repository)
    assert changed == ["docs/page.md", "termgen/a/two.py"]
    assert affected_tests(changed, repository) == [
        "tests/a/test_one.py",
        "tests/b/test_uses_two.py",
    ]


def test_changed_and_new_tests_bring_themselves(repository: Path) -> None:
    (repository / "tests/a/test_one.py").unlink()
    (repository / "tests/b/test_new.py").write_text("")
    changed = changed_files(repository)
    assert changed == ["tests/a/test_one.py", "tests/b/test_new.py"]
    assert affected_tests(changed, repository) == ["tests/b/test_new.py"]


def test_the_harness_brings_those_that_use_it_directly_or_not(repository: Path) -> None:
    (repository / "tests/harness/base.py").write_text("x = 1")
    found = affected_tests(changed_files(repository), repository)
    assert found == ["tests/b/test_uses_more.py"]
