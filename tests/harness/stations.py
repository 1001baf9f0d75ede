"""The stations of a streamed chat answer: the files of termgen it passes, from socket to socket.

As a program (`python stations.py MODEL_FOLDER`), it starts a server, sends it the same request
several times and prints for each the files in which a Python function was called, as a JSON list
of [thread, file] in the order in which each thread first entered each file.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from types import FrameType
from typing import Any, NamedTuple

import termgen

ROOT = Path(__file__).resolve().parents[2]
PREFIX = f"{Path(termgen.__file__).parent}/"
NUM_RUNS = 3
QUIET_S, MOST_WAIT_S = 0.05, 1.0
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello, how are you today?"}],
    "stream": True,
    "max_tokens": 8,
}
BACKGROUND = frozenset({("serving/app.py", "_count_events")})
"""Functions that run whether there is a request or not; what they call is no station.

_count_events: drains the engine's events on a timer, for /metrics.
"""
NAMES = {"MainThread": "event loop", "asyncio": "worker thread", "termgen-engine": "engine thread"}


class Entry(NamedTuple):
    thread: str
    file: str


class Tracer:
    """Notes which files the threads enter that start after `install`, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._entries: list[Entry] = []
        self._seen: set[tuple[int, str]] = set()
        self._running = 0
        self._called_s = 0.0

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def take(self) -> list[Entry]:
        taken, self._entries = self._entries, []
        self._seen.clear()
        return taken

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if not self.is_on or event != "call" or not file.startswith(PREFIX):
            return
        thread = threading.get_ident()
        if thread != self._running:
            self._wait_for_others()
            self._running = thread
        self._called_s = time.monotonic()
        if (thread, file) not in self._seen and _outermost(frame) not in BACKGROUND:
            self._seen.add((thread, file))
            name = re.sub(r"_\d+$", "", threading.current_thread().name)
            self._entries.append(Entry(NAMES.get(name, name), file.removeprefix(PREFIX)))

    def _wait_for_others(self) -> None:
        """Let the thread that ran before come to its next wait: else the order is up to chance."""
        end_s = time.monotonic() + MOST_WAIT_S
        while (now_s := time.monotonic()) < end_s and now_s < self._called_s + QUIET_S:
            time.sleep(QUIET_S / 10)


def _outermost(frame: FrameType | None) -> tuple[str, str]:
    """File and name of the first function of termgen on this stack."""
    found = ("", "")
    while frame is not None:
        if frame.f_code.co_filename.startswith(PREFIX):
            found = frame.f_code.co_filename.removeprefix(PREFIX), frame.f_code.co_name
        frame = frame.f_back
    return found


async def _ask(port: int, tracer: Tracer) -> list[Entry]:
    """Stations from the arrival of the request's bytes to the last frame of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    await asyncio.sleep(4 * QUIET_S)  # what opening the connection causes is over
    tracer.is_on = True
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"data: [DONE]")
    tracer.is_on = False
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert answer.count(b'"content":') >= 2, answer  # steps run together while the loop waits
    writer.close()
    await writer.wait_closed()
    return tracer.take()


async def trace(folder: Path) -> list[list[Entry]]:
    from real_server import serving_tiny

    tracer = Tracer()
    tracer.install()
    async with serving_tiny(folder) as (client, _):
        port = client.base_url.port
        assert port is not None
        await _ask(port, tracer)  # makes what is made for the first request
        return [await _ask(port, tracer) for _ in range(NUM_RUNS)]


def stations(run: Sequence[Entry]) -> list[Entry]:
    """Each file once, where it was first entered."""
    first: dict[str, Entry] = {}
    for entry in run:
        first.setdefault(entry.file, entry)
    return list(first.values())


def differences(documented: Sequence[Entry], runs: Sequence[Sequence[Entry]]) -> Iterator[str]:
    """Where a list disagrees with the runs.

    A file that only some runs enter may be listed or not. The order is compared within each thread
    alone, because which of two threads comes first is up to chance.
    """
    files = [entry.file for entry in documented]
    entered = [{entry.file for entry in run} for run in runs]
    yield from (f"missing: {file}" for file in sorted(set.intersection(*entered) - set(files)))
    yield from (f"never entered: {file}" for file in files if file not in set.union(*entered))
    for thread in dict.fromkeys(entry.thread for entry in documented):
        listed = [entry.file for entry in documented if entry.thread == thread]
        order = [entry.file for entry in runs[0] if entry.thread == thread]
        shared = [file for file in listed if file in order]
        if shared != [file for file in order if file in listed]:
            yield f"not in the order of the {thread}: {', '.join(shared)}"


def as_markdown(found: Sequence[Entry]) -> str:
    legs = groupby(found, key=lambda entry: entry.thread)
    items = [
        f"{i}. {thread}: {', '.join(f'`{entry.file}`' for entry in leg)}"
        for i, (thread, leg) in enumerate(legs, 1)
    ]
    return "".join(fill(item, 120, subsequent_indent="   ") + "\n" for item in items)


def from_markdown(text: str) -> list[Entry]:
    legs = re.findall(r"^\d+\. ([^:]+):(.+(?:\n {3}.+)*)$", text, flags=re.MULTILINE)
    return [Entry(thread, file) for thread, leg in legs for file in re.findall(r"`(.+?)`", leg)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(trace(Path(sys.argv[1])))))
