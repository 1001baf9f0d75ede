"""Renderers of the dashboard: rows of exactly the requested size, with the right contents."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import make_memory_ledger, make_model_info
from tui_harness import NOW_NS, SECOND, busy_snapshot, request_events, step, steps

from termgen.tui.dashboard.pages import kv_map, overview
from termgen.tui.dashboard.pages.batch import batch_panel, column_levels
from termgen.tui.dashboard.pages.graphs import graphs_page
from termgen.tui.dashboard.pages.kv_map import kv_cells, kv_panel, map_rows
from termgen.tui.dashboard.pages.lanes import batch_page
from termgen.tui.dashboard.pages.overview import LiveState
from termgen.tui.dashboard.pages.requests import requests_panel
from termgen.tui.dashboard.pages.timeline import timeline_page
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView, HostReading, windowed
from termgen.tui.loading import loading_rows
from termgen.tui.paint.formatting import brief_id, rate
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import COLOUR_GLYPHS, PLAIN_GLYPHS
from termgen.tui.paint.series import bar, braille, spark
from termgen.tui.paint.spans import Row, row_text, row_width
from termgen.vocabulary.events import BlockState, StepRecord
from termgen.vocabulary.time_spread import Spread

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
    "batch": lambda view, frame: batch_panel(view, frame, COLOUR_GLYPHS),
    "blocks": lambda view, frame: kv_panel(view, frame, COLOUR_GLYPHS, selected="chat-1"),
    "requests": lambda view, frame: requests_panel(view, frame, selected="cmpl-77"),
}


TILE = Frame(40, 7, True)
TOKENS = dict(max_num_batched_tokens=2048)


def of_steps(records: list[StepRecord], **overrides: Any) -> DashboardView:
    """A view of these steps alone."""
    return replace(empty_view(), steps=tuple(records), **{**TOKENS, **overrides})


def made_of(prefill: int, decode: int, padding: int = 0) -> StepRecord:
    return step(
        1, end_ns=NOW_NS, num_decode_rows=decode, num_prefill_tokens=prefill, num_prefill_rows=1
    )._replace(num_padded_tokens=padding)


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
    assert "· block 16 · weights 2.0 + KV 60.0 of 80.0 GiB" in shown
    narrow = row_text(overview.header(model, view, LIVE, 125))
    assert "· block 16 · KV 60.0 GiB" in narrow
    ahead = row_text(overview.header(replace(model, run_ahead_ms=20.0), view, LIVE, 190))
    assert "KV 60.0 of 80.0 GiB · runs up to 20 ms ahead" in ahead
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
        ("waiting/max", "2/2"),
        ("KV used", "36%"),
        ("prefix hits", "63%"),
        ("CUDA graphs", "97%"),
    )
    for row, (name, number) in zip(rows[1:], expected, strict=False):
        line = row_text(row).strip("│ ")
        assert line.startswith(name) and line.split()[-1] == number
        assert name == "prefix hits" or set(line) & set("▁▂▃▄▅▆▇█"), "without a series"


@pytest.mark.parametrize(
    ("width", "heads"), [(44, ["max", "p50", "p99"]), (60, ["max", "p50", "p95", "p99"])]
)
def test_latencies_have_percentiles_and_a_series_each(width: int, heads: list[str]) -> None:
    frame = Frame(width, 7, True)
    rows = [row_text(row).strip("│ ") for row in overview.latency_tile(busy_view(), frame)]
    assert rows[0].startswith("╭─ latency") and rows[1].split() == ["−30", "s", *heads]
    for row, name in zip(rows[2:], ("TTFT", "ITL", "step"), strict=False):
        assert row.startswith(name)
        found = re.findall(r"([\d.]+) (m?s)\b", row)
        most, *shares = [float(n) * (1000 if unit == "s" else 1) for n, unit in found]
        assert shares == sorted(shares) and len(shares) == len(heads) - 1
        assert most >= 0.98 * shares[-1]
        assert set(row) & set("▁▂▃▄▅▆▇█"), "without a series"


def test_a_wait_of_seconds_is_told_in_seconds() -> None:
    view = replace(busy_view(), ttft=Spread(840.0, 3730.0, 4300.0))
    shown = text(overview.latency_tile(view, Frame(60, 7, True)))
    assert "840 ms" in shown and "3.73 s" in shown and "4.30 s" in shown
    assert "4.3k" not in shown and "4.3k" not in text(overview.numbers_lines(view, 80, 3))
    assert "840 ms/3.73 s/4.30 s" in text(overview.numbers_lines(view, 80, 3))


@pytest.mark.parametrize("window_s", [None, 30, 120])
def test_the_rates_say_their_maximum_and_time_span(window_s: int | None) -> None:
    view = replace(busy_view(), window_s=window_s)
    rows = overview.prefill_tile(view, TILE)
    shown = windowed(view.series.prefill, window_s, 2 * TILE.inner_width)
    assert f"max {rate(max(shown))}" in row_text(rows[1])
    span = window_s or TILE.inner_width / 2
    assert f"−{span:g} s" in row_text(rows[-2])
    assert "tok/s" in row_text(rows[0])


@pytest.mark.parametrize("width", [22, 26, 60])
def test_a_narrow_tile_keeps_its_number(width: int) -> None:
    view = replace(busy_view(), prefill_rate=18_930.0, window_s=120)
    unit = {22: "", 26: "/s", 60: " tok/s"}[width]
    assert f" 18.9k{unit} ─" in row_text(overview.prefill_tile(view, Frame(width, 7, True))[0])


def test_the_lines_of_a_small_screen_have_what_the_tiles_have() -> None:
    view = busy_view()
    lines = [row_text(row) for row in overview.numbers_lines(view, 80, 3)]
    plot = r"tok/s *[ ▁▂▃▄▅▆▇█]{3,} max \S+ *"
    assert re.fullmatch(rf"  out +\S+ {plot}  in +512 {plot}  −30 s", lines[0])
    assert lines[1] == "  run 4/8  wait 2  KV 36%  hits 63%  graphs 97%"
    times = r"\S+ ms/\S+ ms/\S+ ms"
    assert re.fullmatch(rf"  TTFT {times}  ITL {times}  p50/95/99", lines[2])
    (line,) = (row_text(row) for row in overview.numbers_lines(view, 80, 1))
    for name in ("out ", "in 512 tok/s", "run 4/8", "wait 2", "KV 36%", "hits 63%"):
        assert f" {name}" in line


def test_a_paused_engine_says_so_at_every_size() -> None:
    view = busy_view()
    assert view.snapshot is not None
    assert "paused" not in text(overview.gauges_tile(view, TILE))
    assert "paused" not in row_text(overview.numbers_lines(view, 60, 3)[0])
    view = replace(view, snapshot=replace(view.snapshot, paused=True))
    assert "paused" in text(overview.gauges_tile(view, TILE))
    assert "paused" in text(overview.gauges_tile(view, Frame(20, 6, True)))
    assert row_text(overview.numbers_lines(view, 60, 3)[0]).startswith(" paused   out ")


def test_batch_has_a_column_and_a_letter_for_every_step() -> None:
    records = steps(40)
    rows = batch_panel(of_steps(records), Frame(60, 9, True), COLOUR_GLYPHS)
    name, letters = row_text(rows[-3]).strip("│ ").split()
    expected = "".join(record.graph_mode[0] for record in records)
    assert (name, letters) == ("graph", expected)
    newest = records[-1]
    assert f"step {newest.step_id // 1000} {newest.step_id % 1000:03}" in row_text(rows[-2])
    assert f"{newest.num_decode_rows} decode" in row_text(rows[-2])


def test_the_batch_says_its_tokens_the_budget_and_the_time_it_spans() -> None:
    records = [*steps(39), made_of(480, 6)._replace(started_ns=NOW_NS - SECOND)]
    title = row_text(batch_panel(of_steps(records), Frame(100, 9, True), COLOUR_GLYPHS)[0])
    assert "batch tokens 486 / 2 048 · 40 steps in 1.5" in title
    for row, name in zip(
        batch_panel(of_steps(records), Frame(100, 9, True), COLOUR_GLYPHS)[1:6],
        ("2.0k", "", "512", "", "0"),
        strict=True,
    ):
        assert row_text(row)[2:].split("│")[0].strip() == name


def test_the_letters_of_the_batch_are_explained() -> None:
    rows = batch_panel(of_steps(steps(40)), Frame(120, 9, True), COLOUR_GLYPHS)
    told = row_text(rows[-2])
    assert "F full " in told and "P pieces " in told and "N none " in told


def test_without_a_gpu_nothing_of_graphs_is_drawn() -> None:
    view = of_steps([s._replace(graph_mode="NONE") for s in steps(40)], on_cpu=True)
    shown = text(batch_panel(view, Frame(120, 9, True), COLOUR_GLYPHS))
    assert "NNN" not in shown and "graph" not in shown
    tile = text(overview.gauges_tile(view, Frame(40, 9, True)))
    assert "graph" not in tile
    lines = text(overview.numbers_lines(view, 80, 3))
    assert "graph" not in lines
    model = make_model_info(memory=make_memory_ledger(), num_threads=4)
    for size in ((80, 20), (140, 36)):
        page = text(graphs_page(view, model, *size, boxed=False))
        assert "processor" in page and "4 threads" in page
        assert "no graph" not in page and "misses" not in page and "recorded" not in page


def test_without_a_gpu_the_processor_has_its_place() -> None:
    host = tuple(HostReading(1.5, int(1.25 * 2**30)) for _ in range(30))
    parts = {"input_us": 200.0, "model_us": 9_000.0, "sample_us": 800.0}
    records = [s._replace(**parts) for s in steps(40)]
    view = of_steps(records, on_cpu=True, host=host, num_cores=2)
    tile = text(overview.gauges_tile(view, Frame(40, 9, True)))
    assert "busy cores" in tile and "1.5/2" in tile and "1.25 GiB" in tile
    assert "memory 1.25 GiB" in text(overview.gauges_tile(view, Frame(40, 7, True)))
    assert "cores 1.5/2  mem 1.25 GiB" in text(overview.numbers_lines(view, 80, 3))
    model = make_model_info(num_threads=1, memory=make_memory_ledger())
    for size in ((80, 20), (140, 36)):
        page = text(graphs_page(view, model, *size, boxed=False))
        assert "1 thread of 2 cores" in page and "1.5 cores busy · resident 1.2 GiB" in page
        for phase, took in (("input", "0.20 ms"), ("model", "9.00 ms"), ("sample", "0.80 ms")):
            assert re.search(rf"{phase} .*{took}", page), (phase, page)


def test_batch_stacks_prefill_over_decode_and_padding_on_top() -> None:
    view = of_steps([made_of(700, 700, 648)])
    rows = batch_panel(view, Frame(50, 9, False), PLAIN_GLYPHS)
    column = [row_text(row)[48] for row in rows[1:-2]]
    assert column == sorted(column, key="░█▒".index) and set(column) == set("░█▒")


def test_the_batch_shows_a_few_decodes_beside_a_full_prompt() -> None:
    """Earlier steps do not matter, and one to ten decodes differ."""
    few = [made_of(0, number) for number in (1, 3, 6, 10)]
    for records in (few, [*[made_of(2048, 0)] * 20, *few]):
        rows = batch_panel(of_steps(records), Frame(60, 15, False), COLOUR_GLYPHS)
        columns = ["".join(row_text(row)[x] for row in rows[1:-2]).strip() for x in range(55, 59)]
        heights = [" ▁▂▃▄▅▆▇█".index(column[0]) + 8 * len(column[1:]) for column in columns]
        assert heights == sorted(set(heights)), columns
    quarter = batch_panel(of_steps([made_of(506, 6)]), Frame(60, 15, False), COLOUR_GLYPHS)
    column = [row_text(row)[58] for row in quarter[1:-2]]
    assert sum(cell != " " for cell in column) == len(column) // 2, "a quarter of the budget"
    bottom = [role for text, role in quarter[-3] if text.strip()]
    assert bottom[-1] == "decode@prefill", "both are seen in the lowest cell"


def test_batch_cursor_marks_a_step_and_tells_of_it() -> None:
    records = steps(300)
    frame = Frame(80, 7, False)
    for back in (0, 3, 77, 78, 150, 299, 500):
        rows = batch_panel(of_steps(records), frame, COLOUR_GLYPHS, cursor=back)
        marked = records[len(records) - 1 - min(back, 299)]
        line = row_text(rows[-1])
        assert str(marked.step_id)[-3:] in line, back
        assert sum(len(t) for t, role in rows[-2] if role.endswith("/r")) == 1


def test_batch_says_why_a_step_replayed_no_graph() -> None:
    records = steps(30)
    why = "a prompt is being computed"
    records[-1] = records[-1]._replace(graph_mode="NONE", graph_reason=why)
    for width, is_told in ((140, True), (50, False)):
        line = row_text(batch_panel(of_steps(records), Frame(width, 7, False), COLOUR_GLYPHS)[-1])
        assert line.count(why) == int(is_told)
    told = row_text(batch_panel(of_steps(records[:-1]), Frame(140, 7, False), COLOUR_GLYPHS)[-1])
    assert "no graph" not in told
    records[-1] = records[-1]._replace(graph_mode="PIECEWISE", graph_reason="log-probabilities")
    told = row_text(batch_panel(of_steps(records), Frame(140, 7, False), COLOUR_GLYPHS)[-1])
    assert "no full graph: log-probabilities" in told


def test_batch_shows_late_compilations_as_a_fault() -> None:
    records = steps(30)
    told = batch_panel(of_steps(records), Frame(100, 7, False), COLOUR_GLYPHS)[-1]
    assert "compiled" not in row_text(told)
    records[-1] = records[-1]._replace(num_late_compiles=2)
    told = batch_panel(of_steps(records), Frame(100, 7, False), COLOUR_GLYPHS)[-1]
    assert ("  compiled while serving: 2", "bad") in told


def test_batch_counts_the_masks_that_came_too_late() -> None:
    records = steps(30)
    frame = Frame(140, 7, False)
    assert "late masks" not in row_text(batch_panel(of_steps(records), frame, COLOUR_GLYPHS)[-1])
    records[-1] = records[-1]._replace(num_late_masks=1200)
    for width in (140, 80):
        last = batch_panel(of_steps(records), Frame(width, 7, False), COLOUR_GLYPHS)[-1]
        assert ("  late masks 1.2k", "muted") in last, (width, last)


def test_batch_counts_the_drafts_that_stayed_in_the_steps_in_view() -> None:
    records = steps(30)
    frame = Frame(140, 7, False)
    assert "drafts" not in row_text(batch_panel(of_steps(records), frame, COLOUR_GLYPHS)[-1])
    records = [
        record._replace(
            num_decode_rows=2, num_draft_tokens=100 + 8 * i, num_accepted_tokens=50 + 6 * i
        )
        for i, record in enumerate(records)
    ]
    for width in (140, 80):
        last = batch_panel(of_steps(records), Frame(width, 7, False), COLOUR_GLYPHS)[-1]
        assert ("  drafts kept 75%, 4.0 tokens a step", "muted") in last, (width, last)


def test_batch_draws_the_share_of_drafts_that_stayed_at_each_position() -> None:
    records = steps(30)
    records = [
        record._replace(
            num_draft_tokens=10 + 24 * i,
            num_accepted_tokens=5 + 12 * i,
            drafted_per_pos=(10 + 8 * i, 8 * i, 7, 8 * i) if i else (10,),
            accepted_per_pos=(5 + 8 * i, 4 * i, 7, 0) if i else (5,),
        )
        for i, record in enumerate(records)
    ]
    records[0] = records[0]._replace(drafted_per_pos=(10, 0, 7), accepted_per_pos=(5, 0, 7))
    last = batch_panel(of_steps(records), Frame(160, 7, False), COLOUR_GLYPHS)[-1]
    assert "tokens a step  by position █▄ ·  " in row_text(last)


def test_batch_says_how_many_steps_were_queued_before_the_marked_one() -> None:
    records = steps(30)
    assert "queued" not in row_text(
        batch_panel(of_steps(records), Frame(100, 7, False), COLOUR_GLYPHS)[-1]
    )
    records[-1] = records[-1]._replace(queue_depth=7)
    told = row_text(batch_panel(of_steps(records), Frame(100, 7, False), COLOUR_GLYPHS)[-1])
    assert "  queued 7 " in told
    records[-1] = records[-1]._replace(covered_us=12_500.0)
    told = row_text(batch_panel(of_steps(records), Frame(140, 7, False), COLOUR_GLYPHS)[-1])
    assert "  queued 7 for pauses of 12.5 ms " in told
    assert "queued" not in row_text(
        batch_panel(of_steps(records), Frame(100, 7, False), COLOUR_GLYPHS, cursor=1)[-1]
    )


def test_column_levels_are_square_roots_and_show_every_part() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        tokens = tuple(rng.choice([0, 0, 1, 3, 64, 2048]) for _ in range(3))
        height, budget = rng.randrange(1, 9), 8192
        prefill, decode, padding = tokens
        ends = column_levels((prefill, decode, padding), height, budget)
        assert list(ends) == sorted(ends) and ends[2] <= 8 * height
        for end, upto in zip(ends, np.cumsum((decode, prefill, padding)), strict=True):
            assert abs(end - 8 * height * math.sqrt(upto / budget)) <= 3, (tokens, height, ends)
        seen = [b > a for a, b in zip((0, *ends), ends, strict=False)]
        assert seen == [bool(decode), bool(prefill), bool(padding)]
    assert column_levels((4096, 0, 0), 5, 2048) == (0, 40, 40), "no higher than the budget"


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


def test_ids_that_a_server_made_up_are_short_and_told_apart_by_more() -> None:
    view = busy_view()
    digits = "1f0c9a3e5b7d4c2f8a6e0d1b3c5f7a90"
    rows = tuple(
        view.requests[i]._replace(request_id=f"chatcmpl-{digits[i:]}{digits[:i]}", params=words)
        for i, words in enumerate(("temperature 0.7", "top_k 40"))
    )
    shown = text(requests_panel(replace(view, requests=rows), Frame(140, 6, True)))
    assert "chat 1f0c9a3e  temperature 0.7" in shown and "chat f0c9a3e5  top_k 40" in shown
    assert digits not in shown
    assert brief_id("my-own-name") == "my-own-name"
    assert brief_id(f"cmpl-{digits}-2") == "text 1f0c9a3e-2"
    assert brief_id(digits) == "1f0c9a3e"


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
    assert "no step yet" in text(batch_panel(view, Frame(100, 6, True), COLOUR_GLYPHS))
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
        batch_panel(view, frame, glyphs),
        timeline_page(view.steps, 100, 30, glyphs, boxed=True, has_run=view.has_run),
        batch_page(view, store.history, 100, 30, glyphs, boxed=True),
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
