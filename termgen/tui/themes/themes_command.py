"""`termgen themes`: which there are, whether a file is a good one, and a file to begin with."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from textual.theme import BUILTIN_THEMES, Theme

from termgen.errors import ConfigError
from termgen.tui.paint.palette import ROLES, VARIABLE_PREFIX, Palette
from termgen.tui.themes.colour_check import alike_roles, weak_roles
from termgen.tui.themes.theme_files import (
    DEFAULT_THEME,
    ThemeError,
    load_all,
    load_theme,
    shipped_folder,
    theme_files,
    user_folder,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

_COLORS = {
    "primary": "names, keys, links, whatever is active",
    "secondary": "figures of time",
    "accent": "your own messages",
    "warning": "what needs attention",
    "error": "what went wrong",
    "success": "what went well",
    "foreground": "text",
    "background": "behind everything",
    "surface": "behind code",
    "panel": "behind a selection",
}
ROLE_WORDS = {
    "text": "ordinary text",
    "muted": "labels and asides: still to be read",
    "faint": "what may be overlooked",
    "border": "frames and empty tracks of bars",
    "accent": "names, keys, cursors",
    "good": "✓",
    "warn": "!",
    "bad": "✗",
    "user": "your messages in the chat",
    "heading": "headings in answers",
    "link": "links in answers",
    "prefill": "prompt tokens being read",
    "decode": "tokens being written",
    "padding": "what a graph computes for no request",
    "latency": "figures of time",
    "mode-full": "F: a step from one whole graph",
    "mode-piecewise": "P: a step from pieces",
    "mode-none": "N: a step without a graph",
    "kv-free": "a free block",
    "kv-cached": "a block kept for a later hit",
    "kv-active": "a block in use",
    "kv-active-alt": "the same, of every other request",
    "kv-shared": "a block of several requests",
    "kv-selected": "the blocks of the marked request",
    "kv-evicted": "a block whose cached prefix was just forgotten",
    "code-text": "code",
    "syn-keyword": "code: keywords",
    "syn-string": "code: strings",
    "syn-number": "code: numbers",
    "syn-comment": "code: comments",
    "syn-function": "code: functions",
    "syn-type": "code: types",
    "syn-operator": "code: operators",
    "background": "behind everything",
    "surface": "behind panels",
    "code": "behind code",
    "select": "behind a selection",
    "drafted": "behind what was guessed, if it is tinted",
}


def list_themes() -> None:
    """Every theme by name, and what is wrong with files that are none."""
    shipped = shipped_folder()
    rows: dict[str, str] = {}
    errors: list[ThemeError] = []
    for path in theme_files(shipped, user_folder()):
        try:
            theme = load_theme(path)
        except ThemeError as error:
            errors.append(error)
            continue
        kind = "dark " if theme.dark else "light"
        where = "" if path.parent == shipped else f"  {path}"
        default = " (default)" if theme.name == DEFAULT_THEME else ""
        rows[theme.name] = f"{theme.name + default:34}  {kind}{where}".rstrip()
    print("\n".join(rows.values()))
    print(f"\nTextual's own as well: {', '.join(sorted(BUILTIN_THEMES))}")
    print(f"yours are read from {user_folder()}; `termgen themes new NAME` begins one")
    for broken in errors:
        print(f"termgen: not usable: {broken}", file=sys.stderr)


def check_theme(file: str) -> None:
    """Raises ThemeError for a file that cannot be used; what is merely hard to read is printed."""
    theme = load_theme(Path(file))
    palette = Palette({**theme.to_color_system().generate(), **theme.variables})
    own = sum(name.startswith(VARIABLE_PREFIX) for name in theme.variables)
    kind = "dark" if theme.dark else "light"
    print(f"{theme.name}: a {kind} theme; {own} of {len(ROLES)} roles set, the others derived")
    for weak in weak_roles(palette):
        print(f"hard to read: {weak}")
    for alike in alike_roles(palette, blindness=("protanopia", "deuteranopia")):
        print(f"note: {alike}")


def new_theme(name: str, *, like: str) -> None:
    """Write a commented file into the user's folder. What is there is not written over."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a theme is named by letters, digits, - and _, not {name!r}")
    themes, _ = load_all(shipped_folder(), user_folder())
    model = {**BUILTIN_THEMES, **themes}.get(like)
    if model is None:
        raise ConfigError(f"no theme {like!r} to begin with; `termgen themes` lists them")
    if name in themes or name in BUILTIN_THEMES:
        raise ConfigError(f"there is a theme {name!r} already")
    path = user_folder() / f"{name}.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(template(name, model))
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path}\nsee it with `termgen chat --theme {name}`; it follows the file as you save it")


assert set(ROLE_WORDS) == ROLES


def template(name: str, model: Theme) -> str:
    """A theme file with the colours of `model`; its roles are there to be uncommented."""
    palette = Palette({**model.to_color_system().generate(), **model.variables})
    lines = [
        "# A theme of termgen. It is read again whenever you save it; `termgen themes check FILE`",
        "# says what is wrong with it, and what is hard to read.",
        f'name = "{name}"',
        f"dark = {'true' if model.dark else 'false'}",
        *(["ansi = true  # the terminal's own sixteen colours"] if model.ansi else []),
        "",
        "# Colours are written as #rrggbb, or by a name of CSS. A theme needs primary, foreground",
        "# and background; what else is left out is derived from them.",
        "[colors]",
    ]
    for color, words in _COLORS.items():
        value = getattr(model, color) or palette.color("text").hex
        lines.append(_entry(color, value, words))
    lines += [
        "",
        "# Roles give one thing on the screen its own colour: take the # away.",
        "[roles]",
    ]
    for role, words in ROLE_WORDS.items():
        lines.append("# " + _entry(role, palette.color(role).hex.lower(), words))
    return "\n".join(lines) + "\n"


def _entry(name: str, value: str, words: str) -> str:
    return f'{name} = "{value}"'.ljust(30) + f"# {words}"
