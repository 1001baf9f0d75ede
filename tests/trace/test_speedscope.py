"""A trace in speedscope, in a real browser: it opens without an error and shows our names."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from browser import CHROMIUM, Page, browser
from fake_engine import make_model_info, make_step_record
from trace_reader import Trace

from termgen.tui.dashboard.trace_export import export_trace
from termgen.vocabulary.events import StepRecord

SPEEDSCOPE = Path(__file__).parents[1] / "node" / "node_modules" / "speedscope" / "dist" / "release"
NEXT_TRACK, TIME_ORDER, SANDWICH = 78, 49, 51
"""Keys n, 1 and 3; the last one shows a table of all names."""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, or CHROMIUM=path"),
    pytest.mark.skipif(
        not SPEEDSCOPE.exists(), reason="needs speedscope: `npm install --prefix tests/node`"
    ),
]


@asynccontextmanager
async def served(*folders: Path) -> AsyncGenerator[str, None]:
    """Files of these folders on one address, as a page may ask for those of its own only."""

    async def answer(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"] or "index.html"
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is None:
            raise web.HTTPNotFound
        if found.suffix == ".gz":  # as a file that is dropped on the page, still packed
            return web.Response(body=found.read_bytes(), content_type="application/octet-stream")
        return web.FileResponse(found)

    app = web.Application()
    app.router.add_get("/{name:[^/]*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def shown(page: Page, condition: Callable[[str], bool]) -> str:
    text = ""
    try:
        async with asyncio.timeout(40):
            while not condition(text):
                text = str(await page.value("document.body.innerText"))
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError((text, page.errors)) from None
    return text


def record(number: int) -> StepRecord:
    """A step of a GPU of five milliseconds, each fourth with a prompt; the next is launched a
    millisecond before its end."""
    begin = 1_000_000_000 + number * 5_000_000
    return make_step_record(
        step_id=number,
        planned_ns=begin - 1_000_000,
        submitted_ns=begin - 800_000,
        launch_us=300.0,
        started_ns=begin,
        ended_ns=begin + 4_900_000,
        landed_ns=begin + 4_950_000,
        applied_ns=begin + 5_100_000,
        num_decode_rows=4,
        num_prefill_rows=int(number % 4 == 0),
        num_prefill_tokens=200 * (number % 4 == 0),
    )


async def test_speedscope_opens_a_trace_and_shows_its_sums(tmp_path: Path) -> None:
    events = [record(number) for number in range(12)]
    model = make_model_info(model_id="smollm2-135m", device="cuda:0")
    file, _ = export_trace(tmp_path, events, model)
    ours = Trace(file)
    sums = Counter[str]()
    async with (
        served(SPEEDSCOPE, tmp_path) as base,
        browser(tmp_path / "profile") as open_page,
    ):
        page = await open_page(f"{base}/#profileURL={base}/{file.name}")
        await shown(page, lambda text: "termgen smollm2-135m (pid 1), host" in text)
        await page.press("3", SANDWICH, "3")
        for number in range(1, len(ours.tracks) + 1):
            title = f"({number}/{len(ours.tracks)})"
            text = await shown(page, lambda text: title in text and "Symbol Name" in text)  # noqa: B023
            sums.update(times_of(text))
            if "device" in text:
                await page.press("1", TIME_ORDER, "1")
                await shown(page, lambda text: "Symbol Name" not in text)
                await page.picture(tmp_path / "speedscope.png")
                await page.press("3", SANDWICH, "3")
            await page.press("n", NEXT_TRACK, "n")
        print(tmp_path / "speedscope.png")
        assert (tmp_path / "speedscope.png").stat().st_size > 10_000, "an empty page is smaller"
        assert not page.errors
        assert all(url.startswith((base, "data:", "blob:", "about:")) for url in page.requested)
    own = {name: ns for (_, name), ns in ours.durations_ns.items()}
    assert own.keys() == {"schedule", "launch", "apply", "results", "decode", "mixed"}
    assert sums == pytest.approx(own, rel=0.005)


def times_of(page: str) -> Counter[str]:
    """The table's totals in nanoseconds: each name stands behind its total and its own time, and
    before its arguments. Names with other arguments have a row of their own."""
    lines = [line.strip() for line in page.partition("Symbol Name")[2].splitlines()]
    rows = [line for line in lines if line]
    found = Counter[str]()
    for total, _, name in zip(rows[::3], rows[1::3], rows[2::3], strict=False):
        number = re.match(r"([\d.]+)(ns|µs|ms|s) ", total)
        assert number is not None, total
        seconds = float(number[1]) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[number[2]]
        found[name.partition(" ")[0]] += round(seconds * 1e9)
    return found
