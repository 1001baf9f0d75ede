"""Reading a faulty stream: full disks, broken frames, several frames in one piece."""

from __future__ import annotations

import asyncio
import errno
import io
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from server_harness import eventually, serving
from tui_harness import MODEL, NOW_NS, step

from termgen.commands import top_command
from termgen.config import UIConfig
from termgen.errors import ConfigError
from termgen.remote.client import RemoteClient
from termgen.tui.feed_app import TopApp
from termgen.tui.feeds import attach
from termgen.tui.feeds.attach import AttachError, RemoteFeed
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.telemetry import Opening, encode, encode_events

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def opening(stream: str = "s", at: int = 0) -> bytes:
    first = Opening(
        stream=stream,
        resumed=at > 0,
        clock_ns=NOW_NS,
        unix_ns=0,
        dropped=0,
        status="ok",
        model=MODEL,
        snapshot=None,
    )
    return bytes(encode(first, f"{stream}-{at}"))


def frames(*step_ids: int, stream: str = "s") -> bytes:
    topics, out = frozenset({"step"}), b""
    for i in step_ids:
        records = [step(i, end_ns=NOW_NS)]
        found = encode_events(records, stream=stream, first=i, dropped=0, topics=topics)
        out += b"".join(map(bytes, found))
    return out


@dataclass
class Scripted:
    """Answers the first connection with the first of `answers`, and so on; keeps them open."""

    url: str
    asked_from: list[str] = field(default_factory=list)
    """The id after which each connection asked to continue."""


@asynccontextmanager
async def scripted(*answers: list[bytes]) -> AsyncGenerator[Scripted, None]:
    """Each string of an answer is sent as one piece."""
    rest, over, open_writers = list(answers), asyncio.Event(), list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        found = re.search(r"(?i)last-event-id: (\S+)", head)
        server.asked_from.append(found[1] if found else "")
        writer.write(HEAD)
        for piece in rest.pop(0) if rest else []:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        await over.wait()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server = Scripted(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    try:
        yield server
    finally:
        over.set()
        listening.close()
        for writer in open_writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def got(feed: RemoteFeed, count: int) -> list[int]:
    """The ids of the steps received, once there are `count`."""
    ring, found = feed.events(), list[Any]()
    await eventually(lambda: bool(found.extend(ring.drain())) or len(found) >= count)
    assert all(isinstance(event, StepRecord) for event in found)
    return [event.step_id for event in found]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "RETRY_S", 0.02)


async def test_what_comes_in_one_piece_with_the_opening_is_kept() -> None:
    async with scripted([opening() + frames(1, 2), frames(3)]) as server:
        feed = await RemoteFeed.connect(server.url, hz=20)
        try:
            assert await got(feed, 3) == [1, 2, 3]
        finally:
            await feed.close()
    piece = opening() + frames(1) + opening("t") + frames(1, stream="t")
    async with scripted([piece]) as server:
        feed = await RemoteFeed.connect(server.url, hz=20)
        try:
            assert await got(feed, 2) == [1, 1]
            assert feed.epoch == 1 and feed.stream == "t"
        finally:
            await feed.close()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (b"event: \xff\nid: s-3\ndata: {}\n\n", "name cannot be read"),
        (b"event: step\nid: s-3\ndata: {}\n\n", "'step' frame cannot be read"),
        (opening().replace(b'"version":1', b'"version":99'), "speaks version 99"),
    ],
)
async def test_a_broken_frame_is_said_and_loses_nothing_before_it(
    broken: bytes, words: str
) -> None:
    answers = [opening(), frames(1, 2) + broken + frames(9)], [broken], [opening(at=2), frames(3)]
    async with scripted(*answers) as server:
        feed = await RemoteFeed.connect(server.url, hz=20)
        told: list[str] = []
        try:
            ring, found = feed.events(), list[Any]()

            def all_came() -> bool:
                found.extend(ring.drain())
                told.append(feed.trouble)
                return len(found) >= 3

            await eventually(all_came)
            assert [event.step_id for event in found] == [1, 2, 3]
            assert server.asked_from == ["", "s-2", "s-2"]
            assert any(words in trouble for trouble in told), set(told)
            await eventually(lambda: feed.is_healthy)
        finally:
            await feed.close()


async def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    file = Full()
    async with scripted([opening(), frames(1), frames(2)]) as server:
        feed = await RemoteFeed.connect(server.url, hz=20, record=file)
        try:
            assert await got(feed, 2) == [1, 2]
            assert feed.trouble == "recording stopped: No space left on device"
            assert file.getvalue() == opening()
        finally:
            await feed.close()


async def test_reading_that_ends_in_a_fault_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted([opening(), frames(1)]) as server:
        feed = await RemoteFeed.connect(server.url, hz=20)

        def fail(_frame: object) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(attach, "decode", fail)
        try:
            await eventually(lambda: not feed.is_healthy)
            assert feed.trouble == "reading ended: RuntimeError: a fault of ours"
        finally:
            await feed.close()


def test_a_recording_that_cannot_be_finished_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        name = "run.events"

        def close(self) -> None:
            if not self.closed:
                super().close()
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(top_command, "_open_recording", lambda _path: Full())
    monkeypatch.setattr(TopApp, "run", lambda self: None)
    monkeypatch.setattr(top_command, "is_here", lambda _url: False)
    with pytest.raises(ConfigError, match=r"run\.events: No space left"):
        top_command.run_top(None, UIConfig(), record="x", key_file=None)


async def test_no_proxy_is_asked_for_a_server_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # a closed port
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with serving(FakeEngine()) as server:
        feed = await RemoteFeed.connect(server.url, hz=4.0)
        await feed.close()
        client = await RemoteClient.connect(server.url)
        await client.aclose()
        with pytest.raises(AttachError, match="no server"):
            await RemoteFeed.connect("http://termgen.invalid", hz=4.0)
