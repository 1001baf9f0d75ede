"""Makes the pictures of docs/dashboard.md: every page, at two sizes, on a CPU and on a GPU.

    python docs/make_dashboard_pictures.py cpu                     # the default model, with a load
    python docs/make_dashboard_pictures.py gpu RECORDING           # a file of `top --record`

The recording may be packed with gzip. `benchmarks/record_events.py` makes one.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import tempfile
from pathlib import Path

from make_pictures import EngineOfPictures, load
from textual.app import App
from textual.pilot import Pilot

from termgen.config import UIConfig
from termgen.tui.app import TermgenApp
from termgen.tui.feed_app import TopApp
from termgen.tui.feeds.replay import ReplayFeed

FOLDER = Path(__file__).parent / "images"
SIZES = ((80, 24), (140, 40))
PAGES = (
    (("o",), "overview"),
    (("t",), "timeline"),
    (("b",), "batch"),
    (("k",), "blocks"),
    (("i",), "request"),
    (("g",), "graphs"),
    (("l",), "log"),
)
"""Keys to press, and the picture of what they show."""
WARM_S = 20.0
"""So that the series have something to show."""
REPLAY_AT_S = 12
"""Where in the recording the pictures are taken."""


async def pages(app: App[None], pilot: Pilot[None], device: str, size: tuple[int, int]) -> None:
    await pilot.press("down", "down")
    await pilot.pause(0.5)
    for keys, name in PAGES:
        await pilot.press(*keys)
        await pilot.pause(0.6)
        app.save_screenshot(str(FOLDER / f"{device}-{name}-{size[0]}x{size[1]}.svg"))


async def on_cpu() -> None:
    """Both sizes of one engine, one after the other."""
    for size in SIZES:
        holder = EngineOfPictures()
        app = TermgenApp(
            holder.start, stop_engine=holder.stop, ui=UIConfig(), start_screen="dashboard"
        )
        async with app.run_test(size=size) as pilot:
            while not hasattr(holder, "engine"):
                await pilot.pause(0.2)
            await pilot.pause(1.0)
            clients = [asyncio.create_task(load(holder.engine, i)) for i in range(24)]
            await pilot.pause(WARM_S)
            await pages(app, pilot, "cpu", size)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def of_recording(recording: Path, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = recording.read_bytes()
        file = Path(folder) / "recording"
        file.write_bytes(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        for size in SIZES:
            feed = ReplayFeed.open(file)

            async def opened(feed: ReplayFeed = feed) -> ReplayFeed:
                return feed

            app = TopApp(opened, ui=UIConfig())
            async with app.run_test(size=size) as pilot:
                await pilot.pause(1.0)
                await pilot.press("space")
                feed.seek(REPLAY_AT_S * 1_000_000_000 - feed.position_ns)
                await pilot.press("space")
                await pilot.pause(0.8)
                await pilot.press("space")
                await pages(app, pilot, device, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("recording", nargs="?", type=Path)
    args = parser.parse_args()
    if args.device == "cpu" and args.recording is None:
        asyncio.run(on_cpu())
    elif args.recording is not None:
        asyncio.run(of_recording(args.recording, args.device))
    else:
        parser.error("gpu takes a recording")


if __name__ == "__main__":
    main()
