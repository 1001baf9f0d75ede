"""Markdown to rows; a stream of it ends like a full parse, at constant cost."""

from __future__ import annotations

import random

import pytest
from tui_harness import in_pieces

from termgen.tui.paint import code_panel, markdown
from termgen.tui.paint.code_panel import COPY_ROLE, CodeBlock, highlight
from termgen.tui.paint.markdown import code_blocks, render
from termgen.tui.paint.markdown_stream import StreamingMarkdown
from termgen.tui.paint.spans import Row, row_text, row_width

PARTS = (
    "# Title\n",
    "para one two\n",
    "\n",
    "- a\n",
    "- b **x**\n",
    "  - nest\n",
    "    deeper\n",
    "1. one\n",
    "1. two\n",
    "0. zero\n",
    "3) three\n",
    "> quote\n",
    "> - in quote\n",
    "```python\n",
    'x = """1\n',
    "```\n",
    "| a | b |\n",
    "|---|--:|\n",
    "| 1 | 2 |\n",
    "===\n",
    "---\n",
    "***\n",
    "    indented\n",
    "* star\n",
    "-\n",
    "word `code` ",
    "~~s~~ ",
    "日本 ",
    "a|b",
    "-|-",
    "~~~\n",
    "10. ten\n",
    "+ plus\n\n  para in item\n",
    "<b>html</b>\n",
    "[x](http://y)\n",
)


def text_of(rows: list[Row]) -> list[str]:
    return [row_text(row).rstrip() for row in rows]


def test_blocks() -> None:
    rows = render("# Head\nsome **bold** text\n\n> said\n\n---\n", 30)
    assert text_of(rows) == ["Head", "", "some bold text", "", "▎ said", "", "─" * 30]
    assert ("bold", "text/b") in rows[2]
    assert rows[0] == (("Head", "heading/bu"),)


def test_lists_number_nest_and_keep_blank_lines() -> None:
    assert text_of(render("- a\n  - b\n- c\n", 20)) == ["• a", "  ◦ b", "• c"]
    assert text_of(render("7. a\n7. b\n", 20)) == [" 7. a", " 8. b"]
    assert text_of(render("- a\n\n- b\n", 20)) == ["• a", "", "• b"]
    assert text_of(render("- one two three\n", 9)) == ["• one two", "  three"]


def test_code_is_a_panel_in_its_own_colours() -> None:
    rows = render("```python\nreturn 1\n```\n", 20)
    assert text_of(rows) == [" python    [1] copy", " return 1", ""]
    assert ("[1] copy", COPY_ROLE) in rows[0]
    assert all(row_width(row) == 20 for row in rows)
    assert ("return", "syn-keyword@code") in rows[1]
    assert all("@code" in role for row in rows for _, role in row)


def test_long_code_lines_are_broken_not_lost() -> None:
    rows = render("```\n" + "x" * 25 + "\n```\n", 12)
    assert "".join("".join(text_of(rows[1:])).split()) == "x" * 25


def test_code_blocks_are_numbered_wherever_they_stand() -> None:
    source = "```py\na\n```\n- x\n\n  ~~~\n  b\n  ~~~\n\n> ```sh x=1\n> c\n> ```\n\n    d\n\te\n"
    rows = text_of(render(source, 30))
    numbers = [row.split("[")[1] for row in rows if "copy" in row]
    assert numbers == [f"{n}] copy" for n in (1, 2, 3, 4)]
    assert code_blocks(source) == [
        CodeBlock("py", "a\n"),
        CodeBlock("", "b\n"),
        CodeBlock("sh", "c\n"),
        CodeBlock("", "d\ne\n"),
    ]
    assert all(row_width(row) <= 6 for row in render(source, 6))


def test_table_aligns_and_shrinks() -> None:
    source = "| name | n |\n|---|--:|\n| a | 1 |\n| bb | 100 |\n"
    assert text_of(render(source, 30)) == [
        "name │    n",
        "─────┼─────",
        "a    │    1",
        "bb   │  100",
    ]
    wide = "| " + "word " * 12 + "| b |\n|---|---|\n| c | d |\n"
    assert all(row_width(row) <= 24 for row in render(wide, 24))


def test_links_show_where_they_go() -> None:
    assert text_of(render("[docs](http://x.y)", 40)) == ["docs (http://x.y)"]
    assert text_of(render("<http://x.y>", 40)) == ["http://x.y"]


def test_html_is_text() -> None:
    assert text_of(render("<script>x</script>", 40)) == ["<script>x</script>"]


def test_highlight_covers_every_character() -> None:
    code = 'def f(x):\n    """a\n    b"""\n\n    return x  # c\n'
    assert "\n".join(row_text(row) for row in highlight(code, "python")) == code
    assert highlight("a\nb", "no-such-language") == [(("a", "code-text"),), (("b", "code-text"),)]


@pytest.mark.parametrize("width", [7, 40])
def test_a_stream_looks_like_a_full_parse_at_every_moment(width: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        source = "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 14)))
        stream = StreamingMarkdown()
        for piece in in_pieces(source, rng, longest=10):
            stream.append(piece)
            assert text_of(stream.rows(width)) == text_of(render(stream.source, width)), source
        stream.finish()
        assert stream.rows(width) == render(source, width)


def test_references_defined_later_are_resolved_at_the_end() -> None:
    stream = StreamingMarkdown()
    stream.append("see [it][a] there\n\nnext\n\n")
    assert "[it][a]" in text_of(stream.rows(60))[0]
    stream.append("[a]: http://x.y\n")
    stream.rows(60)
    stream.finish()
    assert text_of(stream.rows(60))[0] == "see it (http://x.y) there"


def test_a_multi_line_string_in_code_is_coloured_right_at_the_end() -> None:
    stream = StreamingMarkdown()
    stream.append('```python\nx = """one\nreturn\n')
    stream.rows(40)
    stream.append('"""\n```\n')
    stream.finish()
    row = next(row for row in stream.rows(40) if "return" in row_text(row))
    assert ("return", "syn-string@code") in row


def test_another_width_is_rendered_anew() -> None:
    stream = StreamingMarkdown()
    stream.append("- one two three four\n- five six\n- seven\n")
    assert stream.rows(30) == render(stream.source, 30)
    assert stream.rows(8) == render(stream.source, 8)
    assert stream.rows(30) == render(stream.source, 30)


@pytest.mark.parametrize(
    "line",
    ["Some prose with **words** in it.\n\n", "- an item with `code`\n", "1. an item\n"],
)
def test_only_the_open_tail_is_parsed_again(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = markdown.parser.parse

    def counting(source: str, env: dict[str, object]) -> object:
        parsed.append(len(source))
        return parse(source, env)

    monkeypatch.setattr(markdown.parser, "parse", counting)
    stream = StreamingMarkdown()
    for _ in range(300):
        stream.append(line)
        stream.rows(60)
    assert max(parsed) <= 4 * len(line)
    frozen = stream.num_frozen_rows
    before = stream.rows(60)[:frozen]
    stream.append("more")
    assert all(a is b for a, b in zip(stream.rows(60)[:frozen], before, strict=True))


def test_lines_of_an_open_code_block_are_rendered_once() -> None:
    code_panel._open_code_line.cache_clear()
    stream = StreamingMarkdown()
    stream.append("```python\n")
    for number in range(200):
        stream.append(f"x{number} = {number}\n")
        stream.rows(60)
    assert code_panel._open_code_line.cache_info().misses <= 203
