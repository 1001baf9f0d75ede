"""The dashboard sends a terminal only what differs from its contents. Whatever happens between two
frames, the terminal shows the right picture, and the updates stay small."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from textual.app import App, ComposeResult
from textual.drivers.headless_driver import HeadlessDriver
from textual.events import Resize
from textual.geometry import Size
from textual.pilot import Pilot
from textual.widgets import Static
from told_terminal import CONSOLE, Terminal, shown_of
from tui_harness import (
    MS,
    SECOND,
    FrozenApp,
    busy_snapshot,
    chat_engine,
    feed_dashboard,
    ready,
    wait_until,
)
from tui_harness import step as step_record

from termgen.tui.dashboard.dashboard_keys import PAGES
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.palette import Palette
from termgen.vocabulary.events import BlockState


class Watched:
    """An app whose updates go to a terminal."""

    def __init__(self, app: Any, monkeypatch: pytest.MonkeyPatch, size: Any) -> None:
        self.app, self.terminal, self.bytes = app, Terminal(size), 0
        self.is_dropping = False
        display = app._display

        def drawn(screen: Any, update: Any) -> None:
            if update is not None and screen is app.screen and not self.is_dropping:
                told = update.render_segments(CONSOLE)
                self.bytes += len(told.encode())
                self.terminal.feed(told)
            elif update is not None:
                update.render_segments(CONSOLE)  # and thrown away
            display(screen, update)

        monkeypatch.setattr(app, "_display", drawn)

    def check(self) -> None:
        strips = self.app.screen._compositor.render_strips()
        expected = shown_of(strips, self.terminal.size)
        for y, (is_shown, should) in enumerate(zip(self.terminal.shown(), expected, strict=True)):
            assert is_shown == should, f"row {y}"

    async def frame(self, pilot: Pilot[Any], rng: random.Random, number: int) -> None:
        self.tell(rng, number)
        await self.app.dashboard.refresh_view()
        await pilot.pause()

    def tell(self, rng: random.Random, number: int) -> None:
        """Publish many events."""
        app = self.app
        app.now_ns += 250 * MS
        for i in range(rng.randrange(4)):
            app.engine.bus.publish(
                step_record(190_000 + 4 * number + i, end_ns=app.now_ns, ms=rng.uniform(0.5, 9))
            )
        snapshot = busy_snapshot(app.now_ns)
        changed = rng.randrange(1, 600)
        snapshot.block_states[changed : changed + rng.randrange(9)] = BlockState.ACTIVE
        snapshot.block_owners[:] = np.roll(snapshot.block_owners, rng.randrange(3))
        app.engine.scripted_snapshot = snapshot


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("CHANGES_SEED", random.randrange(2**32)))
    print(f"CHANGES_SEED={seed}")
    return random.Random(seed)


def happenings(
    watched: Watched, pilot: Pilot[Any], rng: random.Random
) -> list[Callable[[], Awaitable[None]]]:
    """Actions that draw, cover, move or replace parts of the screen."""
    app = watched.app

    async def page() -> None:
        app.dashboard.action_page(rng.choice(PAGES).name)

    async def notice() -> None:
        app.notify("a notice\nof two lines", timeout=60)

    async def no_notice() -> None:
        app.clear_notifications()

    async def help_and_back() -> None:
        await pilot.press("f1")
        await pilot.pause()
        watched.tell(rng, 9_001)
        await pilot.press("escape")

    async def chat_and_back() -> None:
        await app.action_show("chat")
        await pilot.pause()
        watched.tell(rng, 9_002)
        await app.action_show("dashboard")

    async def theme() -> None:
        app.theme = rng.choice(["termgen-dark", "termgen-light"])

    async def resize() -> None:
        width = rng.choice((watched.terminal.size[0], rng.randrange(60, 140)))
        height = rng.choice([n for n in range(16, 48) if n != watched.terminal.size[1]])
        size = Size(width, height)
        assert isinstance(app._driver, HeadlessDriver)
        app._driver._size = size
        watched.terminal.resize(size)
        watched.tell(rng, 9_003)
        app.post_message(Resize(size, size))
        await app.dashboard.refresh_view()
        await wait_until(pilot, lambda: app.screen.size == size)

    async def search() -> None:
        app.dashboard.action_search()
        await pilot.pause()
        await pilot.press("escape")

    async def select() -> None:
        app.dashboard.action_select(rng.choice((1, -1)))

    async def drop() -> None:
        watched.is_dropping = True
        await watched.frame(pilot, rng, rng.randrange(10_000))
        watched.is_dropping = False
        driver: Any = app._driver
        driver.has_dropped, driver.is_behind = True, False
        app._draw_what_was_dropped()
        watched.tell(rng, 9_004)
        await app.dashboard.refresh_view()

    covers = [notice, help_and_back, page, chat_and_back, no_notice]
    return [*covers, theme, resize, search, select, drop]


async def test_a_terminal_shows_the_picture_whatever_comes_between(
    monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(120, 40)) as pilot:
        watched = Watched(app, monkeypatch, (120, 40))
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        happen = happenings(watched, pilot, rng)
        for number, what in enumerate(rng.sample(2 * happen, 2 * len(happen))):
            for _ in range(rng.randrange(1, 3)):
                await watched.frame(pilot, rng, number)
            await what()
            await pilot.pause()
            for _ in range(rng.randrange(3)):
                await watched.frame(pilot, rng, number)
            print(what.__name__)
            watched.check()


class Moving(App[None]):
    """A canvas below something that grows."""

    text = "a row of text"

    def compose(self) -> ComposeResult:
        yield Static("above")
        yield Canvas(lambda width, height: [((self.text.ljust(width), "text"),)] * height)

    def on_mount(self) -> None:
        canvas = self.query_one(Canvas)
        canvas.styles.height = 3
        canvas.tells_changes = True
        canvas.set_palette(Palette.of(self))


async def test_a_canvas_that_moves_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Moving()
    async with app.run_test(size=(40, 12)) as pilot:
        watched = Watched(app, monkeypatch, (40, 12))
        app.refresh(layout=True)
        canvas = app.query_one(Canvas)
        for height in (2, 4, 3, 1):
            for word in ("is", "was"):  # checking composes, too: the first follows nothing
                app.text = f"a row of text {word} here"
                canvas.repaint()
                await pilot.pause()
            app.text = "a row of text will be here"
            canvas.take_rows()  # and it is drawn because it moves
            app.query_one(Static).styles.height = height
            await pilot.pause()
            watched.check()


@pytest.mark.parametrize("page", [page.name for page in PAGES])
async def test_little_is_told_when_little_changes(
    page: str, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """Only the ages and the newest steps of the frame differ."""
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(120, 40)) as pilot:
        watched = Watched(app, monkeypatch, (120, 40))
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        app.dashboard.action_page(page)
        for number in range(2):
            await watched.frame(pilot, rng, number)
        before = watched.bytes
        app.now_ns += SECOND
        await watched.frame(pilot, rng, 9)
        assert 0 < watched.bytes - before < 6_000
        watched.check()


MOST_CALLS = {
    **{"overview": 2_700, "timeline": 1_970, "batch": 1_730, "blocks": 1_000},
    **{"request": 1_150, "graphs": 1_050},
}
"""Python calls to draw one frame of a busy engine: a tenth more than measured. The log page is
left out, as it has as many lines as this process has logged."""


@pytest.mark.parametrize("page", MOST_CALLS)
async def test_a_frame_takes_few_calls(page: str) -> None:
    """Calls are counted, not time: Python's work for a frame until Textual draws it."""
    app, rng = FrozenApp(chat_engine(), start_screen="dashboard"), random.Random(3)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        app.dashboard.action_page(page)
        await pilot.pause()
        watched = Watched(app, pytest.MonkeyPatch(), (120, 40))
        await watched.frame(pilot, rng, 1)
        counts = []
        for number in range(2, 5):  # other tasks and finalizers only add calls, and not every time
            watched.tell(rng, number)
            counts.append(await calls_of(app.dashboard.refresh_view()))
            await pilot.pause()
        print(f"{page}: {counts}")
        assert min(counts) < MOST_CALLS[page]


async def calls_of(work: Awaitable[None]) -> int:
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        await work
    finally:
        sys.setprofile(None)
    return calls
