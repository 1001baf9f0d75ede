"""The KV block map: every block, or every few blocks, as one cell coloured by state and owner."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from termgen.tui.dashboard.pages.kv_groups import elsewhere, kind_row, kinds_of, states_row
from termgen.tui.dashboard.state.kv_cursor import cell_size
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.formatting import count, percent, plural, rate
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.spans import Row, Span, row_width
from termgen.vocabulary.cache_groups import CacheGroup
from termgen.vocabulary.events import BlockState, EngineSnapshot

FREE, CACHED, ACTIVE, SHARED, ACTIVE_ALT, SELECTED, PART, EVICTED, ELSEWHERE = range(9)
_ODD_OWNER = np.int32(-(2**31) + 1)
"""Masks an owner's last bit and its sign bit: the result is 1 for odd owners, and never for -1
(unowned)."""
WIDE = 100
"""Width at which the title is written out."""
TITLE_ROOM = 18
"""Cells taken by the corners and title of a narrow map."""
_ROLES = (
    "kv-free",
    "kv-cached",
    "kv-active",
    "kv-shared",
    "kv-active-alt",
    "kv-selected",
    "kv-active",
    "kv-evicted",
    "kv-free",
)
LARGE_SIGNS = {"■": "█", "▪": "▓", "▫": "▒"}
"""Signs of cells several characters wide: adjoining squares would look like dashes."""
JUST_NS = 1_000_000_000
"""How long a block counts as just evicted."""
NO_BLOCKS = np.empty(0, np.int32)
BLANK = " "
"""The sign of blocks that another kind of layers holds."""


@dataclass(frozen=True, slots=True, eq=False)
class KvCells:
    """The kind of each cell, and how many blocks one cell stands for."""

    kinds: npt.NDArray[np.uint8]
    blocks_per_cell: float


def kv_cells(
    states: npt.NDArray[np.uint8],
    owners: npt.NDArray[np.int32],
    max_cells: int,
    *,
    selected: int = -1,
    per_cell: int | None = None,
    evicted: npt.NDArray[np.int32] = NO_BLOCKS,
    elsewhere: npt.NDArray[np.bool_] | None = None,
) -> KvCells:
    """Scale the blocks (without null blocks) to at most `max_cells` cells, or to `per_cell` each.

    A cell of several blocks takes the strongest state among them (shared, active, cached, free). It
    is marked as partly used if less than half of it is in use, and as evicted if it has an
    `evicted` block. Neighbouring owners alternate between two tints, so that requests can be kept
    apart. elsewhere: [num_blocks] blocks that do not belong to this map; a cell of these alone says
    so.
    """
    if elsewhere is not None:
        return _without(elsewhere, states, owners, max_cells, selected, per_cell, evicted)
    first = first_block(states)
    evicted = evicted - first
    states, owners = states[first:], owners[first:]
    num_blocks, num_cells = len(states), max(1, max_cells)
    odd = (owners & _ODD_OWNER) == 1  # blocks not in use are unowned
    chosen = (owners == selected) & (states >= BlockState.ACTIVE) if selected >= 0 else None
    if per_cell == 1 or (per_cell is None and num_blocks <= num_cells):
        kinds = states.astype(np.uint8)  # both enums number FREE, CACHED, ACTIVE, SHARED alike
        kinds[odd & (states == BlockState.ACTIVE)] = ACTIVE_ALT
        if chosen is not None:
            kinds[chosen] = SELECTED
        kinds[evicted[(evicted >= 0) & (evicted < num_blocks)]] = EVICTED
        return KvCells(kinds, 1)
    starts = cell_starts(num_blocks, num_cells, per_cell)
    sizes = np.diff(starts, append=num_blocks)
    cells = np.maximum.reduceat(states, starts)
    narrow = np.uint8 if int(sizes.max()) < 256 else np.int32  # half the time where it fits
    used = states >= BlockState.ACTIVE
    num_used = np.add.reduceat(used.view(np.uint8), starts, dtype=narrow).astype(np.int32)
    num_odd = np.add.reduceat(odd.view(np.uint8), starts, dtype=narrow).astype(np.int32)
    active = cells == ACTIVE  # no block of such a cell is shared
    cells[active & (num_odd * 2 > num_used)] = ACTIVE_ALT
    cells[active & (num_used * 2 < sizes)] = PART
    if chosen is not None:
        cells[np.logical_or.reduceat(chosen, starts)] = SELECTED
    there = evicted[(evicted >= 0) & (evicted < num_blocks)]
    cells[np.searchsorted(starts, there, side="right") - 1] = EVICTED
    return KvCells(cells, per_cell or num_blocks / num_cells)


def _without(
    elsewhere: npt.NDArray[np.bool_],
    states: npt.NDArray[np.uint8],
    owners: npt.NDArray[np.int32],
    max_cells: int,
    selected: int,
    per_cell: int | None,
    evicted: npt.NDArray[np.int32],
) -> KvCells:
    """`kv_cells` of a map to which some blocks do not belong."""
    there = ~elsewhere | (states == BlockState.NULL)
    cells = kv_cells(
        np.where(there, states, BlockState.FREE).astype(np.uint8),
        np.where(there, owners, -1).astype(np.int32),
        max_cells,
        selected=selected,
        per_cell=per_cell,
        evicted=evicted[there[evicted.clip(0, len(there) - 1)]] if len(there) else evicted,
    )
    absent = elsewhere[first_block(states) :]
    if len(cells.kinds) == len(absent):
        cells.kinds[absent] = ELSEWHERE
    elif len(absent):
        starts = cell_starts(len(absent), len(cells.kinds), per_cell)
        cells.kinds[np.logical_and.reduceat(absent, starts)] = ELSEWHERE
    return cells


def cell_starts(num_blocks: int, num_cells: int, per_cell: int | None) -> npt.NDArray[np.intp]:
    """[cells] the first block of each."""
    if per_cell is None:
        starts: npt.NDArray[np.intp] = np.arange(num_cells) * num_blocks // num_cells
        return starts
    return np.arange(0, num_blocks, per_cell)


def first_block(states: npt.NDArray[np.uint8]) -> int:
    """The first block shown: block 0 may be the null block."""
    return int(len(states) > 0 and states[0] == BlockState.NULL)


def just_evicted(view: DashboardView) -> npt.NDArray[np.int32]:
    """Blocks whose cached prefix was evicted in the second before the snapshot."""
    snapshot = view.snapshot
    if snapshot is None:
        return NO_BLOCKS
    since = bisect_left(view.steps, snapshot.time_ns - JUST_NS, key=attrgetter("applied_ns"))
    if since == len(view.steps):
        return NO_BLOCKS
    number = snapshot.num_evictions - view.steps[max(0, since - 1)].num_evictions
    known = len(snapshot.evicted_blocks)
    return snapshot.evicted_blocks[known - max(0, min(number, known)) :]


def map_rows(
    cells: KvCells, width: int, glyphs: Glyphs, size: tuple[int, int] = (1, 1)
) -> list[Row]:
    """The cells in reading order, `width` to a row. `size`: columns and lines of each cell; larger
    cells leave their last column and line blank, as a gap between neighbours."""
    kinds = cells.kinds
    if not len(kinds):
        return []
    begins = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1  # runs of one kind
    begins = np.union1d(begins, np.arange(0, len(kinds), width))
    wide, high = size
    runs = _runs(glyphs, width, wide)
    spans = [
        runs[kind][length]
        for kind, length in zip(
            kinds[begins].tolist(), np.diff(begins, append=len(kinds)).tolist(), strict=True
        )
    ]
    ends = np.searchsorted(begins, np.arange(width, len(kinds) + width, width)).tolist()
    rows = [tuple(spans[a:b]) for a, b in pairwise([0, *ends])]
    if high == 1:
        return rows
    return [row for drawn in rows for row in (*[drawn] * (high - 1), ())]


def _signs(glyphs: Glyphs) -> tuple[str, ...]:
    others = glyphs.kv_alt, glyphs.kv_selected, glyphs.kv_part, glyphs.kv_evicted
    return (*glyphs.kv, *others, BLANK)


@lru_cache(maxsize=8)
def _runs(glyphs: Glyphs, width: int, wide: int) -> list[list[Span]]:
    """Spans by cell kind and by run length up to `width`; a cell is `wide` columns."""
    drawn = max(1, wide - 1)
    gap = " " * (wide - drawn)
    cells = [(LARGE_SIGNS.get(one, one) if wide > 1 else one) * drawn for one in _signs(glyphs)]
    return [
        [((cell + gap) * length, role) for length in range(width + 1)]
        for cell, role in zip(cells, _ROLES, strict=True)
    ]


def kv_panel(
    view: DashboardView,
    frame: Frame,
    glyphs: Glyphs,
    *,
    selected: str | None = None,
    groups: Sequence[CacheGroup] = (),
) -> list[Row]:
    """The map with its legend in the title; one for each kind of layers if there is room."""
    snapshot = view.snapshot
    title: list[Span] = [("KV blocks" if frame.width >= WIDE else "KV", "text/b")]
    if snapshot is None:
        return frame.draw(title, (), [((missing_words(view), "muted"),)])
    states = states_row(view, frame.inner_width, glyphs) if frame.inner_height > 1 else None
    rows = max(1, frame.inner_height - (states is not None))
    kinds = kinds_of(groups, snapshot)
    if len(kinds) * 2 > rows:
        kinds = []
    high = rows // len(kinds) - 1 if kinds else rows
    cell = cell_size(len(snapshot.block_states), frame.inner_width, high)
    width = frame.inner_width // cell[0]
    body: list[Row] = []
    for kind in kinds or (None,):
        cells = kv_cells(
            snapshot.block_states,
            snapshot.block_owners,
            width * (high // cell[1]),
            selected=owner_index(snapshot, selected),
            evicted=just_evicted(view),
            elsewhere=None if kind is None else elsewhere(snapshot, kind),
        )
        drawn = map_rows(cells, width, glyphs, cell)
        if kind is not None:
            drawn = [kind_row(snapshot, kind), *drawn, *[()] * (high - len(drawn))]
        body += drawn
    if states is not None:
        body = [*body, *[()] * (rows - len(body)), states]
    per_cell = cells.blocks_per_cell
    scale = f" · {rate(per_cell)}/cell" if per_cell > 1 and frame.width >= WIDE else ""
    title.append((f" · {view.num_blocks:,}".replace(",", " ") + scale, "muted"))
    title += off_words(view)
    return frame.draw(title, kv_legend(view, glyphs, frame.width), body)


def missing_words(view: DashboardView) -> str:
    """Why there is no snapshot."""
    return "not kept for this step" if view.is_past else "waiting for the engine"


def off_words(view: DashboardView) -> list[Span]:
    """How far the snapshot is from the marked step, if it is not of that step."""
    off = view.snapshot_off
    if not off:
        return []
    return [(f" · {plural(abs(off), 'step')} {'later' if off > 0 else 'before'}", "warn")]


def kv_legend(view: DashboardView, glyphs: Glyphs, width: int) -> list[Span]:
    """Signs with their names and counts. What does not fit beside the title is dropped: the share
    in use first, then the counts, so that every sign keeps its name for as long as possible."""
    free, cached, active, shared = glyphs.kv
    num_shared = _num_shared(view)
    parts = [
        (active, "kv-active", "active", view.num_used_blocks - num_shared),
        (shared, "kv-shared", "shared", num_shared),
        (cached, "kv-cached", "cached", view.num_cached_blocks),
        (free, "muted", "free", view.num_free_blocks),
    ]
    if gone := len(just_evicted(view)):
        parts.insert(0, (glyphs.kv_evicted, "kv-evicted", "just evicted", gone))
    used: list[Span] = [(percent(view.kv_usage), "text/b"), (" used", "muted")]
    room = width - TITLE_ROOM - row_width(tuple(off_words(view)))
    forms = (
        [*_named(parts, "  "), *used],
        [*_named(parts, " "), *used],
        _named(parts, " ")[:-1] + [(" free", "muted")],
        _named(parts, " ", counted=False)[:-1] + [(" free", "muted")],
    )
    fitting = (spans for spans in forms if row_width(tuple(spans)) <= room)
    return next(fitting, [(count(view.num_used_blocks), "text"), (" used", "muted")])


def _named(
    parts: Sequence[tuple[str, str, str, int]], gap: str, *, counted: bool = True
) -> list[Span]:
    spans: list[Span] = []
    for sign, role, name, number in parts:
        spans.append((sign, role))
        spans.append((f" {count(number)}" if counted else "", "text"))
        spans.append((f" {name}{gap}", "muted"))
    return spans


def _num_shared(view: DashboardView) -> int:
    if view.snapshot is None:
        return 0
    shared = int(np.count_nonzero(view.snapshot.block_states == BlockState.SHARED))
    return min(shared, view.num_used_blocks)


def owner_index(snapshot: EngineSnapshot, request_id: str | None) -> int:
    if request_id is None:
        return -1
    for index, request in enumerate(snapshot.requests):
        if request.request_id == request_id:
            return index
    return -1
