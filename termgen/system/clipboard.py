"""Programs that put text into the clipboard: those of the desktop, and tmux.

A terminal takes text for the clipboard by an escape sequence (OSC 52), but many refuse it silently;
a program reports whether it worked. Over ssh the desktop's programs would reach the wrong machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

LIMIT_S = 2.0
SSH = ("SSH_TTY", "SSH_CONNECTION")


class Program(NamedTuple):
    argv: tuple[str, ...]
    effect: str
    """What has happened if it ends with 0."""


def programs(environ: Mapping[str, str]) -> Iterator[Program]:
    """Programs to try, in this order."""
    if not any(environ.get(name) for name in SSH):
        if environ.get("WAYLAND_DISPLAY"):
            yield Program(("wl-copy",), "copied by wl-copy")
        if environ.get("DISPLAY"):
            yield Program(("xclip", "-selection", "clipboard"), "copied by xclip")
            yield Program(("xsel", "--clipboard", "--input"), "copied by xsel")
        if sys.platform == "darwin":
            yield Program(("pbcopy",), "copied by pbcopy")
    if environ.get("TMUX"):
        yield Program(
            ("tmux", "load-buffer", "-w", "-"), "copied to tmux's buffer and sent to the terminal"
        )


def copy_with_program(text: str, environ: Mapping[str, str]) -> str | None:
    """Copy with the first program that can. Returns what has happened; None: no program could.

    Blocks for at most `LIMIT_S` for each program.
    """
    for program in programs(environ):
        if _feed(program.argv, text, environ):
            return program.effect
    return None


def _feed(argv: tuple[str, ...], text: str, environ: Mapping[str, str]) -> bool:
    try:
        # No pipes for its output: xclip leaves a process behind, which would keep them open.
        done = subprocess.run(
            argv,
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
