"""Maps of the KV blocks by kind of layers, one above the other, and the row of recurrent states.

All maps show the same blocks in the same places. A map leaves the blocks of other kinds blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.formatting import count, plural
from termgen.tui.paint.palette import Glyphs
from termgen.tui.paint.spans import Row, Span
from termgen.vocabulary.cache_groups import CacheGroup
from termgen.vocabulary.events import BlockState, EngineSnapshot

LEAST_BAR = 8
"""A row of states without room for so many signs has words alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that keep the same part of a context."""

    name: str
    """Such as `full`, `window 1,024` or `chunk 8,192`."""
    num_layers: int
    groups: tuple[int, ...]
    """Their groups, as in `EngineSnapshot.block_groups`."""

    @property
    def label(self) -> str:
        return f"{self.name} · {plural(self.num_layers, 'layer')}"


def kinds_of(groups: Sequence[CacheGroup], snapshot: EngineSnapshot) -> list[Kind]:
    """The kinds of layers, where a snapshot says whose each block is; none if there is but one."""
    names = list(dict.fromkeys(group.name for group in groups))
    if len(names) < 2 or len(snapshot.block_groups) != len(snapshot.block_states):
        return []
    kinds = []
    for name in names:
        members = tuple(i for i, group in enumerate(groups) if group.name == name)
        kinds.append(Kind(name, sum(groups[i].num_layers for i in members), members))
    return kinds


def elsewhere(snapshot: EngineSnapshot, kind: Kind) -> npt.NDArray[np.bool_]:
    """[num_blocks] True for blocks that another kind of layers uses, or has used and cached."""
    own = np.isin(snapshot.block_groups, kind.groups)
    absent: npt.NDArray[np.bool_] = ~own & (snapshot.block_states != BlockState.FREE)
    return absent


def kind_row(snapshot: EngineSnapshot, kind: Kind) -> Row:
    """The line above a kind's map."""
    own = np.isin(snapshot.block_groups, kind.groups)
    states = snapshot.block_states[own]
    num_used = int(np.isin(states, (BlockState.ACTIVE, BlockState.SHARED)).sum())
    num_cached = int((states == BlockState.CACHED).sum())
    counts = f" · {count(num_used)} in use, {count(num_cached)} cached"
    return (kind.name, "text/b"), (kind.label.removeprefix(kind.name) + counts, "muted")


def states_row(view: DashboardView, width: int, glyphs: Glyphs) -> Row | None:
    """Recurrent states: those of running requests, copies as prefixes, and free places. None for
    models without."""
    snapshot = view.snapshot
    if snapshot is None or snapshot.states is None:
        return None
    states, rows = snapshot.states, snapshot.max_num_seqs
    free, cached, active, _ = glyphs.kv
    label, counts = "states", []
    counts.append(f"{view.num_running}/{count(rows)} in use")
    counts += [f"{count(states.num_copies)} cached", f"{count(states.num_free)} free"]
    words = ", ".join(counts)
    room = width - len(label) - len(words) - 4
    bar: list[Span] = []
    if room >= LEAST_BAR:
        parts = (
            (active, "kv-active", view.num_running),
            (free, "kv-free", rows - view.num_running),
            (cached, "kv-cached", states.num_places - states.num_free),
            (free, "kv-free", states.num_free),
        )
        bar = _bar(parts, room)
    gap = "  " if bar else " "
    return ((label, "text/b"), (gap, "text"), *bar, (gap if bar else "", "text"), (words, "muted"))


def _bar(parts: Sequence[tuple[str, str, int]], room: int) -> list[Span]:
    """Signs in proportion; all that are there have at least one."""
    total = max(1, sum(number for _, _, number in parts))
    cells = min(room, total)
    spans: list[Span] = []
    begun = end = 0
    for sign, role, number in parts:
        begun += number
        until = round(begun * cells / total)
        size = min(cells - end, max(until - end, int(number > 0)))
        if size > 0:
            spans.append((sign * size, role))
            end += size
    return spans
