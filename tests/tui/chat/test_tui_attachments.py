"""Files of a question, forms of answers and sampling fields, without Textual."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from termgen.errors import RequestError
from termgen.tui.chat.state import attachments
from termgen.tui.chat.state.answer_form import as_markdown, fits, form_words, parse_form
from termgen.tui.chat.state.attachments import (
    MAX_BYTES,
    Attachment,
    check,
    completions,
    files_below,
    mentions,
    open_mention,
    read_file,
    with_files,
)
from termgen.tui.chat.state.sampling_fields import FIELDS, changes, field_text, read_fields
from termgen.vocabulary.request import FinishReason
from termgen.vocabulary.sampling_params import SamplingParams
from termgen.vocabulary.structured_outputs import StructuredOutputsParams


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("scheduler.py", "src/deep/test_sched.py", "src/my notes.txt", ".hidden/sched.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "sched.js").write_text("no")
    return tmp_path


def test_only_words_that_name_files_are_mentions(folder: Path) -> None:
    text = 'see @scheduler.py, @nobody and a@scheduler.py (@"src/my notes.txt") @src @scheduler.py'
    assert mentions(text) == ["scheduler.py"]
    assert mentions('@"src/my notes.txt" and @' + "x" * 5000) == ["src/my notes.txt"]
    assert mentions(f"@{folder}/scheduler.py?") == [f"{folder}/scheduler.py"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"a\0b", "binary"),
        (b"caf\xe9", "not UTF-8"),
        (b"x" * (MAX_BYTES + 1), "larger than 2.0 MiB"),
    ],
)
def test_what_cannot_be_attached_says_why(folder: Path, data: bytes, reason: str) -> None:
    (folder / "f").write_bytes(data)
    with pytest.raises(RequestError, match=f"^f is .*{reason}"):
        read_file("f")


def test_folders_pipes_and_missing_files_are_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="src is not a file"):
        read_file("src")
    with pytest.raises(RequestError, match="No such file"):
        read_file("gone.py")
    os.mkfifo(folder / "pipe")
    with pytest.raises(RequestError, match="pipe is not a file"):
        read_file("pipe")
    with pytest.raises(RequestError, match="not a path"):
        read_file("a\0b")


def test_text_is_read_as_people_see_it(folder: Path) -> None:
    (folder / "f").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read_file("f").text == "one\ntwo"


def test_files_of_one_question_have_a_limit_together() -> None:
    half = "x" * (MAX_BYTES // 2)
    check([Attachment("a", half), Attachment("b", half)])
    with pytest.raises(RequestError, match="2.0 MiB go with a question"):
        check([Attachment("a", half), Attachment("b", half), Attachment("c", "y")])
    with pytest.raises(RequestError, match="21 files"):
        check([Attachment(str(i), "") for i in range(21)])


def test_a_file_is_sent_as_a_block_that_it_cannot_end() -> None:
    sent = with_files("why?", [Attachment("a.py", "x\n"), Attachment("b", "```\ny\n````\n")])
    assert sent == "a.py:\n```py\nx\n```\n\nb:\n`````\n```\ny\n````\n`````\n\nwhy?"
    assert with_files("why?", ()) == "why?"


def test_completion_finds_files_by_any_part_of_their_path(folder: Path) -> None:
    files = files_below(Path())
    assert files == ["scheduler.py", "src/my notes.txt", "src/deep/test_sched.py"]
    assert completions("", files) == files
    assert completions("SCHED", files) == ["scheduler.py", "src/deep/test_sched.py"]
    assert completions("my", files) == ["src/my notes.txt"]
    assert completions("src/d", files) == ["src/deep/test_sched.py"]
    assert completions("zzz", files) == []
    assert completions(f"{folder}/s", files) == [f"{folder}/scheduler.py", f"{folder}/src/"]
    assert completions("../nowhere/x", files) == []
    assert completions("~nobody-here/x", files) == []


def test_a_large_folder_costs_a_bounded_walk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_LISTED", 2)
    assert files_below(Path()) == ["scheduler.py", "src/my notes.txt"]


@pytest.mark.parametrize(
    ("before", "partial"),
    [
        ("see @sch", "sch"),
        ("@", ""),
        ('@"my no', "my no"),
        ("a@b", None),
        ("@a b", None),
        ("", None),
    ],
)
def test_the_path_being_written(before: str, partial: str | None) -> None:
    assert open_mention(before) == partial


def test_forms_are_read_from_commands(folder: Path) -> None:
    assert parse_form("schema", '{"type": "object"}').json == '{"type":"object"}'
    (folder / "s.json").write_text('{"type": "array"}')
    assert parse_form("schema", "s.json").json == '{"type":"array"}'
    assert parse_form("regex", "[ab]+").regex == "[ab]+"
    form = parse_form("choice", "yes | no")
    assert form.choice == ("yes", "no") and form_words(form) == "one of 2"
    for command, argument, reason in (
        ("schema", "{", "/schema: the schema is not valid JSON"),
        ("schema", "gone.json", "gone.json: No such file"),
        ("choice", "a||b", "/choice: each choice"),
    ):
        with pytest.raises(RequestError, match=reason):
            parse_form(command, argument)


def test_json_is_shown_with_indents_and_checked() -> None:
    form = StructuredOutputsParams(json={"type": "object"})
    assert as_markdown(form, '{"a":[1]}') == '```json\n{\n  "a": [\n    1\n  ]\n}\n```\n'
    assert as_markdown(form, '{"a":[1') == '```json\n{"a":[1\n```\n'
    assert as_markdown(None, '{"a":1}') == '{"a":1}'
    assert fits(form, '{"a":1}', FinishReason.STOP)
    assert not fits(form, '{"a":', FinishReason.LENGTH)
    regex = StructuredOutputsParams(regex="a+")
    assert fits(regex, "aa", FinishReason.STOP) and not fits(regex, "a", FinishReason.LENGTH)
    choice = StructuredOutputsParams(choice=("yes", "no"))
    assert fits(choice, "no", FinishReason.STOP) and not fits(choice, "n", FinishReason.LENGTH)


DEFAULTS = SamplingParams(temperature=0.7, top_p=0.95, stop_token_ids=(7,))


def texts(**changed: str) -> dict[str, str]:
    return {name: field_text(DEFAULTS, name) for name in FIELDS} | changed


def test_fields_show_the_values_and_give_them_back() -> None:
    shown = texts()
    assert shown["temperature"] == "0.7" and shown["seed"] == "" and shown["top_k"] == "0"
    assert read_fields(shown, base=DEFAULTS, defaults=DEFAULTS) == (DEFAULTS, {})
    stops = ("a,b", "\n", "\\n")
    given = SamplingParams(stop=stops, seed=3, max_tokens=9)
    back, _ = read_fields(
        {name: field_text(given, name) for name in FIELDS}, base=DEFAULTS, defaults=DEFAULTS
    )
    assert back is not None
    assert (back.stop, back.seed, back.max_tokens, back.stop_token_ids) == (stops, 3, 9, (7,))


def test_an_empty_field_means_the_default() -> None:
    params, _ = read_fields(texts(temperature="", top_p=" "), base=DEFAULTS, defaults=DEFAULTS)
    assert params == DEFAULTS


def test_every_wrong_field_has_the_message_of_the_parameters() -> None:
    wrong = texts(temperature="hot", top_p="2", seed="1.5", max_tokens="0", top_k="9" * 40)
    params, errors = read_fields(wrong, base=DEFAULTS, defaults=DEFAULTS)
    assert params is None
    assert errors.keys() == {"temperature", "top_p", "seed", "max_tokens", "top_k"}
    assert errors["temperature"] == "temperature must be a finite number, not 'hot'"
    assert errors["top_p"] == "top_p must be in (0, 1], not 2"


def test_changes_name_what_was_set() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.95, seed=7, stop=("a",))
    assert changes(params, DEFAULTS) == ["T 0", "seed 7", "stop (1)"]
    assert changes(DEFAULTS, DEFAULTS) == []
