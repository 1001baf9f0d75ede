"""Programs of ours beside the process: what they are asked, and how they end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import termgen
from termgen.helper_process import HelperDied, HelperProcess

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from termgen.helper_process import answer_questions

def answer(task, raw):
    print("a library says something")
    return task, raw

answer_questions(answer)
"""


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[HelperProcess]:
    """It gives back what it is told."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(Path(termgen.__file__).parents[1])))
    helper = HelperProcess(program)
    yield helper
    helper.close()


def test_what_is_printed_over_there_is_no_answer(helper: HelperProcess) -> None:
    for i in range(3):
        assert helper.ask(i, [b"x", b"y"]) == (i, b"xy")


def test_half_a_question_spoils_no_other(helper: HelperProcess) -> None:
    assert helper.ask("first", [b"x"]) == ("first", b"x")
    with pytest.raises(TypeError):
        helper.ask("second", ["no bytes"])  # type: ignore[list-item]
    assert helper.ask("third", [b"y"]) == ("third", b"y")


def test_nothing_is_started_once_it_is_closed(helper: HelperProcess) -> None:
    assert helper.ask("first") == ("first", b"")
    process = helper.start()
    assert os.getpgid(process.pid) == process.pid, "Ctrl-C does not reach it"
    assert os.getsid(process.pid) == os.getsid(0), "Linux weighs priorities within a session"
    helper.close()
    assert helper.is_closed and process.poll() is not None
    with pytest.raises(HelperDied):
        helper.ask("second")
    assert helper._process is process
