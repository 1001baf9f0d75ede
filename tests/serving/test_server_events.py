"""/v1/events over a socket: contents, resuming, slow readers, limits, the server's end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine, make_model_info, make_snapshot, make_step_record
from fake_nvml import FakeNvml
from real_server import serving_tiny
from server_harness import chat_body, eventually, serving, socket_client

from termgen.errors import OverloadedError
from termgen.serving import event_hub, event_routes
from termgen.serving.event_hub import EncodedSnapshot, Snapshots
from termgen.system import gpu_meter
from termgen.vocabulary.engine_history import HistoryState
from termgen.vocabulary.events import (
    EngineSnapshot,
    EventRing,
    RequestEvent,
    RequestEventKind,
    RequestView,
    StepRecord,
)
from termgen.vocabulary.step_figures import COLUMNS
from termgen.vocabulary.telemetry import (
    Cache,
    Events,
    Frame,
    FrameReader,
    Gpu,
    Message,
    Model,
    Opening,
    decode,
    parse_frame_id,
)

FAST = {"hz": "20"}


class Listening:
    """A reader of one stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.frames: list[Frame] = []
        self.messages: list[Message] = []
        self._reader = FrameReader()
        self._bytes = response.aiter_bytes()

    async def more(self) -> bool:
        """Read a piece; False at the end of the stream."""
        async with asyncio.timeout(10):
            data = await anext(self._bytes, None)
        if data is None:
            return False
        for frame in self._reader.feed(data):
            message = decode(frame)
            assert message is not None
            self.frames.append(frame)
            self.messages.append(message)
        return True

    async def until(self, kind: type, count: int = 1) -> list[Any]:
        while len(found := [m for m in self.messages if isinstance(m, kind)]) < count:
            assert await self.more(), "the stream ended"
        return found

    @property
    def events(self) -> list[Any]:
        return [e for m in self.messages if isinstance(m, Events) for e in m.events]

    @property
    def dropped(self) -> int:
        return [m.dropped for m in self.messages if isinstance(m, (Opening, Events))][-1]


@asynccontextmanager
async def listening(
    client: httpx.AsyncClient, headers: dict[str, str] | None = None, **params: str
) -> AsyncGenerator[Listening, None]:
    options: dict[str, Any] = {"params": {**FAST, **params}, "headers": headers or {}}
    async with client.stream("GET", "/v1/events", **options) as response:
        assert response.status_code == 200, await response.aread()
        reader = Listening(response)
        await reader.until(Opening)
        yield reader


def steps(*numbers: int) -> list[StepRecord]:
    return [make_step_record(step_id=n) for n in numbers]


async def test_the_first_frame_is_everything_as_it_stands() -> None:
    engine = FakeEngine()
    engine.scripted_snapshot = make_snapshot(num_running=3, generation_tokens=77)
    async with socket_client(engine) as client:
        async with listening(client) as reader:
            assert reader.response.headers["content-type"].startswith("text/event-stream")
            assert reader.frames[0].event == "snapshot"
            opening = reader.messages[0]
            assert isinstance(opening, Opening) and opening.snapshot is not None
            assert (opening.version, opening.status, opening.resumed) == (1, "ok", False)
            assert opening.model == engine.model
            assert opening.snapshot.generation_tokens == 77
            assert opening.snapshot.time_ns <= opening.clock_ns + 10**9


async def test_a_real_engine_is_told_as_a_screen_in_its_process_sees_it(
    tiny_llama_dir: Path,
) -> None:
    async with serving_tiny(tiny_llama_dir) as (client, engine):
        ring = engine.events()
        async with listening(client) as reader:
            answer = await client.post("/v1/chat/completions", json=chat_body(max_tokens=20))
            assert answer.status_code == 200
            while not any(
                isinstance(e, RequestEvent) and e.kind is RequestEventKind.FINISHED
                for e in reader.events
            ):
                await reader.more()
            await reader.until(Cache, 2)
            seen = ring.drain()
            while len(reader.events) < len(seen):
                await reader.more()
        assert reader.events == seen, "every record, equal and in order"
        assert any(isinstance(e, StepRecord) for e in seen)
        opening, last = reader.messages[0], (await reader.until(Cache))[-1]
        assert isinstance(opening, Opening) and opening.model == engine.model
        now = await engine.snapshot()
        assert last.snapshot.num_finished == now.num_finished == 1
        assert last.snapshot.block_states.tolist() == now.block_states.tolist()
        await engine.pause()
        async with listening(client) as reader:
            paused = reader.messages[0]
            assert isinstance(paused, Opening) and paused.snapshot is not None
            assert paused.snapshot.paused


