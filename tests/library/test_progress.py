"""Progress on standard error: a bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import io

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


def test_nothing_to_report_prints_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with TerminalProgress(stream):
            pass
        assert stream.getvalue() == ""
