"""The wire format of telemetry: everything an engine publishes survives a round trip."""

from __future__ import annotations

import dataclasses
import json
import random
import typing
from typing import Any

import numpy as np
import pytest
from fake_engine import make_memory_ledger, make_model_info, make_snapshot, make_step_record

from termgen.vocabulary import telemetry
from termgen.vocabulary.device.expert_load import ExpertLoad
from termgen.vocabulary.events import (
    DraftChoice,
    DraftReason,
    EngineEvent,
    EngineSnapshot,
    RequestEvent,
    RequestEventKind,
    RequestView,
    StateView,
    StepRecord,
)
from termgen.vocabulary.startup_phases import StartupPhase
from termgen.vocabulary.telemetry import (
    MAX_ROWS,
    TOPICS,
    Cache,
    Events,
    Frame,
    FrameReader,
    Model,
    Opening,
    TelemetryError,
    decode,
    encode,
    encode_cache,
    encode_events,
    encode_snapshot,
    frame_id,
    parse_frame_id,
    topic_of,
)

ALL = frozenset(TOPICS)


def any_value(rng: random.Random, hint: Any) -> Any:
    """A value of an annotation, so that fields added later are tested as well."""
    if hint is float:
        return rng.choice((0.0, 1e-300, 0.1, rng.random() * 1e9))
    if hint is int:
        return rng.choice((0, -1, rng.getrandbits(62)))
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return rng.choice(("", "FULL", "Grüße 👋", 'a"b\\c\nd', "\u2028"))
    if hint is RequestEventKind:
        return rng.choice(list(RequestEventKind))
    if hint is DraftReason:
        return rng.choice(list(DraftReason))
    if hint == DraftChoice | None:
        return rng.choice((None, any_of(rng, DraftChoice)))
    if typing.get_origin(hint) is tuple:
        return tuple(any_value(rng, typing.get_args(hint)[0]) for _ in range(rng.randrange(4)))
    if typing.get_origin(hint) is np.ndarray:
        kind = typing.get_args(typing.get_args(hint)[1])[0]
        return np.array([rng.randrange(200) for _ in range(rng.randrange(4))], kind)
    raise AssertionError(f"the test knows no values of {hint}")


def any_of(rng: random.Random, kind: type) -> Any:
    made = kind(
        **{name: any_value(rng, hint) for name, hint in typing.get_type_hints(kind).items()}
    )
    if isinstance(made, StepRecord):  # one number of tokens for each id
        made = made._replace(prefill_tokens=tuple(range(len(made.prefill_ids))))
    return made


def any_snapshot(rng: random.Random, step: StepRecord | None) -> EngineSnapshot:
    num_blocks = rng.choice((2, 64, 4000))
    special: dict[str, Any] = {
        "step": step,
        "states": rng.choice((None, any_of(rng, StateView))),
        "experts": any_load(rng),
        "requests": tuple(any_of(rng, RequestView) for _ in range(rng.randrange(4))),
        "block_states": np.array([rng.randrange(5) for _ in range(num_blocks)], np.uint8),
        "block_owners": np.array([rng.randrange(-1, 9) for _ in range(num_blocks)], np.int32),
    }
    hints = typing.get_type_hints(EngineSnapshot)
    plain = {n: any_value(rng, h) for n, h in hints.items() if n not in special}
    return EngineSnapshot(**plain, **special)


def any_load(rng: random.Random) -> ExpertLoad | None:
    if rng.random() < 0.5:
        return None
    counts = [[rng.randrange(1000) for _ in range(70)] for _ in range(rng.randint(1, 4))]
    return ExpertLoad.of(np.array(counts, np.int64))


def assert_same(one: EngineSnapshot, other: EngineSnapshot) -> None:
    for field in dataclasses.fields(EngineSnapshot):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tolist() == b.tolist(), field.name
        elif isinstance(a, ExpertLoad):
            assert isinstance(b, ExpertLoad)
            for part in dataclasses.fields(ExpertLoad):
                ours, theirs = getattr(a, part.name), getattr(b, part.name)
                assert np.array_equal(ours, theirs) and type(ours) is type(theirs), part.name
        else:
            assert a == b and type(a) is type(b), field.name


def through_the_wire(frames: list[Frame], rng: random.Random) -> list[Frame]:
    """Split into pieces anywhere, with pings between frames."""
    data = b"".join(bytes(f) + rng.choice((b"", b": ping\n\n")) for f in frames)
    reader, read = FrameReader(), []
    while data:
        size = rng.randint(1, 200)
        read += reader.feed(data[:size])
        data = data[size:]
    return read


