"""Encoder and decoder of the engine's events on the wire, as `GET /v1/events` streams them.

Lossless: `decode` returns what the engine published, so that a screen in another process can be
drawn from the stream alone. Frames have the fields of the classes in `vocabulary.events` and
`client`, by name. A reader ignores unknown fields and gives missing ones their default; an
incompatible change gets a new VERSION. docs/endpoints.md describes the format. Pure: no sockets, no
engine.
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
from termgen.vocabulary.device.gpu_reading import GpuReading
from termgen.vocabulary.engine_history import HistoryState
from termgen.vocabulary.events import EngineEvent, EngineSnapshot, RequestEvent, StepRecord
from termgen.vocabulary.model_info import ModelInfo

VERSION = 1

MIN_HZ, MAX_HZ = 0.1, 20.0
"""Range of the update rate that a reader may ask for."""

MAX_SILENCE_S = 15.0
"""Interval of keep-alive comments."""

MAX_FRAME_BYTES = 2**24
"""Frame size limit; the largest frame, the state of an engine with a million blocks, has a third of
it."""
MAX_ARRAY_BYTES = 2**26
"""Limit of an unpacked array: sixteen million blocks."""

T = TypeVar("T")

_PLAIN = (bool, int, float, str)
"""JSON's own types."""

TOPICS = ("step", "request", "cache", "model", "gpu")
"""Topics a reader may choose; the first frame is always sent."""

EVENT_TYPES: dict[str, type[StepRecord] | type[RequestEvent]] = {
    "step": StepRecord,
    "request": RequestEvent,
}
_TOPIC_OF: dict[type, str] = {kind: topic for topic, kind in EVENT_TYPES.items()}

MAX_ROWS = 512
"""Rows per frame; encoding holds the GIL, so keep it small."""


class TelemetryError(TermgenError):
    """A stream that is not termgen's, or of an unknown version."""


# -- frames --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """`snapshot`, the first frame: the complete state."""

    version: int = VERSION
    stream: str
    """Id of the stream; event numbers of another stream are not comparable."""
    resumed: bool
    """The stream continues after `Last-Event-ID`, with no loss beyond `dropped`."""
    clock_ns: int
    """The sender's perf_counter_ns now; all times of the stream use this clock."""
    unix_ns: int
    """Unix time at the same moment."""
    dropped: int
    status: str
    """Status as in /ready: ok, draining, asleep, engine_dead."""
    model: ModelInfo
    snapshot: EngineSnapshot | None
    """None if the engine did not answer in time."""
    num_past: int = 0
    """Events that follow which are older than `snapshot`; a `history` frame ends them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """`step` or `request`: records, oldest first."""

    dropped: int
    """Events of any topic lost since the opening because the reader was too slow."""
    events: tuple[EngineEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """`cache`: the engine's current state, with its block map and requests."""

    dropped: int
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`model`: the served model or the status has changed."""

    status: str
    model: ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`gpu`: figures of the engine's GPU since the last such frame, oldest first."""

    readings: tuple[GpuReading, ...]


Message = Opening | Events | Cache | Model | Gpu | HistoryState


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


# -- encoding ------------------------------------------------------------------------------


_NAME_OF: dict[type, str] = {
    Opening: "snapshot",
    Cache: "cache",
    Model: "model",
    Gpu: "gpu",
    HistoryState: "history",
}


def encode(message: Opening | Cache | Model | Gpu | HistoryState, frame_id: str) -> Frame:
    name = _NAME_OF[type(message)]
    return Frame(name, frame_id, _dumps(message))


def encode_snapshot(snapshot: EngineSnapshot) -> bytes:
    """The shared part of a `cache` frame: the same bytes for all subscribers."""
    return _dumps(snapshot)


def encode_cache(encoded: bytes, *, dropped: int, frame_id: str) -> Frame:
    """A `cache` frame around the result of `encode_snapshot`."""
    body = {"dropped": dropped, "snapshot": orjson.Fragment(encoded)}
    return Frame("cache", frame_id, _dumps(body))


def encode_events(
    events: Sequence[EngineEvent], *, stream: str, first: int, dropped: int, topics: frozenset[str]
) -> Iterator[Frame]:
    """Frames of at most `MAX_ROWS` records of one kind, in order. first: number of the first event.

    A frame's id is the number of its last event, so that a reader can resume after it.
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
    """(stream, number) of the last event seen; None for an id that is not termgen's."""
    stream, _, number = text.rpartition("-")
    is_number = number.isascii() and number.isdigit() and len(number) < 19
    return (stream, int(number)) if stream and is_number else None


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """JSON values for fields that are neither plain values nor dataclasses."""
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
    assert callable(value), type(value)  # functions are not sent
    return None


# -- decoding ------------------------------------------------------------------------------


def decode(frame: Frame) -> Message | None:
    """The message of a frame; None for an unknown kind, or a history of another form. Raises
    TelemetryError."""
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
        if frame.event == "history":
            history = _build(HistoryState, body)
            return history if history.is_known else None
        kinds: dict[str, type[Cache] | type[Model] | type[Gpu]]
        kinds = {"cache": Cache, "model": Model, "gpu": Gpu}
        return _build(kinds[frame.event], body) if frame.event in kinds else None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise TelemetryError(f"a {frame.event!r} frame cannot be read: {error!r}") from error


class FrameReader:
    """Splits a stream's bytes into frames. Comments and unknown fields are skipped.

    `feed` raises TelemetryError for names that are not text, and for a frame over the size limit: a
    server must not exhaust the reader's memory."""

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
    """Decode records by whole columns, as hundreds arrive per second."""
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
            _plain_value(int, max(values))  # the parser reads too small numbers as floats
        return values
    if kinds == {list} and typing.get_origin(hint) is tuple and not any(values):
        return [()] * len(values)
    return [_typed(hint, value) for value in values]


def _check_prompts(events: Sequence[EngineEvent]) -> None:
    for event in events:
        if isinstance(event, StepRecord) and len(event.prefill_ids) != len(event.prefill_tokens):
            raise ValueError(f"step {event.step_id} has not one prefill_tokens for each id")


def _build(kind: type[T], value: Mapping[str, Any]) -> T:
    """An instance of a dataclass or named tuple, decoded by its annotations."""
    hints = _hints(typing.cast(Any, kind))
    return kind(
        **{name: _typed(hints[name], item) for name, item in value.items() if name in hints}
    )


def _objects(kind: Any, values: list[Any]) -> tuple[Any, ...]:
    """Instances of one class, decoded by whole columns if each has all fields."""
    hints = _hints(kind)
    try:
        columns = [tuple([value[name] for value in values]) for name in hints]
    except KeyError:
        return tuple(_build(kind, value) for value in values)
    checked = (_column(hint, column) for hint, column in zip(hints.values(), columns, strict=True))
    return tuple(map(kind, *checked))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Resolved annotations, cached: resolving them is the slowest part of decoding."""
    return typing.get_type_hints(kind)


def _typed(hint: Any, value: Any) -> Any:
    """The value converted to the annotated type. Raises TypeError or ValueError if it differs."""
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
    return value  # functions are not sent


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
