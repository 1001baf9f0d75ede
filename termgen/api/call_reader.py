"""Reads one tool call, a JSON object with a name and arguments, as its text arrives.

Arguments go out verbatim and piece by piece, so that what is streamed adds up to what a whole
answer has. Works character by character: how the text is cut changes nothing.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Container

ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"


class _At(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    BEHIND_VALUE = enum.auto()
    END = enum.auto()
    BROKEN = enum.auto()


class CallReader:
    """Feed it text until `is_ended`. What is known of the call is taken by `take_arguments`."""

    def __init__(self, *, name: str | None = None, names: Container[str] | None = None) -> None:
        """name: known already, and the text is only the arguments. names: no other name will do."""
        self.name = name
        self._names = names
        self._only_arguments = name is not None
        self._at = _At.START if name is None else _At.VALUE
        self._key = ARGUMENT_KEYS[0]
        self._raw: list[str] = []
        """The key or value that is being read."""
        self._is_arguments = False
        """The value that is being read is the arguments."""
        self._streams = False
        """And goes out as it comes."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._out: list[str] = []
        self._has_arguments = False

    @property
    def is_ended(self) -> bool:
        return self._at in (_At.END, _At.BROKEN)

    @property
    def is_call(self) -> bool:
        """Its name is known: whatever follows, this is a call."""
        return self.name is not None

    def feed(self, text: str) -> int:
        """How many characters belong to the call."""
        for position, char in enumerate(text):
            if self.is_ended:
                return position
            if not self._read(char):  # the end of a number or a word is seen one too late
                self._read(char)
        return len(text)

    def take_arguments(self) -> str:
        """Those that arrived since; held back until the name is known."""
        if self.name is None:
            return ""
        text, self._out = "".join(self._out), []
        return text

    def finish(self) -> str:
        """The rest of the arguments of a call that is over: it has some in any case."""
        rest = self.take_arguments()
        return rest if rest or self._has_arguments else "{}"

    def _read(self, char: str) -> bool:
        """False if the character was not used up."""
        at = self._at
        if at is _At.IN_VALUE:
            return self._read_value(char)
        if char in SPACE:
            if at is _At.KEY and self._raw:
                self._raw.append(char)
        elif at is _At.START:
            self._at = _At.KEY if char == "{" else _At.BROKEN
        elif at is _At.KEY:
            self._read_key(char)
        elif at is _At.COLON:
            self._at = _At.VALUE if char == ":" else _At.BROKEN
        elif at is _At.VALUE:
            self._begin_value()
            return self._read_value(char)
        elif at is _At.BEHIND_VALUE:
            self._at = {",": _At.KEY, "}": _At.END}.get(char, _At.BROKEN)
        return True

    def _read_key(self, char: str) -> None:
        if not self._raw:
            if char == "}":
                self._at = _At.END
                return
            if char != '"':
                self._at = _At.BROKEN
                return
        self._raw.append(char)
        if len(self._raw) > 1 and self._closes_string(char):
            key = _loads("".join(self._raw))
            self._at = _At.COLON if isinstance(key, str) else _At.BROKEN
            self._key, self._raw = str(key), []

    def _begin_value(self) -> None:
        self._at = _At.IN_VALUE
        self._raw, self._depth, self._in_string = [], 0, False

    def _read_value(self, char: str) -> bool:
        is_first = not self._raw
        if is_first:
            self._is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
            self._has_arguments |= self._is_arguments
            self._streams = self._is_arguments and char in "{["
        if self._in_string:
            if self._closes_string(char):
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}],":
            if self._depth == 0:  # of the object around a number or a word
                self._end_value()
                return False
            self._depth -= char != ","
        elif char in SPACE and self._depth == 0:
            self._end_value()
            return True
        self._raw.append(char)
        if self._streams:
            self._out.append(char)
        if self._depth == 0 and not self._in_string and char in '"}]':
            self._end_value()
        return True

    def _closes_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        else:
            return char == '"'
        return False

    def _end_value(self) -> None:
        text, self._raw = "".join(self._raw), []
        self._at = _At.END if self._only_arguments else _At.BEHIND_VALUE
        if self._key == "name" and self.name is None:
            name = _loads(text)
            if isinstance(name, str) and (self._names is None or name in self._names):
                self.name = name
            else:
                self._at = _At.BROKEN
        elif self._is_arguments and not self._streams:
            value = _loads(text)  # some models write the object as a string
            self._out.append(value if isinstance(value, str) else "{}")


def _loads(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value
