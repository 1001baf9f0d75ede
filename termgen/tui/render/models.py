"""Rows of the model picker: pure functions of the choices."""

from __future__ import annotations

from termgen.tui.model_choice import ModelChoice
from termgen.tui.sanitize import clean_line
from termgen.tui.spans import Row, Span, fit, row_width

NAME_WIDTH = 24
DETAIL_WIDTH = 12
"""The detail column is left out below this width."""


def choice_row(choice: ModelChoice, width: int) -> Row:
    """The model's name, its size, and whether it is on the disk."""
    mark: Span = ("● ", "accent") if choice.is_current else ("  ", "text")
    name: Span = (f"{clean_line(choice.name)}", "text/b" if choice.is_current else "text")
    spans: list[Span] = [mark, *fit((name,), NAME_WIDTH)]
    size = "" if choice.size_bytes is None else bytes_words(choice.size_bytes)
    spans.append((f" {size:>8} ", "text" if choice.is_here else "muted"))
    spans.append(("         ", "text") if choice.is_here else ("to fetch ", "warn"))
    spans.append(_memory(choice))
    if width - row_width(tuple(spans)) >= DETAIL_WIDTH:
        spans = [*fit(spans, row_width(tuple(spans)) + 1), (clean_line(choice.detail), "muted")]
    return fit(spans, width)


def _memory(choice: ModelChoice) -> Span:
    if choice.needs_bytes is None:
        return ("", "muted")
    words = f"≈{bytes_words(choice.needs_bytes)}"
    if choice.fits is None:
        return (f"{words:<18}", "muted")
    verdict = "fits" if choice.fits else "too large"
    return (f"{words:<9}{verdict:<9}", "good" if choice.fits else "bad")


def bytes_words(num_bytes: int) -> str:
    """A size in the format of `termgen models`."""
    if num_bytes >= 10**9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB"


def caution(choice: ModelChoice) -> str:
    """A warning to show before the model is loaded; empty where none applies."""
    parts = []
    if not choice.is_here:
        size = "" if choice.size_bytes is None else f" {bytes_words(choice.size_bytes)}"
        parts.append(f"⏎ again fetches{size}")
    if choice.fits is False:
        parts.append("it seems too large for the memory" + ("" if parts else "; ⏎ again tries"))
    return "; ".join(parts)
