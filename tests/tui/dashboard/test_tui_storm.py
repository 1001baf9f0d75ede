"""A resize storm: whatever sizes the terminal has while an answer streams and events arrive,
nothing fails, and in the end the screen equals that of a terminal of that size."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import Script
from textual.drivers.headless_driver import HeadlessDriver
from textual.events import Resize
from textual.geometry import Size
from textual.pilot import Pilot
from tui_harness import (
    ANSWER,
    MS,
    NOW_NS,
    FrozenApp,
    ask,
    busy_snapshot,
    chat_engine,
    feed_dashboard,
    pieces,
    ready,
    step,
    wait_until,
)

from termgen.tui.dashboard.dashboard_keys import PAGES

NUM_SIZES = 50
LAST = ((120, 40), (43, 11))
TEXT = ANSWER * 3


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("STORM_SEED", random.randrange(2**32)))
    print(f"STORM_SEED={seed}")
    return random.Random(seed)


def sizes(rng: random.Random) -> Iterator[tuple[int, int]]:
    for _ in range(NUM_SIZES):
        yield rng.randint(20, 250), rng.randint(5, 80)


def resize(app: FrozenApp, size: tuple[int, int]) -> None:
    """Resize as a terminal does: without waiting for the effect."""
    assert isinstance(app._driver, HeadlessDriver)
    app._driver._size = size
    app.post_message(Resize(Size(*size), Size(*size)))


def picture(app: FrozenApp) -> list[str]:
    return [strip.text for strip in app.screen._compositor.render_strips()]


async def settle(app: FrozenApp, pilot: Pilot[Any], size: tuple[int, int]) -> list[str]:
    resize(app, size)
    await pilot.pause()
    await wait_until(pilot, lambda: tuple(app.screen.size) == size)
    await pilot.pause()
    return picture(app)


async def fresh_chat(size: tuple[int, int]) -> list[str]:
    app = FrozenApp(chat_engine(Script(pieces=pieces(TEXT))))
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why")
        return await settle(app, pilot, size)


async def test_a_storm_over_a_chat_that_streams(rng: random.Random) -> None:
    all_pieces = pieces(TEXT)
    script = Script(pieces=all_pieces, delay_s=0.005, hold_after=len(all_pieces) - 9)
    app = FrozenApp(chat_engine(script))
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await ask(app, pilot, "why", wait=False)
        for number, size in enumerate(sizes(rng)):
            resize(app, size)
            if number % 5 == 0:  # otherwise the next comes before this one is drawn
                await pilot.pause()
        assert app.chat.is_streaming
        app.engine.release.set()
        await wait_until(pilot, lambda: not app.chat.is_streaming)
        assert app.chat.conversation.turns[0].answer == TEXT
        for size in LAST:
            assert await settle(app, pilot, size) == await fresh_chat(size), size


async def fresh_dashboard(size: tuple[int, int], number: int) -> dict[str, list[str]]:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=size) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        for index in range(number):
            tell(app, index)
        return await all_pages(app, pilot, size)


def tell(app: FrozenApp, index: int) -> None:
    """Publish some events."""
    end = NOW_NS - (NUM_SIZES - index) * MS
    app.engine.bus.publish(step(190_000 + index, end_ns=end, ms=0.9, num_decode_rows=3))
    app.engine.scripted_snapshot = busy_snapshot()


async def all_pages(
    app: FrozenApp, pilot: Pilot[Any], size: tuple[int, int]
) -> dict[str, list[str]]:
    pictures = {}
    for page in PAGES:
        app.dashboard.action_page(page.name)
        await app.dashboard.refresh_view()
        pictures[page.name] = await settle(app, pilot, size)
    return pictures


async def test_a_storm_over_every_page_of_the_dashboard(rng: random.Random) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        for number, size in enumerate(sizes(rng)):
            tell(app, number)
            resize(app, size)
            if number % 5 == 0:
                await app.dashboard.refresh_view()
                await pilot.pause()
            app.dashboard.action_page(PAGES[number % len(PAGES)].name)
        for size in LAST:
            assert await all_pages(app, pilot, size) == await fresh_dashboard(size, NUM_SIZES), size
