"""The timeline and the graphs page for scripted steps, at every size."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import make_memory_ledger, make_model_info, make_step_record
from tui_harness import (
    MS,
    NOW_NS,
    SECOND,
    FrozenApp,
    busy_snapshot,
    chat_engine,
    feed_dashboard,
    ready,
    steps,
)

from termgen.tui.dashboard.dashboard_keys import KEYS, PAGES, page_at, tab_line
from termgen.tui.dashboard.pages import timeline
from termgen.tui.dashboard.pages.graphs import (
    graphs_page,
    memory_panel,
    misses_panel,
    startup_panel,
)
from termgen.tui.dashboard.pages.timeline import lanes_panel, timeline_page
from termgen.tui.dashboard.state.store import MAX_SIZES, DashboardStore, DashboardView, GraphStats
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import COLOUR_GLYPHS, PLAIN_GLYPHS
from termgen.tui.paint.spans import Row, row_text, row_width
from termgen.vocabulary.events import StepRecord
from termgen.vocabulary.memory_ledger import GIB, HostExperts
from termgen.vocabulary.startup_phases import StartupPhase
from termgen.vocabulary.time_spread import quantiles

SIZES = [(30, 6), (80, 21), (120, 37), (200, 57)]
PHASES = (StartupPhase("weights", 2.0), StartupPhase("kernels", 6.0), StartupPhase("graphs", 2.0))


def text(rows: list[Row]) -> str:
    return "\n".join(row_text(row) for row in rows)


def step_at(index: int, *, idle_ms: float = 0.0, **overrides: object) -> StepRecord:
    """Ten milliseconds a step; planned 4 ms ahead of its start, while the one before runs."""
    start = NOW_NS + index * 10 * MS
    fields: dict[str, object] = {
        "step_id": 500 + index,
        "planned_ns": start - 4 * MS,
        "submitted_ns": start - 2 * MS,
        "launch_us": 1000.0,
        "started_ns": start + round(idle_ms * MS),
        "ended_ns": start + 10 * MS,
        "landed_ns": start + 10 * MS,
        "applied_ns": start + 11 * MS,
        "wait_us": 3000.0,
        "schedule_us": 2000.0,
        "apply_us": 1000.0,
        "idle_us": idle_ms * 1e3,
        "queue_depth": 1,
        "graph_mode": "FULL",
    }
    return make_step_record(**(fields | overrides))


def lane(rows: list[Row], name: str) -> str:
    return next(row_text(row) for row in rows if f" {name}" in row_text(row)[:6])[7:-1]


def cells_of(rows: list[Row], name: str, role: str) -> int:
    row = next(row for row in rows if f" {name}" in row_text(row)[:6])
    return sum(len(span[0]) for span in row if span[1] == role)


def test_lanes_are_to_scale() -> None:
    # 4 ms before the first start to 1 ms after the last end: 45 ms in 90 cells
    rows = lanes_panel([step_at(i) for i in range(4)], Frame(98, 10, False), COLOUR_GLYPHS)
    host = lane(rows, "host")
    assert host[:6] == "ssssLL"
    assert host.count("s") == 4 * 4 and host.count("L") == 4 * 2 and host.count("a") == 4 * 2
    assert host[:28].rstrip().endswith("a") or "a" in host[28:30]
    assert lane(rows, "GPU") == " " * 8 + "█" * 80 + "  "
    assert cells_of(rows, "GPU", "decode") == cells_of(rows, "GPU", "kv-active-alt") == 40
    assert lane(rows, "id").split() == ["500", "501", "502", "503"]
    assert lane(rows, "queue").split() == ["1", "1", "1", "1"]
    assert "4 steps · 45.0 ms" in text(rows) and "busy 100%" in text(rows)


def test_a_bubble_shows_where_the_device_was_idle() -> None:
    run = [step_at(0), step_at(1, idle_ms=5.0), step_at(2)]
    rows = lanes_panel(run, Frame(78, 10, False), COLOUR_GLYPHS)  # 70 cells of 0.5 ms
    device = lane(rows, "GPU")
    assert device[8 + 20 : 8 + 30] == "░" * 10 and device.count("░") == 10
    assert "idle 2.50 ms a step" in text(rows) and "busy 83%" in text(rows)
    short = [step_at(0), step_at(1, idle_ms=0.01), step_at(2)]
    assert lane(lanes_panel(short, Frame(78, 10, False), COLOUR_GLYPHS), "GPU").count("░") == 1


def test_in_monochrome_neighbouring_steps_differ_by_sign() -> None:
    rows = lanes_panel([step_at(i) for i in range(4)], Frame(98, 10, False), PLAIN_GLYPHS)
    assert lane(rows, "GPU").strip() == "█" * 20 + "▒" * 20 + "█" * 20 + "▒" * 20


def test_the_marked_step_ends_the_lanes_and_is_told_in_numbers() -> None:
    run = [step_at(i, schedule_us=1000.0 + i) for i in range(20)]
    page = text(timeline_page(run, 120, 40, COLOUR_GLYPHS, boxed=True, cursor=5, num_steps=4))
    assert "step 514" in page and "519" not in page
    assert "schedule 1.01 ms  launch 1.00 ms  wait 3.00 ms  apply 1.00 ms" in page
    assert "where a step goes" in page and "last 15 steps" in page
    newest = text(timeline_page(run, 120, 40, COLOUR_GLYPHS, boxed=True))
    assert "step 519" in newest and " 8 steps" in newest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("boxed", [True, False])
def test_pages_fill_their_size(size: tuple[int, int], boxed: bool) -> None:
    width, height = size
    model = make_model_info(memory=make_memory_ledger(), startup=PHASES)
    empty = DashboardStore(started_ns=NOW_NS).view(NOW_NS)
    for view in (view_of([step_at(i) for i in range(60)]), view_of(steps(300)), empty):
        for rows in (
            timeline_page(view.steps, width, height, COLOUR_GLYPHS, boxed=boxed),
            graphs_page(view, model, width, height, boxed=boxed),
            graphs_page(view, make_model_info(), width, height, boxed=boxed),
        ):
            assert {row_width(row) for row in rows} == {width}
            assert len(rows) <= height


def view_of(run: list[StepRecord]) -> DashboardView:
    store = DashboardStore(started_ns=NOW_NS - 75 * SECOND)
    store.apply(run)
    store.set_snapshot(replace(busy_snapshot(), num_graphs=34, num_graphs_recorded=12))
    return store.view(NOW_NS)


def test_graph_figures_count_by_mode_and_size() -> None:
    full = [step_at(i, num_decode_rows=6, num_padded_tokens=2) for i in range(3)]
    part = step_at(
        3,
        graph_mode="PIECEWISE",
        num_decode_rows=4,
        num_prefill_tokens=500,
        num_padded_tokens=8,
        graph_reason="a prompt",
    )
    none = step_at(4, graph_mode="NONE", graph_reason="log-probabilities of a prompt")
    view = view_of([*full, part, none, none])
    figures = view.graphs
    assert figures.num_steps == 6
    assert [(s.mode, s.size, s.hits, s.padded) for s in figures.sizes] == [
        ("FULL", 8, 3, 6),
        ("PIECEWISE", 512, 1, 8),
    ]
    assert figures.sizes[0].waste == pytest.approx(0.25)
    page = text(graphs_page(view, make_model_info(), 140, 40, boxed=True))
    assert "12 of 34 recorded" in page and "50% FULL" in page and "17% PIECEWISE" in page
    assert "2  no graph: log-probabilities of a prompt" in page
    assert "1  no full graph: a prompt" in page
    assert "25%" in page and "3 steps" in page


def test_the_phases_of_many_steps_are_those_of_each() -> None:
    records = [
        step_at(i, idle_ms=i % 3, publish_us=i, host_us=3.5 * i, schedule_us=100.0 + i)
        for i in range(9)
    ]
    records.append(step_at(9, ended_ns=0))  # a clock that went back
    expected = [[ms_of(s) for s in records] for _, _, ms_of in timeline._PHASES]
    assert timeline.phases_ms(records) == pytest.approx(np.array(expected))


def test_phases_are_remembered_from_frame_to_frame() -> None:
    records = [step_at(i, publish_us=i, schedule_us=100.0 + i) for i in range(40)]
    again = [step_at(i, publish_us=7 * i, schedule_us=300.0) for i in range(40)]
    times = timeline.PhaseTimes()
    frames = [
        *((), records[:5], records[:5], records[3:12], records[30:35], records[10:35]),
        *(records[:20], again[10:25], again[20:22], (), again[:2], records[1:3]),
    ]
    for frame in frames:
        assert np.array_equal(times.of(tuple(frame)), timeline.phases_ms(frame))


def test_quantiles_are_those_of_numpy() -> None:
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = np.random.default_rng(seed)
    for count in (1, 2, 3, 100, 257):
        values = rng.exponential(5.0, (3, count))
        expected = np.percentile(values, (0, 50, 99, 100), axis=1).T
        assert quantiles(values, 0, 50, 99, 100) == pytest.approx(expected)


def test_figures_stay_bounded() -> None:
    stats = GraphStats()
    for i in range(3 * MAX_SIZES):
        stats.add([step_at(0, num_decode_rows=i, graph_mode="FULL", graph_reason=f"why {i}")])
    assert len(stats.figures.sizes) == MAX_SIZES
    assert len(stats.figures.reasons) == MAX_SIZES + 1
    assert stats.figures.reasons[0] == ("FULL", "other", 2 * MAX_SIZES)
    assert stats.figures.num_steps == 3 * MAX_SIZES


def test_memory_parts_fill_the_bar_and_are_named() -> None:
    rows = memory_panel(make_memory_ledger(), Frame(84, 14, True))
    assert "KV cache" in text(rows) and "60.0 GiB" in text(rows) and "75%" in text(rows)
    filled = row_text(rows[1])[2:-2]
    assert len(filled) == 80 and filled.count("■") == 72 and filled.count("·") == 8
    assert cells_in(rows[1], "prefill") == 60
    assert "known at the other end" in text(memory_panel(None, Frame(84, 14, True)))


def test_the_memory_page_says_that_experts_lie_elsewhere() -> None:
    ledger = make_memory_ledger(host_experts=HostExperts(48, 256, 19 * GIB))
    for width in (60, 84):
        found = " ".join(
            row_text(row).strip("│ ") for row in memory_panel(ledger, Frame(width, 12, True))
        )
        words = "the CPU computes 208 of 256 experts of each layer, out of 19.0 GiB of main memory"
        assert words in found
        assert "KV cache" in found


def cells_in(row: Row, role: str) -> int:
    return sum(len(span[0]) for span in row if span[1] == role)


def test_phases_of_the_start_follow_one_another() -> None:
    rows = startup_panel(PHASES, Frame(54, 6, False))  # 30 cells of a third of a second
    lines = [row_text(row)[13:43] for row in rows[1:4]]
    assert lines == [
        "━" * 6 + " " * 24,
        " " * 6 + "━" * 18 + " " * 6,
        " " * 24 + "━" * 6,
    ]
    assert "ready in 10.0 s" in text(rows)
    small = text(startup_panel(PHASES, Frame(54, 2, False)))
    assert "kernels" in small and "weights" not in small


def test_no_miss_is_said() -> None:
    assert "none missed" in text(misses_panel(view_of([step_at(0)]).graphs, Frame(40, 4, True)))


# -- on the screen -------------------------------------------------------------------------


def page_text(app: FrozenApp) -> str:
    return app.screen.query_one("#page", Canvas).text


async def test_pages_have_keys_tabs_and_the_mouse() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        await pilot.press("t")
        await pilot.pause()
        assert "where a step goes" in page_text(app)
        assert not app.screen.query_one("#overview").display
        assert "step 182 299" in page_text(app)
        await pilot.press("left", "left", "minus")
        assert "step 182 297" in page_text(app) and "16 steps" in page_text(app)
        await pilot.press("plus", "plus", "plus", "plus", "plus")
        assert "2 steps" in page_text(app)
        row = row_text(tab_line("timeline"))
        await pilot.click("#tabs", offset=(row.index("graphs"), 0))
        await pilot.pause()
        assert "CUDA graphs" in page_text(app)
        await pilot.press("o")
        await pilot.pause()
        assert app.screen.query_one("#overview").display
        assert not app.screen.query_one("#page").display


async def test_every_key_has_help_and_a_palette_entry() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        entries = {command.title for command in app.get_system_commands(app.screen)}
        assert {page.name.capitalize() for page in PAGES} <= entries
        for binding in KEYS:
            if not binding.action.startswith(("app.", "step(", "select(")):
                assert binding.description in entries and binding.tooltip


def test_tabs_are_where_they_are_drawn() -> None:
    row = row_text(tab_line("overview"))
    for page in PAGES:
        assert page_at(row.index(f" {page.name} ") + 1) == page.name
    assert page_at(0) is None and page_at(len(row)) is None
    row = row_text(tab_line("overview", on_cpu=True))
    assert "graphs" not in row and page_at(row.index(" processor "), on_cpu=True) == "graphs"
    assert page_at(row.index(" log ") + 1, on_cpu=True) == "log"


@pytest.mark.parametrize("width", [80, 140])
def test_the_times_of_a_step_end_on_the_screen(width: int) -> None:
    long = step_at(1, idle_ms=8.25, host_us=123_456.0, publish_us=1234.0, wait_us=123_456.0)
    rows = lanes_panel([step_at(0), long], Frame(width, 12, False), COLOUR_GLYPHS)
    [line] = [
        row_text(row) for row in rows if " apply " in row_text(row) and "wait " in row_text(row)
    ][:1]
    assert line.rstrip().endswith("idle 8.25 ms"), line
    assert ("host in all" in line) == (width == 140)


@pytest.mark.parametrize("width", [46, 48, 80])
def test_the_shares_of_memory_are_whole(width: int) -> None:
    rows = memory_panel(make_memory_ledger(), Frame(width, 14, True))
    lines = [row_text(row).rstrip(" │") for row in rows if "weights" in row_text(row)]
    assert lines and all(line.endswith("%") for line in lines), lines
