"""Watching a running server: its `/v1/events` as an `EngineFeed`, over lost connections too.

`RemoteFeed.connect` waits for the first frame; a task goes on reading until `close`. Whole frames
are written to `record` as they come, so a recording is what `curl -N` would have saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import BinaryIO

import httpx

from termgen.config import is_loopback
from termgen.errors import TermgenError
from termgen.system.waiting import NotYet, read_loading, wait_for_server, why_unreachable
from termgen.tui.feeds.feed import StreamFeed
from termgen.vocabulary.telemetry import (
    MAX_HZ,
    MAX_SILENCE_S,
    MIN_HZ,
    Frame,
    FrameReader,
    Message,
    Opening,
    TelemetryError,
    decode,
)

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 5.0
SILENCE_S = 2 * MAX_SILENCE_S
RETRY_S = 1.0


class AttachError(TermgenError):
    """The server cannot be watched."""


def _say_nothing(phase: str, progress: float) -> None:
    """Default `report`: drop the progress of the server's start."""


class RemoteFeed(StreamFeed):
    """The engine behind a URL."""

    def __init__(self, opening: Opening, stream: _Stream, received_ns: int) -> None:
        super().__init__(opening)
        self._source = stream
        self._offset_ns = opening.clock_ns - received_ns
        self._lost = ""
        """Why nothing comes now, in a few words."""
        self._reading: asyncio.Task[None] | None = None
        self.take(opening)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        hz: float,
        key: str | None = None,
        record: BinaryIO | None = None,
        report: Callable[[str, float], None] = _say_nothing,
        wait_s: float | None = None,
        past: bool = False,
    ) -> RemoteFeed:
        """Raises AttachError when there is no termgen, or it refuses.

        A server that loads its model is waited for, and its phases go to `report`: for `wait_s`
        seconds, or as long as it takes. The same limit is for one that does not listen yet.
        past: begin with the events that the server kept, and its last hour.
        """
        stream = _Stream(url, hz=hz, key=key, record=record, past=past)
        try:
            await wait_for_server(lambda: stream.open(None), report, limit_s=wait_s)
            opening, following = None, list[Message]()
            while not isinstance(opening, Opening):
                opening, *following = await stream.read()
        except BaseException:
            await stream.close()
            raise
        feed = cls(opening, stream, time.perf_counter_ns())
        # The task passes on the records that came with the opening: the caller has no ring yet.
        feed._reading = asyncio.create_task(feed._read(following))
        return feed

    @property
    def trouble(self) -> str:
        return self._lost or super().trouble or self._source.record_trouble

    def now_ns(self) -> int:
        return time.perf_counter_ns() + self._offset_ns

    async def close(self) -> None:
        """Stop reading. May be called again."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await self._source.close()

    async def _read(self, following: Iterable[Message]) -> None:
        try:
            self._take_all(following)
            await self._read_on()
        except Exception as error:  # the top of the task: a picture that stands still says why
            self._lost = f"reading ended: {type(error).__name__}: {error}"

    async def _read_on(self) -> None:
        """Pass on what comes; come back behind the last frame when the connection is lost."""
        while True:
            try:
                self._take_all(await self._source.read())
                self._lost = ""
            except (AttachError, TelemetryError) as error:
                self._lost = self._why_lost(error)
                await asyncio.sleep(RETRY_S)
                await self._reopen()

    def _why_lost(self, error: TermgenError) -> str:
        if self._source.loading:
            return f"the server is loading: {self._source.loading}"
        return "connection lost" if isinstance(error, AttachError) else str(error)

    def _take_all(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if isinstance(message, Opening):
                self._offset_ns = message.clock_ns - time.perf_counter_ns()
            self.take(message)

    async def _reopen(self) -> None:
        try:
            await self._source.open(self._source.last_id)
        except (AttachError, NotYet):
            return  # the next read fails, and it is tried again


class _Stream:
    """One HTTP response after another, as messages."""

    def __init__(
        self, url: str, *, hz: float, key: str | None, record: BinaryIO | None, past: bool
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1/events").removesuffix("/v1")
        if "://" not in self._url:
            self._url = "http://" + self._url
        self._params = {"hz": f"{min(MAX_HZ, max(MIN_HZ, hz)):g}"}
        if past:
            self._params["past"] = "true"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._record = record
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(CONNECT_S, read=SILENCE_S),
            follow_redirects=True,
            trust_env=not _is_here(self._url),  # a proxy does not reach this machine
        )
        self._response: httpx.Response | None = None
        self.last_id: str | None = None
        self.record_trouble = ""
        self.loading = ""
        """The phase that the server was in when it last refused, as words; else empty."""

    async def open(self, last_id: str | None) -> None:
        """Raises NotYet, or AttachError where waiting would not help."""
        self.loading = ""
        await self._end_response()
        headers = self._headers | ({"Last-Event-ID": last_id} if last_id else {})
        try:
            request = self._client.build_request(
                "GET", self._url + "/v1/events", params=self._params, headers=headers
            )
            response = await self._client.send(request, stream=True)
            if response.status_code != 200:
                raw = await response.aread()
                refusal = AttachError(_refusal(self._url, response))
                loading = read_loading(response.status_code, raw, response.headers)
                if loading is not None:
                    self.loading = loading.words
                    raise NotYet(refusal, loading)
                raise refusal
        except httpx.ConnectError as error:
            raise NotYet(
                AttachError(
                    f"no server at {self._url}: {why_unreachable(error)}; start one with "
                    "`termgen serve`, or wait for it with --wait SECONDS"
                )
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise AttachError(f"no server at {self._url}: {why}") from error
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            await response.aclose()
            raise AttachError(f"{self._url} is no termgen server: /v1/events is {kind or 'empty'}")
        self._response = response
        self._reader = FrameReader()
        self._bytes = response.aiter_bytes()

    async def read(self) -> list[Message]:
        """Read at least one message. Raises AttachError when the stream has ended, TelemetryError
        when its first frame cannot be read; messages before such a frame are returned."""
        if self._response is None:
            raise AttachError(f"the connection to {self._url} is lost")
        messages: list[Message] = []
        while not messages:
            try:
                data = await anext(self._bytes, None)
            except httpx.HTTPError as error:
                raise AttachError(f"the connection to {self._url} is lost: {error}") from error
            if data is None:
                await self._end_response()
                raise AttachError(f"{self._url} has ended the stream")
            try:
                self._read_frames(data, messages)
            except TelemetryError:
                await self._end_response()  # so the next read comes back behind the last message
                if not messages:
                    raise
        return messages

    def _read_frames(self, data: bytes, messages: list[Message]) -> None:
        for frame in self._reader.feed(data):
            message = decode(frame)
            self._keep(frame)
            self.last_id = frame.id or self.last_id
            if message is not None:
                messages.append(message)

    def _keep(self, frame: Frame) -> None:
        """A full disk ends the recording, not the watching."""
        if self._record is not None:
            try:
                self._record.write(bytes(frame))
            except OSError as error:
                self._record = None
                self.record_trouble = f"recording stopped: {error.strerror or error}"

    async def close(self) -> None:
        await self._end_response()
        await self._client.aclose()

    async def _end_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()


def _is_here(url: str) -> bool:
    try:
        return is_loopback(httpx.URL(url).host)
    except httpx.InvalidURL:  # reported when it is opened
        return False


def _refusal(url: str, response: httpx.Response) -> str:
    if response.status_code == 401:
        return f"{url} asks for its admin key: set TERMGEN_ADMIN_KEY or give --admin-key-file"
    if response.status_code == 404:
        return f"{url} has no /v1/events: is it a termgen server?"
    try:
        why = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        why = response.reason_phrase
    return f"{url} refuses to be watched: {response.status_code} {why}"
