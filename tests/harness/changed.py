"""Runs the tests of what changed since main: `python tests/harness/changed.py [pytest's options]`.

A changed module of termgen/ brings the tests in its mirrored folder and the tests that import it; a
changed test brings itself, and a changed file of tests/harness/ the tests that import it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BASE = "main"
HARNESS = "tests/harness/"


def changed_files(root: Path, base: str = BASE) -> list[str]:
    """Paths that differ from where the branch left `base`, with files that are not tracked yet."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    (fork,) = git("merge-base", base, "HEAD")
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", fork), *new})


def imports_of(path: Path) -> set[str]:
    """Names of the modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def affected_tests(changed: Iterable[str], root: Path) -> list[str]:
    """Test files and folders, relative to `root`, that these changed paths concern."""
    found: set[str] = set()
    modules: set[str] = set()
    for path in map(Path, changed):
        if path.suffix != ".py":
            continue
        if str(path).startswith(HARNESS):
            modules.add(path.stem)
        elif path.parts[0] == "tests" and path.name.startswith("test_"):
            found.add(str(path))
        elif path.parts[0] == "termgen":
            parts = path.with_suffix("").parts
            modules.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            found.update(_mirrored(path, root))
    modules |= _harness_importers(modules, root)
    for path in (root / "tests").rglob("test_*.py"):
        if imports_of(path) & modules:
            found.add(str(path.relative_to(root)))
    return sorted(path for path in found if (root / path).exists())


def _mirrored(path: Path, root: Path) -> Iterator[str]:
    """The tests that lie directly in the mirrored folder."""
    folder = root / "tests" / Path(*path.parts[1:-1])
    if len(path.parts) > 2:
        yield from (str(test.relative_to(root)) for test in folder.glob("test_*.py"))


def _harness_importers(modules: set[str], root: Path) -> set[str]:
    """Files of the harness that import changed files of the harness, directly or not."""
    harness = {path.stem: imports_of(path) for path in (root / HARNESS).glob("*.py")}
    found = modules & harness.keys()
    while more := {name for name, used in harness.items() if used & found} - found:
        found |= more
    return found


def main(options: list[str]) -> int:
    tests = affected_tests(changed_files(ROOT), ROOT)
    if not tests:
        print("nothing that has tests changed since main")
        return 0
    print(*tests, sep="\n")
    return subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
