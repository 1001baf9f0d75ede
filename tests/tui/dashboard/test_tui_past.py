"""Stepping back: every part of the screen shows the same moment, or says that it was not kept."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import make_snapshot
from test_tui_dashboard import dashboard_app, panel
from textual.pilot import Pilot
from tui_harness import MS, NOW_NS, SECOND, FrozenApp, ready, request_view, step, steps

from termgen.tui.dashboard.state.past import as_of
from termgen.tui.dashboard.state.store import DashboardStore, HostReading, graphs_before
from termgen.vocabulary.device.gpu_reading import GpuReading
from termgen.vocabulary.events import (
    BlockState,
    EngineSnapshot,
    RequestEvent,
    RequestEventKind,
    StepRecord,
)

STEP_NS = 100 * MS
BUSY, CALM = range(100), range(100, 300)
"""Ids of the steps: ten seconds with four requests, then twenty with one."""
NUM_BLOCKS = 601


def end_of(step_id: int) -> int:
    return NOW_NS + (step_id + 1) * STEP_NS


def record(step_id: int) -> StepRecord:
    is_busy = step_id in BUSY
    rows, used = (4, 300) if is_busy else (1, 30)
    return step(
        step_id,
        end_ns=end_of(step_id),
        ms=80.0 if is_busy else 20.0,
        num_decode_rows=rows,
        num_prefill_rows=0,
        num_prefill_tokens=0,
        num_sampled_tokens=rows,
        num_padded_tokens=0,
        graph_mode="NONE" if is_busy else "FULL",
        num_running=rows,
        num_waiting=0,
        num_used_blocks=used,
        num_cached_blocks=0,
        num_free_blocks=600 - used,
    )


def snapshot(step_id: int) -> EngineSnapshot:
    newest = record(step_id)
    names = [f"busy-{n}" for n in range(4)] if step_id in BUSY else ["calm-0"]
    states = np.zeros(NUM_BLOCKS, np.uint8)
    owners = np.full(NUM_BLOCKS, -1, np.int32)
    states[0] = BlockState.NULL
    states[1 : 1 + newest.num_used_blocks] = BlockState.ACTIVE
    owners[1 : 1 + newest.num_used_blocks] = 0
    return make_snapshot(
        time_ns=newest.applied_ns,
        step=newest,
        requests=tuple(request_view(name, "decode", num_output_tokens=9) for name in names),
        num_running=newest.num_running,
        num_waiting=0,
        block_states=states,
        block_owners=owners,
        num_used_blocks=newest.num_used_blocks,
        num_cached_blocks=0,
        num_free_blocks=newest.num_free_blocks,
        num_finished=0 if step_id in BUSY else 4,
        max_num_seqs=8,
        last_progress_ns=newest.applied_ns,
    )


def waits(step_id: int) -> list[RequestEvent]:
    """A first token, after a second when the engine is busy and a tenth of it later."""
    ms = 1000 if step_id in BUSY else 100
    name, at = f"wait-{step_id}", end_of(step_id)
    return [
        RequestEvent(at - ms * MS, name, RequestEventKind.QUEUED, 10, 0, 0),
        RequestEvent(at, name, RequestEventKind.FIRST_TOKEN, 10, 1, 0),
    ]


async def run(app: FrozenApp, pilot: Pilot[Any], *seen: int) -> None:
    """Publish all steps; the dashboard draws a frame, with a snapshot, after each of `seen`."""
    done = 0
    for last in (*seen, CALM[-1]):
        for step_id in range(done, last + 1):
            for event in (*waits(step_id)[: 2 * (step_id % 10 == 5)], record(step_id)):
                app.engine.bus.publish(event)
        done = last + 1
        app.now_ns = end_of(last) + MS
        app.engine.scripted_snapshot = snapshot(last)
        await app.dashboard.refresh_view()
    await pilot.pause()


async def mark(app: FrozenApp, pilot: Pilot[Any], step_id: int) -> None:
    app.dashboard.action_step(CALM[-1] - step_id)
    await pilot.pause()


async def test_every_part_shows_the_marked_step() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 44)) as pilot:
        await ready(app, pilot)
        await run(app, pilot, 60, 90)
        assert "calm-0" in panel(app, "requests") and "1/8" in panel(app, "gauges")
        assert panel(app, "decode").split("\n")[0].count("10.0 tok/s") == 1
        await mark(app, pilot, 90)
        assert f"paused −{CALM[-1] - 90}" in panel(app, "header")
        assert "step 90" in panel(app, "batch")
        gauges = panel(app, "gauges")
        assert "4/8" in gauges and "50%" in gauges and re.search(r"CUDA graphs\W+0%", gauges)
        assert "40.0 tok/s" in panel(app, "decode")
        latency = panel(app, "latency")
        assert re.search(r"TTFT.* 1\.0\d s", latency), latency
        assert re.search(r"step .* (79|80|81)\.\d ms", latency), latency
        requests, blocks = panel(app, "requests"), panel(app, "blocks")
        assert all(f"busy-{n}" in requests for n in range(4)) and "calm" not in requests
        assert "4 running" in requests and "0 finished" in requests
        assert "300 active" in blocks and "50% used" in blocks
        assert "later" not in requests + blocks and "before" not in requests + blocks
        await pilot.press("escape")
        await app.dashboard.refresh_view()
        assert "calm-0" in panel(app, "requests") and "10.0 tok/s" in panel(app, "decode")


async def test_a_snapshot_of_another_step_says_so_and_a_missing_one_too() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 44)) as pilot:
        await ready(app, pilot)
        await run(app, pilot, 60, 90)
        for step_id, words in ((58, "2 steps later"), (91, "1 step before")):
            await mark(app, pilot, CALM[-1])
            app.dashboard._back = None
            await mark(app, pilot, step_id)
            assert words in panel(app, "requests") and words in panel(app, "blocks")
        app.dashboard._back = None
        await mark(app, pilot, 20)
        for name in ("requests", "blocks"):
            assert "not kept for this step" in panel(app, name)
            assert "busy" not in panel(app, name) and "active" not in panel(app, name)
        assert "4/8" in panel(app, "gauges") and "40.0 tok/s" in panel(app, "decode")
        await pilot.press("k")
        await pilot.pause()
        assert "not kept for this step" in panel(app, "page")
        await pilot.press("b")
        await pilot.pause()
        assert "+1" in panel(app, "page") or "no request" in panel(app, "page")


async def test_what_comes_while_frozen_changes_no_past() -> None:
    """A minute passes, and the store's own figures move on."""
    app = dashboard_app()
    async with app.run_test(size=(140, 44)) as pilot:
        await ready(app, pilot)
        await run(app, pilot, 60, 90)
        await mark(app, pilot, 90)
        names = ("decode", "latency", "gauges", "requests", "blocks")
        before = [panel(app, name) for name in names]
        for step_id in range(300, 300 + 5000):
            app.engine.bus.publish(record(step_id))
            if step_id % 500 == 0:
                await app.dashboard.refresh_view()
        app.now_ns = end_of(5299)
        await app.dashboard.refresh_view()
        await pilot.press("right", "left")
        await pilot.pause()
        assert [panel(app, name) for name in names] == before


