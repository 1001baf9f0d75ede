"""Messages of JSON-RPC over two descriptors, a message a line: the transport under `acp`.

Instead of the package's own, whose receive loop ends silently at a line that is no object. Such a
line gets an error for an answer, and the next is read. Threads read and write, so that any kind of
descriptor will do, and a client that does not read holds up nothing but its messages.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

MAX_LINE_BYTES = 50 << 20
MAX_WAITING = 64
"""Messages that are read ahead."""
GRACE_S = 0.1
"""Time at the end of the input for answers to what came right before it."""
META = "_meta"
"""Field of a request for anything: the package would pass what it holds as parameters, those of the
request among them. Nothing here reads it."""
OPTIONAL = "$/"
"""Beginning of notifications that may be left alone, by the protocol: none is known here."""
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
INVALID_PARAMS = -32602

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no message, and the error that answers it."""

    code: int
    words: str
    message_id: str | int | None = None
    """The id of a request, if it has one."""


class StdioTransport:
    """What `acp.AgentSideConnection` takes as its transport. Used on one event loop."""

    def __init__(
        self, reading: int, writing: int, check: Callable[[Message], str] = lambda _: ""
    ) -> None:
        """The descriptors are taken over. The reading begins at once. check: says what is wrong
        with the parameters of a request, where the package would not."""
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Message | BadLine | None] = asyncio.Queue()
        self._room = threading.Semaphore(MAX_WAITING)
        self._outbox: SimpleQueue[tuple[bytes, asyncio.Future[bool]] | None] = SimpleQueue()
        self._unanswered: set[object] = set()
        """Ids of requests that were read and not answered."""
        self._is_broken = False
        """The output takes no more."""
        for work, descriptor in ((self._read, reading), (self._write, writing)):
            name = f"termgen-acp{work.__name__}"
            threading.Thread(target=work, args=(descriptor,), name=name, daemon=True).start()

    async def receive(self) -> Message | None:
        """The next message; None at the end of the input."""
        while True:
            message = await self._inbox.get()
            self._room.release()
            if message is None:
                end_s = self._loop.time() + GRACE_S
                while self._unanswered and not self._is_broken and self._loop.time() < end_s:
                    await asyncio.sleep(GRACE_S / 20)
                return None
            if isinstance(message, dict):
                if "method" in message and "id" in message:
                    self._unanswered.add(message["id"])
                elif str(message.get("method")).startswith(OPTIONAL):
                    continue
                return message
            error = {"code": message.code, "message": message.words}
            await self.send({"jsonrpc": "2.0", "id": message.message_id, "error": error})

    async def send(self, message: Message) -> None:
        """Write a message; returns when it is written. Raises ConnectionError for a request that
        cannot be; nothing else waits for an answer."""
        if "method" not in message:
            message = with_clear_error(message)
            self._unanswered.discard(message["id"])
        written: asyncio.Future[bool] = self._loop.create_future()
        self._outbox.put((as_line(message), written))
        if not await written and "method" in message and "id" in message:
            raise ConnectionError("the client has gone")

    async def close(self) -> None:
        self._outbox.put(None)

    def end(self) -> None:
        """Take the input for ended."""
        self._unanswered.clear()
        self._inbox.put_nowait(None)

    # -- in threads ------------------------------------------------------------------------

    def _read(self, descriptor: int) -> None:
        try:
            with open(descriptor, "rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
                    while not is_whole and (more := file.readline(MAX_LINE_BYTES)):
                        is_whole = more.endswith(b"\n")
                        line = b""
                    self._take(line)
        except OSError:  # a terminal that has gone: the same as the end
            pass
        self._give(None)

    def _take(self, line: bytes) -> None:
        if not line:
            self._give(BadLine(INVALID_REQUEST, f"a line has over {MAX_LINE_BYTES >> 20} MiB"))
        elif line.strip():
            message = read_message(line)
            if isinstance(message, dict) and "id" in message and (words := self._check(message)):
                message = BadLine(INVALID_PARAMS, words, message["id"])
            self._give(message)

    def _give(self, message: Message | BadLine | None) -> None:
        self._room.acquire()
        self._call(self._inbox.put_nowait, message)

    def _write(self, descriptor: int) -> None:
        while (item := self._outbox.get()) is not None:
            line, written = item
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                self._is_broken = True
                self._call(self._inbox.put_nowait, None)
            self._call(_set, written, not self._is_broken)
        os.close(descriptor)

    def _call(self, function: Any, *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the program ends
            return


def _set(written: asyncio.Future[bool], is_written: bool) -> None:
    if not written.done():  # else the sender was cancelled
        written.set_result(is_written)


def read_message(line: bytes) -> Message | BadLine:
    """The message of a line, if it is one that the package can take."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return BadLine(PARSE_ERROR, "the line is not JSON")
    if not isinstance(message, dict):
        kind = "an array" if isinstance(message, list) else "no object"
        return BadLine(INVALID_REQUEST, f"a line must hold one message, not {kind}")
    message_id, method = message.get("id"), message.get("method")
    if isinstance(message_id, (dict, list, bool, float)):
        return BadLine(INVALID_REQUEST, "id must be a string or a whole number")
    if method is None and "id" not in message:
        return BadLine(INVALID_REQUEST, "method is missing")
    if method is not None and not isinstance(method, str):
        return BadLine(INVALID_REQUEST, "method must be a string", message_id)
    if not isinstance(message.get("error"), (dict, type(None))):
        return BadLine(INVALID_REQUEST, "error must be an object")
    params = message.get("params")
    if method is not None and isinstance(params, dict):
        params.pop(META, None)
    return message


def as_line(message: Message) -> bytes:
    try:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a number that JSON does not have, in arguments that a model wrote
        text = json.dumps(_without_nan(message), separators=(",", ":"))
    return text.encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def with_clear_error(answer: Message) -> Message:
    """An answer whose error names the field, where it says that parameters are of a wrong shape:
    the package's own has a list of all that was tried, with the parameters in it."""
    error = answer.get("error")
    data = error.get("data") if isinstance(error, dict) else None
    found = data.get("errors") if isinstance(data, dict) else None
    if not isinstance(error, dict) or not found:
        return answer
    first = found[0]
    where = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    ).removeprefix(".")
    words = f"{where}: {first['msg']}" if where else str(first["msg"])
    return {**answer, "error": {"code": error["code"], "message": words}}
