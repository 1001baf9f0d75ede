"""The wire form of what an engine publishes, as `GET /v1/events` streams it: encoder and decoder.

Lossless: what `decode` returns equals what the engine published, so that a screen in another
process can be drawn from the stream alone. The form follows the fields of the classes in
`engine.events` and `client`, by name. A reader ignores fields it does not know and gives those that
are missing their default; what could not be read so gets a new VERSION. docs/endpoints.md describes
it for other languages. Pure: no sockets, no engine.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import itertools
import math
import types
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import orjson

from termgen.errors import TermgenError
from termgen.vocabulary.events import EngineEvent, EngineSnapshot, RequestEvent, StepRecord
from termgen.vocabulary.model_info import ModelInfo

VERSION = 1

MIN_HZ, MAX_HZ = 0.1, 20.0
"""How often in a second a reader may ask to be told."""

MAX_SILENCE_S = 15.0
"""When there is nothing to tell, a comment comes at least so often."""

MAX_FRAME_BYTES = 2**24
"""Of one frame; the largest, the state of an engine of a million blocks, has a third of it."""
MAX_ARRAY_BYTES = 2**26
"""That an array of a frame unpacks to: sixteen million blocks."""

T = TypeVar("T")


class TelemetryError(TermgenError):
    """A stream that is not one of ours, or of a version this reader does not know."""


# -- what is on the wire -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """`snapshot`, the first frame: everything as it stands."""

    version: int = VERSION
    stream: str
    """Names the numbering of the events: ids of another stream mean nothing here."""
    resumed: bool
    """The frames go on after `Last-Event-ID`, with nothing lost but what `dropped` counts."""
    clock_ns: int
    """The sender's perf_counter_ns now; all times of the stream are by this clock."""
    unix_ns: int
    """The time of day at that moment."""
    dropped: int
    status: str
    """As /ready has it: ok, draining, asleep, engine_dead."""
    model: ModelInfo
    snapshot: EngineSnapshot | None
    """None when the engine did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """`step` or `request`: records, oldest first."""

    dropped: int
    """Events of the chosen topics or others, since the opening, that were lost to slowness."""
    events: tuple[EngineEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """`cache`: the engine's state once more, with its block map and its requests."""

    dropped: int
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`model`: what is served, or how it stands, has changed."""

    status: str
    model: ModelInfo


Message = Opening | Events | Cache | Model

_PLAIN = (bool, int, float, str)
"""Types that JSON has."""

TOPICS = ("step", "request", "cache", "model")
"""What a reader may choose from; the first frame comes in any case."""

EVENT_TYPES: dict[str, type[StepRecord] | type[RequestEvent]] = {
    "step": StepRecord,
    "request": RequestEvent,
}
_TOPIC_OF: dict[type, str] = {kind: topic for topic, kind in EVENT_TYPES.items()}

MAX_ROWS = 512
"""Of one frame. Whoever makes it lets no other thread of its process run meanwhile."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event."""

    event: str
    id: str
    data: bytes

    def __bytes__(self) -> bytes:
        return b"event: %s\nid: %s\ndata: %s\n\n" % (
            self.event.encode(),
            self.id.encode(),
            self.data,
        )


def topic_of(event: EngineEvent) -> str:
    return _TOPIC_OF[type(event)]


# -- to the wire ---------------------------------------------------------------------------


def encode(message: Opening | Cache | Model, frame_id: str) -> Frame:
    name = {Opening: "snapshot", Cache: "cache", Model: "model"}[type(message)]
    return Frame(name, frame_id, _dumps(message))


def encode_snapshot(snapshot: EngineSnapshot) -> bytes:
    """The most of a `cache` frame: the same bytes for whoever is told."""
    return _dumps(snapshot)


def encode_cache(encoded: bytes, *, dropped: int, frame_id: str) -> Frame:
    """A `cache` frame around what `encode_snapshot` made."""
    body = {"dropped": dropped, "snapshot": orjson.Fragment(encoded)}
    return Frame("cache", frame_id, _dumps(body))


def encode_events(
    events: Sequence[EngineEvent], *, stream: str, first: int, dropped: int, topics: frozenset[str]
) -> Iterator[Frame]:
    """Frames of at most `MAX_ROWS` records of one kind, in order. first: the number of the first
    event.

    A frame's id is the number of its last event, so that a reader can go on behind it.
    """
    last = first - 1
    for topic, run in groupby(events, key=topic_of):
        columns = EVENT_TYPES[topic]._fields
        while rows := list(map(tuple, itertools.islice(run, MAX_ROWS))):
            last += len(rows)
            if topic in topics:
                body = {"dropped": dropped, "columns": columns, "rows": rows}
                yield Frame(topic, frame_id(stream, last), _dumps(body))


def frame_id(stream: str, number: int) -> str:
    return f"{stream}-{number}"


def parse_frame_id(text: str) -> tuple[str, int] | None:
    """Stream and number of the last event seen; None for what no frame of ours had."""
    stream, _, number = text.rpartition("-")
    is_number = number.isascii() and number.isdigit() and len(number) < 19
    return (stream, int(number)) if stream and is_number else None


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """JSON values for what the annotated classes hold beside plain values and dataclasses."""
    if isinstance(value, np.ndarray):
        packed = zlib.compress(np.ascontiguousarray(value).data, 1)
        return {
            "dtype": value.dtype.str,
            "shape": value.shape,
            "zlib": base64.b64encode(packed).decode(),
        }
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, Mapping):
        return dict(value)
    assert callable(value), type(value)  # code stays where it is
    return None


# -- from the wire -------------------------------------------------------------------------