def test_long_ago_the_kept_steps_alone_tell() -> None:
    """An engine may do a thousand steps in an hour: more than the series reach."""
    store = DashboardStore(started_ns=NOW_NS)
    records = [step(i, end_ns=NOW_NS + i * 4 * SECOND, ms=9.0) for i in range(1000)]
    store.apply(records)
    now = NOW_NS + 1000 * 4 * SECOND
    view = store.view(now)
    then = as_of(view, 900, store.kept(), store.history)
    assert then.now_ns == records[99].applied_ns and then.steps is view.steps
    assert then.step.p50 == pytest.approx(9.0, rel=0.02)
    assert then.ttft.p50 is None, "which steps do not know"
    assert then.steps_so_far == tuple(records[:100]) and view.steps_so_far == tuple(records)
    assert then.uptime_s == pytest.approx(view.uptime_s - (now - then.now_ns) / 1e9)


def test_graph_counts_without_later_steps() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    records = steps(400)
    kept = rng.randrange(1, 400)
    early, whole = DashboardStore(started_ns=0), DashboardStore(started_ns=0)
    early.apply(records[:kept])
    whole.apply(records)
    found = graphs_before(whole.view(NOW_NS).graphs, records[kept:])
    wanted = early.view(NOW_NS).graphs
    assert found.num_steps == wanted.num_steps and dict(found.modes) == dict(wanted.modes)
    assert set(found.sizes) == set(wanted.sizes) and set(found.reasons) == set(wanted.reasons)


async def test_readings_of_the_machine_end_at_the_marked_step() -> None:
    app = dashboard_app()
    async with app.run_test(size=(140, 44)) as pilot:
        await ready(app, pilot)
        await run(app, pilot, 90)
        early, late = end_of(80), end_of(200)
        dashboard = app.dashboard
        dashboard._gpus = (GpuReading(early, busy=0.11), GpuReading(late, busy=0.99))
        host = tuple(HostReading(cores, 2**30, at) for cores, at in ((1.5, early), (7.5, late)))
        dashboard._view = replace(dashboard.view, host=host, on_cpu=False)
        dashboard.paint()
        assert "99%" in panel(app, "gauges")
        await mark(app, pilot, 90)
        assert "11%" in panel(app, "gauges") and "99%" not in panel(app, "gauges")
        assert dashboard._then.host == host[:1]
