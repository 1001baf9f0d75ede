"""The quick lane: which tests are slow, by measured time.

`tests/slow.txt` lists test functions whose runs, all parameters and set-ups together, took longer
than `SLOW_S`; each gets the mark `slow`. `pytest --measure-slow` writes the list anew from a whole
run.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

SLOW_S = 0.2
LIST = Path(__file__).parent.parent / "slow.txt"


def function_of(nodeid: str) -> str:
    """A test's node id without its parameters, relative to tests/."""
    return nodeid.split("[", 1)[0].removeprefix("tests/")


def slow_functions() -> dict[str, float]:
    """Seconds by slow test function."""
    lines = (line.rsplit(maxsplit=1) for line in LIST.read_text().splitlines())
    return {name: float(seconds) for name, seconds in lines}


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the tests of the list."""
    slow = slow_functions()
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


class Measuring:
    """Sums the time of each test function and writes the list at the end. Tests that were skipped,
    for want of a GPU or a model, keep their line; those that are gone lose it."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = function_of(report.nodeid)
        self._seconds[name] += report.duration
        if report.when == "call" and not report.skipped:
            self._ran.add(name)

    def pytest_sessionfinish(self) -> None:
        found = {name: s for name, s in slow_functions().items() if name in self._seconds}
        for name in self._ran:
            found.pop(name, None)
            if self._seconds[name] > SLOW_S:
                found[name] = self._seconds[name]
        LIST.write_text("".join(f"{name} {found[name]:.1f}\n" for name in sorted(found)))