def decode(frame: Frame) -> Message | None:
    """What a frame says; None for a kind this version does not know. Raises TelemetryError."""
    try:
        body = orjson.loads(frame.data)
        if frame.event in EVENT_TYPES:
            events = _rows(EVENT_TYPES[frame.event], body)
            _check_prompts(events)
            return Events(dropped=_typed(int, body["dropped"]), events=events)
        if frame.event == "snapshot":
            if body["version"] != VERSION:
                raise TelemetryError(
                    f"the server speaks version {body['version']!r} of the event stream, this "
                    f"program version {VERSION}; use the same termgen on both ends"
                )
            return _build(Opening, body)
        kinds: dict[str, type[Cache] | type[Model]] = {"cache": Cache, "model": Model}
        return _build(kinds[frame.event], body) if frame.event in kinds else None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise TelemetryError(f"a {frame.event!r} frame cannot be read: {error!r}") from error


class FrameReader:
    """Bytes of a stream, cut anywhere, to frames. Comments and unknown fields are skipped.

    `feed` raises TelemetryError for names that are no text, and for a frame without an end: a
    server must not fill the memory of who watches it."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        looked_at = max(0, len(self._rest) - 1)
        self._rest += data
        if self._rest.find(b"\n\n", looked_at) < 0:
            blocks: list[bytes] = []
        else:
            *blocks, rest = bytes(self._rest).split(b"\n\n")
            self._rest = bytearray(rest)
        if max(map(len, (self._rest, *blocks))) > MAX_FRAME_BYTES:
            self._rest.clear()
            raise TelemetryError(f"a frame has more than {MAX_FRAME_BYTES:,} bytes")
        for block in blocks:
            fields = {
                name: value.removeprefix(b" ")
                for name, _, value in (line.partition(b":") for line in block.split(b"\n"))
            }
            if b"data" in fields:
                event, number = fields.get(b"event", b"message"), fields.get(b"id", b"")
                try:
                    frame = Frame(event.decode(), number.decode(), fields[b"data"])
                except UnicodeDecodeError as error:
                    raise TelemetryError(f"a frame's name cannot be read: {error}") from error
                yield frame


def _rows(kind: type[T], body: Mapping[str, Any]) -> tuple[T, ...]:
    """Hundreds come a second, so they are looked at by whole columns."""
    record = typing.cast(Any, kind)  # a named tuple
    hints, columns, rows = _hints(record), body["columns"], body["rows"]
    if any(len(row) != len(columns) for row in rows):
        raise ValueError(f"a row has not {len(columns)} values, one for each column")
    if not rows:
        return ()
    given = dict(zip(columns, zip(*rows, strict=True), strict=True))
    fields = (
        _column(hints[name], given[name])
        if name in given
        else itertools.repeat(record._field_defaults[name], len(rows))
        for name in record._fields
    )
    return tuple(map(record._make, zip(*fields, strict=True)))


def _column(hint: Any, values: tuple[Any, ...]) -> Sequence[Any]:
    kinds = set(map(type, values))
    if kinds == {hint} and hint in _PLAIN:
        if hint is int:
            _plain_value(int, max(values))  # what is too small is no int to the parser
        return values
    if kinds == {list} and typing.get_origin(hint) is tuple and not any(values):
        return [()] * len(values)
    return [_typed(hint, value) for value in values]


def _check_prompts(events: Sequence[EngineEvent]) -> None:
    for event in events:
        if isinstance(event, StepRecord) and len(event.prefill_ids) != len(event.prefill_tokens):
            raise ValueError(f"step {event.step_id} has not one prefill_tokens for each id")


def _build(kind: type[T], value: Mapping[str, Any]) -> T:
    """An object of a dataclass or named tuple, by its annotations."""
    hints = _hints(typing.cast(Any, kind))
    return kind(
        **{name: _typed(hints[name], item) for name, item in value.items() if name in hints}
    )


def _objects(kind: Any, values: list[Any]) -> tuple[Any, ...]:
    """Many of one class, by whole columns where each has all of its fields."""
    hints = _hints(kind)
    try:
        columns = [tuple([value[name] for value in values]) for name in hints]
    except KeyError:
        return tuple(_build(kind, value) for value in values)
    checked = (_column(hint, column) for hint, column in zip(hints.values(), columns, strict=True))
    return tuple(map(kind, *checked))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Annotations are text until looked up, which costs more than all else here."""
    return typing.get_type_hints(kind)


def _typed(hint: Any, value: Any) -> Any:
    """What the annotation says. Raises TypeError or ValueError for anything else."""
    if hint in _PLAIN:
        return _plain_value(hint, value)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        wanted = next(a for a in arguments if a is not types.NoneType)
        return None if value is None else _typed(wanted, value)
    if origin is np.ndarray:
        return _array(typing.get_args(arguments[1])[0], value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r:.40} is no list")
        if dataclasses.is_dataclass(arguments[0]):
            return _objects(arguments[0], value)
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.40} is no object")
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_asdict"):
        return _build(typing.cast(Any, hint), value)
    return value  # code stays where it is


def _plain_value(hint: type, value: Any) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError("a number does not fit into 64 bits")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    if type(value) is hint:
        return value
    if hint is float and type(value) is int:
        return float(value)
    raise TypeError(f"{value!r:.40} is no {hint.__name__}")


def _array(dtype: type, value: Mapping[str, Any]) -> Any:
    unpacking = zlib.decompressobj()
    unpacked = unpacking.decompress(base64.b64decode(value["zlib"]), MAX_ARRAY_BYTES)
    if not unpacking.eof:
        raise ValueError(f"an array is cut off, or has more than {MAX_ARRAY_BYTES:,} bytes")
    flat = np.frombuffer(unpacked, value["dtype"])
    return flat.astype(dtype, casting="equiv", copy=False).reshape(value["shape"])
