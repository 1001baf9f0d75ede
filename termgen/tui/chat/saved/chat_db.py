"""The chats on disk: one SQLite file, which several termgens may have open at once.

Synchronous, one thread at a time, and not for an event loop: `ChatStore` gives it a thread of its
own. It knows records, not the tree they make. What SQLite says is passed on as `sqlite3.Error`;
`is_broken` tells a file that is beyond use from trouble that may pass.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from termgen.errors import ChatStoreError
from termgen.tui.chat.saved.chat_records import FOLDER, R, SessionRecord, TurnRecord, record_of
from termgen.tui.chat.state.labels import PINNED, TAGS, Labels, has_tags, split_search

APPLICATION_ID = 0x7467_6368
"""Marks the file as ours."""
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE sessions (session_id TEXT PRIMARY KEY, title TEXT NOT NULL,"
        " created_s REAL NOT NULL, updated_s REAL NOT NULL, model_id TEXT NOT NULL,"
        " system_prompt TEXT, params TEXT NOT NULL, deleted_s REAL)",
        "CREATE INDEX sessions_by_time ON sessions (updated_s)",
        "CREATE TABLE turns (number INTEGER PRIMARY KEY, turn_id TEXT NOT NULL UNIQUE,"
        " session_id TEXT NOT NULL, parent_id TEXT,"
        " is_chosen INTEGER NOT NULL, asked_s REAL NOT NULL, question TEXT NOT NULL,"
        " answer TEXT NOT NULL, state TEXT NOT NULL, model_id TEXT NOT NULL,"
        " figures TEXT NOT NULL)",
        "CREATE INDEX turns_by_session ON turns (session_id)",
    ),
    ("CREATE TABLE drafts (session_id TEXT PRIMARY KEY, text TEXT NOT NULL)",),
    (
        "CREATE TABLE pins (session_id TEXT PRIMARY KEY)",
        "CREATE TABLE tags (session_id TEXT NOT NULL, tag TEXT NOT NULL,"
        " PRIMARY KEY (session_id, tag))",
    ),
    ("ALTER TABLE sessions ADD COLUMN title_by TEXT NOT NULL DEFAULT ''",),
)
"""Steps from each schema version to the next. Never change a released one."""

_WORD_TRIGGERS = {
    "turn_words_new": "AFTER INSERT ON turns BEGIN INSERT INTO turn_words"
    " (rowid, question, answer) VALUES (new.number, new.question, new.answer); END",
    "turn_words_gone": "AFTER DELETE ON turns BEGIN INSERT INTO turn_words"
    " (turn_words, rowid, question, answer)"
    " VALUES ('delete', old.number, old.question, old.answer); END",
    "turn_words_changed": "AFTER UPDATE OF question, answer ON turns BEGIN INSERT INTO turn_words"
    " (turn_words, rowid, question, answer)"
    " VALUES ('delete', old.number, old.question, old.answer);"
    " INSERT INTO turn_words (rowid, question, answer)"
    " VALUES (new.number, new.question, new.answer); END",
}
SESSION_COLUMNS = tuple(SessionRecord.__dataclass_fields__)
TURN_COLUMNS = tuple(TurnRecord.__dataclass_fields__)
_LABELS = (PINNED, TAGS)
BY_USER, BY_MODEL = "user", "model"
"""Who gave a title; empty for the words of the first question."""
BUSY_S = 5.0
"""How long to wait for another process that writes."""
RETRY_S = 0.01
KEPT_DELETED_S = 86_400.0
MAX_LISTED = 500
EXCERPT_BEFORE, EXCERPT_CHARS = 24, 160
FIRST_UNSPACED = "\u2e80"
"""First character of scripts without blanks between words, in which FTS5 finds no parts of a
line."""
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True, slots=True)
class SessionSummary:
    session_id: str
    title: str
    updated_s: float
    model_id: str
    num_turns: int
    excerpt: str = ""
    """A piece of the text around the first word that was searched for."""
    number: int = 0
    """Tells chats of one title apart, counted from the oldest; 0: there is no other."""
    folder: str = ""
    """The folder that it was begun in; empty where it has none."""
    is_pinned: bool = False
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The title as lists show it: `Hello (2)`."""
        return f"{self.title} ({self.number})" if self.number else self.title