def test_every_event_comes_back_in_order() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    events: list[EngineEvent] = [
        any_of(rng, rng.choice((StepRecord, StepRecord, RequestEvent))) for _ in range(300)
    ]
    frames = list(encode_events(events, stream="s1", first=41, dropped=7, topics=ALL))
    read = through_the_wire(frames, rng)
    assert read == frames
    told = [decode(frame) for frame in read]
    assert all(isinstance(m, Events) and m.dropped == 7 for m in told)
    back = [event for m in told if isinstance(m, Events) for event in m.events]
    assert back == events
    assert [type(e) for e in back] == [type(e) for e in events]
    kinds = [e.kind for e in back if isinstance(e, RequestEvent)]
    assert all(isinstance(kind, RequestEventKind) for kind in kinds)
    numbers = [parse_frame_id(frame.id) for frame in read]
    assert numbers[-1] == ("s1", 41 + len(events) - 1)
    for frame, message, number in zip(read, told, numbers, strict=True):
        assert isinstance(message, Events) and number is not None
        assert message.events[-1] == events[number[1] - 41], "an id names its last event"
        assert {topic_of(e) for e in message.events} == {frame.event}


def test_long_runs_are_cut_into_frames_that_are_quickly_made() -> None:
    events: list[EngineEvent] = [
        make_step_record(step_id=number) for number in range(2 * MAX_ROWS + 3)
    ]
    frames = list(encode_events(events, stream="s", first=1, dropped=0, topics=ALL))
    told = [message for frame in frames if isinstance(message := decode(frame), Events)]
    assert [len(message.events) for message in told] == [MAX_ROWS, MAX_ROWS, 3]
    assert [frame.id for frame in frames] == [
        f"s-{number}" for number in (MAX_ROWS, 2 * MAX_ROWS, 2 * MAX_ROWS + 3)
    ]
    assert [event for message in told for event in message.events] == events


def test_a_state_encoded_once_is_told_to_each_as_if_it_were_theirs() -> None:
    snapshot = any_snapshot(random.Random(5), make_step_record())
    encoded = encode_snapshot(snapshot)
    for dropped in (0, 7):
        shared = encode_cache(encoded, dropped=dropped, frame_id="s-4")
        assert shared == encode(Cache(dropped=dropped, snapshot=snapshot), "s-4")


def test_a_topic_that_was_not_chosen_is_not_sent() -> None:
    rng = random.Random(3)
    events = [any_of(rng, kind) for kind in (StepRecord, RequestEvent, StepRecord)]
    frames = list(encode_events(events, stream="s", first=1, dropped=0, topics=frozenset({"step"})))
    assert [(f.event, f.id) for f in frames] == [("step", "s-1"), ("step", "s-3")]


def test_states_and_models_come_back() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    model = make_model_info(
        memory=make_memory_ledger(),
        startup=(StartupPhase("weights", 1.25), StartupPhase("graphs", 0.5)),
        default_params={"temperature": 0.6, "top_k": 20},
        quantization="int8",
    )
    for step in (None, any_of(rng, StepRecord)):
        snapshot = any_snapshot(rng, step)
        opening = Opening(
            stream="ab",
            resumed=True,
            clock_ns=5,
            unix_ns=6,
            dropped=2,
            status="ok",
            model=model,
            snapshot=snapshot,
        )
        (frame,) = through_the_wire([encode(opening, "ab-0")], rng)
        back = decode(frame)
        assert isinstance(back, Opening) and back.snapshot is not None
        assert_same(back.snapshot, snapshot)
        assert dataclasses.replace(back, snapshot=None) == dataclasses.replace(
            opening, snapshot=None
        )
        cache = decode(encode(Cache(dropped=1, snapshot=snapshot), "ab-1"))
        assert isinstance(cache, Cache) and cache.dropped == 1
        assert_same(cache.snapshot, snapshot)
    bare = make_model_info()
    assert decode(encode(Model(status="draining", model=bare), "x-1")) == Model(
        status="draining", model=bare
    )


def test_newer_and_older_ends_understand_each_other() -> None:
    (frame,) = encode_events([make_step_record()], stream="s", first=1, dropped=0, topics=ALL)
    body = json.loads(frame.data)
    body["columns"].append("from_the_future")
    body["rows"][0].append([1, 2])
    index = body["columns"].index("queue_depth")
    del body["columns"][index], body["rows"][0][index]
    told = decode(Frame("step", "s-1", json.dumps(body).encode()))
    assert isinstance(told, Events) and isinstance(told.events[0], StepRecord)
    assert told.events[0].queue_depth == 0
    assert decode(Frame("something-new", "s-1", b"{}")) is None


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("step", b"{"),
        ("step", b'{"dropped":0}'),
        ("step", b'{"dropped":0,"columns":["step_id"],"rows":[[1]]}'),
        ("step", b'{"dropped":0,"columns":["step_id"],"rows":[[1,2]]}'),
        ("request", b'{"dropped":0,"columns":["kind"],"rows":[["x"]]}'),
        ("cache", b"{}"),
        ("snapshot", b"[]"),
        ("snapshot", b'{"version":2}'),
    ],
)
def test_what_is_not_ours_is_told(event: str, data: bytes) -> None:
    with pytest.raises(TelemetryError):
        decode(Frame(event, "", data))


