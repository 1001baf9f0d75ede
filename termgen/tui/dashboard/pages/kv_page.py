"""The page of KV blocks: the map with a cursor, the block under it, hits and evictions by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from termgen.tui.dashboard.pages.kv_groups import (
    Kind,
    elsewhere,
    kind_row,
    kinds_of,
    states_row,
)
from termgen.tui.dashboard.pages.kv_map import (
    first_block,
    just_evicted,
    kv_cells,
    kv_legend,
    map_rows,
    missing_words,
    off_words,
    owner_index,
)
from termgen.tui.dashboard.state.kv_cursor import KvCursor
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.formatting import brief_id, count
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.sanitize import clean_line
from termgen.tui.paint.series import spark
from termgen.tui.paint.spans import Row, Span, merge, row_width
from termgen.vocabulary.cache_groups import CacheGroup
from termgen.vocabulary.events import BlockState, EngineSnapshot, StepRecord

STATE_NAMES = {
    BlockState.FREE: "free",
    BlockState.CACHED: "cached, not in use",
    BlockState.ACTIVE: "in use",
    BlockState.SHARED: "in use by several requests",
}
UNDER_THE_MAP = 3
TICK_LABEL = 18
TICK_MAX = 17


def kv_page(
    view: DashboardView,
    cursor: KvCursor,
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    boxed: bool,
    selected: str | None = None,
    groups: Sequence[CacheGroup] = (),
) -> list[Row]:
    """The whole page is one frame; this also fits `cursor` to the size of the map, or of the maps
    of each kind of layers."""
    frame = Frame(width, height, boxed)
    title: list[Span] = [("KV blocks", "text/b")]
    snapshot = view.snapshot
    if snapshot is None:
        return frame.draw(title, (), [((missing_words(view), "muted"),)])
    first = first_block(snapshot.block_states)
    num_blocks = len(snapshot.block_states) - first
    states = states_row(view, frame.inner_width, glyphs)
    rows = max(1, frame.inner_height - UNDER_THE_MAP - (states is not None))
    kinds = kinds_of(groups, snapshot)
    if len(kinds) * 2 > rows:
        kinds = []
    high = rows // len(kinds) - 1 if kinds else rows
    cursor.fit(num_blocks, frame.inner_width, high, num_maps=len(kinds))
    shown = slice(first + cursor.first, first + cursor.end)
    title.append((f" · {num_blocks:,}".replace(",", " "), "muted"))
    title += off_words(view)
    if cursor.per_cell > 1:
        title.append((f" · {count(cursor.per_cell)} in a cell", "muted"))
    if cursor.end - cursor.first < num_blocks:
        title.append((f" · {cursor.first:,} to {cursor.end - 1:,}".replace(",", " "), "muted"))
    body: list[Row] = []
    for kind in kinds or (None,):
        cells = kv_cells(
            snapshot.block_states[shown],
            snapshot.block_owners[shown],
            cursor.width * cursor.rows,
            selected=owner_index(snapshot, selected),
            per_cell=cursor.per_cell,
            evicted=just_evicted(view) - np.int32(shown.start),
            elsewhere=None if kind is None else elsewhere(snapshot, kind)[shown],
        )
        drawn = _with_cursor(map_rows(cells, cursor.width, glyphs, cursor.size), cursor)
        if kind is not None:
            drawn = [kind_row(snapshot, kind), *drawn, *[()] * (high - len(drawn))]
        body += drawn
    body += [()] * (rows - len(body))
    if states is not None:
        body.append(states)
    body.append(_under_cursor(snapshot, first, cursor, just_evicted(view), kinds))
    body += tick_rows(view.steps_so_far, frame.inner_width)
    # the corners, and the blanks beside both texts
    room = frame.width - row_width(tuple(title)) + 8
    return frame.draw(title, kv_legend(view, glyphs, room), body)


def _with_cursor(rows: list[Row], cursor: KvCursor) -> list[Row]:
    """A map with the cell under the cursor in reverse."""
    (column, line), (wide, high) = cursor.cell, cursor.size
    for y in range(line * high, min(len(rows), (line + 1) * high)):
        for x in range(column * wide, (column + 1) * wide):
            rows[y] = reversed_cell(rows[y], x)
    return rows


def reversed_cell(row: Row, column: int) -> Row:
    """The row with one cell in reverse."""
    spans: list[Span] = []
    at = 0
    for text, role in row:
        inside = column - at
        if 0 <= inside < len(text):
            spans += [
                (text[:inside], role),
                (text[inside], "text/r"),
                (text[inside + 1 :], role),
            ]
        else:
            spans.append((text, role))
        at += len(text)
    return merge(spans)


def _under_cursor(
    snapshot: EngineSnapshot,
    first: int,
    cursor: KvCursor,
    evicted: npt.NDArray[np.int32],
    kinds: Sequence[Kind] = (),
) -> Row:
    """State, kind of layers and owner of the block; for a cell of several blocks, their number in
    each state."""
    if not cursor.num_blocks:
        return (("no blocks", "muted"),)
    cell = cursor.cell_blocks
    blocks = range(first + cell.start, first + cell.stop)
    states = snapshot.block_states[blocks.start : blocks.stop]
    owners = snapshot.block_owners[blocks.start : blocks.stop]
    names = [
        clean_line(brief_id(snapshot.requests[owner].request_id))
        for owner in dict.fromkeys(owners[owners >= 0].tolist())
        if owner < len(snapshot.requests)
    ]
    if len(blocks) == 1:
        spans: list[Span] = [("block ", "muted"), (f"{blocks[0]}", "text/b")]
        spans.append((f"  {STATE_NAMES[BlockState(int(states[0]))]}", "text"))
        group = int(snapshot.block_groups[blocks[0]]) if kinds and states[0] else None
        spans += [(f"  {kind.name}", "muted") for kind in kinds if group in kind.groups]
    else:
        spans = [("blocks ", "muted"), (f"{blocks[0]} to {blocks[-1]}", "text/b")]
        for state, name in STATE_NAMES.items():
            number = int((states == state).sum())
            if number:
                spans.append((f"  {count(number)} {name.split(',')[0]}", "text"))
    gone = int(((evicted >= blocks.start) & (evicted < blocks.stop)).sum())
    if gone:
        spans.append((f"  {f'{gone} ' if len(blocks) > 1 else ''}just evicted", "kv-evicted"))
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        spans += [("  of ", "muted"), (", ".join(names[:3]) + more, "decode")]
    return tuple(spans)


def tick_rows(steps: Sequence[StepRecord], width: int) -> list[Row]:
    """Prefix tokens hit and blocks evicted, one column a step, the newest at the right."""
    has_max = width >= 3 * TICK_LABEL
    room = max(1, width - TICK_LABEL - (TICK_MAX if has_max else 0))
    shown = list(steps[-room - 1 :])
    hits = [max(0, b.prefix_hit_tokens - a.prefix_hit_tokens) for a, b in pairwise(shown)]
    gone = [max(0, b.num_evictions - a.num_evictions) for a, b in pairwise(shown)]
    rows: list[Row] = []
    for name, values, role in (
        ("hit tokens", hits, "kv-shared"),
        ("evictions", gone, "kv-evicted"),
    ):
        label = f"{name:11}{count(sum(values)):>5}  "
        most = f" max {count(max(values, default=0))} a step"
        line = spark(values, room, role=role)
        spans: Row = ((label, "muted"), *line)
        rows.append((*spans, (most.rjust(TICK_MAX), "muted")) if has_max else spans)
    return rows
