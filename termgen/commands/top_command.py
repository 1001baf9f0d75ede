"""`termgen top`: opens files and reads the key on the plain terminal, then shows the dashboard."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from termgen.commands.exit_codes import OK
from termgen.config import UIConfig, is_loopback
from termgen.errors import ConfigError
from termgen.tui.feed_app import TopApp
from termgen.tui.feeds.attach import DEFAULT_URL, RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.feeds.replay import ReplayFeed

KEY_VARIABLE = "TERMGEN_ADMIN_KEY"

NICENESS = 10
"""A tenth of a busy core is left then, enough for keys to be answered."""


def run_top(
    url: str | None,
    ui: UIConfig,
    *,
    record: str | None,
    key_file: str | None,
    wait_s: float | None = None,
) -> int:
    """Watch a server until the person quits."""
    key = read_key(key_file)
    TopApp.check_settings(ui)
    recording = _open_recording(record) if record is not None else None

    async def connect() -> StreamFeed:
        return await RemoteFeed.connect(
            url or DEFAULT_URL,
            hz=ui.dashboard_hz,
            key=key,
            record=recording,
            report=app.report,
            wait_s=wait_s,
        )

    app = TopApp(connect, ui=ui)
    if is_here(url or DEFAULT_URL):
        let_others_first()
    try:
        app.run()
        return app.return_code or OK
    finally:
        if recording is not None:
            _close_recording(recording)


def is_here(url: str) -> bool:
    """Whether the engine shares this machine's processors with whoever watches it."""
    try:
        host = urlsplit(url if "://" in url else f"http://{url}").hostname
    except ValueError:
        return False  # connecting says what is wrong with it
    return host is not None and is_loopback(host)


def let_others_first() -> None:
    """Give way to the engine: on few cores, a picture that is drawn would make its steps wait."""
    if sys.platform != "win32":
        os.nice(NICENESS)
    if sys.platform == "linux":
        with suppress(OSError):  # where a sandbox forbids it
            # Waking up, this process interrupts nobody, whatever session the engine runs in.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_replay(path: Path, ui: UIConfig) -> int:
    """Show a recording. It is read before the screen opens: what is wrong with it is one line."""
    feed = ReplayFeed.open(path)
    feed.stop(True)  # its time begins when the screen is there

    async def start() -> StreamFeed:
        feed.stop(False)
        return feed

    TopApp.check_settings(ui)
    app = TopApp(start, ui=ui)
    app.run()
    return app.return_code or OK


def read_key(path: str | None) -> str | None:
    """The first line of the file, or what the environment has; None without either."""
    if path is None:
        return os.environ.get(KEY_VARIABLE, "").split(",")[0].strip() or None
    try:
        lines = Path(path).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-key-file {path}: {error}", param="admin_key_file") from error
    if not lines:
        raise ConfigError(f"--admin-key-file {path} is empty", param="admin_key_file")
    return lines[0]


def _open_recording(path: str) -> BinaryIO:
    """A recording that exists already is somebody's: it is not written over."""
    try:
        return open(path, "xb")
    except FileExistsError as error:
        raise ConfigError(f"--record {path} exists already", param="record") from error
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror}", param="record") from error


def _close_recording(recording: BinaryIO) -> None:
    """Keep what can be played, and no empty file: a server that could not be watched leaves none.

    What is written last may not fit any more. What is in the file can be played all the same.
    """
    try:
        is_empty = recording.tell() == 0
        recording.close()
        if is_empty:
            os.unlink(recording.name)
    except OSError as error:
        raise ConfigError(
            f"--record {recording.name}: {error.strerror}, so its end is missing", param="record"
        ) from error
