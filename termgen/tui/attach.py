"""Watching a running server: its `/v1/events` as an `EngineFeed`, over lost connections too.

`RemoteFeed.connect` waits for the first frame; a task goes on reading until `close`. Whole frames
are written to `record` as they come, so a recording is what `curl -N` would have saved.
"""

from __future__ import annotations

import asyncio
import time
from typing import BinaryIO

import httpx

from termgen.errors import TermgenError
from termgen.telemetry import FrameReader, Message, Opening, TelemetryError, decode
from termgen.tui.feed import StreamFeed

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 5.0
SILENCE_S = 30.0
"""The server sends keep-alives more often than this."""
RETRY_S = 1.0


class AttachError(TermgenError):
    """The server cannot be watched."""


class RemoteFeed(StreamFeed):
    """The engine behind a URL."""

    def __init__(self, opening: Opening, stream: _Stream, received_ns: int) -> None:
        super().__init__(opening)
        self._source = stream
        self._offset_ns = opening.clock_ns - received_ns
        self._lost = False
        self._reading: asyncio.Task[None] | None = None
        self.take(opening)

    @classmethod
    async def connect(
        cls, url: str, *, hz: float, key: str | None = None, record: BinaryIO | None = None
    ) -> RemoteFeed:
        """Raises AttachError when there is no termgen, or it refuses."""
        stream = _Stream(url, hz=hz, key=key, record=record)
        try:
            await stream.open(None)
            message = None
            while not isinstance(message, Opening):
                message = (await stream.read())[0]
        except BaseException:
            await stream.close()
            raise
        feed = cls(message, stream, time.perf_counter_ns())
        feed._reading = asyncio.create_task(feed._read())
        return feed

    @property
    def trouble(self) -> str:
        return "connection lost" if self._lost else super().trouble

    def now_ns(self) -> int:
        return time.perf_counter_ns() + self._offset_ns

    async def close(self) -> None:
        """Stop reading. May be called again."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await self._source.close()

    async def _read(self) -> None:
        """Pass on what comes; come back behind the last frame when the connection is lost."""
        while True:
            try:
                for message in await self._source.read():
                    if isinstance(message, Opening):
                        self._offset_ns = message.clock_ns - time.perf_counter_ns()
                    self.take(message)
                self._lost = False
            except (AttachError, TelemetryError):
                self._lost = True
                await asyncio.sleep(RETRY_S)
                await self._reopen()

    async def _reopen(self) -> None:
        try:
            await self._source.open(self._source.last_id)
        except AttachError:
            return  # the next read fails, and it is tried again


class _Stream:
    """One HTTP response after another, as messages."""

    def __init__(self, url: str, *, hz: float, key: str | None, record: BinaryIO | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1/events").removesuffix("/v1")
        if "://" not in self._url:
            self._url = "http://" + self._url
        self._params = {"hz": f"{hz:g}"}
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._record = record
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(CONNECT_S, read=SILENCE_S), follow_redirects=True
        )
        self._response: httpx.Response | None = None
        self.last_id: str | None = None

    async def open(self, last_id: str | None) -> None:
        await self._end_response()
        headers = self._headers | ({"Last-Event-ID": last_id} if last_id else {})
        try:
            request = self._client.build_request(
                "GET", self._url + "/v1/events", params=self._params, headers=headers
            )
            response = await self._client.send(request, stream=True)
            if response.status_code != 200:
                await response.aread()
                raise AttachError(_refusal(self._url, response))
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
        """At least one message. Raises AttachError when the stream has ended."""
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
            for frame in self._reader.feed(data):
                if self._record is not None:
                    self._record.write(bytes(frame))
                message = decode(frame)
                self.last_id = frame.id or self.last_id
                if message is not None:
                    messages.append(message)
        return messages

    async def close(self) -> None:
        await self._end_response()
        await self._client.aclose()
        if self._record is not None:
            self._record.flush()

    async def _end_response(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()


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
