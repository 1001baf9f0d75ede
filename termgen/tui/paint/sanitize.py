"""Makes text from a model or a user safe for a terminal.

Control bytes could move the cursor, change the clipboard or the title, and bidi controls could
reorder what is read; each becomes a visible glyph instead. The original text is kept elsewhere:
this is only for what is drawn.
"""

from __future__ import annotations

REPLACEMENT = "\ufffd"
BIDI_GLYPH = "⇄"

_TABLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(0x20) if code not in (9, 10)}
_TABLE[0x09] = "    "
_TABLE[0x7F] = "\u2421"
_TABLE |= dict.fromkeys(range(0x80, 0xA0), REPLACEMENT)
_TABLE |= dict.fromkeys((0x2028, 0x2029), "\n")
_TABLE |= dict.fromkeys(
    (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), BIDI_GLYPH
)
_TABLE |= dict.fromkeys(range(0xD800, 0xE000), REPLACEMENT)  # lone surrogates cannot be written
_TABLE |= dict.fromkeys(range(0xE0000, 0xE0080), REPLACEMENT)  # invisible tag characters

_IN_PLACE = _TABLE | {0x09: "\t"} | dict.fromkeys((0x0A, 0x2028, 0x2029), REPLACEMENT)


def clean(text: str) -> str:
    """Newlines stay, tabs become blanks, CR LF becomes a newline, controls become glyphs."""
    return text.replace("\r\n", "\n").translate(_TABLE)


def clean_line(text: str) -> str:
    """`clean` for a text on one line."""
    return clean(text).replace("\n", " ")


def clean_in_place(line: str) -> str:
    """One line for an editor: each character stays one, and tabs are the editor's."""
    return line.translate(_IN_PLACE)


class StreamCleaner:
    """`clean` over a text that arrives in pieces: a CR LF may be split between two of them."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        text = self._held + piece
        self._held = "\r" if text.endswith("\r") else ""
        return clean(text[:-1] if self._held else text)

    def finish(self) -> str:
        held, self._held = self._held, ""
        return clean(held)
