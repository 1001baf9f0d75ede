"""Roles to styles: the only place where a colour becomes something a terminal understands.

Renderers name roles (`prefill`, `muted`, `kv-shared`). A theme sets them as `tg-<role>` variables;
what it leaves out is derived from Textual's own theme colours, so any Textual theme works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from textual.app import App
from textual.color import Color, ColorParseError
from textual.strip import Strip

from termgen.tui.paint.lean_strip import Inks, LeanStrip
from termgen.tui.paint.spans import Row, row_width

VARIABLE_PREFIX = "tg-"
DRAFTED = "drafted"
"""Background of text that was guessed; underlined where there are no tints."""

# role -> (Textual variable, share of background mixed in)
_DERIVED: dict[str, tuple[str, float]] = {
    "text": ("foreground", 0.0),
    "muted": ("foreground", 0.42),
    "faint": ("foreground", 0.66),
    "border": ("foreground", 0.80),
    "accent": ("primary", 0.0),
    "good": ("success", 0.0),
    "warn": ("warning", 0.0),
    "bad": ("error", 0.0),
    "user": ("accent", 0.0),
    "heading": ("primary", 0.0),
    "link": ("primary", 0.0),
    "prefill": ("warning", 0.0),
    "decode": ("primary", 0.0),
    "padding": ("foreground", 0.70),
    "latency": ("secondary", 0.0),
    "mode-full": ("success", 0.0),
    "mode-piecewise": ("warning", 0.0),
    "mode-none": ("foreground", 0.60),
    "kv-free": ("foreground", 0.82),
    "kv-cached": ("primary", 0.60),
    "kv-active": ("primary", 0.0),
    "kv-active-alt": ("primary", 0.30),
    "kv-shared": ("secondary", 0.0),
    "kv-selected": ("foreground", 0.0),
    "kv-evicted": ("error", 0.0),
    "code-text": ("foreground", 0.10),
    "syn-keyword": ("accent", 0.0),
    "syn-string": ("success", 0.0),
    "syn-number": ("warning", 0.0),
    "syn-comment": ("foreground", 0.55),
    "syn-function": ("primary", 0.0),
    "syn-type": ("secondary", 0.0),
    "syn-operator": ("foreground", 0.30),
    "background": ("background", 0.0),
    "surface": ("surface", 0.0),
    "code": ("surface", 0.0),
    "select": ("panel", 0.0),
    "drafted": ("secondary", 0.72),
}

ROLES = frozenset(_DERIVED)
_FLAGS = {"b": "bold", "i": "italic", "u": "underline", "s": "strike", "r": "reverse"}
_ANSI_FALLBACK = {"muted": "ansi_bright_black", "faint": "ansi_bright_black"}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Glyphs of the shares and states; with few colours or none, they alone carry the meaning."""

    prefill: str
    decode: str
    padding: str
    kv: tuple[str, str, str, str]
    """Free, cached, active, shared."""
    kv_alt: str
    """In use by every other request."""
    kv_part: str
    """A cell of several blocks, less than half of them in use."""
    kv_selected: str
    kv_evicted: str
    """Just evicted: its old content was dropped for new."""
    lengths: tuple[str, str, str]
    """Signs of a request's cached, prompt and output tokens."""
    is_lettered: bool
    """Parts of a whole, of which there are many, differ by letters."""


COLOUR_GLYPHS = Glyphs(
    "█", "█", "░", ("·", "▪", "■", "◆"), "■", "▬", "█", "×", ("▪", "■", "■"), is_lettered=False
)
PLAIN_GLYPHS = Glyphs(
    "█", "▒", "░", ("·", "▫", "■", "◆"), "▣", "▬", "█", "×", ("▫", "■", "▒"), is_lettered=True
)


class Palette:
    """Resolved styles of one theme. Immutable but for its cache of parsed roles."""

    def __init__(
        self, variables: Mapping[str, str], *, mono: bool = False, few_colours: bool = False
    ) -> None:
        self.mono = mono
        self.glyphs = PLAIN_GLYPHS if mono or few_colours else COLOUR_GLYPHS
        self._colors = _resolve(variables)
        has_mixed = self._colors[DRAFTED].ansi is None and self._colors["background"].ansi is None
        self.shows_tints = has_mixed and not (mono or few_colours)
        """False where only whole colours are there: see `DRAFTED`."""
        self._styles: dict[str, Style] = {}
        self._inks = Inks(self.style)

    @classmethod
    def of(cls, app: App[Any]) -> Palette:
        """The palette of the app's theme, reduced to the colours its terminal has."""
        return cls(app.theme_variables, mono=app.no_color, few_colours=has_few_colours(app))

    def color(self, role: str) -> Color:
        return self._colors[role]

    def style(self, role: str) -> Style:
        """Style of `role[@background][/flags][ address]`. Raises KeyError for an unknown role."""
        found = self._styles.get(role)
        if found is None:
            found = self._styles[role] = self._parse(role.partition(" ")[0])
        return found

    def strip(self, row: Row, width: int, *, background: str = "background") -> Strip:
        """Draw a row, filled up or cropped to `width` cells."""
        suffix = "" if background == "background" else "@" + background
        if suffix:
            row = tuple((t, r if "@" in r else _with_background(r, suffix)) for t, r in row)
        cells = row_width(row)
        if cells > width:
            return LeanStrip(row, cells, self._inks).adjust_cell_length(width)
        if cells < width:
            row = (*row, (" " * (width - cells), "text" + suffix))
        return LeanStrip(row, width, self._inks)

    def _parse(self, role: str) -> Style:
        name, _, flags = role.partition("/")
        name, _, background = name.partition("@")
        attributes = {_FLAGS[flag]: True for flag in flags}
        if background == DRAFTED and not self.shows_tints:
            background, attributes["underline"] = "", True
        return Style(
            color=self._colors[name].rich_color,
            bgcolor=self._colors[background or "background"].rich_color,
            **attributes,  # type: ignore[arg-type]
        )


def has_few_colours(app: App[Any]) -> bool:
    """Sixteen or less. What runs without a terminal has them all."""
    return not app.is_headless and app.console.color_system in ("standard", "windows", None)


def _with_background(role: str, suffix: str) -> str:
    name, slash, flags = role.partition("/")
    return f"{name}{suffix}{slash}{flags}"


def _resolve(variables: Mapping[str, str]) -> dict[str, Color]:
    background = _color(variables.get("background"), Color(0, 0, 0))
    foreground = _color(variables.get("foreground"), Color(224, 224, 224))
    colors: dict[str, Color] = {}
    for role, (variable, mix) in _DERIVED.items():
        explicit = variables.get(VARIABLE_PREFIX + role)
        if explicit is not None:
            colors[role] = _color(explicit, foreground)
            continue
        color = _color(variables.get(variable), foreground)
        if color.ansi is not None:  # indexed colours cannot be mixed
            colors[role] = Color.parse(_ANSI_FALLBACK[role]) if role in _ANSI_FALLBACK else color
        else:
            mixed = mix and background.ansi is None
            colors[role] = color.blend(background, mix) if mixed else color
    return colors


def _color(value: str | None, default: Color) -> Color:
    if value is None:
        return default
    try:
        color = Color.parse(value)
    except ColorParseError:
        return default
    return color if color.ansi is not None or color.a == 1 else Color(color.r, color.g, color.b)
