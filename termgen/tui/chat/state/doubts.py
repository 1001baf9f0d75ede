"""Messages that may not be meant as they are written: a mistyped command, a file that is not there.

The model would get them as text, and could make up what is missing. No Textual.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from termgen.tui.chat.state.attachments import missing
from termgen.tui.chat.state.commands import COMMANDS

_COMMAND = re.compile(r"/([a-zA-Z]+)(?=\s|$)")
MOST_NAMED = 3
NAMES = tuple(command.name for command in COMMANDS)


class Doubts:
    """Asks once about each text. commands: names of those that there are."""

    def __init__(self, commands: Collection[str] = NAMES) -> None:
        self._commands = commands
        self.asked = ""
        """The text that was asked about last."""
        self.variables: Collection[str] = ()
        """Those of the kept prompt that was taken last."""

    def about(self, text: str) -> str:
        """The doubt, for the user; empty without one, or if this text was asked about already."""
        found = (
            ""
            if text == self.asked
            else "; ".join([*_command(text, self._commands), *_files(text), *self._unfilled(text)])
        )
        self.asked = text if found else ""
        return found

    def _unfilled(self, text: str) -> list[str]:
        names = [name for name in self.variables if name in text]
        return [f"{', '.join(names[:MOST_NAMED])} is to be filled in"] if names else []


def _command(text: str, names: Collection[str]) -> list[str]:
    found = _COMMAND.match(text.strip())
    if found is None:
        return []
    if found[1] in names:
        return [f"/{found[1]} is a command only with its argument in the same line"]
    close = difflib.get_close_matches(found[1].lower(), names, n=1)
    hint = f", but /{close[0]}" if close else ""
    return [f"there is no command /{found[1]}{hint}"]


def _files(text: str) -> list[str]:
    names = missing(text)
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return [f"there is no file {', '.join(names[:MOST_NAMED])}{more}"]
