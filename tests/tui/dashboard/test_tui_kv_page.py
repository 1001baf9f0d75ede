"""The page of KV blocks: cursor, zoom and scrolling over many blocks, details, hits, evictions."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
from tui_harness import (
    MS,
    NOW_NS,
    SECOND,
    FrozenApp,
    busy_snapshot,
    chat_engine,
    feed_dashboard,
    ready,
    step,
)

from termgen.tui.dashboard.pages.kv_map import EVICTED, just_evicted, kv_cells
from termgen.tui.dashboard.pages.kv_page import kv_page, reversed_cell, tick_rows
from termgen.tui.dashboard.state.kv_cursor import MAX_CELL_HEIGHT, KvCursor
from termgen.tui.dashboard.state.store import DashboardStore, DashboardView
from termgen.tui.paint.canvas import Canvas
from termgen.tui.paint.palette import COLOUR_GLYPHS
from termgen.tui.paint.spans import Row, row_text, row_width
from termgen.vocabulary.cache_groups import CacheGroup, Chunk
from termgen.vocabulary.events import BlockState, EngineSnapshot, StateView


def text(rows: list[Row]) -> str:
    return "\n".join(row_text(row) for row in rows)


def view_of(states: np.ndarray, owners: np.ndarray) -> DashboardView:
    store = DashboardStore(started_ns=NOW_NS)
    store.set_snapshot(replace(busy_snapshot(), block_states=states, block_owners=owners))
    return store.view(NOW_NS)


def many_blocks(count: int) -> DashboardView:
    states = np.zeros(count + 1, np.uint8)
    owners = np.full(count + 1, -1, np.int32)
    states[0] = BlockState.NULL
    states[1:5001], owners[1:5001] = BlockState.ACTIVE, 1
    states[count] = BlockState.CACHED
    return view_of(states, owners)


def test_the_cursor_never_leaves_the_blocks_or_the_view() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        cursor = KvCursor()
        cursor.fit(rng.randrange(1, 100_000), rng.randrange(1, 200), rng.randrange(1, 60))
        for _ in range(30):
            move = rng.randrange(4)
            if move == 0:
                cursor.move(rng.randrange(-500, 500), rng.randrange(-50, 50))
            elif move == 1:
                cursor.zoom(rng.choice((1, -1)))
            elif move == 2:
                column, row = rng.randrange(cursor.width), rng.randrange(cursor.rows)
                at = (column * cursor.cell_width, row * cursor.cell_height)
                if cursor.point(*at) and cursor.wanted_per_cell is None:
                    assert cursor.cell == (column, row)
            else:
                cursor.fit(cursor.num_blocks, rng.randrange(1, 200), rng.randrange(1, 60))
            column, row = cursor.cell
            assert 0 <= column < cursor.width and 0 <= row < cursor.rows
            assert cursor.first <= cursor.block < cursor.end <= cursor.num_blocks
            assert cursor.block in cursor.cell_blocks


@pytest.mark.parametrize("num_blocks", [1, 3, 16, 40, 150, 326, 1000, 4000])
@pytest.mark.parametrize("size", [(80, 21), (140, 37)])
def test_few_blocks_have_large_cells(num_blocks: int, size: tuple[int, int]) -> None:
    """Cells are as large as possible with all of them in view, so that little of the page is
    empty."""
    width, height = size
    states = np.array([BlockState.NULL] + [BlockState.ACTIVE] * num_blocks, np.uint8)
    view, cursor = view_of(states, np.array([-1] + [0] * num_blocks, np.int32)), KvCursor()
    rows = kv_page(view, cursor, width, height, COLOUR_GLYPHS, boxed=False)
    wide, high = cursor.cell_width, cursor.cell_height
    assert {row_width(row) for row in rows} == {width} and len(rows) == height
    if num_blocks == 4000:
        assert (wide, high) == (1, 1)
        return
    assert cursor.per_cell == 1 and cursor.width * cursor.rows >= num_blocks
    cells = (width - 2) * (height - 4)
    assert num_blocks * wide * high * 2 > cells or high == MAX_CELL_HEIGHT, (wide, high)
    seen = sum(text.count("█") for row in rows[1:-3] for text, _ in row)
    if (wide, high) != (1, 1):
        assert seen == num_blocks * max(1, wide - 1) * max(1, high - 1)
    for block in {0, num_blocks // 2, num_blocks - 1}:
        row, column = divmod(block, cursor.width)
        assert cursor.point(column * wide, row * high) and cursor.block == block


def test_zoom_goes_from_all_to_single_blocks() -> None:
    view, cursor = many_blocks(100_000), KvCursor()
    page = text(kv_page(view, cursor, 120, 37, COLOUR_GLYPHS, boxed=True))
    # 116 x 32 cells
    assert "100 000 · 27 in a cell" in page
    assert "blocks 1 to 27  27 in use  of chatcmpl-3f9a01" in page
    for _ in range(10):
        cursor.zoom(1)
    page = text(kv_page(view, cursor, 120, 37, COLOUR_GLYPHS, boxed=True))
    assert "in a cell" not in page and "0 to 3 711" in page
    assert "block 1  in use  of chatcmpl-3f9a01" in page
    cursor.move(columns=1_000_000)
    page = text(kv_page(view, cursor, 120, 37, COLOUR_GLYPHS, boxed=True))
    assert "block 100000  cached" in page and "99 999" in page
    for _ in range(10):
        cursor.zoom(-1)
    assert cursor.wanted_per_cell is None and cursor.first == 0


def test_every_block_of_the_view_has_its_cell() -> None:
    view, cursor = many_blocks(20_000), KvCursor(wanted_per_cell=2)
    rows = kv_page(view, cursor, 104, 27, COLOUR_GLYPHS, boxed=True)  # 100 x 22 cells of two
    active = sum(len(t) for row in rows[1:-4] for t, role in row if role == "kv-active-alt")
    assert active + 1 == 2200  # the cursor is on one; 5000 blocks exceed the view
    cursor.move(rows=24)
    rows = kv_page(view, cursor, 104, 27, COLOUR_GLYPHS, boxed=True)
    assert cursor.first == 2 * 100 * (24 - 11)
    active = sum(len(t) for row in rows[1:-4] for t, role in row if role == "kv-active-alt")
    assert active + 1 == (5000 - cursor.first) // 2


def test_a_cell_of_several_states_is_counted() -> None:
    states = np.array([4, 2, 2, 3, 1, 0, 0, 0, 0], np.uint8)
    owners = np.array([-1, 0, 2, 0, -1, -1, -1, -1, -1], np.int32)
    page = text(kv_page(view_of(states, owners), KvCursor(), 84, 5, COLOUR_GLYPHS, boxed=True))
    assert "block 1  in use  of chat-1" in page
    times = [1] + [101] * 8
    view, cursor = view_of(np.repeat(states, times), np.repeat(owners, times)), KvCursor()
    kv_page(view, cursor, 84, 6, COLOUR_GLYPHS, boxed=True)
    assert cursor.per_cell == 11  # 808 blocks in 80 cells
    cursor.move(columns=18)
    page = text(kv_page(view, cursor, 84, 6, COLOUR_GLYPHS, boxed=True))
    assert "blocks 199 to 209  4 in use  7 in use by several requests  of cmpl-77, chat-1" in page


def test_hits_and_evictions_tick_by_step() -> None:
    hits, gone = (0, 0, 64, 64, 128, 128), (3, 3, 3, 4, 4, 9)
    run = [
        step(i, end_ns=NOW_NS, prefix_hit_tokens=h, num_evictions=g)
        for i, (h, g) in enumerate(zip(hits, gone, strict=True))
    ]
    rows = [row_text(row) for row in tick_rows(run, 28)]
    assert rows[0] == "hit tokens   128  " + "      █ █ "
    assert rows[1] == "evictions      6  " + "       ▂ █"


def test_blocks_that_were_just_evicted_stand_out() -> None:
    """They are marked for a second, in the whole map, in a part of it, and in cells of several
    blocks."""
    states = np.array([BlockState.NULL] + [BlockState.ACTIVE] * 400, np.uint8)
    owners = np.array([-1] + [0] * 400, np.int32)
    view = view_of(states, owners)
    assert view.snapshot is not None
    run = tuple(
        step(i, end_ns=NOW_NS - ago * MS, num_evictions=gone)
        for i, (ago, gone) in enumerate(((3000, 4), (1500, 5), (900, 5), (10, 7)))
    )
    evicted = np.array([9, 8, 7, 400, 1, 3, 2], np.int32)  # the last two of seven are new
    snapshot = replace(view.snapshot, evicted_blocks=evicted, num_evictions=7)
    view = replace(view, steps=run, snapshot=snapshot)
    assert just_evicted(view).tolist() == [3, 2]
    kinds = kv_cells(states, owners, 400, evicted=just_evicted(view)).kinds
    assert np.flatnonzero(kinds == EVICTED).tolist() == [1, 2]  # block 1 is cell 0
    kinds = kv_cells(states, owners, 100, evicted=just_evicted(view)).kinds
    assert np.flatnonzero(kinds == EVICTED).tolist() == [0]
    cursor = KvCursor(block=2)
    page = text(kv_page(view, cursor, 120, 37, COLOUR_GLYPHS, boxed=True))
    assert re.search(r"█ +×+ +×+ +█", page) and "× 2 just evicted" in page
    assert "block 3  in use  just evicted" in page
    later = replace(view, snapshot=replace(snapshot, time_ns=NOW_NS + 5 * SECOND))
    assert "×" not in text(kv_page(later, cursor, 120, 37, COLOUR_GLYPHS, boxed=True))
    zoomed = KvCursor(block=2, wanted_per_cell=1)
    evicted[-1] = 399  # far down a map that does not fit
    page = text(kv_page(view, zoomed, 40, 8, COLOUR_GLYPHS, boxed=True))
    assert "■×■" in page
    zoomed.move(rows=1000)
    page = text(kv_page(view, zoomed, 40, 8, COLOUR_GLYPHS, boxed=True))
    assert "×" in page and "■×■" in page


def test_one_cell_is_reversed() -> None:
    row: Row = (("aaa", "kv-free"), ("bb", "kv-active"))
    assert reversed_cell(row, 3) == (("aaa", "kv-free"), ("b", "text/r"), ("b", "kv-active"))
    assert row_text(reversed_cell(row, 0)) == "aaabb"


@pytest.mark.parametrize("size", [(30, 6), (80, 21), (120, 37), (200, 57)])
@pytest.mark.parametrize("boxed", [True, False])
def test_it_fills_its_size(size: tuple[int, int], boxed: bool) -> None:
    empty = DashboardStore(started_ns=NOW_NS).view(NOW_NS)
    for view in (many_blocks(6000), empty):
        rows = kv_page(view, KvCursor(), *size, COLOUR_GLYPHS, boxed=boxed)
        assert {row_width(row) for row in rows} == {size[0]} and len(rows) == size[1]


async def test_keys_and_mouse_move_the_cursor() -> None:
    app = FrozenApp(chat_engine(), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        page = app.screen.query_one("#page", Canvas)
        await pilot.press("k")
        await pilot.pause()
        assert "block 1 " in page.text and "600" in page.text
        await pilot.press("right", "right", "down")
        assert "block 42 " in page.text and "of chat-1" in page.text
        await pilot.press("end")
        assert "block 600  free" in page.text
        await pilot.press("home")
        assert "block 1 " in page.text and "live" in app.screen.query_one("#header", Canvas).text
        await pilot.hover("#page", offset=(1 + 10, 1 + 2))  # 39 cells of two columns in a line
        await pilot.pause()
        assert f"block {2 * 39 + 5 + 1} " in page.text


GROUPS = (CacheGroup(None, 5), *[CacheGroup(1024, 5)] * 5)


def snapshot_of_groups() -> EngineSnapshot:
    """Blocks 1 to 300 are or were of layers that keep all tokens, the others of a window's."""
    snapshot = busy_snapshot()
    groups = np.where(np.arange(len(snapshot.block_states)) <= 300, 0, 3).astype(np.uint8)
    states = snapshot.block_states.copy()
    states[330:340] = BlockState.ACTIVE
    # The first 8 rows run requests; 16 places have 6 copies and one that is not known yet.
    places = StateView(16, 9, 6, num_made=20, num_used=5, num_evicted=1)
    return replace(snapshot, block_states=states, block_groups=groups, states=places)


