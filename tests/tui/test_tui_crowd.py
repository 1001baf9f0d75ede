"""The dashboard with 500 requests running and 1000 waiting: its figures are right, every request
can be reached, and nothing overflows."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from fake_engine import make_snapshot
from rich.cells import cell_len
from textual.pilot import Pilot
from tui_harness import MS, NOW_NS, SECOND, FrozenApp, chat_engine, ready, request_view, step

from termgen.tui.paint.canvas import Canvas
from termgen.vocabulary.events import (
    BlockState,
    EngineSnapshot,
    RequestEvent,
    RequestEventKind,
    RequestView,
)

NUM_RUNNING, NUM_WAITING, NUM_BLOCKS = 500, 1000, 20_000
NUM_STEPS = 150
FIRST_STEP = 7_000


def name(i: int) -> str:
    return f"chatcmpl-{i:04d}"


def running(i: int) -> RequestView:
    is_prefill = i >= 490
    return request_view(
        name(i),
        "prefill" if is_prefill else "decode",
        num_prompt_tokens=400 + i,
        num_computed_tokens=200 if is_prefill else 400 + i + 60,
        num_output_tokens=0 if is_prefill else 61,
        num_blocks=30,
        num_scheduled_tokens=32 if is_prefill else 1,
        age_s=9.0 - i / 100,
    )


def crowd() -> EngineSnapshot:
    states = np.full(NUM_BLOCKS, BlockState.FREE, dtype=np.uint8)
    owners = np.full(NUM_BLOCKS, -1, dtype=np.int32)
    states[0] = BlockState.NULL
    states[1 : 1 + 30 * NUM_RUNNING] = BlockState.ACTIVE
    owners[1 : 1 + 30 * NUM_RUNNING] = np.repeat(np.arange(NUM_RUNNING), 30)
    waiting = (
        request_view(name(NUM_RUNNING + i), "waiting", num_prompt_tokens=64 + i, age_s=3.0)
        for i in range(NUM_WAITING)
    )
    return make_snapshot(
        time_ns=NOW_NS,
        requests=(*map(running, range(NUM_RUNNING)), *waiting),
        num_running=NUM_RUNNING,
        num_waiting=NUM_WAITING,
        block_states=states,
        block_owners=owners,
        num_used_blocks=30 * NUM_RUNNING,
        num_cached_blocks=0,
        num_free_blocks=NUM_BLOCKS - 1 - 30 * NUM_RUNNING,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=2048,
        waiting_reason="all 500 seats are taken",
        last_progress_ns=NOW_NS,
    )


def publish(app: FrozenApp) -> None:
    kinds = RequestEventKind
    begin = NOW_NS - 9 * SECOND
    for i in range(NUM_RUNNING + NUM_WAITING):
        app.engine.bus.publish(RequestEvent(begin + i, name(i), kinds.QUEUED, 400 + i, 0, 0))
    for i in range(NUM_RUNNING):
        at = begin + SECOND + i * MS
        app.engine.bus.publish(RequestEvent(at, name(i), kinds.SCHEDULED, 400 + i, 0, 0))
        if i < 490:
            first = at + 300 * MS
            app.engine.bus.publish(RequestEvent(first, name(i), kinds.FIRST_TOKEN, 400 + i, 1, 0))
    for i in range(NUM_STEPS):
        app.engine.bus.publish(
            step(
                FIRST_STEP + i,
                end_ns=NOW_NS - (NUM_STEPS - i) * 40 * MS,
                num_decode_rows=490,
                num_prefill_rows=10,
                num_prefill_tokens=320,
                num_sampled_tokens=490,
                num_padded_tokens=22,
                num_running=NUM_RUNNING,
                num_waiting=NUM_WAITING,
                num_used_blocks=30 * NUM_RUNNING,
                num_free_blocks=NUM_BLOCKS - 1 - 30 * NUM_RUNNING,
            )
        )


async def crowded(app: FrozenApp, pilot: Pilot[Any]) -> None:
    await ready(app, pilot)
    app.engine.scripted_snapshot = crowd()
    publish(app)
    await app.dashboard.refresh_view()
    await pilot.pause()


def fits(app: FrozenApp, canvas: str) -> str:
    """The canvas's text, which must fit exactly."""
    shown = app.screen.query_one(f"#{canvas}", Canvas)
    lines = shown.text.split("\n")
    assert len(lines) <= shown.size.height, canvas
    assert all(cell_len(line) <= shown.size.width for line in lines), canvas
    return shown.text


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_crowd_is_shown_and_can_be_walked(size: tuple[int, int]) -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=size) as pilot:
        await crowded(app, pilot)
        shown = [c.id for c in app.screen.query(Canvas) if c.id and c.size.height]
        overview = "\n".join(fits(app, canvas) for canvas in shown)
        assert "requests · 500 running  1000 waiting" in overview
        assert "500/500" in overview and "75%" in overview
        assert size[0] != 80 or re.search(r"run .*500/500  wait .*1000  KV .*75%", overview)
        assert "12.0k" in overview and "chatcmpl-0004" in overview
        row = re.compile(r"chatcmpl-0004\s+● decode\s+404\s+·\s+61\s+\+1\s.*30\s")
        assert row.search(overview)

        await pilot.press("down", "pagedown")
        assert "▸ chatcmpl-0010" in fits(app, "requests")
        app.dashboard.action_select(480)
        await pilot.pause()
        assert "▸ chatcmpl-0490" in fits(app, "requests")
        assert "▶ prefill" in fits(app, "requests").split("▸ chatcmpl-0490")[1].split("\n")[0]
        await pilot.press("b")
        await pilot.pause()
        batch = fits(app, "page")
        assert "490 decode + 320 prefill of 2.0k  pad 22" in batch
        place = re.search(r"requests · (\d+)–(\d+) of 500", batch)
        assert place is not None and "█ prefill  █ decode  ✂ preempted" in batch
        lanes = re.findall(r"^│?\s*(▸ )?\s*(chatcmpl-\d+)", batch, re.MULTILINE)
        running_lanes = [lane for _, lane in lanes if int(lane[-4:]) < NUM_RUNNING]
        assert running_lanes == [name(i) for i in range(int(place[1]) - 1, int(place[2]))]
        assert ("▸ ", name(490)) in lanes
        assert "waiting · 1000" in batch and batch.count("all 500 seats are taken") == 2
        assert "chatcmpl-0500" in batch and "behind 3" in batch

        await pilot.press("i")
        await pilot.pause()
        inspector = fits(app, "page")
        assert "request chatcmpl-0490" in inspector and "9.00 s" in inspector
        assert re.search(r"queue +1\.49 s", inspector)
        await pilot.press("o")
        app.dashboard.action_select(101)
        await pilot.press("i")
        await pilot.pause()
        assert "request chatcmpl-0591" in fits(app, "page") and "waiting" in fits(app, "page")
        await pilot.press("k")
        await pilot.pause()
        assert "KV blocks · 19 999" in fits(app, "page")