async def test_topics() -> None:
    engine = FakeEngine()
    async with socket_client(engine) as client:
        async with listening(client, topics="step,model") as reader:
            event = RequestEvent(1, "r", RequestEventKind.QUEUED, 1, 0, 0)
            for record in steps(1, 2):
                engine.bus.publish(record)
                engine.bus.publish(event)
            engine.scripted_snapshot = make_snapshot(num_running=9)
            await reader.until(Events, 1)
            engine._model = replace(engine.model, max_model_len=99)
            (told,) = await reader.until(Model)
            assert told.model.max_model_len == 99 and told.status == "ok"
            assert [e.step_id for e in reader.events] == [1, 2]
            assert {f.event for f in reader.frames} == {"snapshot", "step", "model"}


async def test_a_lost_connection_goes_on_where_it_was() -> None:
    engine = FakeEngine()
    async with socket_client(engine) as client:
        async with listening(client, topics="step") as reader:
            for record in steps(1, 2, 3):
                engine.bus.publish(record)
            await reader.until(Events)
            while len(reader.events) < 3:
                await reader.more()
            last = reader.frames[-1].id
        for record in steps(4, 5):
            engine.bus.publish(record)
        async with listening(client, {"last-event-id": last}, topics="step") as reader:
            assert reader.messages[0].resumed  # type: ignore[union-attr]
            await reader.until(Events)
            assert [e.step_id for e in reader.events] == [4, 5] and reader.dropped == 0
        for unknown in ("other-3", "nonsense", "x" * 500):
            async with listening(client, {"last-event-id": unknown}) as reader:
                assert not reader.messages[0].resumed  # type: ignore[union-attr]
        async with listening(client, last_event_id=last, topics="step") as reader:
            await reader.until(Events)
            assert [e.step_id for e in reader.events] == [4, 5]


async def test_what_a_slow_reader_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hub, "HISTORY", 50)
    engine = FakeEngine()
    async with socket_client(engine) as client:
        async with listening(client, topics="step") as reader:
            for record in steps(*range(1, 4)):
                engine.bus.publish(record)
            while len(reader.events) < 3:
                await reader.more()
            last = reader.frames[-1].id
        for record in steps(*range(4, 204)):  # more than the ring and the history hold
            engine.bus.publish(record)
        async with listening(client, {"last-event-id": last}, topics="step") as reader:
            while len(reader.events) < 50:
                await reader.more()
        assert [e.step_id for e in reader.events] == list(range(154, 204)), "the oldest go first"
        assert reader.dropped == 150
        metrics = (await client.get("/metrics")).text
        assert 'termgen_event_stream_dropped_total{model="fake/model-1"} 150.0' in metrics


