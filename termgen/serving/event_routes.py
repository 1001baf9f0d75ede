"""`GET /v1/events`: what the engine does, in the wire form of `termgen.vocabulary.telemetry`."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from termgen.api import sse
from termgen.api.errors import no_such_option
from termgen.client import AdminClient, ModelInfo
from termgen.errors import RequestError
from termgen.serving.event_hub import EncodedSnapshot, EventHub, Listener
from termgen.serving.responses import EventWriter, until_disconnect
from termgen.serving.routes import PlainRow
from termgen.serving.state import ServerState, state_of
from termgen.vocabulary.events import EngineEvent
from termgen.vocabulary.telemetry import (
    MAX_HZ,
    MAX_SILENCE_S,
    MIN_HZ,
    TOPICS,
    Frame,
    Gpu,
    Model,
    Opening,
    encode,
    encode_cache,
    encode_events,
    frame_id,
    parse_frame_id,
)

DEFAULT_HZ = 4.0

IDLE_SNAPSHOT_S = 1.0
"""Interval of snapshots of an engine without work."""

MAX_LAST_ID_CHARS = 64

OPTIONS = frozenset({"topics", "hz", "last_event_id", "past"})
"""Query parameters."""


async def events(request: Request) -> ASGIApp:
    state, engine = state_of(request), state_of(request).require_admin()
    for name in request.query_params:
        if name not in OPTIONS:
            raise no_such_option(name)
    topics, hz, past = _topics(request), _hz(request), _past(request)
    given = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
    last_seen = parse_frame_id(given) if given and len(given) <= MAX_LAST_ID_CHARS else None
    return EventsResponse(
        state, engine, state.require_hub(), topics=topics, hz=hz, last_seen=last_seen, past=past
    )


def _topics(request: Request) -> frozenset[str]:
    text = request.query_params.get("topics")
    if text is None:
        return frozenset(TOPICS)
    topics = frozenset(part.strip() for part in text.split(","))
    if not topics <= frozenset(TOPICS):
        raise RequestError(
            f"topics must be some of {', '.join(TOPICS)}, not {text[:60]!r}", param="topics"
        )
    return topics


def _hz(request: Request) -> float:
    text = request.query_params.get("hz")
    if text is None:
        return DEFAULT_HZ
    try:
        hz = float(text)
    except ValueError:
        hz = math.nan
    if not MIN_HZ <= hz <= MAX_HZ:
        raise RequestError(
            f"hz must be a number between {MIN_HZ} and {MAX_HZ:g}, not {text[:40]!r}", param="hz"
        )
    return hz


def _past(request: Request) -> bool:
    text = request.query_params.get("past", "false")
    if text not in ("true", "false"):
        raise RequestError(f"past must be true or false, not {text[:40]!r}", param="past")
    return text == "true"


class EventsResponse:
    """The stream of one listener."""

    def __init__(
        self,
        state: ServerState,
        engine: AdminClient,
        hub: EventHub,
        *,
        topics: frozenset[str],
        hz: float,
        last_seen: tuple[str, int] | None,
        past: bool,
    ) -> None:
        self._state = state
        self._engine = engine
        self._hub = hub
        self._topics = topics
        self._hz = hz
        self._last_seen = last_seen
        self._past = past

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener, resumed = self._hub.join(self._last_seen, past=self._past)
        try:
            await until_disconnect(receive, self._run(send, listener, resumed))
        finally:
            self._hub.leave(listener)

    async def _run(self, send: Send, listener: Listener, resumed: bool) -> None:
        # Listeners need the pings to see that the server lives: this stream always has them.
        asked_s = self._state.config.sse_ping_interval or MAX_SILENCE_S
        writer = EventWriter(
            send,
            sse.HEADERS,
            ping_interval_s=min(asked_s, MAX_SILENCE_S),
            write_chunk=None,
        )
        try:
            source = _Source(
                self._state, self._engine, self._hub, listener, self._topics, 1 / self._hz
            )
            await writer.write(await source.opening(resumed, past=self._past))
            if self._past:
                while data := source.events():
                    await writer.write(data)
                await writer.write(source.history())
            while not await self._closes_within(1 / self._hz):
                data = await source.news()
                if data:
                    await writer.write(data)
            await writer.write(b"", is_last=True)
        finally:
            writer.close()

    async def _closes_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hub.closing.wait()
        return self._hub.closing.is_set()


class _Source:
    """Frames for one listener, and the state that it was sent last."""

    def __init__(
        self,
        state: ServerState,
        engine: AdminClient,
        hub: EventHub,
        listener: Listener,
        topics: frozenset[str],
        interval_s: float,
    ) -> None:
        self._state = state
        self._engine = engine
        self._hub = hub
        self._listener = listener
        self._topics = topics
        self._interval_s = interval_s
        self._sent_model: tuple[str, ModelInfo] = (self._status, engine.model)
        self._sent: EncodedSnapshot | None = None
        self._looked_at = -math.inf
        self._gpu_sent_ns = 0
        """Time of the newest reading of the GPU that was sent."""

    @property
    def _status(self) -> str:
        return self._state.status

    @property
    def _id(self) -> str:
        return frame_id(self._hub.stream, self._listener.cursor)

    async def opening(self, resumed: bool, *, past: bool) -> bytes:
        """past: the events that are behind, and then `history`, follow at once."""
        self._sent = await self._look(0.0)
        opening = Opening(
            stream=self._hub.stream,
            resumed=resumed,
            clock_ns=time.perf_counter_ns(),
            unix_ns=time.time_ns(),
            dropped=self._listener.dropped,
            status=self._sent_model[0],
            model=self._sent_model[1],
            snapshot=self._sent.snapshot if self._sent is not None else None,
            num_past=self._hub.num_behind(self._listener) if past else 0,
        )
        return bytes(encode(opening, self._id))

    def events(self) -> bytes:
        """The next events that are behind, in whole frames; empty if there are none."""
        data = b""
        while not data:
            found, frames = self._read()
            if not found:
                break
            data = b"".join(map(bytes, frames))  # empty if no topic is wanted
        return data

    def history(self) -> bytes:
        """The last hour, up to the events that were sent."""
        return bytes(encode(self._hub.past(), self._id))

    def _read(self) -> tuple[list[EngineEvent], list[Frame]]:
        first, found = self._hub.read(self._listener)
        frames = encode_events(
            found,
            stream=self._hub.stream,
            first=first,
            dropped=self._listener.dropped,
            topics=self._topics,
        )
        return found, list(frames)

    async def news(self) -> bytes:
        found, frames = self._read()
        if "cache" in self._topics and self._may_have_changed(found):
            snapshot = await self._look(self._interval_s / 2)
            if snapshot is not None and not snapshot.shows_as(self._sent):
                self._sent = snapshot
                frames.append(
                    encode_cache(
                        snapshot.encoded, dropped=self._listener.dropped, frame_id=self._id
                    )
                )
        model = (self._status, self._engine.model)
        if "model" in self._topics and model != self._sent_model:
            self._sent_model = model
            frames.append(encode(Model(status=model[0], model=model[1]), self._id))
        if "gpu" in self._topics and (frame := self._gpu_frame()) is not None:
            frames.append(frame)
        return b"".join(map(bytes, frames))

    def _gpu_frame(self) -> Frame | None:
        history, sent_ns = self._hub.gpu.history, self._gpu_sent_ns
        readings = tuple(reading for reading in history if reading.time_ns > sent_ns)
        if not readings:
            return None
        self._gpu_sent_ns = readings[-1].time_ns
        return encode(Gpu(readings=readings), self._id)

    def _may_have_changed(self, found: list[EngineEvent]) -> bool:
        """True if a new snapshot is worth the engine's time: an idle engine is seldom asked."""
        sent = self._sent.snapshot if self._sent is not None else None
        is_busy = sent is None or sent.num_running or sent.num_waiting
        waited_s = time.monotonic() - self._looked_at
        return bool(found or (is_busy and not self._engine.is_paused) or waited_s > IDLE_SNAPSHOT_S)

    async def _look(self, max_age_s: float) -> EncodedSnapshot | None:
        self._looked_at = time.monotonic()
        return await self._hub.snapshots.look(max_age_s)


EVENT_ROWS = (
    PlainRow(
        path="/v1/events", summary="events", handler=events, is_admin=True, is_described=False
    ),
)
