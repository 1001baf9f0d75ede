"""Keys are echoed and answers stream at their pace on a real terminal, also while tools run."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from fake_engine import FakeEngine, Script, make_model_info
from fake_script import GenerateCall
from server_harness import serving
from test_launch import environment
from test_tools_terminal import PAUSE_S
from tool_samples import KNOWS_TOOLS, hermes
from tui_harness import pieces

__all__ = ["environment"]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_KEYS = 15
ECHO_MS = 250.0
"""Ten times what it takes on two quiet cores: for a machine where others compute."""
DELAY_S = 0.05
LATE_MS = 1000.0
WORDS = [f"w{number} " for number in range(100, 140)]
LINKS = 1500
"""Files to search, of 2 MiB each: more than the ten seconds of a search suffice for."""


@pytest.fixture
def key_echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import key_echo

    yield key_echo
    sys.modules.pop("key_echo")


def make_large(folder: Path) -> None:
    """A folder whose search takes longer than the test."""
    folder.mkdir()
    first = folder / "0.txt"
    first.write_text("a line without it\n" * 120_000)
    for number in range(1, LINKS):
        os.link(first, folder / f"{number}.txt")


async def test_keys_and_words_come_in_time_while_tools_run(
    key_echo: ModuleType,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = [hermes("files_search", '{"text": "needle"}'), "Stopped.", "".join(WORDS)]

    def script(_: GenerateCall) -> Script:
        text = left.pop(0)
        return Script(pieces=WORDS if not left else pieces(text), delay_s=DELAY_S)

    found: dict[str, list[float]] = {}
    shown_ms: list[float] = []
    """The time at which each word was on the screen; words that came at once have one."""

    def chat(url: str) -> None:
        flags = ("--url", url, "--tools", "files")
        with key_echo.chat(*flags, environment=environment) as terminal:
            found["idle"] = terminal.echoes_ms(key_echo.letters_of(NUM_KEYS))
            terminal.send("look\r")
            terminal.wait_for(lambda text: "may files do this?" in text)
            terminal.rest(PAUSE_S)
            terminal.send("y")
            terminal.wait_for(lambda text: "may files do this?" not in text)
            terminal.rest(0.3)
            found["tool"] = terminal.echoes_ms(key_echo.letters_of(NUM_KEYS))
            assert "files_search" in terminal.text and "✓" not in terminal.text, "it still runs"
            terminal.send(key_echo.ESC)
            terminal.wait_for(lambda text: "stopped" in text)
            left[:] = left[-1:]
            terminal.send("more\r")
            for word in WORDS:
                seen = terminal.text
                if word.strip() not in seen:
                    terminal.wait_for(lambda text: word.strip() in text)  # noqa: B023
                    shown_ms.append(time.perf_counter() * 1e3)
                else:
                    shown_ms.append(shown_ms[-1])

    make_large(tmp_path / "large")
    engine = FakeEngine(script=script, model=make_model_info(tool_format=KNOWS_TOOLS))
    async with serving(engine) as server:
        monkeypatch.chdir(tmp_path / "large")
        await asyncio.to_thread(chat, server.url)
    assert all(statistics.median(times) < ECHO_MS for times in found.values()), found
    gaps = [after - before for before, after in pairwise(shown_ms)]
    assert sum(gap > 0 for gap in gaps) > len(gaps) / 2, "words come one by one, not in heaps"
    assert shown_ms[-1] - shown_ms[0] < len(gaps) * DELAY_S * 1e3 + LATE_MS