def test_numbers_stay_right_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine was faster than the listeners: both agree on the number of lost events."""
    monkeypatch.setattr(event_hub, "HISTORY", 10)

    async def run() -> None:
        engine = FakeEngine()
        hub = event_hub.EventHub(engine)
        quick, _ = hub.join(None)
        slow, _ = hub.join(None)
        for record in steps(1, 2, 3):
            engine.bus.publish(record)
        assert [e.step_id for e in hub.read(quick)[1]] == [1, 2, 3]  # type: ignore[union-attr]
        for record in steps(*range(4, 30)):
            engine.bus.publish(record)
        first, events = hub.read(quick)
        assert (first, [e.step_id for e in events]) == (20, list(range(20, 30)))  # type: ignore[union-attr]
        assert quick.dropped == 16
        assert hub.read(slow)[0] == 20 and slow.dropped == 19
        assert hub.read(slow) == (30, [])
        hub.leave(quick)
        hub.leave(slow)
        hub.close()

    asyncio.run(run())


async def test_listeners_are_few_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_hub, "MAX_LISTENERS", 2)
    engine = FakeEngine()

    def rings() -> tuple[EventRing, ...]:
        return engine.bus._rings

    async with socket_client(engine) as client:
        before = len(rings())
        assert before == 2, "of the metrics, and of the hub from the start"
        async with listening(client), listening(client):
            assert len(rings()) == before, "all listeners share one"
            refused = await client.get("/v1/events")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_listeners"
            assert refused.headers["retry-after"] == "5"
            assert 'reason="too_many_listeners"} 1.0' in (await client.get("/metrics")).text
        status = 429
        async with asyncio.timeout(10):
            while status == 429:  # the server sees in a moment that they are gone
                await asyncio.sleep(0.01)
                async with client.stream("GET", "/v1/events") as response:
                    status = response.status_code
        assert status == 200 and len(rings()) == before
    assert rings() == ()


async def test_the_engine_is_asked_once_for_all_who_listen() -> None:
    asked, gate = 0, asyncio.Event()

    class CountingEngine(FakeEngine):
        async def snapshot(self) -> EngineSnapshot:
            nonlocal asked
            asked += 1
            await gate.wait()
            return make_snapshot(num_finished=asked)

    snapshots = Snapshots(CountingEngine())
    looking = [asyncio.create_task(snapshots.look()) for _ in range(3)]
    await asyncio.sleep(0)
    looking[0].cancel()  # a client that leaves takes nothing from the others
    await asyncio.sleep(0)
    gate.set()
    one, other = await looking[1], await looking[2]
    assert asked == 1 and one is not None and one is other
    assert await snapshots.look(max_age_s=60) is one
    new = await snapshots.look(max_age_s=0)
    assert asked == 2 and new is not None and not new.shows_as(one)
    snapshots.forget()
    await snapshots.look(max_age_s=60)
    assert asked == 3


def test_a_state_is_the_same_while_only_time_passes() -> None:
    view = RequestView("r", "decode", 5, 0, 9, 4, 1, 1, 0.5, 0, 0)
    old = make_snapshot(requests=(view,), num_running=1)
    states = old.block_states.copy()
    states[3] = 1
    later = replace(old, time_ns=old.time_ns + 9, requests=(replace(view, age_s=0.9),))
    assert EncodedSnapshot(later).shows_as(EncodedSnapshot(old))
    assert not EncodedSnapshot(old).shows_as(None)
    for changed in (
        replace(old, num_waiting=1),
        replace(old, block_states=states),
        replace(old, block_owners=old.block_owners + 1),
        replace(old, evicted_blocks=np.array([3], np.int32), num_evictions=1),
        replace(old, requests=()),
        replace(old, requests=(replace(view, num_output_tokens=5),)),
    ):
        assert not EncodedSnapshot(changed).shows_as(EncodedSnapshot(old))


async def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    engine = FakeEngine()
    states = make_snapshot()
    async with serving(engine) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as deaf:
            deaf.sendall(b"GET /v1/events?hz=20 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
                async with listening(client, topics="step") as reader:
                    for round in range(5):
                        for record in steps(*range(round * 1000, round * 1000 + 1000)):
                            engine.bus.publish(record)
                        engine.scripted_snapshot = replace(states, num_finished=round)
                        await asyncio.sleep(0.06)
                    while len(reader.events) < 5000:
                        await reader.more()
                    assert reader.dropped == 0
                    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *(("topics=step,all", "topics"), ("topics=", "topics"), ("hz=0", "hz"), ("hz=x", "hz")),
        *(("topic=step", "topic"), ("past=1", "past")),
    ],
)
async def test_wrong_questions(query: str, param: str) -> None:
    async with socket_client(FakeEngine()) as client:
        answer = await client.get(f"/v1/events?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("interval", [0.0, 1000.0])
async def test_a_reader_is_told_that_the_server_is_there_whatever_other_streams_are(
    interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_routes, "MAX_SILENCE_S", 0.02)
    engine = FakeEngine()
    engine.scripted_snapshot = make_snapshot()
    async with (
        serving(engine, sse_ping_interval=interval) as server,
        httpx.AsyncClient(base_url=server.url, timeout=5) as client,
        client.stream("GET", "/v1/events?hz=0.1") as response,
    ):
        data = response.aiter_bytes()
        while b": ping\n\n" not in await anext(data):
            pass


async def test_pings_and_keys_and_the_servers_end() -> None:
    engine = FakeEngine()
    engine.scripted_snapshot = make_snapshot()
    keys: dict[str, Any] = {"api_key": ("k",), "admin_key": ("a",)}
    async with serving(engine, sse_ping_interval=0.02, **keys) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/v1/events")).status_code == 401
            known = {"authorization": "Bearer k"}
            assert (await client.get("/v1/events", headers=known)).status_code == 403
            headers = {"authorization": "Bearer a"}
            async with client.stream("GET", "/v1/events?hz=20", headers=headers) as response:
                data = response.aiter_bytes()
                while b": ping\n\n" not in await anext(data):
                    pass
                stopping = asyncio.create_task(server.stop())
                rest = [chunk async for chunk in data]  # ends without an error
                assert all(chunk.startswith((b": ping", b"event: ")) for chunk in rest)
                await stopping


@pytest.mark.parametrize("first_to_leave", [0, 1])
async def test_listeners_at_the_same_place_leave_in_any_order(first_to_leave: int) -> None:
    """After the first leaves, the other goes on: it must not have been taken for it."""
    engine = FakeEngine()
    hub = event_hub.EventHub(engine)
    listeners = [hub.join(None)[0] for _ in range(2)]
    left, stays = listeners[first_to_leave], listeners[1 - first_to_leave]
    hub.leave(left)
    engine.bus.publish(make_step_record())
    assert hub.read(stays)[0] == 1
    hub.leave(stays)
    for _ in range(event_hub.MAX_LISTENERS):
        hub.join(None)
    with pytest.raises(OverloadedError):
        hub.join(None)
    hub.close()


@pytest.mark.parametrize("first_to_leave", [0, 1])
async def test_two_watchers_quit_in_any_order(
    first_to_leave: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    async with socket_client(engine) as client:
        async with AsyncExitStack() as other:
            watchers = [AsyncExitStack(), AsyncExitStack()]
            streams = [await each.enter_async_context(listening(client)) for each in watchers]
            other.push_async_exit(watchers[1 - first_to_leave])
            await watchers[first_to_leave].aclose()
            engine.bus.publish(make_step_record())
            await streams[1 - first_to_leave].until(Events)
    assert engine.bus._rings == ()
    assert not [record for record in caplog.records if record.exc_info]


# -- what was before ----------------------------------------------------------------------


async def test_one_who_asks_for_the_past_begins_with_it() -> None:
    engine = FakeEngine()
    engine.scripted_snapshot = make_snapshot(num_running=3)
    async with socket_client(engine) as client:
        for record in steps(*range(1, 6001)):  # more than one batch of the hub
            engine.bus.publish(record)
        async with listening(client, past="true") as reader:
            (history,) = await reader.until(HistoryState)
            opening = reader.messages[0]
            assert isinstance(opening, Opening) and opening.num_past == 6000
            assert [e.step_id for e in reader.events] == list(range(1, 6001))
            assert isinstance(reader.messages[-1], HistoryState), "it comes behind the past"
            assert history.series[COLUMNS.index("steps")].sum() == 6000
            assert parse_frame_id(reader.frames[-1].id) == parse_frame_id(reader.frames[-2].id)
            engine.bus.publish(steps(6001)[0])
            while len(reader.events) < 6001:
                await reader.more()
            assert reader.dropped == 0
        async with listening(client) as reader:
            engine.bus.publish(steps(6002)[0])
            await reader.until(Events)
            assert reader.messages[0].num_past == 0  # type: ignore[union-attr]
            assert [e.step_id for e in reader.events] == [6002]
            assert not any(isinstance(m, HistoryState) for m in reader.messages)


async def test_one_who_comes_back_gets_what_is_new_and_the_whole_history() -> None:
    engine = FakeEngine()
    engine.scripted_snapshot = make_snapshot()
    async with socket_client(engine) as client:
        for record in steps(1, 2, 3):
            engine.bus.publish(record)
        async with listening(client, past="true") as reader:
            await reader.until(HistoryState)
            last = reader.frames[-1].id
        for record in steps(4, 5):
            engine.bus.publish(record)
        async with listening(client, {"last-event-id": last}, past="true") as reader:
            (history,) = await reader.until(HistoryState)
            opening = reader.messages[0]
            assert isinstance(opening, Opening) and opening.resumed and opening.num_past == 2
            assert [e.step_id for e in reader.events] == [4, 5]
            assert history.series[COLUMNS.index("steps")].sum() == 5


async def test_the_hour_is_counted_while_no_client_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More events than are kept: the hub moves them in time."""
    monkeypatch.setattr(event_hub, "HISTORY", 500)
    monkeypatch.setattr(event_hub, "MOVE_S", 0.01)
    engine = FakeEngine()
    engine.scripted_snapshot = make_snapshot()
    async with socket_client(engine) as client:
        ring = engine.bus._rings[-1]
        for part in range(5):
            for record in steps(*range(part * 400, part * 400 + 400)):
                engine.bus.publish(record)
            await eventually(lambda: not ring._ring)
        async with listening(client, past="true") as reader:
            (history,) = await reader.until(HistoryState)
            assert len(reader.events) == 500
            assert history.series[COLUMNS.index("steps")].sum() == 2000


