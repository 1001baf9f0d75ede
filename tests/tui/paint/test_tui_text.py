"""Spans, number formats and the sanitiser: the base of every renderer."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len

from termgen.tui.paint import formatting, sanitize
from termgen.tui.paint.spans import cut, fit, merge, row_text, row_width, spread, wrap, wrap_hard

ALPHABET = "abc de  fg\tÄß日本語👍🏽\n`*_ \u0301"


def test_fit_pads_and_cuts_to_the_cell() -> None:
    assert row_text(fit([("abc", "text")], 5)) == "abc  "
    assert row_text(fit([("abcdef", "text")], 4)) == "abc…"
    assert row_text(fit([("ab", "text"), ("日本語", "muted")], 5)) == "ab日…"
    assert row_width(fit([("日本語", "text")], 4)) <= 4


def test_cut_keeps_what_fits() -> None:
    assert cut("hello", 5) == "hello"
    assert cut("hello world", 6) == "hello…"
    assert cut("hello", 1) == "h"


def test_spread_puts_two_ends_apart_and_the_left_gives_way() -> None:
    assert row_text(spread([("left", "a")], [("right", "b")], 14)) == "left     right"
    assert row_text(spread([("a long left", "a")], [("right", "b")], 12)) == "a lon… right"


def test_merge_joins_neighbours_of_one_role() -> None:
    assert merge([("a", "x"), ("", "y"), ("b", "x"), ("c", "z")]) == (("ab", "x"), ("c", "z"))


def test_wrap_at_words_keeping_roles() -> None:
    rows = wrap([("one two ", "text"), ("three", "text/b"), (" four", "text")], 9)
    assert [row_text(row) for row in rows] == ["one two", "three", "four"]
    assert ("three", "text/b") in rows[1]


def test_wrap_keeps_a_word_of_several_spans_together() -> None:
    rows = wrap([("aa b", "text"), ("old", "text/b"), ("er", "text")], 7)
    assert [row_text(row) for row in rows] == ["aa", "bolder"]


def test_wrap_breaks_what_is_longer_than_a_line() -> None:
    assert [row_text(row) for row in wrap([("abcdefgh", "text")], 3)] == ["abc", "def", "gh"]
    assert [row_text(row) for row in wrap([("日本語", "text")], 1)] == ["日", "本", "語"]


def test_wrap_never_overflows_nor_loses_a_letter() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(60))).replace("\t", " ")
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        spans = [(text[a:b], f"r{a}") for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        width = rng.randrange(2, 20)
        for wrapper in (wrap, wrap_hard):
            source = [(part.replace("\n", " "), role) for part, role in spans]
            rows = wrapper(source if wrapper is wrap_hard else spans, width)
            assert all(row_width(row) <= width for row in rows), (text, width)
            shown = "".join(row_text(row) for row in rows)
            assert "".join(shown.split()) == "".join(text.split())


def test_wrap_hard_keeps_blanks() -> None:
    assert [row_text(row) for row in wrap_hard([("    ab  cd", "x")], 6)] == ["    ab", "  cd"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1.0k"), (12_345, "12.3k"), (999_499, "999k")]
    + [(1_000_000, "1.0M"), (-1500, "-1.5k"), (2.5e12, "2.5T")],
)
def test_count(value: float, shown: str) -> None:
    assert formatting.count(value) == shown
    assert len(formatting.count(abs(value))) <= 5


def test_other_numbers() -> None:
    assert formatting.rate(0) == "0"
    assert formatting.rate(23.44) == "23.4"
    assert formatting.rate(1234) == "1.2k"
    assert formatting.plural(1, "line") == "1 line"
    assert formatting.plural(0, "line") == "0 lines"
    assert formatting.plural(1234, "line") == "1.2k lines"
    assert formatting.duration(0.142) == "142 ms"
    assert formatting.duration(1.2) == "1.20 s"
    assert formatting.duration(75) == "1:15"
    assert formatting.clock(3723) == "1:02:03"
    assert formatting.percent(None) == "–"
    assert formatting.percent(0.068) == "6.8%"
    assert formatting.percent(0.93) == "93%"
    assert formatting.age(12.34) == "12.3s"
    assert formatting.age(7300) == "2h"


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.0001, "1 µs"),
        (0.035, "35 µs"),
        (0.42, "0.42 ms"),
        (4.9, "4.90 ms"),
        (9.996, "10.0 ms"),
        (31.94, "31.9 ms"),
        (99.96, "100 ms"),
        (840, "840 ms"),
        (999.4, "999 ms"),
        (999.6, "1.00 s"),
        (3730, "3.73 s"),
        (42_100, "42.1 s"),
        (75_000, "1:15"),
    ],
)
def test_a_time_has_its_unit_and_is_in_seconds_from_one_second_on(
    ms: float | None, shown: str
) -> None:
    assert formatting.took(ms) == shown


def test_no_time_is_longer_than_its_column() -> None:
    """Tables reserve seven cells for it."""
    times = [10 ** (exponent / 50) for exponent in range(-200, 350)]
    assert max(len(formatting.took(ms)) for ms in times) <= 7
    assert not any("k" in formatting.took(ms) for ms in times)


def test_controls_become_glyphs() -> None:
    assert sanitize.clean("a\x1b[31mb\x07\x00") == "a␛[31mb␇␀"
    assert sanitize.clean("\x9b31m\x85") == "\ufffd31m\ufffd"
    assert sanitize.clean("\x7f") == "␡"
    assert sanitize.clean("a\u202eb\u2066c\u200f") == "a⇄b⇄c⇄"
    assert sanitize.clean("x\ud800y\U000e0041") == "x\ufffdy\ufffd"


def test_ordinary_text_stays() -> None:
    text = "Grüße, 日本語, 👩‍👩‍👧 and é\n  second line"
    assert sanitize.clean(text) == text
    assert sanitize.clean("a\tb\r\nc\u2028d") == "a    b\nc\nd"
    assert sanitize.clean("over\rwrite") == "over␍write"
    assert sanitize.clean_line("a\nb") == "a b"


def test_nothing_a_terminal_obeys_gets_through() -> None:
    dangerous = "".join(map(chr, [*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F)]))
    safe = sanitize.clean(dangerous)
    assert not [c for c in safe if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0]
    safe.encode("utf-8")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_stream_cleaner_equals_clean_for_any_split(size: int) -> None:
    text = "one\r\ntwo\rthree\x1b]0;t\x07\r\n\r"
    cleaner = sanitize.StreamCleaner()
    parts = [cleaner.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join(parts) + cleaner.finish() == sanitize.clean(text)
    assert cell_len("".join(parts)) > 0
