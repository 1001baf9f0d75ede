"""The recording of the first steps: its files, and the parts of the script that makes it."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CAST, SVG = (ROOT / "docs" / "images" / f"first-steps.{end}" for end in ("cast", "svg"))
MOST_BYTES = 1_500_000
SVG_NAME = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield importlib.import_module("make_recording")  # type: ignore[misc]
    for name in ("make_recording", "recording_svg"):
        sys.modules.pop(name, None)


@pytest.fixture
def svg(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> ModuleType:
    return importlib.import_module("recording_svg")


# -- the files -----------------------------------------------------------------------------


def test_the_recording_is_of_asciinema_s_format(script: ModuleType) -> None:
    head, *lines = map(json.loads, CAST.read_text(encoding="utf-8").splitlines())
    assert head.keys() == {"version", "width", "height", "title", "env"}
    assert (head["version"], head["width"], head["height"]) == (2, 100, 34)
    assert "shortened" in head["title"] and head["env"] == {"TERM": "xterm-256color"}
    times = [at for at, _, _ in lines]
    assert times == sorted(times) and times[0] >= 0 and len(lines) > 100
    assert {kind for _, kind, _ in lines} == {"o"} and times[-1] < 90
    pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert max(pauses) <= script.LONGEST_S + 0.001


def test_the_files_have_no_path_of_a_machine_and_no_key_and_are_small(script: ModuleType) -> None:
    raw = "".join(event.text for event in script.read_cast(CAST))
    words = "\n".join(ET.parse(SVG).getroot().itertext())
    assert "smollm2-135m" in words and "termgen bench serve" in words
    for text in (raw, words):
        script.check_clean(text)
        assert not re.search(r"@[\w-]+:|Bearer |api[_-]key", text)
    assert CAST.stat().st_size + SVG.stat().st_size < MOST_BYTES


def test_the_picture_asks_for_nothing_else() -> None:
    source = SVG.read_text(encoding="utf-8")
    root = ET.fromstring(source)
    tags = {element.tag.removeprefix(SVG_NAME) for element in root.iter()}
    assert tags == {"svg", "title", "style", "defs", "g", "rect", "circle", "text", "use"}
    read = [value for element in root.iter() for value in element.attrib.values()]
    read += [element.text or "" for element in root.iter(f"{SVG_NAME}style")]
    for words in ("//", "@import", "@font-face", "url(", "javascript", "data:"):
        assert not any(words in value for value in read), words
    links = {element.get("href") for element in root.iter(f"{SVG_NAME}use")}
    ids = {f"#{element.get('id')}" for element in root.iter() if element.get("id")}
    assert links == ids
    assert "prefers-reduced-motion" in source


def test_the_picture_moves_through_the_recording(script: ModuleType, svg: ModuleType) -> None:
    pytest.importorskip("pyte")
    shown = list(script.frames_of(script.read_cast(CAST)))
    made = svg.animated_svg(shown, title=script.TITLE, still=len(shown) // 2)
    assert made == SVG.read_text(encoding="utf-8")
    words = script.words_of(shown)
    for seen in ("Ask anything", "knows no tools", "files_list", "timeline", "KV blocks", "ttft"):
        assert seen in words, seen
    script.check_clean(words)


def test_the_readme_shows_it_near_the_top() -> None:
    top = (ROOT / "README.md").read_text(encoding="utf-8").partition("## ")[0]
    assert "(docs/images/first-steps.svg)" in top and "shortened" in top


# -- the script ----------------------------------------------------------------------------


def test_time_is_shortened_where_it_is_said_and_in_no_other_place(script: ModuleType) -> None:
    events = [script.Event(at, str(at)) for at in (0.5, 1.0, 3.0, 11.0, 11.5, 40.0)]
    found = script.squeezed(events, [script.Squeeze(1.0, 11.0, 2.0)])
    times = [at for at, _ in found]
    assert times == pytest.approx([0.5, 1.0, 1.4, 3.0, 3.5, 3.5 + script.LONGEST_S])
    assert [text for _, text in found] == [text for _, text in events]
    same = script.squeezed(events[:3], [script.Squeeze(1.0, 3.0, 2.5)])
    assert same == events[:3], "what is short enough stays"


def test_times_stay_in_order(script: ModuleType) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    at = sorted(rng.uniform(0, 100) for _ in range(200))
    edges = sorted(rng.sample(range(100), 8))
    squeezes = [
        script.Squeeze(begin, end, rng.uniform(0, 20))
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
    ]
    found = script.squeezed([script.Event(one, "") for one in at], squeezes)
    times = [one.seconds for one in found]
    assert times == sorted(times) and times[-1] <= at[-1]


def test_the_home_folder_is_a_tilde_of_the_same_width(script: ModuleType) -> None:
    line = "reads below /tmp/tmpab_c1/garden\x1b[0m | and /tmp/tmpab_c1."
    [event] = script.without_folder([script.Event(1.0, line)], Path("/tmp/tmpab_c1"))
    assert event.text == f"reads below {'~/garden':20}\x1b[0m | and {'~':13}."
    assert len(event.text) == len(line)


@pytest.mark.parametrize(
    "text",
    ["at /root/x", "/home/ann/y", "in /tmp/z", "on box-7 now", "sk-abcdefgh12", "hf_abcdefgh1"],
)
def test_what_is_private_is_refused(script: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="is on the screen"):
        script.check_clean(f"before {text} after", "box-7")
    script.check_clean("reads below ~/garden, box-77", "box-7")


def cells(svg: ModuleType, text: str, **style: Any) -> tuple[Any, ...]:
    return tuple(svg.Cell(one, svg.Style(**style)) for one in text)


def test_a_row_is_runs_of_one_style(svg: ModuleType) -> None:
    wide = (svg.Cell("語", svg.Style(bold=True)), svg.Cell("", svg.Style(bold=True)))
    row = (*cells(svg, "ab "), *wide, *cells(svg, "x", bold=True))
    assert svg.runs_of(row) == [
        (0, 3, "ab ", svg.Style()),
        (3, 3, "語x", svg.Style(bold=True)),
    ]


def test_a_file_has_each_row_once_and_a_step_for_each_frame(svg: ModuleType) -> None:
    empty, first = cells(svg, "      "), cells(svg, "  a<b ", colour="#ff0000")
    second = cells(svg, "done  ", background="#00ff00")
    shown = [
        svg.Shown((first, empty), 1.0),
        svg.Shown((first, second), 2.0),
        svg.Shown((second, first), 1.0),
    ]
    made = svg.animated_svg(shown, title="a & b", still=1)
    root = ET.fromstring(made)
    assert root.find(f"{SVG_NAME}title").text == "a & b"  # type: ignore[union-attr]
    defs = root.find(f"{SVG_NAME}defs")
    assert defs is not None and len(defs) == 2, "a blank row is none"
    [text] = [t for t in defs.iter(f"{SVG_NAME}text") if t.text == "a<b"]
    assert text.get("x") == "16.8" and text.get("textLength") == "25.2"
    assert len(list(root.iter(f"{SVG_NAME}use"))) == 1 + 2 + 2
    assert re.findall(r"([\d.]+)%\{", made) == ["0.000", "25.000", "75.000"]
    assert "play 4.00s step-end infinite" in made


def test_a_screen_shows_what_a_program_leaves(script: ModuleType) -> None:
    pytest.importorskip("pyte")
    screen = script.Screen()
    screen.feed("$ run\r\n\x1b[>1u\x1b[?2026$p\x1b]0;title\x07")
    screen.feed("\x1b[?1049h\x1b[?2026h\x1b[3")
    assert not screen.is_whole
    screen.feed("1mred\x1b[0m\x1b[?2026l")
    assert screen.is_whole and screen.text.split() == ["red"]
    assert screen.frame[0][0] == script.Cell("r", script.Style(colour="#ff6b6b"))
    screen.feed("\x1b[?1049l\x1b[<u")
    assert screen.text.split() == ["$", "run"]
    screen.feed("done")
    assert screen.text.splitlines()[1].rstrip() == "done"


def test_frames_are_whole_pictures_some_times_a_second(script: ModuleType) -> None:
    pytest.importorskip("pyte")
    events = [
        script.Event(0.0, "a"),
        *(script.Event(0.3 + i / 100, "b") for i in range(20)),
        script.Event(0.55, "c"),
        script.Event(1.0, "\x1b[?2026hd"),
        script.Event(1.1, "e\x1b[?2026l"),
        script.Event(5.0, ""),
        script.Event(6.0, "f"),
    ]
    shown = list(script.frames_of(events))
    lines = ["".join(cell.text for cell in one.frame[0]).rstrip() for one in shown]
    assert lines == ["a", f"a{20 * 'b'}", f"a{20 * 'b'}c", f"a{20 * 'b'}cde", f"a{20 * 'b'}cdef"]
    assert [one.seconds for one in shown] == pytest.approx([0.49, 0.06, 0.55, 4.9, script.LAST_S])
