"""A command that runs only while its owner rests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from termgen.system import idle_process
from termgen.system.idle_process import IdleProcess

ROOT = Path(idle_process.__file__).parents[2]
LIMIT_S = 30.0


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Owned:
    """An IdleProcess that runs a Python program, and what it reported."""

    def __init__(self, program: str, *arguments: object, after_s: float = 0.0) -> None:
        self.starts = 0
        self.ends: list[tuple[int, str]] = []
        command = [sys.executable, "-P", "-c", program, *map(str, arguments)]
        self.process = IdleProcess(
            command,
            after_s=after_s,
            on_start=self._start,
            on_end=lambda *end: self.ends.append(end),
        )

    def _start(self) -> None:
        self.starts += 1


@pytest.fixture
def make() -> Iterator[Callable[..., Owned]]:
    made: list[Owned] = []

    def make_one(*arguments: object, after_s: float = 0.0) -> Owned:
        made.append(Owned(*arguments, after_s=after_s))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for owned in made:
        owned.process.close()


WAIT = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def pids(path: Path) -> list[int]:
    wait_for(lambda: path.exists() and path.read_text().count(" ") == 1)
    return [int(pid) for pid in path.read_text().split()]


def test_it_runs_to_its_end_once(make: Callable[..., Owned]) -> None:
    owned = make("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    for _ in range(3):
        owned.process.rest()
    wait_for(lambda: owned.ends)
    assert owned.process.is_over
    owned.process.rest()
    time.sleep(0.05)
    (end,) = owned.ends
    assert end[0] == 3 and sorted(end[1].split()) == ["err", "out"] and owned.starts == 1


def test_work_ends_it_at_once_with_its_children(make: Callable[..., Owned], tmp_path: Path) -> None:
    owned = make(WAIT, tmp_path / "pids")
    owned.process.rest()
    found = pids(tmp_path / "pids")
    assert all(map(is_alive, found))
    began = time.monotonic()
    owned.process.busy()
    assert time.monotonic() - began < 0.5
    wait_for(lambda: not any(map(is_alive, found)))
    time.sleep(0.05)
    assert owned.ends == [] and not owned.process.is_over, "it was killed from here"


def test_it_starts_anew_after_a_longer_rest(make: Callable[..., Owned], tmp_path: Path) -> None:
    owned = make(WAIT, tmp_path / "pids", after_s=0.05)
    for start in range(1, 3):
        owned.process.rest()
        pids(tmp_path / "pids")
        owned.process.busy()
        (tmp_path / "pids").unlink()
        assert owned.starts == start and owned.process._after_s == 0.05 * 2**start
    owned.process._after_s = idle_process.MAX_WAIT_S * 0.75
    owned.process.rest()
    owned.process.busy()
    assert owned.process._after_s == idle_process.MAX_WAIT_S * 0.75, "it had not begun"


def test_a_short_rest_starts_nothing(make: Callable[..., Owned]) -> None:
    owned = make("", after_s=0.1)
    for _ in range(4):
        owned.process.rest()
        time.sleep(0.05)
        owned.process.busy()
    time.sleep(0.2)
    assert owned.starts == 0 and owned.ends == []


def test_its_end_can_be_waited_for(make: Callable[..., Owned], tmp_path: Path) -> None:
    owned = make(WAIT, tmp_path / "pids")
    owned.process.end()
    owned.process.rest()
    command, _ = pids(tmp_path / "pids")
    owned.process.end()
    assert not is_alive(command) and not owned.process.is_over


def test_nothing_starts_after_its_close(make: Callable[..., Owned]) -> None:
    owned = make("", after_s=0.02)
    owned.process.rest()
    owned.process.close()
    owned.process.rest()
    time.sleep(0.1)
    assert owned.starts == 0 and owned.ends == []


def test_a_command_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, str]] = []
    process = IdleProcess(
        ["/no/such/program"],
        after_s=0.0,
        on_start=lambda: None,
        on_end=lambda *end: ends.append(end),
    )
    process.rest()
    wait_for(lambda: ends)
    ((code, reason),) = ends
    assert code == -1 and "No such file" in reason and process.is_over
    process.close()


OWNED = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(ROOT)!r})
from termgen.system.idle_process import run_while_owned
run_while_owned(sys.stdin.read)
pathlib.Path(sys.argv[1]).write_text(f"{{os.getpid()}} {{os.nice(0)}}")
time.sleep(600)
"""
OWNER = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from termgen.system.idle_process import IdleProcess
command = [sys.executable, "-P", "-c", {OWNED!r}, sys.argv[1]]
IdleProcess(command, after_s=0.0, on_start=lambda: None, on_end=lambda *end: None).rest()
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "nice"), reason="no priorities here")
def test_it_has_the_lowest_priority_and_ends_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-P", "-c", OWNER, str(tmp_path / "facts")])
    try:
        pid, niceness = pids(tmp_path / "facts")
        assert niceness == idle_process.NICENESS and is_alive(pid)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    wait_for(lambda: not is_alive(pid))
