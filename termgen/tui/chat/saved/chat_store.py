"""`ChatStore`: the chats of this program, written and read by one thread so that no screen waits.

A write is queued under a key and replaces a waiting write of that key: a slow disk gets the latest
text, not a queue of all. Writes that fail for a passing reason (locked, full) are kept and retried.
A broken file is renamed and a new one begun; a file that cannot be used at all leaves the chats in
memory. `report` passes each fault to the screen once.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_data_path

from termgen.errors import ChatStoreError, ConfigError
from termgen.tui.chat.saved.chat_db import (
    BUSY_S,
    ChatDatabase,
    SessionSummary,
    is_broken,
    set_aside,
)

T = TypeVar("T")
Write = Callable[[ChatDatabase], None]
Read = tuple[Callable[[ChatDatabase], Any], "asyncio.Future[Any]"]

RETRY_S = 3.0
OFF = "off"


def store_path(setting: str | None) -> Path | None:
    """Path of the chats' file; None for nowhere."""
    if setting == OFF:
        return None
    if setting:
        try:
            return Path(setting).expanduser()
        except RuntimeError:
            raise ConfigError(f"chat_db: {setting} is not a path", param="chat_db") from None
    return user_data_path("termgen") / "chats.sqlite3"


@dataclass(frozen=True, slots=True)
class Resume:
    """An earlier chat to begin with."""

    session_id: str
    given: Mapping[str, Any]
    """Settings that count more than those it was held with, by their names in `UIConfig`."""


def chats_to_begin_with(
    setting: str | None, session: str | None, given: Mapping[str, Any]
) -> tuple[ChatStore, Resume | None]:
    """The chats for a command line. session: as for `find_session`; None for a new chat."""
    path = store_path(setting)
    resume = Resume(find_session(path, session), given) if session is not None else None
    return ChatStore(path), resume


def find_session(path: Path | None, wanted: str) -> str:
    """The id of a chat by its id, its title or a part of it; "" is the last one.

    For the command line, before anything has taken the screen over. Raises `ConfigError`.
    """
    if path is None:
        raise ConfigError("no chats are kept: chat_db is off", param="chat_db")
    try:
        if not path.exists():
            raise ConfigError(f"there is no chat to go on with: {path} does not exist")
        database = ChatDatabase(path)
    except (OSError, sqlite3.Error, ChatStoreError) as error:
        raise ConfigError(
            f"the chats in {path} cannot be read: {error}; leave --continue and --session out"
        ) from None
    try:
        return _pick(database.sessions(), wanted.strip())
    except sqlite3.Error as error:
        raise ConfigError(f"the chats in {path} cannot be read: {error}") from None
    finally:
        database.close()


def _pick(sessions: Sequence[SessionSummary], wanted: str) -> str:
    if not sessions:
        raise ConfigError("there is no chat to go on with yet")
    if not wanted:
        return sessions[0].session_id
    word = wanted.casefold()
    for found in (
        [s for s in sessions if s.session_id == wanted],
        [s for s in sessions if s.title.casefold() == word],
        [s for s in sessions if s.name.casefold() == word],
        [s for s in sessions if word in s.title.casefold() or s.session_id.startswith(word)],
    ):
        if len(found) == 1:
            return found[0].session_id
        if found:
            names = ", ".join(f"{s.name!r} ({s.session_id[:8]})" for s in found[:5])
            raise ConfigError(f"--session {wanted!r} may be any of {names}", param="session")
    raise ConfigError(f"--session: no chat is called {wanted!r}", param="session")