def altered(frame: Frame, *path: Any, to: Any) -> Frame:
    """The frame with one value of its JSON replaced."""
    body = json.loads(frame.data)
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return dataclasses.replace(frame, data=json.dumps(body).encode())


def test_values_of_another_type_are_told() -> None:
    (steps,) = encode_events([make_step_record()], stream="s", first=1, dropped=0, topics=ALL)
    request = RequestView("r", "decode", 5, 0, 9, 4, 1, 1, 0.5, 0, 0)
    cache = encode(Cache(dropped=0, snapshot=make_snapshot(requests=(request,))), "s-1")
    model = encode(Model(status="ok", model=make_model_info()), "s-1")
    column = StepRecord._fields.index
    for frame, path, value in (
        (model, ("model",), "x"),
        (model, ("model",), None),
        (model, ("model", "num_blocks"), "many"),
        (model, ("model", "startup"), "ab"),
        (model, ("model", "default_params"), [1]),
        (model, ("status",), 5),
        (cache, ("snapshot", "requests"), None),
        (cache, ("snapshot", "time_ns"), None),
        (cache, ("snapshot", "num_running"), True),
        (cache, ("snapshot", "block_states", "dtype"), "<f8"),
        (cache, ("snapshot", "block_states"), [1, 2]),
        (steps, ("rows", 0, column("applied_ns")), None),
        (steps, ("rows", 0, column("applied_ns")), "5"),
        (steps, ("rows", 0, column("applied_ns")), 5.5),
        (steps, ("rows", 0, column("graph_mode")), 5),
        (steps, ("rows", 0, column("prefill_ids")), "abc"),
        (steps, ("rows", 0, column("prefill_ids")), [5]),
        (steps, ("rows", 0, column("prefill_ids")), ["a", "b"]),
        (steps, ("rows", 0, column("step_id")), 10**400),
        (steps, ("rows", 0, column("publish_us")), float("nan")),
        (steps, ("rows", 0, column("step_id")), 2**63),
        (steps, ("rows", 0, column("step_id")), -(2**63) - 1),
        (cache, ("snapshot", "num_free_blocks"), 2**63),
        (cache, ("snapshot", "requests", 0), [1]),
        (cache, ("snapshot", "requests", 0), {"request_id": "r"}),
        (cache, ("snapshot", "requests", 0, "num_blocks"), "7"),
        (cache, ("snapshot", "requests", 0, "age_s"), None),
        (steps, ("rows", 0), 5),
        (steps, ("dropped",), "x"),
    ):
        assert decode(frame) is not None
        with pytest.raises(TelemetryError, match="cannot be read"):
            decode(altered(frame, *path, to=value))
    whole = altered(steps, "rows", 0, column("publish_us"), to=3)
    told = decode(whole)
    assert isinstance(told, Events) and isinstance(told.events[0], StepRecord)
    assert type(told.events[0].publish_us) is float, "JSON of other programs writes 3.0 as 3"


def test_a_frame_or_an_array_without_measure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_FRAME_BYTES", 1000)
    reader = FrameReader()
    assert not list(reader.feed(b"data: " + b"x" * 900))
    with pytest.raises(TelemetryError, match="more than 1,000 bytes"):
        list(reader.feed(b"x" * 200))  # it does not wait for the end
    with pytest.raises(TelemetryError, match="more than 1,000 bytes"):
        list(FrameReader().feed(b"data: " + b"x" * 2000 + b"\n\n"))
    assert [f.data for f in FrameReader().feed(b"data: " + b"x" * 900 + b"\n\n" + b"data: y" * 50)]
    many = FrameReader()
    assert sum(len(list(many.feed(b"data: " + b"x" * 900 + b"\n\n"))) for _ in range(9)) == 9

    encoded = encode_snapshot(make_snapshot(block_states=np.zeros(2000, np.uint8)))
    frame = encode_cache(encoded, dropped=0, frame_id="s-1")
    assert isinstance(decode(frame), Cache)
    monkeypatch.setattr(telemetry, "MAX_ARRAY_BYTES", 1999)
    with pytest.raises(TelemetryError, match="more than 1,999 bytes"):
        decode(frame)


def test_ids() -> None:
    assert parse_frame_id(frame_id("a-b", 12)) == ("a-b", 12)
    for text in ("", "5", "-5", "a-", "a--", "a-x", "a-١", "a-" + "9" * 30):
        assert parse_frame_id(text) is None, text


def test_a_snapshot_of_a_large_cache_is_small() -> None:
    states = np.zeros(100_000, np.uint8)
    states[1:60_000] = 2
    owners = np.repeat(np.arange(250, dtype=np.int32), 400)
    frame = encode(
        Cache(dropped=0, snapshot=make_snapshot(block_states=states, block_owners=owners)), "s-1"
    )
    assert len(frame.data) < 20_000
