"""`termgen top`: open files and read the key on the plain terminal, then show the dashboard."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from termgen.commands.exit_codes import OK
from termgen.commands.remote_command import read_key
from termgen.config import UIConfig, is_loopback
from termgen.errors import ConfigError
from termgen.system.remembered import Remembered
from termgen.tui.dashboard.fleet import OpenFeed
from termgen.tui.feed_app import FleetApp, TopApp
from termgen.tui.feeds.attach import DEFAULT_URL, RemoteFeed
from termgen.tui.feeds.feed import StreamFeed
from termgen.tui.feeds.replay import ReplayFeed

NICENESS = 10
"""On a busy core this leaves a tenth of its time, enough to respond to keys."""


def run_top(
    url: str | None,
    ui: UIConfig,
    *,
    record: str | None,
    key_file: str | None,
    wait_s: float | None = None,
) -> int:
    """Watch a server until the user quits."""
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
            past=True,
        )

    app = TopApp(connect, ui=ui, remembered=Remembered.of_user())
    if is_here(url or DEFAULT_URL):
        let_others_first()
    try:
        app.run()
        return app.return_code or OK
    finally:
        if recording is not None:
            _close_recording(recording)


def run_fleet(urls: Sequence[str], ui: UIConfig, *, key_file: str | None) -> int:
    """Watch several servers until the user quits. They have the same key, if they have one."""
    key = read_key(key_file)
    FleetApp.check_settings(ui)

    def opener(url: str) -> OpenFeed:
        async def connect(report: Callable[[str, float], None]) -> StreamFeed:
            return await RemoteFeed.connect(
                url, hz=ui.dashboard_hz, key=key, report=report, past=True
            )

        return connect

    servers = [(url, opener(url)) for url in urls]
    app = FleetApp(servers, ui=ui, remembered=Remembered.of_user())
    if any(map(is_here, urls)):
        let_others_first()
    app.run()
    return app.return_code or OK


def is_here(url: str) -> bool:
    """True if the engine shares this machine's processors with the dashboard."""
    try:
        host = urlsplit(url if "://" in url else f"http://{url}").hostname
    except ValueError:
        return False  # connecting reports what is wrong with it
    return host is not None and is_loopback(host)


def let_others_first() -> None:
    """Lower this process's priority: on few cores, drawing would delay the engine's steps."""
    if sys.platform != "win32":
        os.nice(NICENESS)
    if sys.platform == "linux":
        with suppress(OSError):  # where a sandbox forbids it
            # SCHED_BATCH: waking up preempts no thread, in whatever session the engine runs.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_replay(path: Path, ui: UIConfig) -> int:
    """Show a recording. It is read before the screen opens, so that an error is one plain line."""
    feed = ReplayFeed.open(path)
    feed.stop(True)  # paused until the screen is open

    async def start() -> StreamFeed:
        feed.stop(False)
        return feed

    TopApp.check_settings(ui)
    app = TopApp(start, ui=ui, remembered=Remembered.of_user())
    app.run()
    return app.return_code or OK


def _open_recording(path: str) -> BinaryIO:
    """Open the recording; an existing file is never overwritten."""
    try:
        return open(path, "xb")
    except FileExistsError as error:
        raise ConfigError(f"--record {path} exists already", param="record") from error
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror}", param="record") from error


def _close_recording(recording: BinaryIO) -> None:
    """Close the recording and remove it if it is empty, as when the server could not be watched.

    The last write may fail on a full disk; the part in the file can still be played.
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
