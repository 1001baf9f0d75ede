"""Makes the pictures of the README and the docs from the real program and the default model.

    python docs/make_pictures.py            # all of them
    python docs/make_pictures.py themes     # those of docs/themes.md
    python docs/make_pictures.py bench      # those of docs/bench.md

`make_dashboard_pictures.py` makes those of docs/dashboard.md, `make_recording.py` the moving one of
the first steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from termgen.bench.options import ServeOptions
from termgen.client import ChatPrompt
from termgen.commands.bench_run import Subject
from termgen.commands.bench_watch import BenchWatch, measure_serve
from termgen.config import EngineConfig, UIConfig
from termgen.engine.loop.engine import AsyncEngine
from termgen.tui.app import TermgenApp
from termgen.tui.bench_app import BenchApp
from termgen.tui.themes.theme_files import shipped_folder
from termgen.vocabulary.sampling_params import SamplingParams

FOLDER = Path(__file__).parent / "images"
QUESTION = "Write a Python function that adds two numbers, and explain it in two sentences."
SYSTEM = "You are a helpful assistant. " * 12


class EngineOfPictures:
    engine: AsyncEngine

    async def start(self, on_progress):  # type: ignore[no-untyped-def]
        config = EngineConfig(max_num_seqs=12, kv_cache_gib=0.12, max_model_len=2048)
        self.engine = await AsyncEngine.start(config, on_progress=on_progress)
        return self.engine

    async def stop(self) -> None:
        await self.engine.shutdown()


async def load(engine: AsyncEngine, index: int) -> None:
    """One client: a shared system prompt, so that later requests find a prefix in the cache."""
    await asyncio.sleep(0.4 * index)
    text = f"Tell me something about the number {index}. " + "Be brief. " * (7 * (index % 5))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    params = SamplingParams(
        temperature=0.8, seed=index, max_tokens=60 + 25 * index, ignore_eos=True
    )
    async for _ in engine.generate(ChatPrompt(messages), params, request_id=f"client-{index}"):
        pass


async def themes() -> None:
    """The same moment of the same run in each theme."""
    holder = EngineOfPictures()
    app = TermgenApp(holder.start, stop_engine=holder.stop, ui=UIConfig(), start_screen="dashboard")
    async with app.run_test(size=(96, 26)) as pilot:
        while not hasattr(holder, "engine"):
            await pilot.pause(0.2)
        await pilot.pause(1.0)
        clients = [asyncio.create_task(load(holder.engine, i)) for i in range(18)]
        await pilot.pause(12.0)
        await pilot.press("space", "down")
        for path in sorted(shipped_folder().glob("*.toml")):
            if app.available_themes[path.stem].ansi:  # it looks as the terminal has it
                continue
            app.theme = path.stem
            await pilot.pause(0.5)
            app.save_screenshot(str(FOLDER / f"theme-{path.stem}.svg"))
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def main() -> None:
    holder = EngineOfPictures()
    ui = UIConfig(temperature=0.0, max_tokens=160)
    app = TermgenApp(holder.start, stop_engine=holder.stop, ui=ui)
    async with app.run_test(size=(120, 36)) as pilot:
        while not hasattr(holder, "engine"):
            await pilot.pause(0.2)
        await pilot.pause(1.0)
        await pilot.press(*QUESTION)
        await pilot.press("enter")
        await wait_until_idle(holder.engine, pilot)
        await pilot.pause(1.0)
        app.save_screenshot(str(FOLDER / "chat.svg"))


async def wait_until_idle(engine: AsyncEngine, pilot) -> None:  # type: ignore[no-untyped-def]
    await pilot.pause(0.5)
    while (await engine.snapshot()).num_running:
        await pilot.pause(0.2)


async def bench() -> None:
    """A load test of a server of its own: in the middle of it, and its report."""
    with TemporaryDirectory() as folder:
        options = ServeOptions(
            num_prompts=40,
            request_rate=2.5,
            random_input_len=60,
            random_output_len=24,
            goodput=("ttft:800", "tpot:200"),
            watch=True,
            output_html=str(Path(folder) / "run.html"),
        )
        watch = BenchWatch(options, Subject(None, (), None, 0), hz=4.0)
        async with contextlib.AsyncExitStack() as stack:
            app = BenchApp(
                watch.view,
                begin=lambda: watch.begin(stack, measure_serve),
                stop=watch.stop,
                open_feed=watch.open_feed,
                ui=UIConfig(),
            )
            async with app.run_test(size=(120, 36)) as pilot:
                while watch.view().num_done < 20:
                    await pilot.pause(0.2)
                app.save_screenshot(str(FOLDER / "bench.svg"))
                while not watch.view().is_over:
                    await pilot.pause(0.2)
                await pilot.pause(1.0)
                await pilot.press("pagedown", "pagedown")
                await pilot.pause(0.5)
                app.save_screenshot(str(FOLDER / "bench-report.svg"))


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["main", "themes", "bench"]
    for name, make in (("main", main), ("themes", themes), ("bench", bench)):
        if name in chosen:
            asyncio.run(make())