@pytest.mark.parametrize("per_cell", [None, 4])
def test_each_kind_of_layers_has_its_map(per_cell: int | None) -> None:
    store, cursor = DashboardStore(started_ns=NOW_NS), KvCursor(wanted_per_cell=per_cell)
    store.set_snapshot(snapshot_of_groups())
    cursor.block = 400
    page = kv_page(store.view(NOW_NS), cursor, 82, 30, COLOUR_GLYPHS, boxed=False, groups=GROUPS)
    assert {row_width(row) for row in page} == {82} and len(page) == 30
    high = cursor.map_height
    full, window = page[1 : high + 2], page[high + 2 : 2 * high + 3]
    assert "full · 5 layers · 215 in use, 61 cached" in row_text(full[0])
    assert "window 1,024 · 25 layers · 10 in use, 39 cached" in row_text(window[0])
    size = cursor.per_cell
    for rows, cached in ((full, range(240, 301)), (window, [*range(301, 330), *range(340, 350)])):
        found = sum(text.count("▪") for row in rows[1:] for text, _ in row)
        used = {(block - 1) // size for block in range(330, 340)}
        assert found == len({(block - 1) // size for block in cached} - used)
    assert sum(text.count("◆") for row in window[1:] for text, _ in row) == 0
    assert "states  ■■■■····▪▪▪▪▪▪▪·········  4/8 in use, 6 cached, 9 free" in text(page)
    assert cursor.point(3, high + 1 + 1) and cursor.block == cursor.first + 3 * size
    assert not cursor.point(3, 0) and not cursor.point(3, 2 * (high + 1)), "a name; below the maps"


def test_without_room_for_several_maps_there_is_one() -> None:
    store, cursor = DashboardStore(started_ns=NOW_NS), KvCursor()
    store.set_snapshot(snapshot_of_groups())
    view = store.view(NOW_NS)
    page = text(kv_page(view, cursor, 60, 8, COLOUR_GLYPHS, boxed=False, groups=GROUPS))
    assert "layers" not in page and "◆" in page and "6 cached, 9 free" in page
    one = kv_page(view, cursor, 60, 20, COLOUR_GLYPHS, boxed=False, groups=GROUPS[1:])
    assert "layers" not in text(one), "all are of one kind"


def test_a_chunk_is_a_kind_of_its_own() -> None:
    groups = [CacheGroup.of(window, 5) for window in (None, 340, 340, Chunk(340), 340)]
    store = DashboardStore(started_ns=NOW_NS)
    store.set_snapshot(snapshot_of_groups())
    page = text(
        kv_page(store.view(NOW_NS), KvCursor(), 82, 40, COLOUR_GLYPHS, boxed=False, groups=groups)
    )
    assert "window 340 · 15 layers" in page
    assert "chunk 340 · 5 layers · 10 in use, 39 cached" in page


async def test_maps_of_kinds_fit_a_narrow_screen() -> None:
    app = FrozenApp(chat_engine(cache_groups=GROUPS), start_screen="dashboard")
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await feed_dashboard(app, pilot)
        app.engine.scripted_snapshot = snapshot_of_groups()
        await app.dashboard.refresh_view()
        await pilot.pause()
        assert "9 free" in app.screen.query_one("#blocks", Canvas).text
        await pilot.press("k")
        await pilot.pause()
        lines = app.screen.query_one("#page", Canvas).text.splitlines()
        assert lines[1].startswith(" full · 5 layers") and lines[9].startswith(" window 1,024 · 25")
        await pilot.press("end", "+", "+", "+", "left")
        assert "block 599  free" in app.screen.query_one("#page", Canvas).text
        await pilot.hover("#page", offset=(1 + 4, 1 + 8 + 1))
        await pilot.pause()
        # The first line of 78 cells was out of view.
        assert "block 83  in use  full" in app.screen.query_one("#page", Canvas).text
