"""The file that `termgen themes new` writes: every colour and role, with what it is for."""

from __future__ import annotations

from textual.theme import Theme

from termgen.tui.palette import ROLES, Palette

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
    "padding": "what a graph computes for nobody",
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
}
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
