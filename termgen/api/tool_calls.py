"""A model's text taken apart into content and tool calls, while it arrives.

One parser per choice: `feed` it text, `finish` it at the end. Streamed and whole answers go through
the same parser, and how the text is cut changes nothing but how the parts are cut. What looks like
a call and is none stays content.

`CallReader` reads one call, a JSON object with a name and arguments, character by character.
Arguments go out verbatim and piece by piece, so that what is streamed adds up to what a whole
answer has.
"""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from termgen.api.tool_grammar import MARKERS
from termgen.vocabulary.tool_format import ResponseParser, ToolStyle

ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"

END_OF_CALL = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


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
    """Reads a call piece by piece: `feed` it text until `is_ended`, and take what is known of
    it."""

    def __init__(self, *, name: str | None = None, names: Container[str] | None = None) -> None:
        """name: known already, so the text is only the arguments. names: no other name is
        accepted."""
        self.name = name
        self._names = names
        self._only_arguments = name is not None
        self._at = _At.START if name is None else _At.VALUE
        self._key = ARGUMENT_KEYS[0]
        self._raw: list[str] = []
        """Characters of the key or value that is being read."""
        self._is_arguments = False
        """True while the value that is being read is the arguments."""
        self._streams = False
        """True while arguments are passed on as they come."""
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
        """True once the name is known: whatever follows, this is a call."""
        return self.name is not None

    def feed(self, text: str) -> int:
        """Read text; returns how many characters of it belong to the call."""
        for position, char in enumerate(text):
            if self.is_ended:
                return position
            if not self._read(char):  # the end of a number or a word is seen one too late
                self._read(char)
        return len(text)

    def take_arguments(self) -> str:
        """Arguments that arrived since the last call; held back until the name is known."""
        if self.name is None:
            return ""
        text, self._out = "".join(self._out), []
        return text

    def finish(self) -> str:
        """The rest of the arguments of a call that has ended, `{}` if it had none."""
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


# -- the text of an answer -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thoughts, where the model declares how its responses are parsed."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str
    """A piece of a JSON object."""


Part = Content | Reasoning | CallStart | CallArguments


class CallParser(Protocol):
    num_calls: int

    @property
    def is_cut(self) -> bool:
        """True where the text so far ends within the arguments of a call."""
        ...

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


class StyleParser:
    """Reads calls in the styles of `ToolStyle`."""

    def __init__(self, style: ToolStyle, names: frozenset[str]) -> None:
        self.num_calls = 0
        self._style = style
        self._marker = MARKERS[style]
        self._names = names
        self._mode: Callable[[], bool] = self._text if self._marker else self._first
        self._rest = ""
        """Text not yet used up."""
        self._held = ""
        """White space that is dropped if a call follows."""
        self._raw = ""
        """Text of a call whose name is not known yet."""
        self._reader = CallReader()
        self._is_announced = False
        self._is_list = style is ToolStyle.LLAMA
        """Calls may follow each other after a separator."""
        self._parts: list[Part] = []
        self._is_last = False

    @property
    def is_cut(self) -> bool:
        return self._mode == self._call and self._reader.is_call

    def feed(self, text: str) -> list[Part]:
        self._rest += text
        while self._mode():
            pass
        parts, self._parts = self._parts, []
        return _merged(parts)

    def finish(self) -> list[Part]:
        self._is_last = True
        parts = self.feed("")
        if self._raw:
            self._say(self._raw + self._rest)
        if not self.num_calls:
            self._say_at_once(self._held)
        self._raw = self._held = ""
        return _merged(parts + self._parts)

    # -- modes: each returns whether it got further ------------------------------------------

    def _text(self) -> bool:
        """Read content, until a marker."""
        before, marker, behind = self._rest.partition(self._marker)
        if marker:
            self._say(before)
            self._rest = behind
            self._raw = marker
            self._mode = self._begin_call
            return True
        keep = 0 if self._is_last else _overlap(self._rest, self._marker)
        self._say(self._rest[: len(self._rest) - keep])
        self._rest = self._rest[len(self._rest) - keep :]
        return False

    def _first(self) -> bool:
        """Read the first word of an answer, which is a call as a whole or has none."""
        text = self._rest.lstrip(SPACE)
        if not self._is_last and len(text) < len(PYTHON_TAG) and PYTHON_TAG.startswith(text):
            return False
        text = text.removeprefix(PYTHON_TAG).lstrip(SPACE)
        if text.startswith("{"):
            self._rest, self._raw = text, self._rest[: len(self._rest) - len(text)]
            self._mode = self._begin_call
        elif text or self._is_last:
            self._mode = self._only_text
        return bool(text) or self._is_last

    def _only_text(self) -> bool:
        self._say(self._rest)
        self._rest = ""
        return False

    def _begin_call(self) -> bool:
        text = self._rest.lstrip(SPACE)
        if not text:
            return False
        if self._marker == MARKERS[ToolStyle.MISTRAL] and text[0] != "{":
            if text[0] != "[":
                return self._begin_named(text)
            used = len(self._rest) - len(text) + 1
            self._raw, self._rest = self._raw + self._rest[:used], self._rest[used:]
            self._is_list = True
        self._begin(CallReader(names=None if self._marker else self._names))
        return True

    def _begin_named(self, text: str) -> bool:
        """Read `name[ARGS]{...}`, perhaps with an id between."""
        head, brace, arguments = text.partition("{")
        if not brace:
            return False
        self._raw += self._rest[: len(self._rest) - len(text)] + head
        self._rest = brace + arguments
        self._begin(CallReader(name=head.partition("[")[0].strip(SPACE)))
        return True

    def _begin(self, reader: CallReader) -> None:
        self._reader, self._is_announced = reader, False
        self._mode = self._call

    def _call(self) -> bool:
        used = self._reader.feed(self._rest)
        if not self._is_announced:
            self._raw += self._rest[:used]
        self._rest = self._rest[used:]
        self._tell()
        if not self._reader.is_ended:
            return False
        if self._reader.is_call:
            self._tell_arguments(self._reader.finish())
            self._mode = self._behind_call
        else:
            raw, self._raw = self._raw, ""
            self._say(raw)
            self._mode = self._text if self._marker else self._only_text
        return True

    def _tell(self) -> None:
        if self._reader.is_call and not self._is_announced:
            self._is_announced = True
            self._raw = self._held = ""
            assert self._reader.name is not None
            self._parts.append(CallStart(self.num_calls, self._reader.name))
            self.num_calls += 1
        self._tell_arguments(self._reader.take_arguments())

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self.num_calls - 1, text))

    def _behind_call(self) -> bool:
        if self._style is ToolStyle.HERMES:
            return self._skip_to_end()
        text = self._rest.lstrip(SPACE)
        if not text:
            return False
        if self._is_list and text[0] in ",;":
            self._rest = text[1:].lstrip(SPACE)
            if not self._rest:
                self._rest = text
                return False
            self._begin(CallReader(names=None if self._marker else self._names))
            return True
        self._rest = text.removeprefix("]") if self._is_list and self._marker else text
        self._mode = self._text if self._marker else self._only_text
        return True

    def _skip_to_end(self) -> bool:
        """Skip the text between a call and its end tag, which has no meaning."""
        _, tag, behind = self._rest.partition(END_OF_CALL)
        if tag:
            self._rest = behind
            self._mode = self._text
            return True
        keep = _overlap(self._rest, END_OF_CALL)
        self._rest = self._rest[len(self._rest) - keep :]
        return False

    def _say(self, text: str) -> None:
        """Emit content. White space at its end waits for more; that between calls is dropped."""
        body = text.rstrip(SPACE)
        if body:
            self._say_at_once(self._held + body)
            self._held = text[len(body) :]
        else:
            self._held += text

    def _say_at_once(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))


