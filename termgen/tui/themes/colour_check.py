"""Checks that the colours of a palette can be read, and differ enough. No Textual app, no files.

Contrast is WCAG 2's. Colour blindness is simulated with the matrices of Machado, Oliveira and
Fernandes (2009) at full strength; distances are taken in Oklab. Used by `termgen themes check` and
by the tests of the shipped themes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from textual.color import Color

from termgen.tui.paint.palette import DRAFTED, Palette

READABLE, FAINT, HIGH = 4.5, 3.0, 7.0
"""Least contrast of text, of what may be overlooked, and of text in a high-contrast theme."""
APART = 0.09
"""Least distance in Oklab of two colours that must not be taken for each other."""

TEXT_ROLES = tuple(
    "text muted accent good warn bad user heading link prefill decode latency "
    "mode-full mode-piecewise mode-none".split()
)
CODE_ROLES = tuple(
    "code-text syn-keyword syn-string syn-number syn-comment syn-function syn-type "
    "syn-operator".split()
)
FAINT_ROLES = tuple(
    "faint padding kv-cached kv-active kv-active-alt kv-shared kv-selected kv-evicted".split()
)
"""Asides, and the cells of the map, which are marks rather than text."""
CATEGORIES: tuple[tuple[str, ...], ...] = (
    ("prefill", "decode", "padding", "latency"),
    ("mode-full", "mode-piecewise", "mode-none"),
    ("kv-free", "kv-cached", "kv-active", "kv-shared", "kv-selected", "kv-evicted"),
    ("good", "warn", "bad"),
)
"""Roles that stand side by side for different things."""

Matrix = tuple[tuple[float, float, float], ...]
BLINDNESS: dict[str, Matrix] = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
_LMS: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_OKLAB: Matrix = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


class Weakness(NamedTuple):
    """A role on its background with less contrast than it needs."""

    role: str
    background: str
    contrast: float
    least: float

    def __str__(self) -> str:
        return (
            f"`{self.role}` on `{self.background}` has a contrast of {self.contrast:.1f}, "
            f"and needs {self.least:g}"
        )


class Likeness(NamedTuple):
    """Two roles that a person with this colour blindness cannot tell apart."""

    one: str
    other: str
    blindness: str
    distance: float

    def __str__(self) -> str:
        return f"`{self.one}` and `{self.other}` look alike with {self.blindness}"


def contrast(one: Color, other: Color) -> float:
    """The ratio of WCAG 2, from 1 to 21."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def weak_roles(
    palette: Palette, *, readable: float = READABLE, faint: float = FAINT
) -> Iterator[Weakness]:
    """Text that is hard to read, the selection's background included."""
    wanted = [(role, "background", readable) for role in TEXT_ROLES]
    wanted += [(role, "code", readable) for role in CODE_ROLES]
    wanted += [(role, "background", faint) for role in FAINT_ROLES]
    grounds = ("select", "surface", *([DRAFTED] if palette.shows_tints else []))
    wanted += [("text", ground, readable) for ground in grounds]
    for role, background, least in wanted:
        value = contrast(palette.color(role), palette.color(background))
        if value < least:
            yield Weakness(role, background, value, least)


def alike_roles(
    palette: Palette, *, blindness: Sequence[str] = tuple(BLINDNESS), apart: float = APART
) -> Iterator[Likeness]:
    """Pairs of roles in one category that are too close for some kind of sight."""
    for category in CATEGORIES:
        for one, other in combinations(category, 2):
            for kind in blindness:
                seen = [simulate(palette.color(role), kind) for role in (one, other)]
                value = distance(*seen)
                if value < apart:
                    yield Likeness(one, other, kind, value)


def simulate(color: Color, blindness: str) -> Color:
    """The colour as a person with that blindness sees it."""
    linear = _times(BLINDNESS[blindness], _linear(color))
    red, green, blue = (round(255 * _encoded(min(1.0, max(0.0, part)))) for part in linear)
    return Color(red, green, blue)


def distance(one: Color, other: Color) -> float:
    """Euclidean, in Oklab: 0.02 can just be seen, black and white are 1 apart."""
    pairs = zip(_oklab(one), _oklab(other), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def _luminance(color: Color) -> float:
    red, green, blue = _linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _oklab(color: Color) -> tuple[float, ...]:
    return _times(_OKLAB, tuple(part ** (1 / 3) for part in _times(_LMS, _linear(color))))


def _linear(color: Color) -> tuple[float, ...]:
    parts = color.normalized
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)


def _encoded(part: float) -> float:
    return float(part * 12.92 if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055)


def _times(matrix: Matrix, vector: Sequence[float]) -> tuple[float, ...]:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