def numbers(titles: Sequence[str]) -> list[int]:
    """A number for each title that is there several times, counted from the last; 0 for others."""
    folded = [title.casefold() for title in titles]
    counts, left = Counter(folded), Counter(folded)
    found = []
    for title in folded:
        found.append(left[title] if counts[title] > 1 else 0)
        left[title] -= 1
    return found


def is_broken(error: sqlite3.Error) -> bool:
    """True if the file is damaged, and not just locked, full or forbidden."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN


def set_aside(path: Path) -> Path:
    """Rename a broken file, with what SQLite keeps beside it; returns its new name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name, number = f"{path.stem}.broken-{stamp}", 1
    while path.with_name(name + path.suffix).exists():
        number += 1
        name = f"{path.stem}.broken-{stamp}-{number}"
    aside = path.with_name(name + path.suffix)
    path.rename(aside)
    for end in ("-wal", "-shm"):
        beside = path.with_name(path.name + end)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + end))
    return aside


class ChatDatabase:
    def __init__(
        self,
        path: Path | None,
        *,
        busy_s: float = BUSY_S,
        migrations: Sequence[Sequence[str]] = MIGRATIONS,
        use_fts: bool = True,
    ) -> None:
        """path: None keeps the chats in memory. Raises `ChatStoreError`, `OSError` or
        `sqlite3.Error`."""
        self._migrations = migrations
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.touch(mode=0o600)  # a chat is private
        self._connection = sqlite3.connect(path or ":memory:", timeout=busy_s, isolation_level=None)
        deadline = time.monotonic() + busy_s
        try:
            while not self._prepare(path, use_fts=use_fts, deadline=deadline):
                time.sleep(RETRY_S)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, path: Path | None, *, use_fts: bool, deadline: float) -> bool:
        """False where another process has the file, as it may be making it right now. SQLite waits
        for the others by itself, but not where it is to change how the file is written."""
        try:
            self._check_is_ours(path)
            # a write ahead log lets others read meanwhile; it is safe from a killed process
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._migrate()
            self.has_fts = use_fts and self._knows_fts()
            self._prepare_words()
            self._purge()
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > deadline:
                raise
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            return False
        return True

    def _check_is_ours(self, path: Path | None) -> None:
        verdict = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            error = sqlite3.DatabaseError(verdict)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        self._connection.execute("BEGIN")  # another process may be making the file right now
        mark = self._connection.execute("PRAGMA application_id").fetchone()[0]
        count = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        self._connection.execute("ROLLBACK")
        if mark != APPLICATION_ID and count:
            raise ChatStoreError(f"{path} is a database of another program")
        if self._version > len(self._migrations):
            raise ChatStoreError(f"{path} was written by a newer termgen; update this one")

    @property
    def _version(self) -> int:
        version: int = self._connection.execute("PRAGMA user_version").fetchone()[0]
        return version

    def _migrate(self) -> None:
        if self._version == len(self._migrations):
            return
        with self.transaction():
            # read again: another process may have been here first
            for number, statements in enumerate(self._migrations, 1):
                if number > self._version:
                    for statement in statements:
                        self._connection.execute(statement)
                    self._connection.execute(f"PRAGMA user_version = {number}")
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")

    def _knows_fts(self) -> bool:
        try:
            self._connection.execute("CREATE VIRTUAL TABLE temp.words_probe USING fts5(text)")
        except sqlite3.OperationalError:
            return False
        self._connection.execute("DROP TABLE temp.words_probe")
        return True

    def _prepare_words(self) -> None:
        """The index of words. Where SQLite has none, its triggers must not be in the way."""
        names = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        there = {row[0] for row in self._connection.execute(names)} & set(_WORD_TRIGGERS)
        if len(there) == (len(_WORD_TRIGGERS) if self.has_fts else 0):
            return
        with self.transaction():
            for name in _WORD_TRIGGERS:
                self._connection.execute(f"DROP TRIGGER IF EXISTS {name}")
            if not self.has_fts:
                return
            self._connection.execute(
                "CREATE VIRTUAL TABLE IF NOT EXISTS turn_words USING fts5"
                " (question, answer, content = 'turns', content_rowid = 'number')"
            )
            self._connection.execute("INSERT INTO turn_words (turn_words) VALUES ('rebuild')")
            for name, trigger in _WORD_TRIGGERS.items():
                self._connection.execute(f"CREATE TRIGGER {name} {trigger}")

    def _purge(self) -> None:
        """Forget what was deleted a day ago."""
        with self.transaction():
            self._connection.execute(
                "DELETE FROM sessions WHERE deleted_s < ?", (time.time() - KEPT_DELETED_S,)
            )
            for table in ("turns", "drafts", "pins", "tags"):
                self._connection.execute(
                    f"DELETE FROM {table} WHERE session_id NOT IN (SELECT session_id FROM sessions)"
                )

    @property
    def others_version(self) -> int:
        """Another number whenever another connection has written to the file."""
        version: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
        return version

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk has ended it already
                self._connection.execute("ROLLBACK")
            raise

    def save_session(self, session: SessionRecord) -> None:
        """Save a chat. The title is set once; only `rename` and `retitle` change it. A deleted chat
        is restored. Labels are saved by `pin` and `tag`: another window may have changed them."""
        params = {name: value for name, value in session.params.items() if name not in _LABELS}
        self._put(
            f"INSERT INTO sessions ({', '.join(SESSION_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (session_id) DO UPDATE SET deleted_s = NULL,"
            " title_by = CASE WHEN deleted_s IS NULL THEN title_by ELSE '' END,"
            " title = CASE WHEN deleted_s IS NULL THEN title ELSE excluded.title END,"
            " updated_s = max(updated_s, excluded.updated_s), model_id = excluded.model_id,"
            " system_prompt = excluded.system_prompt, params = excluded.params",
            session.session_id,
            session.title,
            session.created_s,
            session.updated_s,
            session.model_id,
            session.system_prompt,
            json.dumps(params, ensure_ascii=False),
        )

    def _put(self, statement: str, *values: object) -> None:
        """A string that is not quite text (half of a pair of code units) is written escaped."""
        plain = [
            value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
            for value in values
        ]
        self._connection.execute(statement, plain)

    def save_turn(self, turn: TurnRecord) -> None:
        """A turn without a session is never shown and goes with the next `_purge`."""
        self._put(
            "INSERT INTO turns (turn_id, session_id, parent_id, is_chosen, asked_s, question,"
            " answer, state, model_id, figures) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (turn_id) DO UPDATE SET answer = excluded.answer,"
            " state = excluded.state, figures = excluded.figures",
            turn.turn_id,
            turn.session_id,
            turn.parent_id,
            turn.is_chosen,
            turn.asked_s,
            turn.question,
            turn.answer,
            turn.state,
            turn.model_id,
            json.dumps(dict(turn.figures)),
        )

    def choose(self, session_id: str, parent_id: str | None, turn_id: str) -> None:
        """Put this turn on the path, instead of the other children of its parent."""
        self._put(
            "UPDATE turns SET is_chosen = (turn_id = ?) WHERE session_id = ? AND parent_id IS ?",
            turn_id,
            session_id,
            parent_id,
        )

    def remove_turn(self, turn_id: str) -> None:
        self._put("DELETE FROM turns WHERE turn_id = ?", turn_id)

    def rename(self, session_id: str, title: str) -> None:
        self._put(
            "UPDATE sessions SET title = ?, title_by = ? WHERE session_id = ?",
            title,
            BY_USER,
            session_id,
        )

    def retitle(self, session_id: str, before: str, title: str) -> bool:
        """Take a title by the model in place of the one before. False if that has changed
        meanwhile, or is the user's own."""
        done = self._connection.execute(
            "UPDATE sessions SET title = ?, title_by = ?"
            " WHERE session_id = ? AND title = ? AND title_by = '' AND deleted_s IS NULL",
            (title, BY_MODEL, session_id, before),
        )
        return done.rowcount == 1

    def delete(self, session_id: str) -> None:
        """Delete a chat; `restore` can bring it back for a day."""
        self._put("UPDATE sessions SET deleted_s = ? WHERE session_id = ?", time.time(), session_id)

    def restore(self, session_id: str) -> None:
        self._put("UPDATE sessions SET deleted_s = NULL WHERE session_id = ?", session_id)

    def pin(self, session_id: str, is_pinned: bool) -> None:
        if is_pinned:
            self._put("INSERT OR IGNORE INTO pins VALUES (?)", session_id)
        else:
            self._put("DELETE FROM pins WHERE session_id = ?", session_id)

    def tag(self, session_id: str, tag: str, has_it: bool) -> None:
        if has_it:
            self._put("INSERT OR IGNORE INTO tags VALUES (?, ?)", session_id, tag)
        else:
            self._put("DELETE FROM tags WHERE session_id = ? AND tag = ?", session_id, tag)

    def labels(self) -> dict[str, Labels]:
        """Those of each chat that has any."""
        tags: dict[str, list[str]] = {}
        for session_id, tag in self._connection.execute("SELECT * FROM tags ORDER BY tag"):
            tags.setdefault(session_id, []).append(tag)
        pins = {session_id for (session_id,) in self._connection.execute("SELECT * FROM pins")}
        return {
            session_id: Labels(session_id in pins, tuple(tags.get(session_id, ())))
            for session_id in pins | tags.keys()
        }

    def tags(self) -> dict[str, int]:
        """How many chats have each tag, the most used first."""
        rows = self._connection.execute(
            "SELECT tag, count(*) FROM tags JOIN sessions USING (session_id)"
            " WHERE deleted_s IS NULL GROUP BY tag ORDER BY count(*) DESC, tag"
        )
        return dict(rows.fetchall())

    def save_draft(self, session_id: str, text: str) -> None:
        """Keep what a chat's prompt holds; nothing of an empty one."""
        if text:
            self._put("INSERT OR REPLACE INTO drafts VALUES (?, ?)", session_id, text)
        else:
            self._put("DELETE FROM drafts WHERE session_id = ?", session_id)

    def draft(self, session_id: str) -> str:
        row = self._connection.execute(
            "SELECT text FROM drafts WHERE session_id = ?", (session_id,)
        ).fetchone()
        return str(row[0]) if row is not None else ""

    def recent_questions(self, limit: int) -> list[str]:
        """Questions of all chats, the oldest of them first."""
        rows = self._connection.execute(
            "SELECT t.question FROM turns t JOIN sessions s USING (session_id)"
            " WHERE s.deleted_s IS NULL ORDER BY t.number DESC LIMIT ?",
            (limit,),
        ).fetchall()
        return [str(question) for (question,) in reversed(rows)]

    def find(self, session_id: str) -> tuple[SessionRecord, list[TurnRecord]] | None:
        """What `load` returns; None where there is no such chat, or it has been deleted."""
        there = self._connection.execute(
            "SELECT 1 FROM sessions WHERE session_id = ? AND deleted_s IS NULL", (session_id,)
        )
        return self.load(session_id) if there.fetchone() is not None else None

    def load(self, session_id: str) -> tuple[SessionRecord, list[TurnRecord]]:
        row = self._connection.execute(
            f"SELECT {', '.join(SESSION_COLUMNS)} FROM sessions"
            " WHERE session_id = ? AND deleted_s IS NULL",
            (session_id,),
        ).fetchone()
        if row is None:
            raise ChatStoreError("this chat has been deleted")
        session = _checked(SessionRecord, SESSION_COLUMNS, row, "params")
        rows = self._connection.execute(
            f"SELECT {', '.join(TURN_COLUMNS)} FROM turns WHERE session_id = ? ORDER BY number",
            (session_id,),
        )
        turns = [_checked(TurnRecord, TURN_COLUMNS, each, "figures") for each in rows]
        labels = self.labels().get(session_id, Labels()).as_params()
        return replace(session, params={**session.params, **labels}), turns

    def sessions(self, words: str = "", *, pinned_first: bool = False) -> list[SessionSummary]:
        """The latest first; with words, those that have them all in a title or a turn, and a tag
        for each word with a `#`."""
        wanted, given = split_search(words)
        labels = self.labels()
        found = self._search(given) if given else {}
        rows = self._connection.execute(
            "SELECT s.session_id, s.title, s.updated_s, s.model_id, count(t.number), s.params"
            " FROM sessions s LEFT JOIN turns t USING (session_id) WHERE s.deleted_s IS NULL"
            " GROUP BY s.session_id ORDER BY s.updated_s DESC, s.rowid DESC"
        ).fetchall()
        summaries = []
        numbered = list(zip(rows, numbers([row[1] for row in rows]), strict=True))
        if pinned_first:
            numbered.sort(key=lambda each: not labels.get(each[0][0], Labels()).is_pinned)
        for row, number in numbered:
            session_id, title, updated_s, model_id, num_turns, params = row
            own = labels.get(session_id, Labels())
            if not has_tags(own.tags, wanted):
                continue
            in_title = all(word.casefold() in title.casefold() for word in given)
            if in_title or session_id in found:
                excerpt = found.get(session_id, "")
                summaries.append(
                    SessionSummary(
                        *(session_id, title, updated_s, model_id, num_turns, excerpt, number),
                        folder=_folder_of(params),
                        is_pinned=own.is_pinned,
                        tags=own.tags,
                    )
                )
            if len(summaries) == MAX_LISTED:
                break
        return summaries

    def _search(self, words: Sequence[str]) -> dict[str, str]:
        """Session -> where its latest turn with these words has the first of them."""
        text = "t.question || char(10) || t.answer"
        if self.has_fts and not any(char >= FIRST_UNSPACED for word in words for char in word):
            # quoted, so that no word is taken for an operator; a beginning is enough
            pattern = " ".join('"' + word.replace('"', '""') + '"*' for word in words)
            rows = self._connection.execute(
                f"SELECT t.session_id, {text} FROM turn_words JOIN turns t"
                " ON t.number = turn_words.rowid WHERE turn_words MATCH ? ORDER BY t.number",
                (pattern,),
            )
        else:
            where = " AND ".join([f"{text} LIKE ? ESCAPE '!'"] * len(words))
            rows = self._connection.execute(
                f"SELECT t.session_id, {text} FROM turns t WHERE {where} ORDER BY t.number",
                [f"%{_escaped(word)}%" for word in words],
            )
        return {session_id: _excerpt(said, words[0]) for session_id, said in rows}


