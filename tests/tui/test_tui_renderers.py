"""Renderers of the dashboard: rows of exactly the asked size, saying what the state says."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import make_memory_ledger, make_model_info
from tui_harness import NOW_NS, SECOND, busy_snapshot, request_events, step, steps

from termgen.engine.events import BlockState
from termgen.tui.palette import COLOUR_GLYPHS, PLAIN_GLYPHS
from termgen.tui.render import kv_map, overview
from termgen.tui.render.batch import batch_panel, column_cells
from termgen.tui.render.frame import Frame
from termgen.tui.render.kv_map import kv_cells, kv_panel, map_rows
from termgen.tui.render.lanes import batch_page
from termgen.tui.render.loading import loading_rows
from termgen.tui.render.overview import LiveState
from termgen.tui.render.requests import requests_panel
from termgen.tui.render.series import bar, braille, spark
from termgen.tui.render.timeline import timeline_page
from termgen.tui.spans import Row, row_text, row_width
from termgen.tui.store import DashboardStore, DashboardView

LIVE = LiveState(hz=4, paused=False, healthy=True, observer_share=0.012)
SIZES = [(20, 3), (58, 5), (80, 6), (120, 9), (200, 14)]


def busy_view() -> DashboardView:
    store = DashboardStore(started_ns=NOW_NS - 75 * SECOND)
    store.apply(request_events())
    store.apply(steps(300))
    store.set_snapshot(busy_snapshot())
    return store.view(NOW_NS)


def empty_view() -> DashboardView:
    return DashboardStore(started_ns=NOW_NS).view(NOW_NS)


def text(rows: list[Row]) -> str:
    return "\n".join(row_text(row) for row in rows)


PANELS: dict[str, Callable[[DashboardView, Frame], list[Row]]] = {
    "decode": overview.decode_tile,
    "prefill": overview.prefill_tile,
    "latency": overview.latency_tile,
    "gauges": overview.gauges_tile,
    "batch": lambda view, frame: batch_panel(view.steps, frame, COLOUR_GLYPHS),
    "blocks": lambda view, frame: kv_panel(view, frame, COLOUR_GLYPHS, selected="chat-1"),
    "requests": lambda view, frame: requests_panel(view, frame, selected="cmpl-77"),
}


TILE = Frame(40, 7, True)


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("make", [busy_view, empty_view])
def test_panels_fill_their_frame_exactly(
    name: str, boxed: bool, make: Callable[[], DashboardView]
) -> None:
    view = make()
    for width, height in SIZES:
        rows = PANELS[name](view, Frame(width, height, boxed))
        assert len(rows) == height
        assert {row_width(row) for row in rows} == {width}, (name, width, height)


@pytest.mark.parametrize("width", [40, 58, 80, 100, 120, 200])
def test_header_and_lines_fit(width: int) -> None:
    model = make_model_info(
        model_id="a-rather-long-model-name-7b-instruct",
        device_name="H100",
        memory=make_memory_ledger(),
    )
    for view in (busy_view(), empty_view()):
        assert row_width(overview.header(model, view, LIVE, width)) == width
        for height in (1, 3):
            lines = overview.numbers_lines(view, width, height)
            assert len(lines) == height and all(row_width(line) <= width for line in lines)


def test_header_says_how_the_dashboard_is() -> None:
    model, view = make_model_info(), busy_view()
    live = row_text(overview.header(model, view, LIVE, 140))
    assert "fake/model-1 float32 · test CPU · 4.1k context · block 16" in live
    assert "● live 4 Hz  observer 1.2%  1:15" in live
    model = replace(model, memory=make_memory_ledger())
    shown = row_text(overview.header(model, view, LIVE, 160))
    assert "· block 16 · memory 72.0 of 80.0 GiB, KV 60.0 GiB" in shown
    narrow = row_text(overview.header(model, view, LIVE, 125))
    assert "· block 16 · KV 60.0 GiB" in narrow
    ahead = row_text(overview.header(replace(model, run_ahead_ms=20.0), view, LIVE, 190))
    assert ", KV 60.0 GiB · runs 20 ms ahead" in ahead
    paused = row_text(overview.header(model, view, replace(LIVE, paused=True, back=3), 120))
    assert "❚❚ paused −3" in paused
    dead = row_text(overview.header(model, view, replace(LIVE, healthy=False), 120))
    assert "✗ engine stopped" in dead
    lost = row_text(overview.header(model, replace(view, num_dropped=1234), LIVE, 120))
    assert "1.2k lost" in lost


def test_gauges_show_the_numbers() -> None:
    rows = overview.gauges_tile(busy_view(), Frame(40, 7, True))
    expected = (
        ("running", "4/8"),
        ("waiting", "2"),
        ("KV used", "36%"),
        ("prefix hits", "63%"),
        ("CUDA graphs", "97%"),
    )
    for row, (name, number) in zip(rows[1:], expected, strict=False):
        line = row_text(row).strip("│ ")
        assert line.startswith(name) and line.split()[-1] == number
        assert name == "prefix hits" or set(line) & set("▁▂▃▄▅▆▇█"), "without a series"


def test_latencies_have_three_percentiles_and_a_series_each() -> None:
    rows = [row_text(row).strip("│ ") for row in overview.latency_tile(busy_view(), TILE)]
    assert rows[0].startswith("╭─ latency · ms") and rows[1].split() == ["p50", "p95", "p99"]
    for row, name in zip(rows[2:], ("TTFT", "ITL", "step"), strict=False):
        head, *_, p50, p95, p99 = row.split()
        assert head == name and float(p50) <= float(p95) <= float(p99)
        assert set(row) & set("▁▂▃▄▅▆▇█"), "without a series"


@pytest.mark.parametrize("width", [22, 26, 60])
def test_a_narrow_tile_keeps_its_number(width: int) -> None:
    view = replace(busy_view(), prefill_rate=18_930.0, window_s=120)
    unit = {22: "", 26: "/s", 60: " tok/s"}[width]
    assert f" 18.9k{unit} ─" in row_text(overview.prefill_tile(view, Frame(width, 7, True))[0])


def test_the_lines_of_a_small_screen_have_what_the_tiles_have() -> None:
    view = busy_view()
    lines = [row_text(row) for row in overview.numbers_lines(view, 80, 3)]
    series = r" *[ ▁▂▃▄▅▆▇█]{6,} "
    numbers = r"\S+/\S+/\S+"
    assert re.fullmatch(rf" out{series}\S+  in{series}512 tok/s  graphs{series}97%", lines[0])
    assert re.fullmatch(rf" run{series}4/8  wait{series}2  KV{series}36%  hit{series}63%", lines[1])
    words = rf" TTFT{series}{numbers}  ITL{series}{numbers} ms p50/p95/p99"
    assert re.fullmatch(words, lines[2])
    (line,) = (row_text(row) for row in overview.numbers_lines(view, 80, 1))
    for name in ("out ", "in 512 tok/s", "run 4/8", "wait 2", "KV 36%", "hit 63%"):
        assert f" {name}" in line


def test_a_paused_engine_says_so_at_every_size() -> None:
    view = busy_view()
    assert view.snapshot is not None
    assert "paused" not in text(overview.gauges_tile(view, TILE))
    assert "paused" not in row_text(overview.numbers_lines(view, 60, 3)[0])
    view = replace(view, snapshot=replace(view.snapshot, paused=True))
    assert "paused" in text(overview.gauges_tile(view, TILE))
    assert "paused" in text(overview.gauges_tile(view, Frame(20, 6, True)))
    assert row_text(overview.numbers_lines(view, 60, 3)[0]).startswith(" paused  out ")


def test_batch_has_a_column_and_a_letter_for_every_step() -> None:
    records = steps(40)
    rows = batch_panel(records, Frame(60, 9, True), COLOUR_GLYPHS)
    letters = row_text(rows[-3]).strip("│ ")
    expected = "".join(record.graph_mode[0] for record in records)
    assert letters == expected
    assert "40 steps" in row_text(rows[0])
    newest = records[-1]
    assert f"step {newest.step_id // 1000} {newest.step_id % 1000:03}" in row_text(rows[-2])
    assert f"{newest.num_decode_rows} decode" in row_text(rows[-2])


def test_batch_stacks_prefill_over_decode_and_padding_on_top() -> None:
    record = step(
        1, end_ns=NOW_NS, num_decode_rows=4, num_prefill_tokens=4, num_prefill_rows=1
    )._replace(num_padded_tokens=4)
    rows = batch_panel([record], Frame(40, 9, False), PLAIN_GLYPHS)
    column = [row_text(row)[38] for row in rows[1:-2]]
    solid = [sign for sign in column if sign != " "]
    assert set(solid) == {"░", "█", "▒"}
    assert solid == sorted(solid, key="░█▒".index)


def test_batch_cursor_marks_a_step_and_tells_of_it() -> None:
    records = steps(300)
    frame = Frame(80, 7, False)
    for back in (0, 3, 77, 78, 150, 299, 500):
        rows = batch_panel(records, frame, COLOUR_GLYPHS, cursor=back)
        marked = records[len(records) - 1 - min(back, 299)]
        line = row_text(rows[-1])
        assert str(marked.step_id)[-3:] in line, back
        assert sum(len(t) for t, role in rows[-2] if role.endswith("/r")) == 1


def test_batch_says_why_a_step_replayed_no_graph() -> None:
    records = steps(30)
    why = "a prompt is being computed"
    records[-1] = records[-1]._replace(graph_mode="NONE", graph_reason=why)
    for width, is_told in ((140, True), (50, False)):
        line = row_text(batch_panel(records, Frame(width, 7, False), COLOUR_GLYPHS)[-1])
        assert line.count(why) == int(is_told)
    told = row_text(batch_panel(records[:-1], Frame(140, 7, False), COLOUR_GLYPHS)[-1])
    assert "no graph" not in told
    records[-1] = records[-1]._replace(graph_mode="PIECEWISE", graph_reason="log-probabilities")
    told = row_text(batch_panel(records, Frame(140, 7, False), COLOUR_GLYPHS)[-1])
    assert "no full graph: log-probabilities" in told


def test_batch_shows_late_compilations_as_a_fault() -> None:
    records = steps(30)
    told = batch_panel(records, Frame(100, 7, False), COLOUR_GLYPHS)[-1]
    assert "compiled" not in row_text(told)
    records[-1] = records[-1]._replace(num_late_compiles=2)
    told = batch_panel(records, Frame(100, 7, False), COLOUR_GLYPHS)[-1]
    assert ("  compiled while serving: 2", "bad") in told


def test_batch_says_how_many_steps_were_queued_before_the_marked_one() -> None:
    records = steps(30)
    assert "queued" not in row_text(batch_panel(records, Frame(100, 7, False), COLOUR_GLYPHS)[-1])
    records[-1] = records[-1]._replace(queue_depth=7)
    told = row_text(batch_panel(records, Frame(100, 7, False), COLOUR_GLYPHS)[-1])
    assert "  queued 7 " in told
    assert "queued" not in row_text(
        batch_panel(records, Frame(100, 7, False), COLOUR_GLYPHS, cursor=1)[-1]
    )


def test_column_cells_share_the_height() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        tokens = tuple(rng.choice([0, 0, 1, 3, 64, 2048]) for _ in range(3))
        height = rng.randrange(0, 9)
        cells = column_cells(tokens, height, max(16, sum(tokens)))
        assert all(cell >= 0 for cell in cells) and sum(cells) <= height
        if height >= 3:
            assert [bool(c) for c in cells] == [bool(t) for t in tokens], (tokens, height, cells)


def test_kv_cells_one_per_block_when_there_is_room() -> None:
    states = np.array([4, 0, 1, 2, 3, 2], dtype=np.uint8)
    owners = np.array([-1, -1, -1, 0, 0, 1], dtype=np.int32)
    cells = kv_cells(states, owners, 10)
    assert cells.blocks_per_cell == 1
    expected = [kv_map.FREE, kv_map.CACHED, kv_map.ACTIVE, kv_map.SHARED, kv_map.ACTIVE_ALT]
    assert cells.kinds.tolist() == expected
    chosen = kv_cells(states, owners, 10, selected=0).kinds.tolist()
    assert chosen == [0, 1, kv_map.SELECTED, kv_map.SELECTED, kv_map.ACTIVE_ALT]
    assert row_text(map_rows(cells, 5, COLOUR_GLYPHS)[0]) == "·▪■◆■"
    assert row_text(map_rows(cells, 3, PLAIN_GLYPHS)[1]) == "◆▣"


def test_kv_cells_scale_and_never_hide_a_used_block() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(100):
        count = int(rng.integers(1, 3000))
        states = rng.choice(4, count, p=[0.9, 0.05, 0.04, 0.01]).astype(np.uint8)
        owners = np.where(states >= BlockState.ACTIVE, rng.integers(0, 9, count), -1)
        room = int(rng.integers(1, 800))
        cells = kv_cells(states, owners.astype(np.int32), room, selected=2)
        assert len(cells.kinds) == min(count, room)
        bounds = np.arange(len(cells.kinds) + 1) * count // len(cells.kinds)
        for kind, a, b in zip(cells.kinds, bounds, bounds[1:], strict=False):
            strongest = states[a:b].max()
            selected = bool((owners[a:b] == 2).any())
            assert (kind == kv_map.SELECTED) == selected
            if not selected:
                assert (kind in (0, 1, 3) and kind == strongest) or (
                    kind in (kv_map.ACTIVE, kv_map.ACTIVE_ALT, kv_map.PART) and strongest == 2
                )


def test_a_cell_that_is_hardly_used_looks_so() -> None:
    states = np.array([2, 0, 0, 0], dtype=np.uint8)
    owners = np.array([0, -1, -1, -1], dtype=np.int32)
    assert kv_cells(states, owners, 1).kinds.tolist() == [kv_map.PART]


def test_kv_legend_counts_every_state() -> None:
    shown = row_text(kv_panel(busy_view(), Frame(120, 9, True), COLOUR_GLYPHS)[0])
    for expected in ("151 active", "64 shared", "110 cached", "275 free", "36% used"):
        assert expected in shown


def test_request_table_shows_each_request_and_its_step() -> None:
    shown = text(requests_panel(busy_view(), Frame(140, 14, True), selected="cmpl-77"))
    lines = shown.split("\n")
    assert "4 running  2 waiting" in lines[0] and "37 finished" in lines[0]
    chat = next(line for line in lines if "chat-1" in line)
    for expected in ("● decode", "1.8k", "1.0k", "105", "+1", "27.4", "119", "4.2s"):
        assert expected in chat
    prefill = next(line for line in lines if "b20c44" in line)
    assert "▶ prefill" in prefill and "+256" in prefill
    assert "▸ cmpl-77" in shown
    assert "✓ stop" in shown and "– abort" in shown and "27.9s ago" in shown


def test_request_table_scrolls_no_further_than_its_end() -> None:
    view = busy_view()
    shown = text(requests_panel(view, Frame(100, 6, True), first=99))
    assert view.requests[-1].request_id in shown
    assert view.requests[0].request_id not in shown


def test_request_ids_from_clients_are_cleaned() -> None:
    view = busy_view()
    evil = view.requests[0]._replace(request_id="\x1b[2Jx\ny")
    shown = text(requests_panel(replace(view, requests=(evil,)), Frame(100, 6, True)))
    assert "\x1b" not in shown and "␛[2Jx y" in shown


def test_empty_panels_teach() -> None:
    view = empty_view()
    assert "no requests yet" in text(requests_panel(view, Frame(100, 6, True)))
    assert "in the chat (1)" in text(requests_panel(view, Frame(100, 6, True)))
    for width in (60, 100):
        without = text(requests_panel(view, Frame(width, 6, True), has_chat=False))
        assert "send one to /v1/chat/completions" in without and "in the chat" not in without
    assert "no step yet" in text(batch_panel((), Frame(100, 6, True), COLOUR_GLYPHS))
    late = replace(view, num_finished=12)
    shown = text(requests_panel(late, Frame(100, 6, True)))
    assert "12 finished" in shown and "no request since this screen began to listen" in shown


def test_a_screen_opened_late_does_not_say_that_nothing_ran() -> None:
    store = DashboardStore(started_ns=NOW_NS - SECOND)
    assert not store.view(NOW_NS).has_run
    store.set_snapshot(replace(busy_snapshot(), requests=(), num_running=0, num_waiting=0))
    view, glyphs = store.view(NOW_NS), COLOUR_GLYPHS
    assert view.has_run and not view.steps
    frame = Frame(100, 6, True)
    pages = [
        batch_panel(view.steps, frame, glyphs, has_run=view.has_run),
        timeline_page(view.steps, 100, 30, glyphs, boxed=True, has_run=view.has_run),
        batch_page(view, store.lanes, 100, 30, glyphs, boxed=True),
    ]
    for page in pages:
        assert "no step since this screen began to listen" in text(page)
        assert "first request" not in text(page) and "no step yet" not in text(page)


def test_series() -> None:
    assert row_text(spark([0, 1, 4, 8], 5, role="decode")) == "  ▁▄█"
    assert row_text(spark([], 3, role="decode")) == "   "
    rows = braille([0, 8, 1], 2, 2, role="decode")
    assert [len(row_text(row)) for row in rows] == [2, 2]
    assert row_text(rows[1])[1] == chr(0x2800 + 0x47 + 0x80)  # full height, then one dot
    assert row_text(bar(0.5, 8, role="x")) == "━━━━────"
    assert row_text(bar(0.01, 8, role="x")) == "╸───────"
    assert row_text(bar(2, 4, role="x")) == "━━━━"
    assert row_text(bar(0, 4, role="x")) == "────"


def test_loading_shows_what_is_done_and_how_far() -> None:
    phases = [("fetching", 1.0), ("loading weights", 0.62)]
    shown = text(loading_rows(phases, 3.2, 80, 24, quit_key="f8"))
    assert "✓ fetching" in shown and "● loading weights" in shown and "62%" in shown
    assert "3.2 s   f8 quits" in shown
    assert "starting" in text(loading_rows([], 0.0, 80, 24, quit_key="f8"))
    narrow = loading_rows(phases, 3.2, 50, 10, quit_key="f8")
    assert all(row_width(row) <= 50 for row in narrow)
