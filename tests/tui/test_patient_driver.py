"""A terminal that is not read delays neither the event loop nor the exit, and is redrawn later."""

from __future__ import annotations

import io
import os
import sys
import threading
import time

import pytest
from textual.app import App
from textual.drivers._writer_thread import WriterThread
from textual.drivers.linux_driver import LinuxDriver
from tui_harness import FrozenApp, chat_engine

from termgen.system.native_stderr import STDERR, without_panic_traces
from termgen.tui.app import MOST_QUEUED, PatientDriver

LIMIT_S = 20.0


class Stuck(io.StringIO):
    """A file whose writers wait until it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_written, self.is_read = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.is_written.set()
        assert self.is_read.wait(LIMIT_S)
        return super().write(text)


def make_driver(file: io.StringIO) -> PatientDriver:
    driver = PatientDriver.__new__(PatientDriver)
    driver.attrs_before = None
    driver._writer_thread = WriterThread(file)
    driver._writer_thread.start()
    return driver


def test_writes_never_wait() -> None:
    file = Stuck()
    driver = make_driver(file)
    done = threading.Event()

    def write() -> None:
        driver.write("frame 0\n")
        assert file.is_written.wait(LIMIT_S)  # the driver's thread waits for the terminal now
        for i in range(1, 10 * MOST_QUEUED):
            driver.write(f"frame {i}\n")
        driver.close()
        done.set()

    threading.Thread(target=write, daemon=True).start()
    assert done.wait(LIMIT_S), "a write waited for the terminal"
    assert driver.is_behind and driver.has_dropped
    file.is_read.set()
    deadline = time.monotonic() + LIMIT_S
    while driver.is_behind:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.write("last\n")
    driver.close()  # now it waits for the queued output
    lines = file.getvalue().splitlines()
    assert lines[0] == "frame 0" and lines[-1] == "last"
    assert MOST_QUEUED <= len(lines) <= MOST_QUEUED + 3


async def test_the_screen_is_drawn_again_once_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FrozenApp(chat_engine())
    async with app.run_test() as pilot:
        await pilot.pause()
        drawn: list[dict[str, object]] = []
        monkeypatch.setattr(app, "refresh", lambda *args, **kinds: drawn.append(kinds))
        driver = type("Driver", (), {"has_dropped": True, "is_behind": True})()
        real, app._driver = app._driver, driver
        try:
            app._draw_what_was_dropped()
            assert drawn == []
            driver.is_behind = False
            app._draw_what_was_dropped()
            app._draw_what_was_dropped()
        finally:
            app._driver = real
        assert drawn == [{"layout": True}]


def test_a_terminal_gets_this_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEXTUAL_DRIVER", raising=False)
    assert FrozenApp(chat_engine()).get_driver_class() is PatientDriver
    monkeypatch.setattr(
        "textual.constants.DRIVER", "textual.drivers.headless_driver:HeadlessDriver"
    )
    assert not issubclass(FrozenApp(chat_engine()).get_driver_class(), LinuxDriver)


async def test_frames_are_drawn_while_standard_error_is_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    real = os.dup(STDERR)
    os.dup2(writing, STDERR)
    try:
        with open(os.devnull) as stdin, open(STDERR, "w", closefd=False) as stderr:
            monkeypatch.setattr(sys, "__stdin__", stdin)
            monkeypatch.setattr(sys, "__stderr__", stderr)
            driver = PatientDriver(App())
            monkeypatch.undo()
        assert driver._file is not None
        with without_panic_traces():
            driver._file.write("a frame")
            driver._file.flush()
            os.write(STDERR, b" and a line")
            assert os.read(reading, 100) == b"a frame"
        assert os.read(reading, 100) == b" and a line"
        driver._file.close()
    finally:
        os.dup2(real, STDERR)
        for descriptor in (real, reading, writing):
            os.close(descriptor)