def _checked(record_class: type[R], columns: Sequence[str], row: Sequence[Any], of_json: str) -> R:
    """A row as a record; a disk may have changed what SQLite does not look at."""
    values = dict(zip(columns, row, strict=True))
    if "is_chosen" in values:
        values["is_chosen"] = bool(values["is_chosen"])
    try:
        values[of_json] = json.loads(values[of_json])
        return record_of(record_class, values, record_class.__name__)
    except (ValueError, TypeError, RecursionError, ChatStoreError) as error:
        raise ChatStoreError(f"this chat cannot be read: {error}") from None


def _folder_of(params: str) -> str:
    """The folder among a chat's parameters, if that can be read."""
    if f'"{FOLDER}"' not in params:
        return ""
    try:
        folder = json.loads(params).get(FOLDER)
    except (ValueError, AttributeError, RecursionError):
        return ""
    return folder if isinstance(folder, str) else ""


def _escaped(word: str) -> str:
    for char in "!%_":
        word = word.replace(char, "!" + char)
    return word


def _excerpt(said: str, word: str) -> str:
    at = max(0, said.casefold().find(word.casefold()) - EXCERPT_BEFORE)
    piece = " ".join(said[at : at + EXCERPT_CHARS].split())
    return f"…{piece}" if at else piece
