"""The load of a mixture's experts: a panel of the device page.

One row for each layer, or for the most uneven of a few, and a cell for each expert, or for a few:
the fuller, the more tokens went there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from termgen.client import ModelInfo
from termgen.tui.dashboard.state.store import DashboardView
from termgen.tui.paint.formatting import count, percent
from termgen.tui.paint.frame import Frame
from termgen.tui.paint.spans import Row, Span, cut, fit
from termgen.vocabulary.device.expert_load import FULL, FULL_SHARE, ExpertLoad

MOST_ROWS = 12
"""Layers that are shown."""
LINES = 2
"""Above those."""
LEAST_HEIGHT = 3
SHADES = ((0.0, " "), (0.5, "░"), (1.5, "▒"), (3.0, "▓"))
"""Shares up to which a cell has this sign, as multiples of an even one."""
FULLEST = "█"
LABEL = 8


def is_mixture(model: ModelInfo) -> bool:
    memory = model.memory
    return memory is not None and memory.reads is not None and memory.reads.experts_bytes > 0


def experts_height(view: DashboardView, model: ModelInfo, room: int, edge: int) -> int:
    """Rows of the panel, of those that there are; 0 for a model without experts."""
    load = load_of(view)
    if not is_mixture(model) and load is None:
        return 0
    num_layers = 0 if load is None or not load.num_choices else len(load.peaks)
    wanted = edge + 1 if not num_layers else edge + LINES + min(MOST_ROWS, num_layers)
    return min(room, wanted) if room >= LEAST_HEIGHT else 0


def load_of(view: DashboardView) -> ExpertLoad | None:
    return None if view.snapshot is None else view.snapshot.experts


def experts_panel(view: DashboardView, model: ModelInfo, frame: Frame) -> list[Row]:
    load, title = load_of(view), [("experts", "text/b")]
    if load is None or not load.num_choices:
        words = _why_unknown(view, model)
        return frame.draw(title, (), [((cut(words, frame.inner_width), "muted"),)])
    num_layers, worst = len(load.peaks), load.worst_layer
    title.append((f" · {count(load.num_experts)} in each of {num_layers} layers", "muted"))
    right: list[Span] = [("busiest ", "muted"), (f"{load.imbalance:.1f}x", "decode/b")]
    right.append((" an even share", "muted"))
    peak = f"{load.peaks[worst]:.1f}x"
    most = f"most uneven: layer {worst}, expert {load.busiest[worst]} with {peak}"
    unused = f"{percent(load.unused_share)} of the experts had no token since the start"
    lines: list[Row] = [((most, "text"),), ((unused, "muted"),)]
    body = [fit(line, frame.inner_width) for line in lines]
    num_rows = min(MOST_ROWS, frame.inner_height - len(body))
    return frame.draw(title, right, body + _cell_rows(load, num_rows, frame.inner_width))


def _why_unknown(view: DashboardView, model: ModelInfo) -> str:
    if view.snapshot is None:
        return "not kept for this step" if view.is_past else "not known yet"
    if load_of(view) is not None:
        return "no token went to any yet"
    where = "where the weights are floats" if model.device == "cpu" else "in kernels of a GPU"
    return f"which of them tokens go to is not counted {where}"


def _cell_rows(load: ExpertLoad, num_rows: int, width: int) -> list[Row]:
    """All layers, or of as many parts of them as there are rows the most uneven one."""
    if num_rows < 1:
        return []
    room, num_layers = max(1, width - LABEL), len(load.peaks)
    rows: list[Row] = []
    for part in np.array_split(np.arange(num_layers), min(num_rows, num_layers)):
        layer = int(part[load.peaks[part].argmax()])
        signs = "".join(map(_sign, _folded(load.cells[layer], room).tolist()))
        rows.append(((f"{layer}".rjust(LABEL - 2) + "  ", "muted"), (signs, "decode")))
    return rows


def _folded(cells: npt.NDArray[np.uint8], room: int) -> npt.NDArray[np.float64]:
    """Shares as multiples of an even one. Neighbours are put together where there is no room."""
    parts = np.array_split(cells.astype(np.float64), min(room, len(cells)))
    return np.array([part.mean() for part in parts]) / FULL * FULL_SHARE


def _sign(share: float) -> str:
    return next((sign for limit, sign in SHADES if share <= limit), FULLEST)