class DeclaredParser:
    """Reads what the model's files declare, with the parser of transformers.

    It returns a call when the call is complete, so arguments come in one piece.
    """

    is_cut = False

    def __init__(self, parser: ResponseParser, *, reads_calls: bool) -> None:
        """reads_calls: False where the request has no tools; a call in the text is then content."""
        self.num_calls = 0
        self._parser = parser
        self._reads_calls = reads_calls
        self._unread = ""
        """Text before the first part that the files declare."""
        self._has_read = False
        self._is_broken = False
        """True once the parser could not read a call: the rest is content."""

    def feed(self, text: str) -> list[Part]:
        if not self._has_read:
            self._unread += text
        return self._read(lambda: self._parser.feed(text), text)

    def finish(self) -> list[Part]:
        parts = self._read(lambda: self._parser.finalize()[1], "")
        if self._has_read or not self._unread:
            return parts
        return [Content(self._unread)]  # not as the files declare: better than no answer

    def _read(self, read: Callable[[], list[dict[str, Any]]], text: str) -> list[Part]:
        parts: list[Part] = []
        if self._is_broken:
            return [Content(text)] if text else []
        try:
            events = read()
        except (AttributeError, LookupError, TypeError, ValueError):
            rest = text if self._has_read else self._unread
            self._is_broken = self._has_read = True
            return [Content(rest)] if rest else []
        for event in events:
            if event["type"] == "region_chunk" and event["field"] == "content":
                parts.append(Content(event["text"]))
            elif event["type"] == "region_chunk" and event["field"] in REASONING_FIELDS:
                parts.append(Reasoning(event["text"]))
            elif event["field"] == "tool_calls" and event["type"] == "region_close":
                value = event["value"]
                for call in value if isinstance(value, list) else [value]:
                    parts += self._call(call)
        self._has_read |= bool(events)
        return _merged(parts)

    def _call(self, call: Any) -> list[Part]:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not (isinstance(function, dict) and isinstance(name, str)) or not self._reads_calls:
            return [Content(json.dumps(call, ensure_ascii=False))]
        arguments = function.get("arguments", function.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self.num_calls += 1
        index = self.num_calls - 1
        return [CallStart(index, name), CallArguments(index, arguments or "{}")]


def _overlap(text: str, word: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a word."""
    most = min(len(text), len(word) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(word[:n])), 0)


def _merged(parts: Sequence[Part]) -> list[Part]:
    """The parts with neighbours of one kind joined."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments):
            merged[-1] = CallArguments(part.index, last.text + part.text)
        else:
            merged.append(part)
    return merged


def message_fields(parser: CallParser, text: str) -> dict[str, Any]:
    """The fields of an assistant's message with this text."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for part in [*parser.feed(text), *parser.finish()]:
        match part:
            case Content(piece):
                texts["content"] += piece
            case Reasoning(piece):
                texts["reasoning_content"] += piece
            case CallStart(_, name):
                calls.append(new_call(name))
            case CallArguments(index, piece):
                calls[index]["function"]["arguments"] += piece
    fields: dict[str, Any] = {"content": texts["content"] or (None if calls else "")}
    if texts["reasoning_content"]:
        fields["reasoning_content"] = texts["reasoning_content"]
    return {**fields, "tool_calls": calls} if calls else fields


def new_call(name: str) -> dict[str, Any]:
    """A call without arguments yet."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def delta_of(part: Part) -> dict[str, Any]:
    """The `delta` object of a part."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **new_call(name)}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
