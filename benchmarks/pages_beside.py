"""The cost of a frame of each dashboard page, beside a running engine.

Used by `screen_cost.py`. The engine and its requests are those of the other parts. Each page is
shown by an app of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from async_screen_parts import FrontSizes, Terminal, dashboard, reading
from frame_cost import HEAD, FrameCosts, figures, line

from termgen.config import EngineConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.tui.dashboard.dashboard_keys import PAGES
from termgen.vocabulary.events import StepRecord

ROWS, COLUMNS = 40, 120
READ_EVERY_S = 0.25
SETTLE_S = 1.0
MOST_WAIT_S = 60.0
LEAST_FRAMES = 4
"""Few frames are drawn when other processes keep the cores busy."""


async def _pages_beside(
    engine: AsyncEngine, sizes: FrontSizes, hz: float
) -> AsyncIterator[tuple[str, dict[str, float]]]:
    """Each page with the figures of its frames while every request decodes."""
    ring = engine.events()
    terminal = Terminal(ROWS, COLUMNS)
    try:
        with FrameCosts() as costs:
            for page in PAGES:
                async with (
                    dashboard(engine, terminal, hz, page=page.name),
                    reading(engine, sizes, every_s=READ_EVERY_S),
                ):
                    async with asyncio.timeout(MOST_WAIT_S):
                        while not any(
                            isinstance(e, StepRecord) and e.num_decode_rows == sizes.streams
                            for e in ring.drain()
                        ):
                            await asyncio.sleep(0.02)
                    await asyncio.sleep(SETTLE_S)
                    first = len(costs.frames)
                    async with asyncio.timeout(MOST_WAIT_S):
                        while len(costs.frames) - 1 <= first + LEAST_FRAMES:
                            await asyncio.sleep(sizes.seconds)
                    found = figures(costs.frames[first:-1])
                yield page.name, found
                while (await engine.snapshot()).num_running:
                    await asyncio.sleep(0.02)
                ring.drain()
    finally:
        terminal.close()
        engine.close_events(ring)


async def print_pages_beside(
    config: EngineConfig, sizes: FrontSizes, hz: float
) -> dict[str, dict[str, float]]:
    print(f"{hz:g} Hz beside the engine\n{HEAD}")
    engine, found = await AsyncEngine.start(config), {}
    try:
        async for page, costs in _pages_beside(engine, sizes, hz):
            found[page] = costs
            print(line(page, costs), flush=True)
    finally:
        await engine.shutdown()
    return found
