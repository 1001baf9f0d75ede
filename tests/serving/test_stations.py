"""docs/architecture.md lists the files that a streamed chat answer passes. To write the list anew:

WRITE_STATIONS=1 pytest tests/serving/test_stations.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stations import (
    BACKGROUND,
    NUM_RUNS,
    ROOT,
    Entry,
    as_markdown,
    differences,
    from_markdown,
    stations,
)

PAGE = ROOT / "docs" / "architecture.md"
LIST = re.compile(r"(?<=<!-- stations -->\n).*?(?=<!-- end of stations -->)", re.DOTALL)
MOST_FILES = 63
"""The goal is 45."""


def test_the_page_lists_the_stations_of_a_streamed_answer(tiny_llama_dir: Path) -> None:
    folders = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "harness")))
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "harness" / "stations.py"), str(tiny_llama_dir)],
        env={**os.environ, "PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    runs = [[Entry(*entry) for entry in run] for run in json.loads(result.stdout)]
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("WRITE_STATIONS"):
        text = f"{len(stations(runs[0]))} files:\n\n{as_markdown(stations(runs[0]))}"
        page, num_lists = LIST.subn(text, page)
        assert num_lists == 1
        PAGE.write_text(page, encoding="utf-8")
    (text,) = LIST.findall(page)
    documented = from_markdown(text)
    assert list(differences(documented, runs)) == [], "WRITE_STATIONS=1 writes the list anew"
    assert text.startswith(f"{len(documented)} files:\n")
    assert len(runs) == NUM_RUNS and len(documented) <= MOST_FILES


LOOP, WORKER = "event loop", "worker thread"
RUN = [Entry(LOOP, "a.py"), Entry(WORKER, "b.py"), Entry(LOOP, "c.py"), Entry(LOOP, "b.py")]


def test_a_file_is_listed_where_it_was_first_entered() -> None:
    assert stations(RUN) == RUN[:3]
    text = as_markdown(stations(RUN))
    assert text == "1. event loop: `a.py`\n2. worker thread: `b.py`\n3. event loop: `c.py`\n"
    assert from_markdown(text) == RUN[:3] and not list(differences(RUN[:3], [RUN, RUN]))


def test_a_long_leg_is_wrapped_and_read_again() -> None:
    run = [Entry(LOOP if i % 20 else WORKER, f"folder/file{i}.py") for i in range(60)]
    assert max(map(len, as_markdown(run).splitlines())) <= 120
    assert from_markdown(as_markdown(run)) == run


def test_what_is_left_out_is_there() -> None:
    for file, name in BACKGROUND:
        assert f"def {name}(" in (ROOT / "termgen" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("documented", "found"),
    [
        (RUN[:2], "missing: c.py"),
        ([*RUN[:3], Entry(LOOP, "d.py")], "never entered: d.py"),
        ([RUN[2], RUN[0], RUN[1]], "not in the order of the event loop: c.py, a.py"),
    ],
)
def test_a_wrong_list_is_found(documented: list[Entry], found: str) -> None:
    assert list(differences(documented, [RUN, RUN])) == [found]


def test_what_is_up_to_chance_is_not_held_against_a_list() -> None:
    assert not list(differences(RUN[:3], [RUN, RUN[:2]]))  # c.py is entered by one of two requests
    assert not list(differences(RUN[:2], [RUN, RUN[:2]]))
    assert not list(differences([RUN[1], RUN[0], RUN[2]], [RUN]))  # the worker may come first
