"""Progress on standard error: a bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import io

from termgen.library.fetch import _progress_class
from termgen.library.hub_files import _bar, _Share
from termgen.library.progress import TerminalProgress
from termgen.vocabulary.startup_phases import READY


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(stream: io.StringIO) -> str:
    with TerminalProgress(stream) as progress:
        for fraction in (0.0, 0.25, 1.0, 7.0):
            progress("fetching the model", fraction)
        progress("loading weights", -1.0)
        progress("loading weights", 0.5)
        progress(READY, 1.0)
    return stream.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    text = report(io.StringIO())
    assert text == "termgen: fetching the model\ntermgen: loading weights\n"


def test_a_bar_on_a_terminal_that_leaves_nothing_behind() -> None:
    text = report(Terminal())
    assert "fetching the model" in text and "loading weights" in text
    assert "100%" in text and "700%" not in text
    assert "\n" not in text.rstrip("\n")
    assert text.split("\r")[-1].strip() == "", "the bar is wiped at the end"


def test_bars_that_only_report_take_no_line_from_it() -> None:
    """They stay in tqdm's list of bars until they are collected."""
    share = _Share("a file", 0, 10, 10, lambda what, part: None)
    kept = [
        _bar(share)(total=10, unit="B"),
        _progress_class("b", 10, lambda what, part: None)(total=10),
    ]
    text = report(Terminal())
    assert "\n" not in text.rstrip("\n") and "\x1b[A" not in text, kept


def test_nothing_to_report_prints_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with TerminalProgress(stream):
            pass
        assert stream.getvalue() == ""