class ChatStore:
    def __init__(
        self, path: Path | None = None, *, busy_s: float = BUSY_S, retry_s: float = RETRY_S
    ) -> None:
        """path: None keeps the chats for as long as the program runs. Nothing is opened before
        `start`."""
        self.path = path
        self._busy_s = busy_s
        self._retry_s = retry_s
        self._report: Callable[[str], None] = lambda _message: None
        self._replaced: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        """Guards all below but the database, which is the thread's."""
        self._pending: dict[object, Write] = {}
        self._reads: deque[Read] = deque()
        self._is_closing = False
        self._retry_at_s = 0.0
        self._is_failing = False
        self.trouble = ""
        """Why chats cannot be saved; empty while they can."""

    def start(self, *, report: Callable[[str], None], replaced: Callable[[], None]) -> None:
        """Open it, from a running loop; both functions are called on that loop.

        `replaced` tells that a new file was begun: what is open should be written again.
        """
        assert self._thread is None, "started already"
        self._loop = asyncio.get_running_loop()
        self._report, self._replaced = report, replaced
        self._thread = threading.Thread(target=self._run, name="termgen-chats", daemon=True)
        self._thread.start()

    def put(self, key: object, write: Write) -> None:
        """Write this soon, in the order of the last `put` of each key."""
        with self._wake:
            self._pending.pop(key, None)
            self._pending[key] = write
            self._wake.notify()

    async def read(self, function: Callable[[ChatDatabase], T]) -> T:
        """Run it on the thread, after what was put (unless that fails). Raises `ChatStoreError`."""
        assert self._loop is not None, "not started"
        answer: asyncio.Future[T] = self._loop.create_future()
        with self._wake:
            if self._is_closing:
                raise ChatStoreError("the chats are closed already")
            self._reads.append((function, answer))
            self._wake.notify()
        return await answer

    async def close(self) -> None:
        """Write what waits and end the thread. May be called again."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the top of the thread: a bug of ours ends the saving, no more
            self.trouble = f"chats are not saved any more: {type(error).__name__}: {error}"
            self._tell(self.trouble)
        with self._wake:
            self._is_closing = True
            reads = list(self._reads)
        for _, answer in reads:
            self._give(answer.set_exception, answer, ChatStoreError("the chats are closed"))

    def _serve(self) -> None:
        database = self._open()
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work, timeout=self._until_retry())
                pending = {}
                if self._may_write or self._is_closing:
                    pending, self._pending = self._pending, pending
                read = self._reads.popleft() if self._reads else None
                is_closing = self._is_closing
            if pending:
                database = self._write(database, pending)
            if read is not None:
                database = self._answer(database, *read)
            if is_closing and not self._reads and (not self._pending or self._is_failing):
                break
        database.close()

    @property
    def _may_write(self) -> bool:
        return bool(self._pending) and time.monotonic() >= self._retry_at_s

    def _has_work(self) -> bool:
        return self._may_write or bool(self._reads) or self._is_closing

    def _until_retry(self) -> float | None:
        return max(0.0, self._retry_at_s - time.monotonic()) if self._pending else None

    def _open(self) -> ChatDatabase:
        """The file, or a new one in place of a broken one, or at worst memory."""
        path = self.path
        for _ in range(2):
            try:
                return ChatDatabase(path, busy_s=self._busy_s)
            except sqlite3.Error as error:
                if path is None or not is_broken(error):
                    self._tell(f"chats are not kept: {path} cannot be opened: {error}")
                    break
                if not self._set_aside(path, error):
                    break
            except (OSError, ChatStoreError) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                self._tell(f"chats are not kept: {path}: {reason}" if reason else f"{error}")
                break
        self.path = None
        return ChatDatabase(None)

    def _set_aside(self, path: Path, error: sqlite3.Error) -> bool:
        try:
            aside = set_aside(path)
        except OSError as failure:
            self._tell(f"chats are not kept: {path} is broken ({error}): {failure.strerror}")
            return False
        self._tell(f"the saved chats were broken ({error}); the file is now {aside}")
        return True

    def _replace(self, database: ChatDatabase, error: sqlite3.Error) -> ChatDatabase:
        """Go on with a new file. Programs with an open chat write it again."""
        database.close()
        path = self.path
        if path is not None and not self._set_aside(path, error):
            self.path = None
        fresh = self._open()
        self._call(self._replaced)
        return fresh

    def _write(self, database: ChatDatabase, pending: dict[object, Write]) -> ChatDatabase:
        try:
            with database.transaction():
                for write in pending.values():
                    write(database)
        except sqlite3.DatabaseError as error:
            if not isinstance(error, sqlite3.OperationalError) and not is_broken(error):
                raise
            with self._wake:
                later, self._pending = self._pending, pending
                for key, write in later.items():
                    self._pending.pop(key, None)
                    self._pending[key] = write
                self._retry_at_s = time.monotonic() + self._retry_s
            if is_broken(error):
                self._retry_at_s = 0.0
                return self._replace(database, error)
            if not self._is_failing:
                self._is_failing = True
                self.trouble = f"chats cannot be saved now: {error}"
                self._tell(f"{self.trouble}. The chat goes on; trying again")
            return database
        if self._is_failing:
            self._is_failing, self._retry_at_s, self.trouble = False, 0.0, ""
            self._tell("chats are saved again")
        return database

    def _answer(
        self,
        database: ChatDatabase,
        function: Callable[[ChatDatabase], Any],
        answer: asyncio.Future[Any],
    ) -> ChatDatabase:
        try:
            found = function(database)
        except ChatStoreError as error:
            self._give(answer.set_exception, answer, error)
        except sqlite3.Error as error:
            if is_broken(error):
                database = self._replace(database, error)
            failure = ChatStoreError(f"the chats cannot be read: {error}")
            self._give(answer.set_exception, answer, failure)
        except Exception as error:  # a bug of ours, or words that are no text: this read only
            failure = ChatStoreError(f"the chats cannot be read: {type(error).__name__}: {error}")
            self._give(answer.set_exception, answer, failure)
        else:
            self._give(answer.set_result, answer, found)
        return database

    def _give(self, setter: Callable[[Any], None], answer: asyncio.Future[Any], what: Any) -> None:
        def give() -> None:
            if not answer.done():  # who asked may have gone
                setter(what)

        self._call(give)

    def _tell(self, message: str) -> None:
        self._call(lambda: self._report(message))

    def _call(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: no screen is left to report to
            return
