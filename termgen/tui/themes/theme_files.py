"""Themes from TOML files: `themes/*.toml` of the package and of the user's config folder.

A file has `name`, `dark`, `ansi` (its colours are the terminal's own sixteen), a table `[colors]`
of Textual's theme colours, and a table `[roles]` of termgen's own roles (`prefill`, `kv-shared`,
...; see `palette`). What is left out is derived. A broken file raises `ThemeError` with the reason;
nothing else is affected.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from platformdirs import user_config_path
from textual.color import Color, ColorParseError
from textual.theme import BUILTIN_THEMES, Theme

from termgen.errors import ConfigError, TermgenError
from termgen.tui.paint.palette import ROLES, VARIABLE_PREFIX

DEFAULT_THEME = "termgen-dark"
SIXTEEN_COLOURS = "termgen-16"
"""The default where the terminal has no more."""
MAX_THEME_BYTES = 64 * 1024

_COLORS = (
    "primary",
    "secondary",
    "warning",
    "error",
    "success",
    "accent",
    "foreground",
    "background",
    "surface",
    "panel",
    "boost",
)
_REQUIRED = ("primary", "foreground", "background")
_TOP_LEVEL = {"name", "dark", "ansi", "colors", "roles"}


class ThemeError(TermgenError):
    """A theme file that cannot be used; the message names the file and the reason."""


def shipped_folder() -> Path:
    """Inside the package when installed, at the top of the repository when run from it."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "themes"
    return inside if inside.is_dir() else package.parent / "themes"


def user_folder() -> Path:
    return user_config_path("termgen") / "themes"


def theme_files(*folders: Path) -> Iterator[Path]:
    """Theme files in name order; later folders may replace themes of earlier ones."""
    for folder in folders:
        if folder.is_dir():
            yield from sorted(folder.glob("*.toml"))


def load_theme(path: Path) -> Theme:
    """Read and check one file."""
    try:
        if path.stat().st_size > MAX_THEME_BYTES:
            raise ThemeError(f"{path.name}: larger than {MAX_THEME_BYTES // 1024} KiB")
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ThemeError(f"{path.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ThemeError(f"{path.name}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ThemeError(f"{path.name}: {error}") from error
    return parse_theme(data, source=path.name)


def parse_theme(data: Mapping[str, Any], *, source: str) -> Theme:
    """A theme from a parsed file; `source` names it in errors."""
    unknown = set(data) - _TOP_LEVEL
    if unknown:
        raise ThemeError(f"{source}: unknown key {sorted(unknown)[0]!r}")
    name = data.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ThemeError(f"{source}: `name` is missing")
    flags = {"dark": data.get("dark", True), "ansi": data.get("ansi", False)}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ThemeError(f"{source}: `{flag}` must be true or false")
    colors = _table(data, "colors", frozenset(_COLORS), source)
    roles = _table(data, "roles", ROLES, source)
    for required in _REQUIRED:
        if required not in colors:
            raise ThemeError(f"{source}: [colors] needs `{required}`")
    variables = {VARIABLE_PREFIX + role: value for role, value in roles.items()}
    if flags["ansi"]:  # Textual derives no colour from indexed ones
        front, behind = colors["foreground"], colors["background"]
        variables |= {
            "ansi-foreground": front,
            "ansi-background": behind,
            "block-cursor-foreground": behind,
            "block-cursor-background": colors["primary"],
        }
    theme = Theme(name=name, **flags, variables=variables, primary=colors["primary"])
    return replace(theme, **colors)  # type: ignore[arg-type]


def _table(
    data: Mapping[str, Any], key: str, allowed: frozenset[str], source: str
) -> dict[str, str]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise ThemeError(f"{source}: [{key}] must be a table")
    for name, value in table.items():
        if name not in allowed:
            raise ThemeError(f"{source}: [{key}] has no `{name}`")
        if not isinstance(value, str):
            raise ThemeError(f"{source}: [{key}] {name} must be a colour in quotes")
        try:
            Color.parse(value)
        except ColorParseError as error:
            raise ThemeError(f"{source}: [{key}] {name}: {value!r} is not a colour") from error
    return dict(table)


def load_all(*folders: Path) -> tuple[dict[str, Theme], list[ThemeError]]:
    """Every usable theme by name, and what is wrong with the others."""
    themes: dict[str, Theme] = {}
    errors: list[ThemeError] = []
    for path in theme_files(*folders):
        try:
            theme = load_theme(path)
        except ThemeError as error:
            errors.append(error)
        else:
            themes[theme.name] = theme
    return themes, errors


def check_name(name: str | None, *folders: Path) -> None:
    """Raises ConfigError if a person asked for a theme that there is not, or that is broken."""
    themes, errors = load_all(*folders)
    if name is None or name in themes or name in BUILTIN_THEMES:
        return
    broken = "".join(f"; not loaded: {error}" for error in errors)
    raise ConfigError(
        f"theme must be one of {', '.join(themes)} or a theme of Textual, not {name!r}{broken}",
        param="theme",
    )
