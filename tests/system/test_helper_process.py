"""Helper processes: their questions, their end, and the resources they leave."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_resources import no_process, resources

import termgen
from termgen.errors import OverloadedError
from termgen.system import helper_process
from termgen.system.helper_process import (
    HelperClosed,
    HelperDied,
    HelperFault,
    HelperMissing,
    HelperProcess,
    HelperTooSlow,
    refusal,
)

LIMIT_S = 20.0
"""Never reached."""

PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
from termgen.system.helper_process import answer_questions

def answer(task, raw):
    print("a library says something", flush=True)
    os.write(1, b"and so does one in C")
    match task:
        case ["sleep", seconds]:
            time.sleep(seconds)
        case ["print", size]:
            sys.stderr.write("x" * size)
        case ["die", words]:
            raise MemoryError(words)
        case ["fail"]:
            raise KeyError(task)
        case ["keep"]:
            return lambda: "nothing that could be sent"
        case ["leave"]:
            os._exit(3)
    return task, raw

answer_questions(answer)
"""


def write_program(folder: Path, text: str = PROGRAM) -> Path:
    program = folder / "program.py"
    program.write_text(text.format(root=str(Path(termgen.__file__).parents[1])))
    return program


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[HelperProcess]:
    """A helper that echoes its questions."""
    helper = HelperProcess(write_program(tmp_path))
    yield helper
    helper.close()


def ask(helper: HelperProcess, task: object, *parts: bytes) -> Any:
    return helper.ask(task, parts, limit_s=LIMIT_S)


def test_what_is_printed_over_there_is_no_answer(helper: HelperProcess) -> None:
    for i in range(3):
        assert ask(helper, i, b"x", b"y") == (i, b"xy")


def test_half_a_question_spoils_no_other(helper: HelperProcess) -> None:
    assert ask(helper, "first", b"x") == ("first", b"x")
    with pytest.raises(TypeError):
        ask(helper, "second", "no bytes")  # type: ignore[arg-type]
    assert ask(helper, "third", b"y") == ("third", b"y")


def test_megabytes_go_both_ways_beside_much_that_is_printed(helper: HelperProcess) -> None:
    body = os.urandom(2**20)
    task = ["print", 300_000]  # more than a pipe holds
    assert ask(helper, task, body, body) == (task, body * 2)


def test_nothing_is_started_once_it_is_closed(helper: HelperProcess) -> None:
    assert ask(helper, "first") == ("first", b"")
    process = helper.start()
    assert os.getpgid(process.pid) == process.pid, "Ctrl-C does not reach it"
    assert os.getsid(process.pid) == os.getsid(0), "Linux weighs priorities within a session"
    helper.close()
    assert helper.is_closed and process.poll() is not None
    with pytest.raises(HelperClosed):
        ask(helper, "second")
    with pytest.raises(HelperClosed):
        helper.start()
    helper.close()


def test_a_limit_is_over_with_its_question(
    helper: HelperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_process, "ORPHAN_S", 0.0)
    process = helper.start()
    ask(helper, "it runs")
    assert helper.ask("first", limit_s=0.6) == ("first", b"")
    for task, kind in ((["fail"], "KeyError"), (["keep"], "PicklingError|AttributeError")):
        with pytest.raises(RuntimeError, match=f"({kind}) in a helper"):
            helper.ask(task, limit_s=0.6)
    time.sleep(0.8)
    assert ask(helper, "second") == ("second", b"")
    assert helper.start() is process


def test_a_question_without_end_is_ended_and_the_next_is_answered(helper: HelperProcess) -> None:
    ask(helper, "it runs")
    process = helper.start()
    with pytest.raises(HelperTooSlow):
        helper.ask(["sleep", 600], limit_s=0.05)
    assert process.poll() == -signal.SIGKILL
    assert ask(helper, "next") == ("next", b"")


@pytest.mark.parametrize("size", [1, 2**22])
def test_one_that_stands_still_is_ended_too(helper: HelperProcess, size: int) -> None:
    """It may not even read its question."""
    process = helper.start()
    ask(helper, "it runs")
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(HelperTooSlow):
        helper.ask("stopped", [b"x" * size], limit_s=0.05)
    assert ask(helper, "next") == ("next", b"")


def test_one_that_never_begins_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helper_process, "MAX_START_S", 0.05)
    helper = HelperProcess(write_program(tmp_path, "import time; time.sleep(600)"))
    with pytest.raises(HelperMissing):
        ask(helper, "anybody there?")
    helper.close()
    assert "program.py took too long" in caplog.text


