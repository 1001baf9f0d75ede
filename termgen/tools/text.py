"""Text of tools, made fit for a model and a screen: cut, and without control codes."""

from __future__ import annotations

import re

MAX_RESULT_CHARS = 16_000
"""Characters of one result that a model is shown, where its context is long or unknown."""
LEAST_RESULT_CHARS = 500
CONTEXT_SHARE = 0.25
CHARS_PER_TOKEN = 4
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control codes but tab and newline, and halves of a pair of code units."""


def escaped(text: str) -> str:
    """Control codes as `\\x1b`; CR LF becomes a newline."""
    return _CONTROLS.sub(lambda found: _escape(found[0]), text.replace("\r\n", "\n"))


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def shortened(text: str, most: int) -> str:
    """The first characters, and how many more there were: `... 960k more`."""
    if len(text) <= most:
        return text
    return f"{text[:most]}... {amount(len(text) - most)} more"


def amount(number: int) -> str:
    """`960`, `960k`, `2.1M`."""
    if number < 1000:
        return str(number)
    if number < 999_500:
        return f"{number / 1000:.0f}k"
    return f"{number / 1e6:.1f}M"


def for_model(result: str, most: int = MAX_RESULT_CHARS) -> str:
    """A result as the model is shown it. Takes the same time for any length."""
    if len(result) <= most:
        return escaped(result)
    return f"{escaped(result[:most])}... {amount(len(result) - most)} more"


def result_chars(context_tokens: int) -> int:
    """How much of a result a model with this context is shown; 0: its context is unknown."""
    if not context_tokens:
        return MAX_RESULT_CHARS
    share = int(context_tokens * CONTEXT_SHARE * CHARS_PER_TOKEN)
    return max(LEAST_RESULT_CHARS, min(MAX_RESULT_CHARS, share))
