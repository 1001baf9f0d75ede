"""The engine's reading list names files that exist, few enough for an afternoon."""

from __future__ import annotations

import re
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "termgen" / "engine"
README = ENGINE / "README.md"
MOST_FILES = 22
MOST_LINES = 6980
ITEM = re.compile(r"^(\d+)\. \[`([^`]+)`\]\(([^)]+)\): \S", re.MULTILINE)


def test_the_spine_is_numbered_and_exists() -> None:
    items = ITEM.findall(README.read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in items] == list(range(1, len(items) + 1))
    for _, name, link in items:
        assert (ENGINE / link).resolve() == ENGINE.parent / name
        assert (ENGINE / link).is_file(), name


def test_the_spine_is_read_in_an_afternoon() -> None:
    items = ITEM.findall(README.read_text(encoding="utf-8"))
    lines = {name: len((ENGINE.parent / name).read_bytes().splitlines()) for _, name, _ in items}
    assert 18 <= len(lines) == len(items) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES, lines


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert len(links) > MOST_FILES
    assert [link for link in links if not (ENGINE / link).exists()] == []


def test_attention_begins_with_a_short_reference() -> None:
    names = [name for _, name, _ in ITEM.findall(README.read_text(encoding="utf-8"))]
    first = next(name for name in names if "/attention/" in name)
    source = (ENGINE.parent / first).read_text(encoding="utf-8")
    assert first.endswith("reference.py") and len(source.splitlines()) <= 150
