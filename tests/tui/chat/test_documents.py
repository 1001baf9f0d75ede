"""PDF files and web pages that go with a question: their text, their faults, and a screen that
does not wait for them."""

from __future__ import annotations

import os
import random
import re
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from chat_harness import SIZE, sent
from fake_engine import Script
from tui_harness import FrozenApp, chat_engine, ready, wait_until

from termgen.errors import RequestError
from termgen.tui.chat.state import attachments, document_program, documents

PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>t</title>
<style>p { color: red }</style><script>let hidden = 1;</script></head>
<body><h1>Cats</h1><p>They <b>sleep</b> in <a href="https://cat.example/x">boxes</a>.</p>
<ul><li>one</li><li>two</li></ul><img src="a.png" alt="a picture"><!-- unseen --></body></html>"""


def pdf(*pages: str) -> bytes:
    """A PDF file with one line of text a page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    start = len(data)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    data += b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n"
    return data + trailer.encode()


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    documents._read.clear()
    monkeypatch.chdir(tmp_path)


def title(app: FrozenApp) -> str:
    return str(app.chat.prompt.border_title or "")


def read(name: str, data: bytes) -> str:
    Path(name).write_bytes(data)
    return attachments.read_file(name).text


def test_a_page_becomes_markdown() -> None:
    text = read("cats.html", PAGE.encode())
    assert text.startswith("# Cats\n\nThey **sleep** in [boxes](https://cat.example/x).")
    assert "* one" in text and not any(word in text for word in ("hidden", "red", "unseen", "<"))
    file = attachments.read_file("cats.html")
    assert attachments.with_name(file).startswith("cats.html:\n```\n# Cats"), "no language"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("<p>grüße</p>".encode(), "grüße"),
        (b'<meta charset="iso-8859-15"><p>10 \xa4</p>', "10 €"),
        ("<p>grüße</p>".encode("utf-16"), "grüße"),
        (b"<p>10 \x80</p>", "10 €"),
        (b'<meta charset="no-such"><p>\xe9t\xe9</p>', "été"),
    ],
)
def test_pages_are_decoded_as_they_say(data: bytes, expected: str) -> None:
    assert read("a.HTM", data).strip() == expected


def test_a_pdf_has_its_pages_below_their_numbers() -> None:
    text = read("notes.pdf", pdf("The first page", "", "The third"))
    assert text == "[page 1]\nThe first page\n\n[page 3]\nThe third\n"


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("a.pdf", b"", "a.pdf is no PDF file that can be read"),
        ("a.pdf", b"%PDF-1.4 nonsense", "a.pdf is no PDF file that can be read"),
        ("a.pdf", pdf(""), "a.pdf holds no text: its pages may be pictures"),
        ("a.html", b"<script>only()</script>", "a.html holds no text"),
    ],
)
def test_faults_are_one_line(name: str, data: bytes, fault: str) -> None:
    for _ in range(2):  # the second one is known already
        with pytest.raises(RequestError, match=fault) as raised:
            read(name, data)
        assert "\n" not in str(raised.value) and raised.value.param == "attachment"


def test_an_encrypted_pdf_says_so() -> None:
    import io

    import pypdf

    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf("secret")))
    writer.encrypt("password", algorithm="RC4-128")
    target = io.BytesIO()
    writer.write(target)
    with pytest.raises(RequestError, match="is encrypted"):
        read("a.pdf", target.getvalue())


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, task in (("pypdf", ("pdf", "a.pdf")), ("html2text", ("page", "a.html"))):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(RequestError, match=r"pip install 'termgen\[files\]'"):
            document_program.answer(task, b"x")


def test_what_takes_too_long_costs_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "READ_S", 0.2)
    with pytest.raises(RequestError, match=r"a\.html takes too much time to read"):
        read("a.html", b"<div>" * 400_000)
    monkeypatch.setattr(documents, "READ_S", 60.0)
    monkeypatch.setattr(documents, "MAX_BYTES", 1 << 20)
    with pytest.raises(RequestError, match="larger than 1 MiB"):
        read("b.pdf", bytes(1 << 21))