def test_last_words_are_logged_and_reach_no_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A screen may be drawn on that terminal."""
    helper = HelperProcess(write_program(tmp_path))
    for task, words in (
        (["die", "so much text"], "ended with status 1"),
        (["die", "so much text"], "MemoryError: so much text"),
        (["leave"], "ended with status 3; its last words: a library says something"),
    ):
        caplog.clear()
        with pytest.raises(HelperDied):
            ask(helper, task)
        assert words in caplog.text
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()
    with pytest.raises(HelperTooSlow):
        helper.ask(["print", 200_000], limit_s=0)
    with pytest.raises(HelperDied):
        ask(helper, ["die", "y" * 100_000])
    assert len(caplog.text) < 3 * helper_process.KEPT_OUTPUT_BYTES
    helper.close()
    assert capfd.readouterr() == ("", "")


def test_one_that_cannot_be_started_has_its_reason_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    helper = HelperProcess(write_program(tmp_path, "import no_such_module"))
    before = resources()
    for _ in range(2):
        with pytest.raises(HelperMissing):
            ask(helper, "first")
    assert caplog.text.count("No module named 'no_such_module'") == 2
    helper.close()
    assert resources() <= before


def test_one_that_was_killed_while_it_had_nothing_to_do_is_replaced(
    helper: HelperProcess, caplog: pytest.LogCaptureFixture
) -> None:
    ask(helper, "first")
    process = helper.start()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ask(helper, "second") == ("second", b"")
    assert "program.py ended with status -9" in caplog.text


MOST_DESCRIPTORS = 10
NEEDED_DESCRIPTORS = 6
"""Two for a socket, two for a pipe, and two to start a process."""


@contextlib.contextmanager
def fewer_descriptors() -> Iterator[list[int]]:
    """Use up all descriptors; closing some of the yielded ones frees them."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + MOST_DESCRIPTORS, limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def test_without_file_descriptors_or_processes_it_says_so_and_goes_on_later(
    helper: HelperProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resources()
    with fewer_descriptors() as taken:
        for _ in range(NEEDED_DESCRIPTORS):  # each additional one moves the failure
            with pytest.raises(HelperMissing):
                ask(helper, "first")
            os.close(taken.pop())
        assert ask(helper, "first") == ("first", b"")
    helper.start().kill()

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_process)
        time.sleep(0.01)
        for _ in range(50):
            with pytest.raises(HelperFault) as fault:
                ask(helper, "second")
        told = refusal(fault.value, "prompt", "tokenised", param="prompt")
        assert isinstance(told, OverloadedError) and told.retry_after_s > 0
        assert (told.status, told.code, told.param) == (429, "no_process", "prompt")
    assert ask(helper, "third") == ("third", b"")
    helper.close()
    assert resources() <= before


def test_one_that_nobody_refers_to_leaves_nothing(tmp_path: Path) -> None:
    before = resources()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        helper = HelperProcess(write_program(tmp_path))
        ask(helper, "first")
        assert not resources() <= before
        del helper
        assert resources() <= before


@pytest.mark.parametrize("question", [None, ["sleep", 600]])
def test_it_ends_with_a_process_that_is_killed(tmp_path: Path, question: object) -> None:
    """The killed process has no time to close it, not even in the middle of a question."""
    text = """
import sys
from pathlib import Path
from termgen.system.helper_process import HelperProcess
helper = HelperProcess(Path(sys.argv[1]))
helper.ask("first", limit_s=20)
print(helper.start().pid, flush=True)
question = eval(sys.argv[2])
if question:
    helper.ask(question, limit_s=0.3)
input()
"""
    asking = subprocess.Popen(
        [sys.executable, "-c", text, str(write_program(tmp_path)), repr(question)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(termgen.__file__).parents[1],
    )
    assert asking.stdout is not None and asking.stdin is not None
    with asking:
        pid = int(asking.stdout.readline())
        time.sleep(0.1 if question else 0)
        asking.kill()
    _until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    return " Z " in Path(f"/proc/{pid}/stat").read_text()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_at_any_moment_it_gives_right_answers_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads ask, one kills or stops it, and one closes it in the end."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    monkeypatch.setattr(helper_process, "MAX_START_S", 2.0)  # in this case it is stopped, too
    before, num_threads = resources(), threading.active_count()
    helper = HelperProcess(write_program(tmp_path))
    outcomes: list[str] = []
    is_over = threading.Event()

    def ask_on(name: int) -> None:
        i = 0
        while not is_over.is_set():
            task, body = (name, i), b"%d" % i * 50_000
            i += 1
            try:
                assert helper.ask(task, [body], limit_s=1.0) == (task, body)
                outcomes.append("answered")
            except HelperFault as fault:
                outcomes.append(type(fault).__name__)

    threads = [threading.Thread(target=ask_on, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(12):
            time.sleep(rng.random() * 0.25)
            child = helper._child
            if child is not None:
                signals = [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV]
                child.process.send_signal(rng.choice(signals))
        outcomes.append("quiet")
        _until(lambda: "answered" in outcomes[outcomes.index("quiet") :])
    finally:
        helper.close()
        is_over.set()
        for thread in threads:
            thread.join()
    print({outcome: outcomes.count(outcome) for outcome in outcomes})
    assert "HelperClosed" in outcomes
    assert resources() <= before and threading.active_count() == num_threads
