"""`x` on the dashboard: a trace of what it shows, in the current folder."""

from __future__ import annotations

import csv
import os
import subprocess
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from trace_reader import Trace
from tui_harness import SECOND, FrozenApp, chat_engine, feed_dashboard, ready, wait_until

from termgen.tui.dashboard import trace_export
from termgen.tui.dashboard.state.store import DashboardView
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.step_figures import BUCKET_NS

TRACE_PROCESSOR = os.environ.get("TRACE_PROCESSOR")
"""Perfetto's `trace_processor_shell`."""
SLICES = """
SELECT thread.name AS track, slice.name AS name, SUM(slice.dur) AS ns, COUNT(*) AS num,
       MAX(slice.dur) AS longest
FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid)
GROUP BY thread.name, slice.name;
"""


def notes(app: FrozenApp) -> str:
    return "\n".join(notification.message for notification in app._notifications)


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("termgen-*.trace.json.gz"))


async def test_x_writes_the_steps_up_to_the_marked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("x")
        await wait_until(pilot, lambda: "no step to write yet" in notes(app))
        assert traces(tmp_path) == []
        await feed_dashboard(app, pilot)
        await pilot.press("x")
        await wait_until(pilot, lambda: len(traces(tmp_path)) == 1 and "perfetto" in notes(app))
        events = app.screen._event_reader.events  # type: ignore[attr-defined]
        steps = [event for event in events if isinstance(event, StepRecord)]
        (first,) = traces(tmp_path)
        whole = Trace(first)
        assert num_steps(whole) == len(steps) > 10
        device = sum(s.ended_ns - s.started_ns for s in steps)
        assert sum(ns for (t, _), ns in whole.durations_ns.items() if t == "device") == device
        await pilot.press("left", "left", "left", "left", "x")
        await wait_until(pilot, lambda: notes(app).count("perfetto") == 2)
        (second,) = {*traces(tmp_path)} - {first}
        assert num_steps(Trace(second)) == len(steps) - 4
        assert str(second) in notes(app)


async def exported(folder: Path) -> tuple[Path, DashboardView]:
    """A trace that `x` wrote, and what the dashboard showed."""
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        app.now_ns += SECOND  # so that the newest point of the series is full
        await app.dashboard.refresh_view()
        await pilot.press("x")
        await wait_until(pilot, lambda: len(traces(folder)) == 1 and "perfetto" in notes(app))
        view = app.dashboard.view
    return traces(folder)[0], view


async def test_a_trace_has_the_sums_that_the_dashboard_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, view = await exported(tmp_path)
    trace = Trace(file)
    device = [
        (end - begin, event["args"])
        for key, slices in trace.slices.items()
        if trace.tracks[key].startswith("device")
        for begin, end, event in slices
    ]
    assert len(device) == len(view.steps) == view.graphs.num_steps > 100
    assert max(ns for ns, _ in device) / 1e6 == pytest.approx(view.series.step_ms.max())
    assert median(ns for ns, _ in device) / 1e6 == pytest.approx(view.step.p50, rel=0.03)
    tokens_of_a_point = BUCKET_NS / 1e9
    prompts = sum(args["prompt_tokens"] for _, args in device)
    assert prompts == pytest.approx(view.series.prefill.sum() * tokens_of_a_point) and prompts > 0
    modes = Counter(args["graph"] for _, args in device)
    assert dict(modes) == dict(view.graphs.modes)
    running = trace.counters["requests"][-1][1]
    assert running == {"running": view.num_running, "waiting": view.num_waiting}
    blocks = trace.counters["blocks"][-1][1]
    assert blocks["used"] == view.num_used_blocks and blocks["free"] == view.num_free_blocks
    finished = {e["id"] for e in trace.events if e["ph"] == "e" and "reason" in e.get("args", {})}
    assert finished == {row.request_id for row in view.requests if row.finished} != set()


@pytest.mark.skipif(
    TRACE_PROCESSOR is None, reason="needs TRACE_PROCESSOR=path of Perfetto's trace_processor_shell"
)
async def test_perfetto_reads_the_same_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, view = await exported(tmp_path)
    (tmp_path / "slices.sql").write_text(SLICES)
    argv = [str(TRACE_PROCESSOR), "--query-file", "slices.sql", str(file)]
    read = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert read.returncode == 0, read.stderr
    rows = list(csv.DictReader(line for line in read.stdout.splitlines() if line))
    assert rows, read.stdout
    sums, device = Counter[tuple[str, str]](), Counter[str]()
    for row in rows:
        kind = row["track"].split()[0]
        sums[kind, row["name"]] += int(row["ns"])
        if kind == "device":
            device["steps"] += int(row["num"])
            device["longest"] = max(device["longest"], int(row["longest"]))
    assert sums == Trace(file).durations_ns
    assert device["steps"] == len(view.steps)
    assert device["longest"] / 1e6 == pytest.approx(view.series.step_ms.max())


def num_steps(trace: Trace) -> int:
    return sum(event["name"] == "schedule" for event in trace.events if event["ph"] == "X")


async def test_a_folder_that_cannot_be_written_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_export, "write_trace", fail)
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(100, 30)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("x")
        await wait_until(pilot, lambda: "No space left on device" in notes(app))
        assert traces(tmp_path) == []
        assert app.is_running


def test_two_of_one_second_have_names_of_their_own(tmp_path: Path) -> None:
    from fake_engine import make_model_info, make_step_record

    made = [
        trace_export.export_trace(tmp_path, [make_step_record()], make_model_info())[0]
        for _ in range(3)
    ]
    assert len({*made}) == 3 and traces(tmp_path) == sorted(made)