def test_a_million_events_are_bounded() -> None:
    async def run() -> None:
        engine = FakeEngine()
        hub = event_hub.EventHub(engine)
        base, size = make_step_record(), 10_000
        for part in range(100):
            for number in range(part * size, (part + 1) * size):
                engine.bus.publish(base._replace(step_id=number))
            hub._move()
        assert len(hub._history) == event_hub.HISTORY
        listener, _ = hub.join(None, past=True)
        assert hub.num_behind(listener) == event_hub.HISTORY
        assert hub.read(listener)[0] == 1_000_001 - event_hub.HISTORY and listener.dropped == 0
        steps_counted = hub.past().series[COLUMNS.index("steps")].sum()
        assert steps_counted == 1_000_000
        hub.close()

    asyncio.run(run())


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu_meter, "READ_S", 0.02)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


async def test_listeners_get_each_reading_of_the_gpu_once(nvml: FakeNvml) -> None:
    engine = FakeEngine(model=make_model_info(device="cuda:1"))
    async with socket_client(engine) as client:
        async with listening(client) as reader, listening(client) as other:
            await reader.until(Gpu, 5)
            await other.until(Gpu, 2)
            found = [r for m in reader.messages if isinstance(m, Gpu) for r in m.readings]
            times = [reading.time_ns for reading in found]
            assert times == sorted(set(times)) and found[0].power_w == 684.5
            opening = reader.messages[0]
            assert isinstance(opening, Opening)
            assert abs(found[0].time_ns - opening.clock_ns) < 10**9, "one clock"
            also = {r for m in other.messages if isinstance(m, Gpu) for r in m.readings}
            assert {*found} & also, "one meter for all"
        await until_not_read(nvml)


async def until_not_read(nvml: FakeNvml) -> None:
    async with asyncio.timeout(10):
        before = -1
        while nvml.reads != before:
            before = nvml.reads
            await asyncio.sleep(0.1)


async def test_a_listener_to_other_topics_gets_no_reading(nvml: FakeNvml) -> None:
    engine = FakeEngine(model=make_model_info(device="cuda:0"))
    async with socket_client(engine) as client:
        async with listening(client, topics="step,gpu") as wants:
            async with listening(client, topics="step") as reader:
                await wants.until(Gpu, 2)
                engine.bus.publish(make_step_record(step_id=1))
                await reader.until(Events)
                assert not any(isinstance(m, Gpu) for m in reader.messages)


async def test_a_server_without_a_gpu_sends_no_reading(nvml: FakeNvml) -> None:
    engine = FakeEngine()
    async with socket_client(engine) as client:
        async with listening(client) as reader:
            engine.bus.publish(make_step_record(step_id=1))
            await reader.until(Events)
            assert not any(isinstance(m, Gpu) for m in reader.messages) and not nvml.reads