def test_more_text_than_a_question_takes_is_refused() -> None:
    huge = zlib.compress(b"BT /F1 12 Tf (" + b"word " * 600_000 + b") Tj ET", 9)
    page = b"<< /Length %d /Filter /FlateDecode >>\nstream\n" % len(huge) + huge + b"\nendstream"
    data, old = pdf("short", "second"), re.compile(rb"<< /Length \d+ >>\nstream.*?endstream", re.S)
    with pytest.raises(RequestError, match="too long: 1 of its pages"):
        read("bomb.pdf", old.sub(lambda _: page, data, count=1))


def test_broken_files_never_raise_anything_else() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng, good = random.Random(seed), pdf("one", "two")
    for _ in range(40):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            document_program.answer(("pdf", "a.pdf"), bytes(data[: rng.randrange(len(data))]))
        except RequestError as error:
            assert "\n" not in str(error)


def test_a_document_is_read_once_until_it_changes() -> None:
    Path("a.html").write_text("<p>one</p>")
    assert documents.is_unread("a.html") and not documents.is_unread("gone.html")
    assert attachments.read_file("a.html").text == "one\n"
    assert not documents.is_unread("a.html") and not documents.is_unread("a.txt")
    Path("a.html").write_text("<p>other</p>")
    os.utime("a.html", ns=(1, 1))
    assert documents.is_unread("a.html")
    assert attachments.read_file("a.html").text == "other\n"
    for number in range(documents.MOST_KEPT):
        read(f"{number}.html", b"<p>x</p>")
    assert documents.is_unread("a.html"), "only the last ones are kept"


async def test_the_screen_does_not_wait_for_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is sent as soon as it is read; a changed one is not."""
    may_read, real = threading.Event(), documents._text_of

    def slowly(*arguments: Any) -> str:
        assert may_read.wait(30)
        return real(*arguments)

    monkeypatch.setattr(documents, "_text_of", slowly)
    Path("notes.pdf").write_bytes(pdf("The first page"))
    Path("cats.html").write_text(PAGE)
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        app.chat.prompt.insert("what is in @notes.pdf")
        await pilot.press("enter")
        await wait_until(pilot, lambda: "notes.pdf is read" in title(app))
        assert not engine.calls and app.chat.prompt.text == "what is in @notes.pdf"
        may_read.set()
        await wait_until(pilot, lambda: bool(engine.calls))
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert sent(engine)[-1] == (
            "user",
            "notes.pdf:\n```\n[page 1]\nThe first page\n```\n\nwhat is in @notes.pdf",
        )
        may_read.clear()
        app.chat.prompt.insert("and @cats.html")
        await pilot.press("enter")
        await wait_until(pilot, lambda: "cats.html is read" in title(app))
        app.chat.prompt.insert("?")
        may_read.set()
        await wait_until(pilot, lambda: "cats.html is read" not in title(app))
        assert app.chat.prompt.text == "and @cats.html?" and len(engine.calls) == 1
        await pilot.press("enter")
        await wait_until(pilot, lambda: len(engine.calls) == 2)
        assert "# Cats" in sent(engine)[-1][1]


async def test_a_document_is_attached_and_a_broken_one_refused() -> None:
    Path("cats.html").write_text(PAGE)
    Path("bad.pdf").write_bytes(b"%PDF-1.4 nonsense")
    engine = chat_engine(Script(pieces=("ok",)))
    app = FrozenApp(engine)
    async with app.run_test(size=SIZE) as pilot:
        await ready(app, pilot)
        for name in ("cats.html", "bad.pdf"):
            app.chat.prompt.insert(f"/attach {name}")
            await pilot.press("enter")
            await wait_until(pilot, lambda name=name: not documents.is_unread(name))
        await wait_until(pilot, lambda: len(app._notifications) == 1)
        assert "no PDF file" in next(iter(app._notifications)).message
        assert [file.name for file in app.chat.files.attached] == ["cats.html"]
        app.chat.prompt.insert("see @bad.pdf")
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.chat.prompt.text == "see @bad.pdf")
        assert not engine.calls
